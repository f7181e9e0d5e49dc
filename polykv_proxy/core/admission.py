"""Whether one more session may come in.

Rule 1: pure, like the picture it is decided on.
Rule 2: only sessions that come in are judged. Who is inside is never refused for the floor.
Rule 3: a newcomer's effect must be seen before many more follow: while it settles, others wait. Where many
decode, as many may settle at a time as are an eighth of those.
Rule 4: advisory policies refuse nobody, and the cell wall is no policy: it is the ledger's, in every mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from polykv_proxy.core.headroom import (
    Arm,
    Capacity,
    Failing,
    Picture,
    Reason,
    capacity,
    failing,
    headroom_sessions,
    retry_after_s,
    settles,
)
from polykv_proxy.core.policies import OnSaturation

if TYPE_CHECKING:
    from polykv_proxy.core.policies import Policy


@dataclass(frozen=True, slots=True)
class Entered:
    """It may come in."""

    backpressure: Arm | None = None
    """The arm that would have refused it, were the policy enforced."""
    sessions_remaining: int | None = None
    """How many more may follow, where the policy warns."""


@dataclass(frozen=True, slots=True)
class Held:
    """It waits."""

    failing: Failing
    max_wait_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """It may not come in."""

    failing: Failing
    retry_after_s: int
    capacity: Capacity
    """The numbers behind it."""

    @property
    def cannot_tell(self) -> bool:
        """Whether nobody knows, which is another answer than that there is no room."""
        return self.failing.reason is Reason.STALE


Verdict: TypeAlias = "Entered | Held | Refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """What is known of a session that wants to come in."""

    expected_tokens: int | None = None
    """That it is going to need."""
    may_wait: bool = True
    """False once it has waited as long as it may."""
    first: bool = False
    """It waits already, and it is its turn."""


def decide(picture: Picture, policy: Policy, newcomer: Newcomer, jitter: float) -> Verdict:
    """What happens to a session that wants to come in.

    1. Nothing is enforced: it comes in, and is told which arm fails, if one does.
    2. The samples are stale: nobody can tell.
    3. The policy warns: it comes in, and is told how many may follow and which arm fails.
    4. Nothing stands in its way: it comes in.
    5. Time may help, it may wait, and there is room to wait: it waits. Where the policy does not queue, only
       for newcomers to settle, and not longer than they may take.
    6. Refused.

    Args:
        picture: the engine.
        policy: in force for its pool.
        newcomer: who asks.
        jitter: see ``retry_after_s``.
    """
    expected = newcomer.expected_tokens
    if not policy.enforced:
        fails = failing(picture, policy, expected) if policy.judges else None
        return Entered(None if fails is None else fails.arm)  # 1
    if picture.stale:
        fails = Failing(Arm.TPS, Reason.STALE)
        return Refused(fails, retry_after_s(picture, jitter), capacity(picture, policy, expected))  # 2
    fails = failing(picture, policy, expected)
    if policy.on_saturation is OnSaturation.WARN:
        headroom = headroom_sessions(picture, policy, expected)
        remaining = None if headroom is None else max(0, headroom - 1)
        return Entered(None if fails is None else fails.arm, remaining)  # 3
    fails = _obstacle(picture, fails, first=newcomer.first)
    if fails is None:
        return Entered()  # 4
    queues = policy.on_saturation is OnSaturation.QUEUE
    helps = fails.arm is not Arm.CONTEXT and (queues or fails.reason in (Reason.SETTLING, Reason.IN_LINE))
    if newcomer.may_wait and helps:
        if picture.waiting < policy.queue_max_depth or newcomer.first:
            return Held(fails, policy.queue_max_wait_s if queues else policy.settle_max_s)  # 5
        fails = Failing(Arm.QUEUE, Reason.QUEUE_FULL)
    return Refused(fails, retry_after_s(picture, jitter), capacity(picture, policy, expected))  # 6


def _obstacle(picture: Picture, fails: Failing | None, *, first: bool) -> Failing | None:
    """What stands in a session's way.

    1. It can never fit its context: waiting would not help.
    2. Others of its pool wait: it is behind them.
    3. An arm that fails.
    4. Newcomers that settle.
    """
    if fails is not None and fails.arm is Arm.CONTEXT:
        return fails  # 1
    if picture.waiting and not first:
        return Failing(Arm.QUEUE, Reason.IN_LINE)  # 2
    if fails is None and settles(picture):
        return Failing(Arm.TPS, Reason.SETTLING)  # 4
    return fails  # 3
