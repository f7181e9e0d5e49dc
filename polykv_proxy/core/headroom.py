"""How much room there is for one more session, as told from a picture of the engine.

Rule 1: pure. The same picture and policy give the same answer; asking changes nothing.
Rule 2: three arms, and all must hold: the floor of tokens per second, the KV cells, the context. Each that
fails has a name. Slots are none of them: who came in waits for one, and is told so.
Rule 3: two projections are made and both are shown. The fitted one decides where it may be trusted, and
where it may not, the one that promises less.
Rule 4: what is not known is None, and nobody is refused for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import TYPE_CHECKING

from polykv_proxy.core.experience import compaction_pressure
from polykv_proxy.core.policies import OnSaturation, Projection
from polykv_proxy.core.presence import working_at_most

if TYPE_CHECKING:
    from polykv_proxy.core.curve import Fit
    from polykv_proxy.core.ledger import Figures
    from polykv_proxy.core.policies import Policy

SETTLE_SHARE = 8
"""One newcomer may settle at a time, or one for so many that work."""

MAX_HEADROOM = 4096
"""Sessions up to which headroom is looked for."""

RETRY_MAX_S = 60
RETRY_GUESS_S = 2.0
"""Seconds between two sessions that leave, before any left."""


class Arm(StrEnum):
    """What a session has to pass."""

    TPS = "tps"
    CELLS = "cells"
    CONTEXT = "context"
    QUEUE = "queue"


class Reason(StrEnum):
    """Why an arm fails."""

    TPS_FLOOR = "projected tps below floor"
    SETTLING = "settling"
    CELLS = "kv headroom exhausted"
    CONTEXT = "context headroom exhausted"
    QUEUE_FULL = "queue full"
    EXPIRED = "waited too long"
    IN_LINE = "others wait"
    SLOT = "no slot free"
    """It may come in, and its request waits."""
    STALE = "samples stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What the gate sees of an engine at one moment."""

    working: int
    """Sessions with a request, those in prefill and those that wait for a slot too."""
    live: float
    """Those, and the sessions inside that pause and will be back."""
    duty: float = 1.0
    """Share of them that works at a time, 0 to 1."""
    promised: int = 0
    """Places that were reserved and not yet taken."""
    settling: int = 0
    """Newcomers whose effect is not seen yet."""
    decoding: int = 0
    """Sessions that ``mean_tps`` is the mean of."""
    mean_tps: float | None = None
    floor: float | None = None
    """The highest floor that was promised to those inside."""
    fit: Fit | None = None
    reach: int = 0
    """Number of sessions up to which the fit may be trusted."""
    bias: float | None = None
    """Measured over fitted, lately."""
    margin_ratio: float = 0.0
    """Share by which what comes may fall short of what is foreseen."""
    cells: Figures | None = None
    """None: the engine's cells are not known."""
    marginal_tokens: float | None = None
    """Cells that a session takes, on average."""
    pressure: float | None = None
    """The engine's own, of its cells in use and of the fullest window, see ``experience.pressure``."""
    window: int | None = None
    """Tokens of one session's context."""
    slots_free: int | None = None
    seq_ids_used: int | None = None
    seq_ids_max: int | None = None
    waiting: int = 0
    """Sessions that wait to come in, of this pool."""
    at_gate: int = 0
    """Of all pools."""
    in_line: int = 0
    """Requests past the gate that wait for slots or cells."""
    line_cells: int = 0
    """Cells that those take, as far as that is known."""
    line_unknown: int = 0
    """Those of them of which it is not."""
    leave_gap_s: float | None = None
    """Seconds between two sessions that leave."""
    refused: int = 0
    """Sessions refused since the last one left."""
    stale: bool = False


@dataclass(frozen=True, slots=True)
class Failing:
    """An arm that does not hold."""

    arm: Arm
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """Tokens per second of each session with so many more inside."""

    model: float | None
    """From the fitted curve."""
    measured: float | None
    """From what is measured now, if those that decode shared a fixed number of tokens."""
    deciding: float | None
    """The one that counts."""
    trusted: bool
    """Whether the curve was seen near there."""


def foresee(picture: Picture, projection: Projection, more: int = 1) -> Foreseen:
    """What the mean would be.

    The number that counts is that of sessions at work: now and with the newcomers, or as many as those inside
    make up but rarely, whichever is more.

    1. Nobody works: nothing can be said, and nothing has to be.
    2. Conservative: the measured one, which is mean x n / (n + 1) where nobody pauses. Tokens of all together
       never become fewer with one more, so this is never too high.
    3. Fitted, and trusted: the curve, corrected by its bias.
    4. Fitted, and not trusted: the lower of both.

    Args:
        picture: the engine.
        projection: of the policy.
        more: sessions that would come in.
    """
    if not picture.working:
        return Foreseen(model=None, measured=None, deciding=None, trusted=False)  # 1
    entering = picture.promised + more
    n = max(picture.working + entering, working_at_most(picture.live + entering, picture.duty))
    measured = None if picture.mean_tps is None else picture.mean_tps * min(1.0, picture.decoding / n)
    model = None if picture.fit is None else (picture.bias or 1.0) / picture.fit.tpot_s(n)
    trusted = model is not None and n <= picture.reach
    known = [value for value in (measured, model) if value is not None]
    if projection is Projection.CONSERVATIVE:
        deciding = measured  # 2
    elif trusted:
        deciding = model  # 3
    else:
        deciding = min(known) if known else None  # 4
    return Foreseen(model=model, measured=measured, deciding=deciding, trusted=trusted)


def floor_of(picture: Picture, policy: Policy) -> float | None:
    """The floor that a newcomer has to keep: its own and those of all inside."""
    floors = [each for each in (policy.target_tps_per_session, picture.floor) if each is not None]
    return max(floors) if floors else None


def keeps_floor(picture: Picture, policy: Policy, more: int = 1) -> bool:
    """Whether so many more sessions leave every promised floor kept, as far as anybody can tell."""
    floor = floor_of(picture, policy)
    if floor is None:
        return True
    foreseen = foresee(picture, policy.projection, more)
    if foreseen.deciding is None:
        return True
    margin = picture.margin_ratio if foreseen.deciding == foreseen.model else 0.0
    return foreseen.deciding * (1.0 - margin) >= floor


def failing(picture: Picture, policy: Policy, expected_tokens: int | None = None) -> Failing | None:
    """The first arm that a session would fail; None if it may come in.

    1. What it expects to need fits neither its window nor the cells at their emptiest: context.
    2. What it needs, or an average session, and the policy's headroom exceed the cells that are free: cells.
    3. The floor would not be kept: tps.
    """
    cells = picture.cells
    if expected_tokens is not None:
        limits = [limit for limit in (picture.window, None if cells is None else cells.total) if limit]
        if limits and expected_tokens > min(limits):
            return Failing(Arm.CONTEXT, Reason.CONTEXT)  # 1
    if cells is not None:
        need = picture.marginal_tokens or 0.0 if expected_tokens is None else expected_tokens
        if need + policy.kv_headroom_ratio * cells.total > cells.admissible:
            return Failing(Arm.CELLS, Reason.CELLS)  # 2
    if not keeps_floor(picture, policy):
        return Failing(Arm.TPS, Reason.TPS_FLOOR)  # 3
    return None


def settles(picture: Picture) -> bool:
    """Whether newcomers have to be waited for."""
    return picture.settling >= max(1, (picture.working - picture.settling) // SETTLE_SHARE)


def headroom_sessions(picture: Picture, policy: Policy, expected_tokens: int | None = None) -> int | None:
    """How many more sessions may come in, as far as is known; None if nothing limits them.

    They are held to the arms, not to the slots: sessions pause, and take turns in those. Who waits already
    comes first: at the gate, to come in; past it, to have its cells (to the floor it is at work).

    Args:
        picture: the engine.
        policy: in force for the pool.
        expected_tokens: that each is going to need; None: as many as sessions take on average.
    """
    fails = failing(picture, policy, expected_tokens)
    if fails is not None:
        return 0
    limits = []
    if floor_of(picture, policy) is not None:
        low, high = 0, MAX_HEADROOM
        while low < high:
            middle = (low + high + 1) // 2
            if keeps_floor(picture, policy, picture.at_gate + middle):
                low = middle
            else:
                high = middle - 1
        if low < MAX_HEADROOM:
            limits.append(low)
    each = picture.marginal_tokens if expected_tokens is None else expected_tokens
    if picture.cells is not None:
        ahead = picture.line_cells + policy.kv_headroom_ratio * picture.cells.total
        ahead += (picture.at_gate + picture.line_unknown) * (picture.marginal_tokens or 0.0)
        spare = picture.cells.admissible - ahead
        if spare < 0:
            return 0
        if each:
            limits.append(int(spare // each))
    return min(limits) if limits else None


def retry_after_s(picture: Picture, jitter: float) -> int:
    """Whole seconds after which a place may be free, 1 at least.

    Places come free one by one, so those who were refused since the last one are ahead.

    Args:
        picture: the engine.
        jitter: 0 to 1, another for each answer: they must not all come back at once.
    """
    gap_s = RETRY_GUESS_S if picture.leave_gap_s is None else picture.leave_gap_s
    wait_s = gap_s * (1 + picture.refused) * (0.5 + jitter)
    return max(1, min(RETRY_MAX_S, ceil(wait_s)))


# -- capacity --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Room for one more session; the members of the capacity document, None where unknown."""

    can_admit: bool
    """Whether nothing stands in its way."""
    reason: Reason | None
    """Why not; or, if so, what its request waits for once it is in."""
    projected_mean_tps_if_admitted: float | None
    projected_model: float | None
    projected_measured: float | None
    projection_bias_ewma: float | None
    mean_active_tps: float | None
    n_active_sessions: int
    headroom_sessions: int | None
    """That would come in now, behind those who wait; 0 unless ``can_admit``; None if nothing limits them."""
    kv_headroom_pct: float | None
    kv_cells_free: int | None
    kv_cells_total: int | None
    marginal_tokens_mean: float | None
    seq_ids_used: int | None
    seq_ids_max: int | None
    slots_free: int | None
    ctx_headroom_tokens: int | None
    compaction_pressure: float | None
    pressure: float | None
    settling: bool
    queue_depth: int
    """All that wait: at the gate, and for slots or cells."""
    sessions_waiting: int
    """Those of them at the gate."""
    retry_after_s: int | None


def capacity(picture: Picture, policy: Policy, expected_tokens: int | None = None) -> Capacity:
    """What somebody who asks for room is told.

    Args:
        picture: the engine.
        policy: in force for the pool.
        expected_tokens: that the session is going to need.
    """
    cells = picture.cells
    foreseen = foresee(picture, policy.projection)
    stands = _stands_in_its_way(picture, policy, expected_tokens)
    raw = None if picture.stale else picture.pressure
    spaces = [
        space for space in (picture.window, None if cells is None else cells.admissible) if space is not None
    ]
    return Capacity(
        can_admit=stands is None,
        reason=_waits_inside(picture) if stands is None else stands,
        projected_mean_tps_if_admitted=foreseen.deciding,
        projected_model=foreseen.model,
        projected_measured=foreseen.measured,
        projection_bias_ewma=picture.bias,
        mean_active_tps=picture.mean_tps,
        n_active_sessions=picture.working,
        headroom_sessions=headroom_sessions(picture, policy, expected_tokens) if stands is None else 0,
        kv_headroom_pct=100.0 * cells.free / cells.total if cells is not None and cells.total else None,
        kv_cells_free=None if cells is None else cells.free,
        kv_cells_total=None if cells is None else cells.total,
        marginal_tokens_mean=picture.marginal_tokens,
        seq_ids_used=picture.seq_ids_used,
        seq_ids_max=picture.seq_ids_max,
        slots_free=picture.slots_free,
        ctx_headroom_tokens=min(spaces) if spaces else None,
        compaction_pressure=compaction_pressure(raw),
        pressure=raw,
        settling=settles(picture),
        queue_depth=picture.at_gate + picture.in_line,
        sessions_waiting=picture.at_gate,
        retry_after_s=None if stands is None else retry_after_s(picture, 0.5),
    )


def _stands_in_its_way(picture: Picture, policy: Policy, expected_tokens: int | None) -> Reason | None:
    """Why one more session would not come in; None if it would.

    1. The samples are stale: nobody can tell.
    2. An arm fails, whatever the policy makes of that.
    3. The policy holds newcomers: others of its pool wait, or newcomers settle.
    """
    if picture.stale:
        return Reason.STALE  # 1
    fails = failing(picture, policy, expected_tokens)
    if fails is not None:
        return fails.reason  # 2
    if policy.enforced and policy.on_saturation is not OnSaturation.WARN:  # 3
        if picture.waiting:
            return Reason.IN_LINE
        if settles(picture):
            return Reason.SETTLING
    return None


def _waits_inside(picture: Picture) -> Reason | None:
    """What the request of a session that comes in waits for, if it has to."""
    if picture.slots_free == 0:
        return Reason.SLOT
    return Reason.IN_LINE if picture.in_line else None
