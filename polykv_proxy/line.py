"""Requests that wait for their slots, and before that for an engine that has any.

Who is next is the core's to say (``core.leases``); here each waits on a future of his own, so that he can
leave at any moment, and what was given to him in that moment is passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
from time import monotonic
from typing import TYPE_CHECKING

from polykv_proxy.core.decisions import Admit, Lease, Never, Place, Queue, Reject, Ticket
from polykv_proxy.errors import NoRoomError, SaturatedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from polykv_proxy.core.decisions import Command
    from polykv_proxy.core.plane import ControlPlane
    from polykv_proxy.core.slots import Ask
    from polykv_proxy.metrics import Metrics
    from polykv_proxy.readings import Readings


class Pending:
    """A request's wait for its slots."""

    def __init__(self, line: Line, ticket: Ticket | None, lease: Lease | None, waited_s: float = 0.0) -> None:
        self._line = line
        self.waited_s = waited_s
        """Seconds that it had waited before it asked for slots."""
        self.ticket = ticket
        """Its place in line, where it has to wait."""
        self.lease = lease
        self.woken: asyncio.Future[Lease] | None = None

    async def wait(self, timeout_s: float) -> Lease | None:
        """The lease, or None when ``timeout_s`` seconds pass without one; wait again or give up then."""
        if self.lease is None:
            assert self.woken is not None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    self.lease = await asyncio.shield(self.woken)
        return self.lease

    def give_up(self) -> None:
        """Leave the queue; a lease that came in the meantime goes to the next in line."""
        if self.ticket is not None and self.lease is None:
            self._line.gave_up(self.ticket)


class Line:
    """Who waits for one engine.

    Args:
        plane: its state.
        readings: told when a request begins.
        metrics: what becomes of requests is counted there.
        perform: does what the plane says.
        now_ts: epoch seconds.
    """

    def __init__(
        self,
        plane: ControlPlane,
        readings: Readings,
        metrics: Metrics,
        perform: Callable[[list[Command]], None],
        now_ts: Callable[[], float],
    ) -> None:
        self._plane = plane
        self._readings = readings
        self._metrics = metrics
        self._perform = perform
        self._now_ts = now_ts
        self._waiters: dict[int, Pending] = {}

    def request(
        self, ask: Ask, *, conversation: bool = True, place: Place | None = None, waited_s: float = 0.0
    ) -> Pending:
        """Ask for slots, from a place in line where it was held.

        Args:
            ask: what it wants.
            conversation: whether it belongs to a session.
            place: in line, where it waited before.
            waited_s: seconds that it waited at the gate; they are a part of its wait.

        Raises:
            SaturatedError: too many wait already.
            NoRoomError: it can never fit the cells.
        """
        decision = self._plane.leases.on_request(
            ask, monotonic(), now_ts=self._now_ts(), conversation=conversation, place=place
        )
        match decision:
            case Admit(lease):
                self._metrics.on_admission("admitted", waited_s)
                self._readings.due.set()
                self._perform(self._plane.cells.reclaim())
                return Pending(self, None, lease)
            case Queue(ticket):
                pending = Pending(self, ticket, None, waited_s)
                pending.woken = asyncio.get_running_loop().create_future()
                self._waiters[id(ticket)] = pending
                return pending
            case Reject(code, message):
                self._metrics.on_admission("rejected")
                raise SaturatedError(message, code=code, retry_after_s=2)
            case Never() as never:
                self._metrics.on_admission("rejected")
                raise _no_room(never)

    def hold(self, place: Place | None) -> Place:
        """A request is to wait before it asks for slots; it counts as one of those who wait.

        Args:
            place: where it waited before, if it did.

        Raises:
            SaturatedError: too many wait already.
        """
        held = self._plane.leases.on_held(place)
        if isinstance(held, Reject):
            self._metrics.on_admission("rejected")
            raise SaturatedError(held.message, code=held.code, retry_after_s=2)
        return held

    def let_go(self, place: Place | None) -> None:
        """It waits there no more, if it did."""
        if place is not None:
            self._plane.leases.on_let_go(place)

    def gave_up(self, ticket: Ticket) -> None:
        """See ``Pending.give_up``."""
        self._waiters.pop(id(ticket), None)
        if ticket.lease is None:
            self._metrics.on_admission("gave_up")
        self._perform(self._plane.leases.on_gave_up(ticket, monotonic()))

    def wake(self, ticket: Ticket) -> None:
        """A ticket has its lease, or never will."""
        pending = self._waiters.pop(id(ticket), None)
        if pending is not None and pending.woken is not None and ticket.never is not None:
            pending.woken.set_exception(_no_room(ticket.never))
            pending.woken.exception()  # whoever waited may be leaving
        elif pending is None or pending.woken is None or ticket.lease is None:
            self._perform(self._plane.leases.on_gave_up(ticket, monotonic()))
        else:
            self._metrics.on_admission("queued", monotonic() - ticket.since + pending.waited_s)
            pending.woken.set_result(ticket.lease)


def _no_room(never: Never) -> NoRoomError:
    return NoRoomError(
        f"the prompt has {never.required_tokens} tokens, and there are KV cells for {never.room_tokens}, "
        "one of them for the answer",
        required_tokens=never.required_tokens,
        ctx_size=never.room_tokens,
    )
