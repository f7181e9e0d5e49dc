"""What an engine can do for pools, one class a capability level.

A backend knows how the engine is told where a request runs and what it rides on, how pools are made and
given back, and how to see that a slot is idle. When any of that should happen is decided elsewhere.
``Patched`` is here, with the engine that only relays; ``copies`` holds pools as slot files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from polykv_proxy.core.slots import Content
from polykv_proxy.core.types import Capability, SlotState
from polykv_proxy.errors import DisabledError, PolyKVError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from polykv_proxy.core.decisions import AttachPlan, Lease
    from polykv_proxy.core.types import PoolNumber, SlotId, SlotSample, Tokens
    from polykv_proxy.engine.client import EngineClient
    from polykv_proxy.engine.patched import Materialized, SnapshotTaken
    from polykv_proxy.engine.wire import Prompt

LAUNCH_GRACE_S = 3.0
"""Seconds after which an abandoned request that did not show will not run."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a request is to run, in the form that its engine understands."""

    headers: tuple[tuple[bytes, bytes], ...] = ()
    id_slot: SlotId | None = None
    """A member of the body; None: it has none."""


class Backend(Protocol):
    """One engine, at one capability level."""

    capability: Capability
    pins_in_body: bool
    """Whether a request says in its body where it runs."""
    snapshots_running: bool
    """Whether a slot can be made a pool of while it works."""

    async def prompt_tokens(self, count_path: str, body: bytes) -> Tokens | None:
        """Exact tokens of a body whose API counts at that route; None where they cannot be had."""

    async def prompt(self, count_path: str, body: bytes, *, text_from: int) -> Prompt | None:
        """The same, but text of so many bytes or more may be shown as it is."""

    async def shared(self, slot: SlotId) -> SlotSample | None:
        """What a slot shares with pools; None: nothing ever."""

    async def materialize(
        self,
        number: PoolNumber,
        tokens: Tokens,
        lease: Lease,
        *,
        parent: PoolNumber | None = None,
        branch_pos: int = 0,
    ) -> Materialized:
        """Compute a pool in the lease's slot, which is of no use to anybody afterwards."""

    async def snapshot(
        self,
        number: PoolNumber,
        slot: SlotId,
        n_tokens: int | None,
        parent: PoolNumber | None,
        lease: Lease | None,
    ) -> SnapshotTaken:
        """Make a pool of what a slot holds. ``lease`` keeps others off it, where it must not work."""

    async def release(self, number: PoolNumber) -> int:
        """Give back what is under a number; returns the cells that nobody else held."""

    async def dispatch(
        self,
        lease: Lease,
        plan: AttachPlan | None,
        prompt: Tokens | None,
        send: Callable[[Address], Awaitable[T]],
        *,
        pinnable: bool,
    ) -> T:
        """Send a request to its slot, on what the plan says.

        Args:
            lease: its hold on its slots.
            plan: the pool it is to ride on.
            prompt: its tokens, where they are known.
            send: sends it; called once, and at once unless the engine has to be prepared.
            pinnable: whether its body can say where it runs.
        """

    async def remains(self, lease: Lease, overdue_s: float, *, others: int, stop: bool) -> Content | None:
        """One look at what an abandoned request left running: what its first slot holds, None till all idle.

        Args:
            lease: its hold on its slots.
            overdue_s: seconds since it should have shown; negative before.
            others: slots in which other requests run.
            stop: whether to stop it.
        """

    def forget(self, slots: Iterable[SlotId]) -> None:
        """Somebody else changed what these slots hold."""

    def listing(self) -> dict[str, Any]:
        """What a listing of pools says about this engine in particular."""


class Patched:
    """Zero copy: pools are sequences of the engine, and requests say in headers what they ride on."""

    capability = Capability.ZERO_COPY
    pins_in_body = False
    snapshots_running = True

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def prompt_tokens(self, count_path: str, body: bytes) -> Tokens | None:
        """The counting routes give the tokens, too."""
        return await self._client.count_tokens(count_path, body)

    async def prompt(self, count_path: str, body: bytes, *, text_from: int) -> Prompt | None:
        """And the text, of whatever API."""
        return await self._client.prompt(count_path, body, text_from=text_from)

    async def shared(self, slot: SlotId) -> SlotSample | None:
        """As the counters show it now."""
        return (await self._client.counters()).slots[slot]

    async def materialize(
        self,
        number: PoolNumber,
        tokens: Tokens,
        lease: Lease,
        *,
        parent: PoolNumber | None = None,
        branch_pos: int = 0,
    ) -> Materialized:
        """An ordinary completion for the engine, whose cells stay under the pool's sequence."""
        return await self._client.materialize(
            number, tokens, lease.slots[0], lease.lease_id, parent=parent, branch_pos=branch_pos
        )

    async def snapshot(
        self,
        number: PoolNumber,
        slot: SlotId,
        n_tokens: int | None,
        parent: PoolNumber | None,
        lease: Lease | None,  # noqa: ARG002 - a slot at work will do
    ) -> SnapshotTaken:
        """One more sequence for cells that exist."""
        return await self._client.snapshot(number, slot, n_tokens, parent)

    async def release(self, number: PoolNumber) -> int:
        """The engine counts what became free."""
        return await self._client.release(number)

    async def dispatch(
        self,
        lease: Lease,
        plan: AttachPlan | None,
        prompt: Tokens | None,  # noqa: ARG002 - the engine compares for itself
        send: Callable[[Address], Awaitable[T]],
        *,
        pinnable: bool,  # noqa: ARG002 - headers go with any body
    ) -> T:
        """Nothing to prepare: the engine attaches when it launches the request."""
        headers = [(b"X-PolyKV-Slot", b"%d" % lease.slots[0]), (b"X-PolyKV-Tag", b"%d" % lease.lease_id)]
        if plan is not None and plan.tokens:
            headers.append((b"X-PolyKV-Attach", b"%d:%d" % (plan.pool.number, plan.tokens)))
        return await send(Address(tuple(headers)))

    async def remains(
        self,
        lease: Lease,
        overdue_s: float,
        *,
        others: int,  # noqa: ARG002 - tags tell whose task is where
        stop: bool,
    ) -> Content | None:
        """The counters show by tag what became of it."""
        sample = await self._client.counters()
        slots = [slot for slot in sample.slots if slot.slot in lease.slots]
        empty = not sample.slots[lease.slots[0]].tokens
        if not any(slot.tag == lease.lease_id for slot in slots):
            if overdue_s <= 0:
                return None  # not started yet
            return Content.NOTHING if empty else Content.OLD  # refused before it started
        busy = [slot for slot in slots if slot.state is not SlotState.IDLE]
        for slot in busy:
            if stop and slot.tag == lease.lease_id:
                await self._client.cancel(slot.slot, slot.task)
        if busy:
            return None
        return Content.NOTHING if empty else Content.NEW

    def forget(self, slots: Iterable[SlotId]) -> None:
        """The engine knows what its slots hold."""

    def listing(self) -> dict[str, Any]:
        """Nothing in particular."""
        return {}


class Relaying:
    """No pools: requests go to whatever slot the engine chooses."""

    capability = Capability.RELAY
    pins_in_body = False
    snapshots_running = False

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def prompt_tokens(self, count_path: str, body: bytes) -> Tokens | None:  # noqa: ARG002
        """Nobody needs them."""
        return None

    async def prompt(self, count_path: str, body: bytes, *, text_from: int) -> Prompt | None:  # noqa: ARG002
        """Nor this."""
        return None

    async def shared(self, slot: SlotId) -> SlotSample | None:  # noqa: ARG002
        """Nothing."""
        return None

    async def materialize(self, *_: object, **__: object) -> Materialized:
        """Refused."""
        raise DisabledError("pools are off")

    async def snapshot(self, *_: object, **__: object) -> SnapshotTaken:
        """Refused."""
        raise DisabledError("pools are off")

    async def release(self, number: PoolNumber) -> int:  # noqa: ARG002
        """There is nothing under any number."""
        return 0

    async def dispatch(
        self,
        lease: Lease,  # noqa: ARG002
        plan: AttachPlan | None,  # noqa: ARG002
        prompt: Tokens | None,  # noqa: ARG002
        send: Callable[[Address], Awaitable[T]],
        *,
        pinnable: bool,  # noqa: ARG002
    ) -> T:
        """As it is."""
        return await send(Address())

    async def remains(
        self,
        lease: Lease,  # noqa: ARG002
        overdue_s: float,
        *,
        others: int,
        stop: bool,  # noqa: ARG002
    ) -> Content | None:
        """Nothing tells whose task is where: no more busy slots than are accounted for will do."""
        try:
            busy = sum(slot.is_processing for slot in await self._client.slots())
        except PolyKVError:
            busy = others + 1  # its /slots may be switched off: nothing will ever tell
        return Content.NEW if busy <= others or overdue_s > LAUNCH_GRACE_S else None

    def forget(self, slots: Iterable[SlotId]) -> None:
        """Nothing is known of them."""

    def listing(self) -> dict[str, Any]:
        """Nothing in particular."""
        return {}
