"""Which request runs in which slot, and whose conversation a slot still holds.

Rule 1: a slot runs one lease at a time; it is given away only when the engine is known to be done with it.
Rule 2: a conversation returns to the slot that still holds it, while that slot is idle.
Rule 3: a request never takes a slot whose content it does not continue while an empty one is idle.
Rule 4: a request whose client comes again while the engine still stops the one that it left waits for that
slot: what was computed there is its own.
Rule 5: content is compared within a scope only, and decides speed, never correctness: the engine compares
tokens itself before it reuses anything.
Rule 6: what a client left is there for a while for its retry; who needs a slot takes any other first.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from typing import TYPE_CHECKING, TypeAlias

from polykv_proxy.core.types import SlotId, SlotState, common_prefix, text_prefix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polykv_proxy.core.cells import Need
    from polykv_proxy.core.sessions import Session
    from polykv_proxy.core.types import EngineSample, LeaseId, Scope, Tokens

Chain: TypeAlias = tuple[int, ...]
"""Fingerprint of a conversation: one link for what precedes the messages, one for each message, in order.
Each link is a hash of everything up to it, so that two chains which share a link share all before it. A
request that continues a conversation has the earlier request's chain as a prefix."""

SAME_CONVERSATION_LINKS = 2
"""Common links from which a request counts as the same conversation and not as another one that merely
shares its system prompt (the first link)."""


class Content(Enum):
    """What a slot holds once a request is over."""

    NEW = "new"
    """The request's conversation, complete or as far as it came."""
    OLD = "old"
    """What it held before: the engine refused the request before it touched anything."""
    NOTHING = "nothing"
    """Nothing of use."""


@dataclass(slots=True, eq=False)
class Slot:
    """One slot as the proxy owns it."""

    slot: SlotId
    lease: LeaseId | None = None
    session: Session | None = None
    chain: Chain = ()
    tokens: Tokens | None = None
    """Leading tokens that it holds or is computing, as far as the proxy knows them."""
    last_used: float = 0.0
    """Monotonic seconds; still to come where it is kept for a client that left it and may ask again."""
    left_by: LeaseId | None = None
    """The lease that left what it holds."""
    confirmed: bool = False
    """Whether the engine was seen to be done with that one."""
    borrowed: bool = False
    """Whether its lease only keeps others off what it holds."""
    before: tuple[Session | None, Chain] = (None, ())
    """Session and chain that the running lease displaced; they are right again if it never began."""

    @property
    def idle(self) -> bool:
        """Whether it may be given away."""
        return self.lease is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a request wants from the board."""

    scope: Scope
    name: str | None = None
    """Session name from a field or header."""
    chain: Chain = ()
    """Empty for work without a conversation, such as computing a pool."""
    structured: bool = True
    """Whether the links are messages. In plain text a long common start says nothing about identity."""
    slots: int = 1
    """More than one for several completions in one request; capped at what the engine has."""
    exclusive: bool = False
    """The engine will choose the further slots itself, so that all must be idle."""
    only: SlotId | None = None
    """Nothing but this slot will do."""
    need: Need | None = None
    """What it takes of the cells; None for work that takes none."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Slots for a request; the first is the one it is pinned to."""

    slots: tuple[SlotId, ...]
    continues: bool
    """Whether the first slot holds the conversation's earlier state."""


class SlotBoard:
    """All slots of one engine.

    Every question is answered from an index, so that hundreds of slots cost a request no more than four.
    """

    def __init__(self, count: int) -> None:
        self.slots = [Slot(SlotId(number)) for number in range(count)]
        self._empty: dict[SlotId, None] = dict.fromkeys(slot.slot for slot in self.slots)
        """Idle, and hold nothing."""
        self._held: dict[SlotId, None] = {}
        """Idle, and hold a conversation; the one unused for the longest time first."""
        self._links: dict[tuple[Scope, str | None, int], dict[SlotId, None]] = {}
        """Slots by each link of what they hold."""
        self._leaving: set[SlotId] = set()
        """Slots whose clients left, while the engine is being stopped."""

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    @property
    def idle_count(self) -> int:
        """Slots that may be given away."""
        return len(self._empty) + len(self._held)

    def place(self, ask: Ask) -> Placement | None:
        """Find slots without taking them; None when the request has to wait.

        1. One certain slot is wanted: that one, if idle.
        2. The engine will spread the work itself: every slot, once all are idle.
        3. A slot that holds this conversation: the longest common chain.
        4. A slot that holds nothing.
        5. The slot that was used longest ago.
        """
        if ask.only is not None:  # 1
            slot = self.slots[ask.only] if ask.only < len(self.slots) else None
            return Placement((ask.only,), continues=False) if slot is not None and slot.idle else None
        if ask.exclusive:  # 2
            chosen = tuple(slot.slot for slot in self.slots)
            return Placement(chosen, continues=False) if self.idle_count == len(chosen) else None
        wanted = max(1, min(ask.slots, len(self.slots)))
        if self.idle_count < wanted:
            return None
        own = self._holding(ask)  # 3
        first = next(iter(self._empty or self._held)) if own is None else own[0]  # 4, 5
        if wanted == 1:
            return Placement((first,), continues=own is not None)
        # the engine gives further completions to the lowest idle slots, see get_free_slots()
        others = [number for number in sorted((*self._empty, *self._held)) if number != first]
        return Placement((first, *others[: wanted - 1]), continues=own is not None)

    def held_links(self, ask: Ask) -> int:
        """Links of the request's conversation that an idle slot holds; 0 if none does."""
        held = self._holding(ask)
        return 0 if held is None else held[1]

    def holder(self, ask: Ask) -> Session | None:
        """The session of the idle slot that holds the request's conversation."""
        held = self._holding(ask)
        if held is not None:
            return self.slots[held[0]].session
        left = self._left(ask)
        return None if left is None else self.slots[left].session

    def awaits(self, ask: Ask) -> bool:
        """Whether a slot that will be idle in a moment holds what the request begins with (rule 4)."""
        return self._left(ask) is not None and self._holding(ask) is None

    def _left(self, ask: Ask) -> SlotId | None:
        """The slot whose client left a request that this one repeats, or goes on with."""
        if not self._leaving or ask.only is not None or ask.exclusive or ask.slots > 1:
            return None
        for depth in range(len(ask.chain), SAME_CONVERSATION_LINKS - 1, -1):
            for number in self._links.get((ask.scope, ask.name, ask.chain[depth - 1]), ()):
                if number in self._leaving and len(self.slots[number].chain) == depth:
                    return number
        return None

    def _holding(self, ask: Ask) -> tuple[SlotId, int] | None:
        """The idle slot that shares most links with the request, if it is the same conversation; how many.

        A link stands for all before it, so the deepest link that a slot holds is the whole common chain. The
        first link alone is what many conversations begin with.
        """
        for depth in range(len(ask.chain), SAME_CONVERSATION_LINKS - 1, -1):
            holders = self._links.get((ask.scope, ask.name, ask.chain[depth - 1]), ())
            edited = None
            for number in holders:
                if number not in self._held:
                    continue
                length = len(self.slots[number].chain)
                if length == depth:
                    return number, depth
                if ask.structured and 2 * depth >= length:
                    edited = number
            if edited is not None:
                return edited, depth
        return None

    def take(self, placement: Placement, lease: LeaseId, session: Session | None, ask: Ask) -> None:
        """Give the slots to a lease; conversations that lived there are no longer resident."""
        for number in placement.slots:
            slot = self.slots[number]
            if slot.session is not None and slot.session is not session and slot.session.slot == number:
                # an operator's action on a certain slot is no conversation
                slot.session.slot, slot.session.taken = None, ask.only is None
            self._empty.pop(number, None)
            self._held.pop(number, None)
            slot.before = (slot.session, slot.chain)
            slot.lease = lease
            self._hold(slot, None, ())
            if not (placement.continues and number == placement.slots[0]):
                slot.tokens = None
        first = self.slots[placement.slots[0]]
        self._hold(first, session, ask.chain)
        if session is not None:
            session.slot, session.taken = first.slot, False

    def is_leaving(self, number: SlotId) -> bool:
        """Whether the engine is being stopped in a slot, for the client of its request left."""
        return number in self._leaving

    def leave(self, number: SlotId) -> None:
        """The client of the request in a slot left; it is free once the engine is done."""
        self._leaving.add(number)

    def free(self, number: SlotId, now: float, content: Content, *, keep_s: float = 0.0) -> None:
        """The engine is done with a slot; for so many seconds it counts as just used (rule 6)."""
        self._leaving.discard(number)
        slot = self.slots[number]
        if content is Content.NEW:
            slot.left_by, slot.confirmed = slot.lease, False
        slot.lease, slot.last_used = None, now + keep_s
        if content is not Content.NEW:
            self.forget(number)
        if content is Content.OLD:
            session, chain = slot.before
            if session is not None and session.slot is None:
                session.slot, session.taken = number, False
                self._hold(slot, session, chain)
        slot.before = (None, ())
        self._rest(number)

    def oldest(self) -> SlotId | None:
        """The idle slot with something in it that was unused for the longest time."""
        return next(iter(self._held), None)

    def hold(self, number: SlotId, lease: LeaseId) -> bool:
        """Keep everybody off an idle slot without changing what it holds; False while it is at work."""
        slot = self.slots[number]
        if not slot.idle:
            return False
        slot.lease, slot.borrowed = lease, True
        self._empty.pop(number, None)
        self._held.pop(number, None)
        return True

    def let_go(self, number: SlotId) -> None:
        """Give a slot back after ``hold``, as it was; it counts as used no later than before."""
        self.slots[number].lease, self.slots[number].borrowed = None, False
        self._rest(number)

    def _rest(self, number: SlotId) -> None:
        """An idle slot takes its place among those that hold something, or nothing."""
        slot = self.slots[number]
        self._empty.pop(number, None)
        if not slot.chain:
            self._empty[number] = None
            return
        later = list(
            takewhile(lambda each: self.slots[each].last_used > slot.last_used, reversed(self._held))
        )
        for each in (number, *reversed(later)):
            self._held.pop(each, None)
            self._held[each] = None

    def move(self, source: SlotId, target: SlotId, now: float) -> LeaseId | None:
        """A lease's request turned out to run in another slot: what it brought moves there.

        What the target held is gone. A lease that was to have the target and has not begun gets the source.

        Args:
            source: the slot that it was given.
            target: the slot that it took.
            now: monotonic seconds.

        Returns:
            The lease that has the source now; None: the source is idle, and holds what it held before.
        """
        here, there = self.slots[source], self.slots[target]
        lease, session, chain = here.lease, here.session, here.chain
        waiting, its_session, its_chain = there.lease, there.session, there.chain
        self._hold(here, None, ())
        self._hold(there, None, ())
        if waiting is None and its_session is not None and its_session.slot == target:
            its_session.slot, its_session.taken = None, True
        self._empty.pop(target, None)
        self._held.pop(target, None)
        there.lease, there.tokens, there.before = lease, None, (None, ())
        self._hold(there, session, chain)
        here.lease, here.tokens = waiting, None
        here.borrowed, there.borrowed = there.borrowed, False
        if source in self._leaving:
            self._leaving.discard(source)
            self._leaving.add(target)
        if waiting is not None:
            here.before = (None, ())
            self._hold(here, its_session, its_chain)
            if its_session is not None and its_session.slot == target:  # it may run elsewhere by now
                its_session.slot = source
        if session is not None:
            session.slot = target
        if waiting is None:
            self.free(source, now, Content.OLD)
        return waiting

    def forget_before(self, number: SlotId) -> None:
        """What a lease displaced is gone from its slot, whether the lease begins or not."""
        self.slots[number].before = (None, ())

    def forget(self, number: SlotId) -> None:
        """The slot holds nothing of use any more."""
        slot = self.slots[number]
        if slot.session is not None and slot.session.slot == number:
            slot.session.slot = None
        self._hold(slot, None, ())
        slot.tokens = None
        if number in self._held:
            del self._held[number]
            self._empty[number] = None

    def lost(self, sample: EngineSample) -> list[Slot]:
        """Idle slots that do not hold their conversation any more.

        A reading may be older than what a slot is known to hold; tags count up, and tell.

        1. Empty: the engine needed the cells, or somebody emptied it. One whose session is to move was
           emptied on purpose, and is known by where it was.
        2. Somebody else's task ran there, which has no tag.
        """
        gone = []
        for seen in sample.slots:
            slot = self.slots[seen.slot]
            if not slot.idle or slot.session is None or slot.left_by is None:
                continue
            if seen.state is not SlotState.IDLE or slot.session.moves_to is not None:
                continue
            if seen.tag >= slot.left_by:
                slot.confirmed = True
                if not seen.tokens:
                    gone.append(slot)  # 1
            elif slot.confirmed:
                gone.append(slot)  # 2
        return gone

    def closest(self, tokens: Tokens, scope: Scope, *, other_than: SlotId) -> tuple[Slot, int] | None:
        """The slot of a conversation of this scope that shares most leading text with a prompt."""
        best: tuple[Slot, int] | None = None
        text = text_prefix(tokens)
        for slot in self.slots:
            if slot.tokens is None or slot.session is None or slot.session.scope != scope:
                continue
            if slot.slot == other_than:
                continue
            common = min(common_prefix(slot.tokens, tokens), text)
            if common and (best is None or common > best[1]):
                best = (slot, common)
        return best

    def _hold(self, slot: Slot, session: Session | None, chain: Chain) -> None:
        """Change what a slot holds, and the index with it."""
        if slot.session is not None:
            scope, name = slot.session.scope, slot.session.name
            for link in dict.fromkeys(slot.chain):  # a hash may meet itself
                holders = self._links[scope, name, link]
                del holders[slot.slot]
                if not holders:
                    del self._links[scope, name, link]
        slot.session, slot.chain = session, chain
        if session is not None:
            for link in chain:
                self._links.setdefault((session.scope, session.name, link), {})[slot.slot] = None
