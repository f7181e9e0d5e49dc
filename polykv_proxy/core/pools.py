"""Prefix pools: what one is, its place among others, and what stands in the way of its end.

Rule 1: a pool never changes once it is resident; to extend is to create a child.
Rule 2: an id is a digest of the content: it never names anything else, and content never has two ids.
Rule 3: [0, D) of a child is its parent's, token for token; only [D, L) is its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from polykv_proxy.core.types import PoolId, PoolOrigin, PoolState, common_prefix
from polykv_proxy.errors import PoolInUseError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polykv_proxy.core.types import PoolNumber, PoolUid, Scope, Tokens

DIGEST_BYTES = 16


def pool_id_of(tokens: Tokens, *, model: str, adapters: str, scope: Scope) -> PoolId:
    """The id of this content.

    Each part is hashed under its own tag, so that no two combinations can run into each other.

    Args:
        tokens: the whole prefix.
        model: identity of the model and of everything else that changes KV bytes.
        adapters: identity of the LoRA set in force.
        scope: whose keys may share it.
    """
    digest = blake2b(digest_size=DIGEST_BYTES, person=b"polykv-pool")
    for tag, part in ((b"m", model), (b"a", adapters), (b"s", scope)):
        raw = part.encode()
        digest.update(tag + len(raw).to_bytes(4, "little") + raw)
    digest.update(b"t" + len(tokens).to_bytes(4, "little"))
    digest.update(memoryview(tokens).cast("B"))
    return PoolId(digest.hexdigest())


@dataclass(slots=True, eq=False)
class PrefixPool:
    """A token span that is, was or will be resident in an engine under a sequence id of its own."""

    pool_id: PoolId
    tokens: Tokens
    """The full prefix [0, L)."""
    scope: Scope
    number: PoolNumber
    origin: PoolOrigin
    created_ts: float
    parent: PrefixPool | None = None
    branch_pos: int = 0
    """D: [0, D) is the parent's."""
    label: str | None = None
    pinned: bool = False
    state: PoolState = PoolState.MATERIALIZING
    uid: PoolUid | None = None
    """The engine's name while resident, and afterwards the name under which slots may still hold cells."""
    file_bytes: int | None = None
    """Size of the file that it is, where pools are files; None where they are cells, or while it has none."""
    ttl_s: float | None = None
    """Seconds out of use after which it is released by itself; None: never."""
    last_access_ts: float = 0.0
    """When it was last asked for, by a request or by somebody who creates it."""
    held_ts: float | None = None
    """When it was last seen to be held by something."""
    orphan_ts: float | None = None
    """Since when it is seen to be pinned for nobody; None while it is not."""
    hits: int = 0
    """Requests that attached."""
    attached: int = 0
    """Requests that run on it now."""
    released: bool = False
    lingers: bool = False
    """Released, but the engine still has all of it under its number."""
    before: PoolState | None = None
    """What it was, if it is being computed again: what it is again should that fail."""
    home: tuple[PoolId, int] | None = None
    """Where a lost pool was: its parent, and the branch position; None: it was a root."""
    lost_resident: bool = False
    """Whether a lost pool was resident when its engine went."""
    children: list[PrefixPool] = field(default_factory=list)

    @property
    def prefix_len(self) -> int:
        """L."""
        return len(self.tokens)

    @property
    def own_len(self) -> int:
        """L - D: tokens that were computed for this pool alone."""
        return self.prefix_len - self.branch_pos

    @property
    def resident(self) -> bool:
        """Whether requests can attach."""
        return self.state is PoolState.RESIDENT and not self.released

    @property
    def occupies_sequence(self) -> bool:
        """Whether it holds one of the engine's sequence ids."""
        return self.state in (PoolState.MATERIALIZING, PoolState.RESIDENT)

    @property
    def comes_back(self) -> bool:
        """Whether it can be had by asking for its content: it was evicted, or is being computed."""
        return self.state in (PoolState.EVICTED, PoolState.MATERIALIZING)

    @property
    def edge(self) -> tuple[PrefixPool | None, int]:
        """The nearest ancestor that has an id, and the leading tokens that are its; (None, 0) without one."""
        above, shared = self.parent, self.branch_pos
        while above is not None and above.released:
            shared = min(shared, above.branch_pos)
            above = above.parent
        return above, 0 if above is None else shared

    @property
    def living_children(self) -> list[PrefixPool]:
        """Children that have an id; ghosts left out."""
        return [child for child in self.children if not child.released]

    def join(self) -> None:
        """Its parent knows it."""
        if self.parent is not None and self not in self.parent.children:
            self.parent.children.append(self)

    def leave(self) -> None:
        """Its parent does not know it any more."""
        if self.parent is not None and self in self.parent.children:
            self.parent.children.remove(self)

    def live_on(self, old: PrefixPool) -> None:
        """It takes up the old life of content that is known by its id.

        Label, pin and lifetime stay unless given anew; one that came by itself and is asked for now does not
        count as automatic any more.
        """
        if old.origin is not PoolOrigin.AUTO:
            self.origin = old.origin
        self.created_ts, self.hits = old.created_ts, old.hits
        self.label = old.label if self.label is None else self.label
        self.ttl_s = old.ttl_s if self.ttl_s is None else self.ttl_s
        self.pinned = self.pinned or old.pinned
        self.before, self.home, self.lost_resident = old.state, old.home, old.lost_resident
        for child in old.children:
            child.parent = self
        self.children = list(old.children)

    def match(self, tokens: Tokens) -> int:
        """Leading tokens of a prompt that this pool holds."""
        return common_prefix(self.tokens, tokens)

    def subtree(self) -> Iterator[PrefixPool]:
        """This pool and everything below it that is not released, parents first."""
        yield self
        for child in self.living_children:
            yield from child.subtree()

    def is_below(self, other: PrefixPool) -> bool:
        """Whether ``other`` is this pool or one of its ancestors."""
        return self is other or (self.parent is not None and self.parent.is_below(other))

    def depth(self) -> int:
        """1 for a root."""
        return 1 if self.parent is None else 1 + self.parent.depth()

    def check_release(self, *, recursive: bool) -> list[PrefixPool]:
        """What a release would remove, leaves first.

        Raises:
            PoolInUseError: it has children and ``recursive`` was not asked for, or one is being computed.
        """
        doomed = list(self.subtree())[::-1]
        children = [child.pool_id for child in self.living_children]
        if children and not recursive:
            raise PoolInUseError(
                f"pool {self.pool_id} has {len(children)} children; release them first or pass recursive=1",
                code="pool_has_children",
                children=children,
            )
        if any(each.state is PoolState.MATERIALIZING for each in doomed):
            raise PoolInUseError(f"pool {self.pool_id} is being computed", code="pool_materializing")
        return doomed

    def check_evict(self, *, flush: bool) -> list[PrefixPool]:
        """What an eviction (of the whole subtree: a flush) would take from the engine, leaves first.

        Raises:
            PoolInUseError: a pin, children that are resident, or one that is being computed.
        """
        doomed = list(self.subtree())[::-1] if flush else [self]
        pinned = [each.pool_id for each in doomed if each.pinned]
        if pinned:
            raise PoolInUseError(
                "a pinned pool is not evicted; unpin it first", code="pool_pinned", pinned=pinned
            )
        children = [child.pool_id for child in self.living_children if child.occupies_sequence]
        if children and not flush:
            raise PoolInUseError(
                f"pool {self.pool_id} has {len(children)} resident children; evict them first or flush",
                code="pool_has_children",
                children=children,
            )
        if any(each.state is PoolState.MATERIALIZING for each in doomed):
            raise PoolInUseError(f"pool {self.pool_id} is being computed", code="pool_materializing")
        return [each for each in doomed if each.resident]
