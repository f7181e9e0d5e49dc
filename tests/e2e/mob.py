"""Clients without a plan: many at once, each of whose operations is drawn when the last one is over."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from e2e.audit import Picture
from e2e.harness import LOOK_S, PATIENCE_S, Http, Served
from polykv_proxy.readings import FRESH_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

SEGMENTS = 5
MAX_SEGMENTS = 5
SESSIONS = 6
KNOWN = 12
"""Pools that are remembered, of those that are there and of those that were."""
DEEPEST = 8
"""Segments in the longest prefix."""

SETTLED_S = 30.0
"""Within this, what the engine was told to give up is given up."""

REFUSALS = {
    "pool_capacity_exhausted",
    "pool_given_up",
    "pool_has_children",
    "pool_in_use",
    "pool_lost",
    "pool_materializing",
    "pool_not_found",
    "pool_pinned",
    "prefix_mismatch",
    "session_not_found",
    "session_not_resident",
}
"""What may be answered to an operation that came at the wrong moment."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the work is: what one model computes at once takes another a second."""

    vocabulary: int
    """Token ids to draw from are below this."""
    clients: int
    bout: int
    """Operations between two rests."""
    segment: int
    """Tokens of the blocks that prefixes are made of."""
    talk: int
    """Tokens of an answer that others have something to do with while it comes."""
    head: int
    """Tokens that many plain prompts begin with, enough for a pool to come by itself."""


class Mob:
    """The clients and what they know together.

    Args:
        served: the proxy.
        http: the way to it.
        scale: how large the work is.
        seed: decides every draw; how those who work at the same time interleave is the machine's.
    """

    def __init__(self, served: Served, http: Http, scale: Scale, seed: int) -> None:
        self.served = served
        self.http = http
        self.scale = scale
        self.dice = random.Random(seed)
        self.log: deque[str] = deque([f"seed {seed}"], maxlen=300)
        self.done: Counter[str] = Counter()
        """Operations that did what they were drawn for, by kind."""
        self.refused: Counter[str] = Counter()
        """Operations that came at the wrong moment, by reason."""
        self.looks = 0
        self.automatic: set[str] = set()
        """Pools that came by themselves."""
        self.known: dict[str, list[int]] = {}
        """Tokens of the pools that were seen, by id, also of those that are gone."""
        self.sent: dict[str, list[int]] = {}
        """What each session asked last: most of what its slot holds."""
        self.sessions: dict[str, None] = {}
        """Ids of sessions in the order of their last answer."""
        self.segments = [self._draw(scale.segment) for _ in range(SEGMENTS)]
        self.head = self._draw(scale.head)
        self.bytes_per_cell = 0
        self.problems: list[str] = []
        self.last: Picture | None = None
        """What was seen at the last rest, and what is wrong with it."""

    def _draw(self, count: int) -> list[int]:
        return [self.dice.randrange(100, self.scale.vocabulary) for _ in range(count)]

    # -- what to draw from -----------------------------------------------------------------------------------

    def tokens(self) -> list[int]:
        """A prefix that is likely to have something in common with others."""
        known = self.known.get(self.pool())
        segment = self.scale.segment
        if known and len(known) < DEEPEST * segment and self.dice.random() < 0.5:
            return known + self.dice.choice(self.segments)[: self.dice.randint(0, segment)]
        count = self.dice.randint(1, MAX_SEGMENTS)
        joined = [token for _ in range(count) for token in self.dice.choice(self.segments[: count + 1])]
        return joined[: len(joined) - self.dice.randint(0, segment // 2)]

    def tail(self) -> list[int]:
        """A few tokens that are probably nobody else's."""
        return self._draw(self.dice.randint(1, 30))

    def pool(self) -> str:
        """A pool that exists or existed."""
        return self.dice.choice(list(self.known) or ["never-was"])

    def session(self) -> str:
        """One that may still be in its slot."""
        recent = list(self.sessions)[-2:]
        return self.dice.choice(recent) if recent else "never-was"

    # -- operations, each drawn completely before it starts --------------------------------------------------

    async def ask(self, kind: str, path: str, body: Any) -> Any:
        """One request that may be refused, but only for a reason that makes sense."""
        answer = await self.http.post(path, body)
        if answer.status < 400:
            if answer.json.get("already_released"):
                self.known.pop(answer.json["pool_id"], None)
                kind = "released already"
            elif answer.json.get("created") is False:
                kind = "had already"
            self.done[kind] += 1
            return answer.json
        code = answer.json["error"]["code"]
        self.refused[code] += 1
        if code == "pool_not_found":
            self.known.pop(path.split("/")[3], None)
        # a slot may hold less than a snapshot wants
        may = REFUSALS | {"engine_refused"} if kind == "snapshot" else REFUSALS
        assert code in may, (path, str(body)[:200], answer.status, answer.body)
        return None

    def remember(self, answer: Any, tokens: list[int]) -> None:
        """Keep what is known of a pool."""
        if answer is not None:
            self.known.pop(answer["pool_id"], None)
            self.known[answer["pool_id"]] = tokens[: answer["prefix_len"]]
            while len(self.known) > KNOWN:
                self.known.pop(next(iter(self.known)))

    def create(self) -> Callable[[], Awaitable[None]]:
        """A root, or what is there already."""
        tokens, pin = self.tokens(), self.dice.random() < 0.05

        async def go() -> None:
            self.remember(await self.ask("create", "/polykv/pools", {"tokens": tokens, "pin": pin}), tokens)

        return go

    def fork(self) -> Callable[[], Awaitable[None]]:
        """An extension or a branch."""
        pool_id = self.pool()
        parent = self.known.get(pool_id) or self.tokens()
        keep = len(parent) if self.dice.random() < 0.5 else self.dice.randint(1, len(parent))
        tokens = parent[:keep] + self.dice.choice(self.segments)[: self.dice.randint(1, self.scale.segment)]

        async def go() -> None:
            answer = await self.ask("fork", f"/polykv/pools/{pool_id}/fork", {"tokens": tokens})
            self.remember(answer, tokens)

        return go

    def snapshot(self) -> Callable[[], Awaitable[None]]:
        """A pool of what a session has that answered a while ago, perhaps below another pool."""
        name, (path, body) = self.session(), self._picture()

        async def go() -> None:
            answer = await self.ask("snapshot", path, body | {"from_session": name})
            self.remember(answer, self.sent.get(name, []))

        return go

    def snapshot_live(self) -> Callable[[], Awaitable[None]]:
        """The same of a session that is talking."""
        question, (path, body) = self._question(), self._picture()
        question |= {"stream": True, "max_tokens": self.scale.talk, "ignore_eos": True}

        async def go() -> None:
            async with self.http.kept.post("/v1/completions", json=question) as talk:
                assert talk.status == 200, await talk.read()
                name = talk.headers.get("x-session-id")  # a head that could not wait has none
                if name is not None:
                    answer = await self.ask("snapshot", path, body | {"from_session": name})
                    self.remember(answer, question["prompt"])
                assert b'"error"' not in await talk.read()

        return go

    def _picture(self) -> tuple[str, dict[str, Any]]:
        """Where to ask for a snapshot, and for how much."""
        parent, cut = self.pool(), self.dice.choice([None, None, self.scale.segment, 2 * self.scale.segment])
        path = "/polykv/pools" if self.dice.random() < 0.6 else f"/polykv/pools/{parent}/fork"
        return path, {} if cut is None else {"n_tokens": cut}

    def _question(self) -> dict[str, Any]:
        kind = self.dice.random()
        name = f"s{self.dice.randrange(SESSIONS)}"
        body: dict[str, Any] = {"max_tokens": self.dice.randint(1, 6), "session_id": name}
        if kind < 0.1 and name in self.sent:
            body["prompt"] = self.sent[name][: DEEPEST * self.scale.segment] + self.tail()
        elif kind < 0.5:
            body["pool_id"] = self.pool()
            known = self.known.get(body["pool_id"]) or self.tokens()
            body["prompt"] = known[: self.dice.randint(max(1, len(known) - 30), len(known))] + self.tail()
            if self.dice.random() < 0.2:
                body["shared_prefix_n_tokens"] = self.dice.randint(0, len(known))
        elif kind < 0.75:
            body["prompt"] = self.tokens() + self.tail()
        else:
            body["prompt"] = self.head + self.tail()
        body["stream"] = self.dice.random() < 0.4
        return body

    def request(self) -> Callable[[], Awaitable[None]]:
        """A completion on a pool, or on what is found for it."""
        body = self._question()

        async def go() -> None:
            answer = await self.http.post("/v1/completions", body)
            assert answer.status == 200, answer.body
            assert not body["stream"] or answer.events, answer.body
            assert b'"error"' not in answer.body, answer.body
            name = answer.headers.get("x-session-id", "held")
            self.sessions.pop(name, None)
            self.sessions[name], self.sent[name] = None, body["prompt"]
            timings = (answer.events[-1] if body["stream"] else answer.json)["timings"]
            planned = int(answer.headers.get("x-cached-prefix-tokens", 0))
            attached = min(planned, timings["cache_n"]) > 0
            self.done["attach" if attached else "run plain"] += 1
            assert timings["cache_n"] + timings["prompt_n"] == len(body["prompt"]), answer.body

        return go

    def leave(self) -> Callable[[], Awaitable[None]]:
        """A client that does not wait for its answer, or for the pool that it wanted."""
        patience_s = self.dice.choice([0.001, 0.005, 0.02, 0.05])
        kind = self.dice.random()
        if kind < 0.6:
            path, body = "/v1/completions", self._question() | {"max_tokens": self.scale.talk}
        else:
            path = "/polykv/pools"
            body = {"tokens": self.tokens()} if kind < 0.9 else {"from_session": self.session()}

        async def go() -> None:
            try:
                async with asyncio.timeout(patience_s):
                    await self.http.post(path, body)
            except TimeoutError:
                self.done["leave"] += 1
            else:
                self.done["stay after all"] += 1

        return go

    def verb(self, verb: str) -> Callable[[], Awaitable[None]]:
        """One that is done to a pool that exists or existed."""
        recursive = "?recursive=1" if self.dice.random() < 0.4 else ""
        path = f"/polykv/pools/{self.pool()}/{verb}{recursive}"
        again = self.dice.random() < 0.3  # one that is gone may be asked for once more

        async def go() -> None:
            answer = await self.ask(verb, path, {})
            for pool_id in (answer or {}).get("released", [])[again:]:
                self.known.pop(pool_id, None)

        return go

    def draw(self) -> tuple[str, Callable[[], Awaitable[None]]]:
        """What somebody does next."""
        makes = {"create": 3, "fork": 4, "snapshot": 1, "snapshot_live": 2, "request": 10, "leave": 4}
        verbs = {"pin": 1, "unpin": 3, "evict": 3, "flush": 1, "release": 6}
        mix = makes | verbs
        kind = self.dice.choices(list(mix), list(mix.values()))[0]
        return kind, self.verb(kind) if kind in verbs else getattr(self, kind)()

    # -- work and rest ---------------------------------------------------------------------------------------

    async def work(self, operations: int) -> None:
        """That many operations, with a rest and a look at everything every now and then."""
        left = operations
        self.bytes_per_cell = (await self.http.get("/props")).json["opencoti"]["kv_bytes_per_cell"]
        while left:
            count = min(left, self.dice.randint(1, 2 * self.scale.bout))
            left -= count
            turns = iter(range(count))
            async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
                for client in range(self.scale.clients):
                    group.create_task(self._client(client, turns))
            await self.look()

    async def _client(self, client: int, turns: Any) -> None:
        for _ in turns:  # whoever is free takes the next one
            kind, operation = self.draw()
            self.log.append(f"client {client} {kind}")
            await operation()

    async def look(self) -> Picture:
        """At rest, the engine and the proxy tell the same story, and it adds up."""
        async with asyncio.timeout(SETTLED_S):
            while True:
                counters = await self.served.quiet()
                await asyncio.sleep(FRESH_S)
                picture = Picture(
                    counters,
                    (await self.http.get("/polykv/pools")).json,
                    (await self.http.get("/polykv/sessions")).json["sessions"],
                    self.bytes_per_cell,
                )
                self.problems, self.last = picture.problems(), picture
                if not self.problems:
                    break
                await asyncio.sleep(LOOK_S)  # what the engine was told to give up is not given up yet
        self.looks += 1
        # pools also come by themselves, or of requests that nobody waited for
        there = picture.listed["pools"]
        self.known = {pool["pool_id"]: self.known.get(pool["pool_id"], []) for pool in there}
        self.automatic |= {pool["pool_id"] for pool in there if pool["origin"] == "auto"}
        return picture

    async def go_home(self) -> None:
        """Release everything, empty the slots: nothing is left, and all of it can be had again."""
        await self.served.clear()

        async def nothing_lingers() -> bool:
            return not (await self.served.listing())["draining"]

        await self.served.until(nothing_lingers)
        picture = await self.look()
        assert picture.listed["pools"] == picture.listed["draining"] == picture.listed["unpooled"] == []
        assert picture.counters["kv"]["n_used"] == 0
        assert not [session for session in picture.sessions if session["resident"]]
        room = picture.listed["pool_seq_ids_max"]
        for number in range(room):
            answer = await self.http.post("/polykv/pools", {"tokens": [100 + number, *self.head[:40]]})
            assert answer.status == 201, answer.body
        refused = await self.http.post("/polykv/pools", {"tokens": [100 + room, *self.head[:40]]})
        assert refused.json["error"]["code"] == "pool_capacity_exhausted"
        await self.served.clear()
        assert (await self.look()).counters["kv"]["n_used"] == 0
