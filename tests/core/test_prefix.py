"""The prefix index: what it finds is what agrees, whatever is added and removed."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from polykv_proxy.core.pools import PrefixPool
from polykv_proxy.core.prefix import BLOCK_TOKENS, PrefixIndex, block_hashes
from polykv_proxy.core.types import PoolId, PoolNumber, PoolOrigin, Scope, as_tokens, common_prefix

SCOPE, FOREIGN = Scope("a"), Scope("b")


def pool_of(tokens, scope=SCOPE):
    """A pool with this content."""
    return PrefixPool(
        pool_id=PoolId(str(id(tokens))),
        tokens=as_tokens(tokens),
        scope=scope,
        number=PoolNumber(0),
        origin=PoolOrigin.EXPLICIT,
        created_ts=0.0,
    )


def test_finds_the_deepest_pool_and_says_how_much_agrees():
    """Of nested pools the longest one wins, and the count goes to the first differing token."""
    base = list(range(300))
    root, child = pool_of(base[:130]), pool_of(base[:200] + [7] * 50)
    index = PrefixIndex()
    index.add(root)
    index.add(child)
    assert index.match(as_tokens(base), SCOPE) == (child, 200)
    assert index.match(as_tokens([*base[:128], 9, 9]), SCOPE)[1] == 128


def test_short_pools_are_found_by_short_prompts():
    """A pool without a whole block is compared directly."""
    pool = pool_of(range(40))
    index = PrefixIndex()
    index.add(pool)
    assert index.match(as_tokens(range(60)), SCOPE) == (pool, 40)
    assert len(index) == 0


def test_scopes_do_not_see_each_other():
    """The scope is part of every hash."""
    tokens = list(range(200))
    index = PrefixIndex()
    index.add(pool_of(tokens))
    index.add(pool_of(range(30)))
    assert index.match(as_tokens(tokens), FOREIGN) is None
    assert not set(block_hashes(as_tokens(tokens), SCOPE)) & set(block_hashes(as_tokens(tokens), FOREIGN))


def test_removal_leaves_nothing_behind():
    """Rule 3: an emptied index is empty; removing twice is no error."""
    pools = [pool_of(range(start, start + 150)) for start in (0, 0, 5)] + [pool_of(range(10))]
    index = PrefixIndex()
    for pool in pools:
        index.add(pool)
    for pool in pools + pools:
        index.remove(pool)
    assert len(index) == 0
    assert index.match(as_tokens(range(150)), SCOPE) is None


block = st.integers(0, 2).map(lambda kind: [kind] * BLOCK_TOKENS)
prompts = st.tuples(st.lists(block, max_size=4), st.lists(st.integers(0, 1), max_size=5)).map(
    lambda parts: [token for one in parts[0] for token in one] + parts[1]
)


@given(st.lists(prompts.filter(bool), max_size=12), st.data(), prompts)
def test_agrees_with_comparing_every_pool(contents, data, prompt):
    """Against brute force: as long a match as any pool has, down to whole blocks."""
    index, pools = PrefixIndex(), [pool_of(tokens) for tokens in contents]
    for pool in pools:
        index.add(pool)
    kept = [pool for pool in pools if data.draw(st.booleans())]
    for pool in pools:
        if pool not in kept:
            index.remove(pool)
    tokens = as_tokens(prompt)
    best = max((common_prefix(pool.tokens, tokens) for pool in kept), default=0)
    found = index.match(tokens, SCOPE)
    if best >= BLOCK_TOKENS:
        assert found is not None
        assert found[1] == best
        assert common_prefix(found[0].tokens, tokens) == best
    elif found is not None:
        assert found[1] == common_prefix(found[0].tokens, tokens) <= best
