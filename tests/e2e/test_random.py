"""Random work on the real engine: every cell has its owner at every rest, and in the end none is left."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from e2e.harness import PATIENCE_S, Served, serve
from e2e.tiny_models import llama

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

SEED = 20_240
OPERATIONS = 2_000
"""On the tiny model, some 45 a second; 10,000 are a matter of minutes."""
OPERATIONS_SMOLLM = 60
TOGETHER = 4
"""Operations that start at once, at most."""
ROUNDS_BETWEEN_LOOKS = 12

SLOTS, POOLS, CELLS = 4, 9, 12_288
SEGMENTS, SEGMENT_TOKENS, MAX_SEGMENTS = 5, 70, 5
SESSIONS = 6
KNOWN = 12
HEAD = 300
"""What the longer prompts begin with, enough for a pool to come by itself."""

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


class Mob:
    """Clients without a plan.

    Args:
        served: the proxy.
        seed: decides every operation; how those that run together interleave is the machine's.
        vocabulary: token ids to draw from are below this.
    """

    def __init__(self, served: Served, seed: int, vocabulary: int) -> None:
        self.served = served
        self.dice = random.Random(seed)
        self.log: list[str] = [f"seed {seed}"]
        self.codes: Counter[str] = Counter()
        self.known: dict[str, list[int]] = {}
        """Tokens of the pools that were seen, by id, also of those that are gone."""
        self.sent: dict[str, list[int]] = {}
        """What each session asked last: most of what its slot holds."""
        self.sessions: dict[str, None] = {}
        """Ids of sessions in the order of their last answer."""
        draw = self.dice.randrange
        self.segments = [[draw(100, vocabulary) for _ in range(SEGMENT_TOKENS)] for _ in range(SEGMENTS)]
        self.head = [draw(100, vocabulary) for _ in range(HEAD)]
        self.vocabulary = vocabulary

    def tokens(self) -> list[int]:
        """A prefix that is likely to have something in common with others."""
        known = self.known.get(self.pool())
        if known and len(known) < 800 and self.dice.random() < 0.5:
            return known + self.dice.choice(self.segments)[: self.dice.randint(0, SEGMENT_TOKENS)]
        count = self.dice.randint(1, MAX_SEGMENTS)
        joined = [token for _ in range(count) for token in self.dice.choice(self.segments[: count + 1])]
        return joined[: self.dice.randint(max(40, len(joined) - 60), len(joined))]

    def tail(self) -> list[int]:
        """A few tokens that are probably nobody else's."""
        return [self.dice.randrange(100, self.vocabulary) for _ in range(self.dice.randint(1, 30))]

    def pool(self) -> str:
        """A pool that exists or existed."""
        return self.dice.choice(list(self.known) or ["never-was"])

    def session(self) -> str:
        """One that may still be in its slot."""
        recent = list(self.sessions)[-3:]
        return self.dice.choice(recent) if recent else "never-was"

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """One request that may be refused, but only for a reason that makes sense."""
        answer = await self.served.http(method, path, body)
        if answer.status < 400:
            self.codes["fine"] += 1
            if "already_released" in answer.json:
                self.known.pop(answer.json["pool_id"], None)
            return answer.json
        code = answer.json["error"]["code"]
        if code == "pool_not_found":
            self.known.pop(path.split("/")[3], None)
        self.codes[code] += 1
        assert code in REFUSALS, (method, path, str(body)[:200], answer.status, answer.body)
        return None

    def remember(self, answer: Any, tokens: list[int]) -> None:
        """Keep what is known of a pool."""
        if answer is not None:
            self.known.pop(answer["pool_id"], None)
            self.known[answer["pool_id"]] = tokens[: answer["prefix_len"]]

    # -- operations, each drawn completely before it starts ------------------------------------------------

    def create(self) -> Callable[[], Awaitable[None]]:
        """A root, or what is there already."""
        tokens, pin = self.tokens(), self.dice.random() < 0.05

        async def go() -> None:
            self.remember(await self.ask("POST", "/polykv/pools", {"tokens": tokens, "pin": pin}), tokens)

        return go

    def fork(self) -> Callable[[], Awaitable[None]]:
        """An extension or a branch."""
        pool_id = self.pool()
        parent = self.known.get(pool_id) or self.tokens()
        keep = len(parent) if self.dice.random() < 0.5 else self.dice.randint(1, len(parent))
        tokens = parent[:keep] + self.dice.choice(self.segments)[: self.dice.randint(1, SEGMENT_TOKENS)]

        async def go() -> None:
            answer = await self.ask("POST", f"/polykv/pools/{pool_id}/fork", {"tokens": tokens})
            self.remember(answer, tokens)

        return go

    def snapshot(self) -> Callable[[], Awaitable[None]]:
        """A pool of what a session has, perhaps below another pool."""
        name, parent = self.session(), self.pool()
        cut = self.dice.choice([None, None, 64, 150])
        path = "/polykv/pools" if self.dice.random() < 0.6 else f"/polykv/pools/{parent}/fork"

        async def go() -> None:
            body = {"from_session": name} | ({} if cut is None else {"n_tokens": cut})
            answer = await self.served.http.post(path, body)
            if answer.status < 400:
                self.codes["snapshot"] += 1
                self.remember(answer.json, self.sent.get(name, []))
                return
            error = answer.json["error"]
            self.codes[error["code"]] += 1
            # a slot may hold less than n_tokens
            assert error["code"] in REFUSALS | {"engine_refused"}, error

        return go

    def request(self) -> Callable[[], Awaitable[None]]:
        """A completion: on a pool, or on what is found for it; from start to end, or not."""
        kind = self.dice.random()
        name = f"s{self.dice.randrange(SESSIONS)}"
        body: dict[str, Any] = {"max_tokens": self.dice.randint(1, 6), "session_id": name}
        if kind < 0.1 and name in self.sent:
            body["prompt"] = self.sent[name][:800] + self.tail()
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
        stream = body["stream"] = self.dice.random() < 0.4
        leaves = self.dice.random() < 0.2
        if leaves:
            body["max_tokens"] = 60
        patience_s = self.dice.choice([0.0, 0.005, 0.02, 0.05])

        async def go() -> None:
            if leaves:
                await self.leave("/v1/completions", body, patience_s)
                return
            answer = await self.served.http.post("/v1/completions", body)
            assert answer.status == 200, answer.body
            assert not stream or answer.events, answer.body
            assert b'"error"' not in answer.body, answer.body
            name = answer.headers["x-session-id"]
            self.sessions.pop(name, None)
            self.sessions[name], self.sent[name] = None, body["prompt"]
            self.codes["answered"] += 1

        return go

    def leave_creation(self) -> Callable[[], Awaitable[None]]:
        """Somebody wants a pool and does not wait for it."""
        tokens, patience_s = self.tokens(), self.dice.choice([0.0, 0.005, 0.02])
        name = self.session()
        body = {"tokens": tokens} if self.dice.random() < 0.7 else {"from_session": name}
        return lambda: self.leave("/polykv/pools", body, patience_s)

    async def leave(self, path: str, body: Any, patience_s: float) -> None:
        """A request whose client goes away."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self.served.http.post(path, body)
        self.codes["left"] += 1

    def verb(self) -> Callable[[], Awaitable[None]]:
        """Pin, unpin, evict, flush or release."""
        verb = self.dice.choice(
            ["pin", "unpin", "unpin", "unpin", "evict", "evict", "flush", "release", "release", "release"]
        )
        recursive = "?recursive=1" if self.dice.random() < 0.3 else ""
        path = f"/polykv/pools/{self.pool()}/{verb}{recursive}"

        async def go() -> None:
            answer = await self.ask("POST", path, {})
            for pool_id in (answer or {}).get("released", [])[1:]:  # one may be asked for once more
                self.known.pop(pool_id, None)
            if len(self.known) > KNOWN:
                self.known.pop(next(iter(self.known)))

        return go

    # -- rounds --------------------------------------------------------------------------------------------

    async def work(self, operations: int) -> None:
        """That many operations, with a look at everything every few rounds."""
        kinds = [self.create, self.fork, self.fork, self.snapshot, self.request, self.request]
        kinds += [self.request, self.leave_creation, self.verb, self.verb, self.verb]
        done, rounds = 0, 0
        while done < operations:
            drawn = []
            for _ in range(self.dice.randint(1, TOGETHER)):
                kind = self.dice.choice(kinds)
                drawn.append(kind())
                self.log.append(f"{done} {kind.__name__}")
                done += 1
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*(operation() for operation in drawn))
            rounds += 1
            if rounds % ROUNDS_BETWEEN_LOOKS == 0:
                await self.look()
        await self.look()

    async def look(self) -> dict[str, Any]:
        """At rest, the engine and the proxy tell the same story."""
        await self.served.until(self._numbers_are_back)
        counters = await self.served.quiet()
        listed = await self.served.listing()
        assert counters["n_deferred"] == 0
        resident = [pool for pool in listed["pools"] if pool["residency"] == "resident"]
        assert all(pool["residency"] in ("resident", "evicted") for pool in listed["pools"]), listed
        assert Counter(pool["prefix_len"] for pool in resident) == Counter(
            pool["n_tokens"] for pool in counters["pools"]
        )
        assert listed["unattributed_cells"] == 0, listed
        # pools also come by themselves, or of requests that nobody waited for
        self.known = {pool["pool_id"]: self.known.get(pool["pool_id"], []) for pool in listed["pools"]}
        return listed

    async def _numbers_are_back(self) -> bool:
        """What the engine was told to give up is given up."""
        await self.served.quiet()
        listed = await self.served.listing()
        resident = sum(pool["residency"] == "resident" for pool in listed["pools"])
        return listed["pool_seq_ids_used"] == resident == len((await self.served.counters())["pools"])

    async def go_home(self) -> None:
        """Release everything, empty the slots: nothing is left."""
        await self.served.clear()
        listed = await self.look()
        counters = await self.served.quiet()
        assert listed["pools"] == listed["draining"] == listed["unpooled"] == []
        assert counters["kv"]["n_used"] == 0
        assert counters["pools"] == []
        sessions = (await self.served.http.get("/polykv/sessions")).json["sessions"]
        assert not [session for session in sessions if session["state"] == "running"]


async def unleash(served: Served, operations: int, vocabulary: int) -> Counter[str]:
    """Run a mob; tell what it did when it found something."""
    mob = Mob(served, SEED, vocabulary)
    try:
        await mob.work(operations)
        await mob.go_home()
    except BaseException:
        print(*mob.log, mob.codes, served.log[-5:], sep="\n")
        raise
    print(mob.codes)
    for event in ("pool_release_failed", "internal_error"):
        assert not served.events(event)
    return mob.codes


@pytest.mark.timeout(3600)
async def test_random_work_on_a_tiny_model_leaves_no_cell_behind(
    patched: Path, smollm: Path, tmp_path: Path
) -> None:
    """Thousands of operations: the sums hold at every rest, and in the end nothing is left."""
    model = tmp_path / "llama.gguf"
    llama(model, smollm)
    sizes = ("--parallel", str(SLOTS), "--ctx-size", str(CELLS), "--max-pools", str(POOLS))
    async with serve(tmp_path, "--model", str(model), *sizes) as served:
        codes = await unleash(served, OPERATIONS, 1000)
    # what was asked for did happen: much work was done, and every way to refuse it was seen
    assert codes["answered"] > OPERATIONS / 20
    assert codes["fine"] > OPERATIONS / 20
    assert codes["snapshot"] > OPERATIONS / 500  # most sessions lost their slot by then
    assert codes.keys() >= {"pool_capacity_exhausted", "pool_has_children", "pool_pinned", "left"}


async def test_random_work_on_a_real_model_leaves_no_cell_behind(
    patched: Path, smollm: Path, tmp_path: Path
) -> None:
    """The same with the built-in model, where computing takes time and requests overlap more."""
    sizes = ("--parallel", str(SLOTS), "--ctx-size", str(CELLS), "--max-pools", str(POOLS))
    async with serve(tmp_path, *sizes) as served:
        codes = await unleash(served, OPERATIONS_SMOLLM, 40_000)
    assert codes["answered"] > OPERATIONS_SMOLLM / 20
