"""Trees of pools, and pools in them."""

from polykv_proxy.core.pools import pool_id_of
from polykv_proxy.core.types import PoolOrigin, PoolUid, Scope, as_tokens

SCOPE = Scope("")


def content_id(tokens, *, model="m", adapters="", scope=SCOPE):
    """The id of a content."""
    return pool_id_of(as_tokens(tokens), model=model, adapters=adapters, scope=scope)


def add(tree, tokens, *, parent=None, branch_pos=0, ready=True, uid=None, scope=SCOPE, **options):
    """A pool in ``tree``, resident unless not ``ready``."""
    pool = tree.add(
        content_id(tokens, scope=scope),
        as_tokens(tokens),
        **{"scope": scope, "origin": PoolOrigin.EXPLICIT, "now_ts": 10.0} | options,
        parent=parent,
        branch_pos=branch_pos,
    )
    if ready:
        tree.ready(pool, PoolUid(uid if uid is not None else 100 + pool.number))
    return pool


def evicted(tree, pool):
    """What stands for a pool after an eviction that the engine has carried out."""
    stand_in = tree.evict(pool)
    tree.retire(pool.number)
    return stand_in
