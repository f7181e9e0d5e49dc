"""A discrete-event simulation of an engine and its users, and the limiters that the gate is measured by.

The engine computes one token for each session that decodes in a step. A step takes max(t0, a + b n) for n of
them, and longer while a prompt is computed beside them, of which a step takes so many tokens at most. What
varies from look to look is drawn from a seed before anything happens, so that two runs of one trace differ by
what was decided and by nothing else.

All sessions that decode get the same rate, so one running total G(t) of the tokens of each tells when any of
them is done: at G(start) + length. That makes a run cost what its events do, not sessions times seconds.
"""
# ruff: noqa: D102 - the limiters override what Limiter documents

from __future__ import annotations

import random
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import exp
from typing import Any

from polykv_proxy.core.admission import Entered
from polykv_proxy.core.curve import EXPERIENCED_S
from polykv_proxy.core.gate import Entry, Gate, Waiter
from polykv_proxy.core.policies import Mode, OnSaturation, Policy, Projection
from polykv_proxy.core.sight import Look

LOOK_S = 0.25
"""Seconds between two samples, as the product's sampler takes them while the engine works."""

LOOKS_A_SECOND = round(1 / LOOK_S)
KEPT_SHARE = 0.99

RESOLUTION = 0.02
"""What one session does to the rate of the others can be less than what the rate does by itself. A refusal is
clearly wrong if the floor would have been kept with this share of it to spare."""


@dataclass(frozen=True)
class Profile:
    """An engine, and the floor that its operator promises."""

    name: str
    t0: float
    a: float
    b: float
    prompt_s: float
    """Seconds that a prompt token adds to a step."""
    prompt_cap: int
    """Prompt tokens of a step while others decode."""
    floor: float
    noise: float = 0.0
    """Deviation of the time of a step, from one look to the next, as a share of it."""

    def tpot_s(self, n: int) -> float:
        """Seconds for a step without a prompt in it."""
        return max(self.t0, self.a + self.b * n)

    @property
    def sustainable(self) -> int:
        """Sessions that can decode at the floor, or above it."""
        n = 0
        while 1.0 / self.tpot_s(n + 1) >= self.floor:
            n += 1
        return n


@dataclass(frozen=True)
class Turn:
    """One request of a session, and the pause after it."""

    prompt: int
    tokens: int
    pause_s: float


@dataclass(frozen=True)
class Client:
    """A session that comes at its time, if it is let in."""

    number: int
    at: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Load:
    """Who comes: a ramp up to so many times the sustainable load, which then stays."""

    times: float = 2.0
    ramp_s: float = 120.0
    last_s: float = 300.0
    tokens: float = 400.0
    """Mean length of an answer; lengths are lognormal."""
    spread: float = 0.6
    prompt: int = 60
    """Mean tokens of a prompt beyond what a pool holds."""
    turns: int = 1
    """Mean number of turns."""
    pause_s: float = 0.0
    """Mean pause between them."""


def trace(profile: Profile, load: Load, seed: int) -> list[Client]:
    """Those who come, the same for the same seed."""
    draw = random.Random(seed)
    stay_s = load.turns * load.tokens / profile.floor + (load.turns - 1) * load.pause_s
    working = profile.sustainable
    # with pauses, more can be inside than can decode
    inside = working * stay_s / max(1e-9, load.turns * load.tokens / profile.floor)
    most = load.times * inside / stay_s
    clients: list[Client] = []
    at = 0.0
    while at < load.last_s:
        at += draw.expovariate(most)
        if draw.random() > min(1.0, at / load.ramp_s):
            continue
        count = 1 if load.turns == 1 else 1 + min(50, int(draw.expovariate(1.0 / (load.turns - 1))))
        turns = tuple(
            Turn(
                1 + int(draw.expovariate(1.0 / load.prompt)),
                max(8, int(load.tokens * draw.lognormvariate(-(load.spread**2) / 2, load.spread))),
                draw.expovariate(1.0 / load.pause_s) if load.pause_s else 0.0,
            )
            for _ in range(count)
        )
        clients.append(Client(len(clients), at, turns))
    return clients


class Limiter:
    """Lets everybody in: what there is without a gate. The others override what they need."""

    def on_arrival(self, engine: Engine, client: Client, now: float) -> bool | None:
        """Whether a session may come in; None: it waits, ``on_look`` will let it in."""
        return True

    def on_begin(self, client: Client, now: float) -> None:
        """A further turn of one that is inside."""

    def on_end(self, client: Client, now: float, *, last: bool) -> None:
        """A turn is over, and the session with the last one."""

    def on_look(self, engine: Engine, look: Look) -> tuple[list[Client], list[Client]]:
        """A sample; who of those that wait comes in, and who is refused."""
        return [], []


class Static(Limiter):
    """So many sessions inside and no more."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def on_arrival(self, engine: Engine, client: Client, now: float) -> bool | None:
        return engine.inside < int(self.limit)


class Adaptive(Static):
    """A limit that follows what sessions get, looked at once a second."""

    def __init__(self, floor: float) -> None:
        super().__init__(1.0)
        self.floor = floor
        self.next = 0.0

    def on_look(self, engine: Engine, look: Look) -> tuple[list[Client], list[Client]]:
        if look.mean_tps is not None and look.taken_at >= self.next:
            self.next = look.taken_at + 1.0
            self.limit = self.adapted(engine.inside, look.mean_tps)
        return [], []

    def adapted(self, inside: int, mean_tps: float) -> float:
        """The next limit."""
        raise NotImplementedError


class Aimd(Adaptive):
    """One more each second while the floor is kept and the limit is used, a tenth less when it is not."""

    def adapted(self, inside: int, mean_tps: float) -> float:
        if mean_tps < self.floor:
            return max(1.0, self.limit * 0.9)
        return self.limit + 1.0 if inside >= 0.8 * self.limit else self.limit


class Gradient(Adaptive):
    """Netflix's gradient, with the floor's time for a token as the one to hold: limit x gradient + root."""

    def adapted(self, inside: int, mean_tps: float) -> float:
        if inside < 0.5 * self.limit:
            return self.limit
        gradient = max(0.5, min(1.0, mean_tps / self.floor))
        return max(1.0, 0.8 * self.limit + 0.2 * (self.limit * gradient + self.limit**0.5))


class OurGate(Limiter):
    """The product's gate. Without ``closes`` clients never say that a session is over, as most do not."""

    def __init__(self, floor: float, *, closes: bool = True, **policy: Any) -> None:
        self.closes = closes
        given: dict[str, Any] = {"mode": Mode.ENFORCED, "on_saturation": OnSaturation.REJECT, **policy}
        self.policy = Policy(target_tps_per_session=floor, **given)
        self.gate = Gate(stale_after_s=3.0)
        self.waiting: dict[int, tuple[Waiter, Client]] = {}
        self.draw = random.Random(1)

    def on_arrival(self, engine: Engine, client: Client, now: float) -> bool | None:
        entry = Entry(session=client.number, policy=self.policy)  # type: ignore[arg-type]
        passage = self.gate.on_request(entry, now, jitter=self.draw.random(), scope="")  # type: ignore[arg-type]
        if isinstance(passage, Waiter):
            self.waiting[client.number] = (passage, client)
            return None
        return isinstance(passage, Entered)

    def on_begin(self, client: Client, now: float) -> None:
        entry = Entry(session=client.number, policy=self.policy)  # type: ignore[arg-type]
        passage = self.gate.on_request(entry, now, jitter=0.5, scope="")  # type: ignore[arg-type]
        assert isinstance(passage, Entered)

    def on_end(self, client: Client, now: float, *, last: bool) -> None:
        self.gate.on_over(client.number, now, cells=100)  # type: ignore[arg-type]
        if last and self.closes:
            self.gate.on_close(client.number, now)  # type: ignore[arg-type]

    def on_look(self, engine: Engine, look: Look) -> tuple[list[Client], list[Client]]:
        now = look.taken_at
        for number, tokens in engine.decoded():
            self.gate.on_tokens(number, tokens)  # type: ignore[arg-type]
        self.gate.on_look(look)
        entered = [self.waiting.pop(each.entry.session)[1] for each in self.gate.wake(now)]  # type: ignore[call-overload]
        refused = []
        for number, (waiter, client) in list(self.waiting.items()):
            if now - waiter.since >= waiter.max_wait_s:
                del self.waiting[number]
                last = self.gate.on_expired(waiter, now, jitter=self.draw.random())
                (entered if isinstance(last, Entered) else refused).append(client)
        return entered, refused


class Replay(Limiter):
    """What was decided in another run, and one more session let in."""

    def __init__(self, admitted: dict[int, float], also: int) -> None:
        self.admitted = admitted
        self.also = also
        self.held: list[tuple[float, int, Client]] = []

    def on_arrival(self, engine: Engine, client: Client, now: float) -> bool | None:
        at = self.admitted.get(client.number)
        if at is not None and at > now:
            heappush(self.held, (at, client.number, client))
            return None
        return at is not None or client.number == self.also

    def on_look(self, engine: Engine, look: Look) -> tuple[list[Client], list[Client]]:
        entered = []
        while self.held and self.held[0][0] <= look.taken_at:
            entered.append(heappop(self.held)[2])
        return entered, []


@dataclass
class Second:
    """One second of the engine."""

    tokens: float = 0.0
    session_s: float = 0.0
    tps: float | None = None
    """What a session experienced at its end: a mean over about two seconds, as the product measures it."""

    def kept(self, floor: float) -> bool:
        """Whether those who decoded had their floor."""
        return self.tps is None or self.tps >= floor * (1.0 - 1e-9)


@dataclass
class Outcome:
    """What came of a run."""

    floor: float
    seconds: list[Second] = field(default_factory=list)
    admitted: dict[int, float] = field(default_factory=dict)
    refused: dict[int, float] = field(default_factory=dict)
    stays: dict[int, tuple[float, float]] = field(default_factory=dict)
    most_inside: int = 0

    def kept_share(self, since: float = 0.0, until: float = float("inf"), spare: float = 0.0) -> float:
        """Share of the session-seconds of a time in which the floor was kept, with so much of it to spare."""
        chosen = [each for at, each in enumerate(self.seconds) if since <= at + 1 and at <= until]
        total = sum(each.session_s for each in chosen)
        floor = self.floor * (1.0 + spare)
        return sum(each.session_s for each in chosen if each.kept(floor)) / total if total else 1.0

    @property
    def goodput_tokens(self) -> float:
        """Tokens of session-seconds in which the floor was kept."""
        return sum(each.tokens for each in self.seconds if each.kept(self.floor))


@dataclass(eq=False)
class _Run:
    client: Client
    turn: int = 0
    left: float = 0.0
    """Prompt tokens to compute."""
    since: float = 0.0
    """G at which it began to decode, or was looked at last."""


class Engine:
    """One run of a trace under a limiter."""

    def __init__(
        self, profile: Profile, clients: list[Client], limiter: Limiter, last_s: float, seed: int = 0
    ):
        self.profile, self.limiter, self.last_s = profile, limiter, last_s
        self.outcome = Outcome(profile.floor)
        self.inside = 0
        self._clients = clients
        self._next = 0
        draw = random.Random(1000 + seed)
        self._noise = [
            max(0.2, draw.gauss(1.0, profile.noise)) if profile.noise else 1.0
            for _ in range(int(last_s / LOOK_S) + 2)
        ]
        self._looks = 0
        self._total = 0.0
        """G: tokens of each session that decodes, so far."""
        self._done: list[tuple[float, int, _Run]] = []
        self._fresh: dict[int, _Run] = {}
        """Those that decode, whose tokens the limiter was not told yet."""
        self._decoding = 0
        self._prompts: list[_Run] = []
        self._pauses: list[tuple[float, int, _Run]] = []
        self._second = Second()
        self._window = [0.0, 0.0]
        self._decayed = [0.0, 0.0]
        """Tokens and session-seconds, forgotten alike."""
        self._ewma: float | None = None

    def run(self, until: int | None = None) -> Outcome:
        """To the end, or until one session left."""
        now = 0.0
        while now < self.last_s:
            rate, prompt_rate = self._rates()
            look_at = (self._looks + 1) * LOOK_S
            upcoming = min(
                look_at,
                self._clients[self._next].at if self._next < len(self._clients) else look_at,
                self._pauses[0][0] if self._pauses else look_at,
                now + (self._done[0][0] - self._total) / rate if self._done else look_at,
                now + self._prompts[0].left / prompt_rate if self._prompts else look_at,
            )
            self._pass(max(0.0, upcoming - now), rate, prompt_rate)
            now = max(now, upcoming)
            self._events(now)
            if now >= look_at - 1e-12:
                self._look(now)
            if until is not None and until in self.outcome.stays and self.outcome.stays[until][1] < now:
                break
        return self.outcome

    def decoded(self) -> list[tuple[int, int]]:
        """Tokens of each session whose first ones just came."""
        told = []
        for number, run in list(self._fresh.items()):
            tokens = self._total - run.since
            told.append((number, int(tokens)))
            run.since += int(tokens)
            if tokens > 64:
                del self._fresh[number]
        return told

    def _rates(self) -> tuple[float, float]:
        """Tokens a second of each that decodes, and of prompts."""
        profile = self.profile
        noise = self._noise[self._looks]
        if not self._decoding:
            return 1.0, 1.0 / (profile.prompt_s * noise)
        step = profile.tpot_s(self._decoding)
        if self._prompts:
            step += profile.prompt_s * profile.prompt_cap
        return 1.0 / (step * noise), profile.prompt_cap / (step * noise)

    def _pass(self, span: float, rate: float, prompt_rate: float) -> None:
        if self._decoding:
            tokens, session_s = span * rate * self._decoding, span * self._decoding
            self._total += span * rate
            self._second.tokens += tokens
            self._second.session_s += session_s
            self._window[0] += tokens
            self._window[1] += session_s
        if self._prompts:
            self._prompts[0].left -= span * prompt_rate

    def _events(self, now: float) -> None:
        while self._done and self._done[0][0] <= self._total + 1e-9:
            self._end(heappop(self._done)[2], now)
        while self._prompts and self._prompts[0].left <= 1e-9:
            run = self._prompts.pop(0)
            run.since = self._total
            self._fresh[run.client.number] = run
            self._decoding += 1
            heappush(self._done, (self._total + run.client.turns[run.turn].tokens, run.client.number, run))
        while self._pauses and self._pauses[0][0] <= now:
            run = heappop(self._pauses)[2]
            self.limiter.on_begin(run.client, now)
            run.left = run.client.turns[run.turn].prompt
            self._prompts.append(run)
        while self._next < len(self._clients) and self._clients[self._next].at <= now:
            client = self._clients[self._next]
            self._next += 1
            verdict = self.limiter.on_arrival(self, client, now)
            if verdict:
                self._enter(client, now)
            elif verdict is False:
                self.outcome.refused[client.number] = now

    def _enter(self, client: Client, now: float) -> None:
        self.inside += 1
        self.outcome.most_inside = max(self.outcome.most_inside, self.inside)
        self.outcome.admitted[client.number] = now
        self.outcome.stays[client.number] = (now, float("inf"))
        self._prompts.append(_Run(client, left=client.turns[0].prompt))

    def _end(self, run: _Run, now: float) -> None:
        self._decoding -= 1
        self._fresh.pop(run.client.number, None)
        last = run.turn + 1 == len(run.client.turns)
        self.limiter.on_end(run.client, now, last=last)
        if last:
            self.inside -= 1
            self.outcome.stays[run.client.number] = (self.outcome.stays[run.client.number][0], now)
            return
        heappush(self._pauses, (now + run.client.turns[run.turn].pause_s, run.client.number, run))
        run.turn += 1

    def _look(self, now: float) -> None:
        self._looks += 1
        tokens, session_s = self._window
        self._window = [0.0, 0.0]
        kept = exp(-LOOK_S / EXPERIENCED_S)
        self._decayed = [self._decayed[0] * kept + tokens, self._decayed[1] * kept + session_s]
        self._ewma = self._decayed[0] / self._decayed[1] if self._decayed[1] > 1e-6 else None
        look = Look(
            taken_at=now,
            decoding=self._decoding,
            mean_tps=self._ewma if self._decoding else None,
            tokens=round(tokens * 1000),
            seconds=session_s * 1000,
        )
        entered, refused = self.limiter.on_look(self, look)
        for client in entered:
            self._enter(client, now)
        self.outcome.refused.update((client.number, now) for client in refused)
        if self._looks % LOOKS_A_SECOND == 0:
            self._second.tps = self._ewma
            self.outcome.seconds.append(self._second)
            self._second = Second()


def simulate(profile: Profile, load: Load, limiter: Limiter, seed: int, until: int | None = None) -> Outcome:
    """One run."""
    engine = Engine(profile, trace(profile, load, seed), limiter, load.last_s, seed)
    return engine.run(until)


@dataclass(frozen=True)
class Judgement:
    """Refusals, looked at again."""

    looked_at: int
    wrong: int
    clearly: int
    """Of them, those for which there was more room than can be told from noise."""


def wrong_rejections(profile: Profile, load: Load, outcome: Outcome, seed: int, most: int) -> Judgement:
    """How many of so many refusals were wrong.

    The trace is run again with everything decided as it was, and that session let in when it was refused. If
    the floor was kept as promised while it was inside, the refusal was wrong.
    """
    numbers = sorted(outcome.refused)
    chosen = numbers[:: max(1, len(numbers) // most)][:most]
    wrong = clearly = 0
    for number in chosen:
        again = simulate(profile, load, Replay(outcome.admitted, number), seed, until=number)
        since, until = again.stays[number]
        wrong += again.kept_share(since, until) >= KEPT_SHARE
        clearly += again.kept_share(since, until, RESOLUTION) >= KEPT_SHARE
    return Judgement(len(chosen), wrong, clearly)


def best_static(profile: Profile, load: Load, seeds: range) -> tuple[float, int]:
    """Mean goodput and limit of the best static limit, found by search with hindsight."""

    def goodput(limit: int) -> float:
        runs = [simulate(profile, load, Static(limit), seed).goodput_tokens for seed in seeds]
        return sum(runs) / len(runs)

    centre = profile.sustainable * (1 if load.turns == 1 else 2)
    step = max(1, centre // 8)
    known = {limit: goodput(limit) for limit in range(max(1, centre - 6 * step), centre + 6 * step, step)}
    while step > 1:
        step = max(1, step // 2)
        best = max(known, key=lambda limit: known[limit])
        for limit in (best - step, best + step):
            if limit >= 1 and limit not in known:
                known[limit] = goodput(limit)
    best = max(known, key=lambda limit: known[limit])
    return known[best], best


PROFILES = (
    Profile("cpu, 2 cores", 0.018, 0.005, 0.015, 0.0008, 64, floor=10.0, noise=0.01),
    Profile("24 GB card", 0.012, 0.006, 0.0006, 0.00008, 128, floor=20.0, noise=0.003),
    Profile("96 GB card", 0.014, 0.008, 0.00012, 0.00002, 256, floor=20.0, noise=0.001),
    Profile("1,000 sessions", 0.014, 0.010, 0.0000565, 0.000005, 512, floor=15.0, noise=0.0003),
)
"""Shapes as measured: small models on two cores lose their share with each session, cards have a knee."""

__all__ = [
    "PROFILES",
    "Aimd",
    "Gradient",
    "Limiter",
    "Load",
    "OurGate",
    "Outcome",
    "Profile",
    "Projection",
    "Static",
    "best_static",
    "simulate",
    "wrong_rejections",
]
