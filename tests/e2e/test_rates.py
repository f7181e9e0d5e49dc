"""Rates on the real engine: what is reported is what clients get, whatever API they use."""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise, product
from statistics import fmean
from time import monotonic
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from test_metrics import documented, parsed

from e2e.harness import PATIENCE_S, Served, serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 224
STEADY_AFTER = 64
"""Tokens after which a rate is looked at."""

WITHIN = 0.10
LOOKS_BACK_S = (0.25, 0.5, 1.0, 2.0, 4.0)
LATE_S = (0.0, 0.25, 0.5)
"""A rate weighs the time behind it, the more the nearer: it is a mean of plain looks back of such lengths. It
is so much late: the engine is looked at a few times a second, and its documents are sent."""

PROMPT = "Count from 1 to 1000, one number in each line, without stopping."
VARIANTS = [(api, stream) for api in ("chat", "anthropic", "responses") for stream in (True, False)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxy(tmp_path_factory: Any, patched: Any, smollm: Any) -> AsyncIterator[Served]:
    """Four slots, and a stream of rates with ten documents a second."""
    sizes = ("--parallel", "4", "--ctx-size", "8192", "--max-pools", "4")
    args = [f"--engine-arg={word}" for word in ("--metrics", "--sse-ping-interval", "1")]
    env = {"POLYKV_TELEMETRY__TPS_INTERVAL_S": "0.1"}
    async with serve(tmp_path_factory.mktemp("rates"), *sizes, *args, env=env) as served:
        yield served


def request_of(api: str, *, stream: bool, tokens: int = TOKENS) -> tuple[str, dict[str, Any]]:
    """Path and body of a request that generates ``tokens`` tokens."""
    body: dict[str, Any] = {"stream": stream, "temperature": 0, "model": "any"}
    if api == "responses":
        return "/v1/responses", {**body, "input": PROMPT, "max_output_tokens": tokens, "ignore_eos": True}
    body |= {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": tokens}
    if api == "anthropic":
        return "/v1/messages", body  # it takes no ignore_eos; this prompt is not answered to its end
    return "/v1/chat/completions", {**body, "ignore_eos": True}


class Course:
    """How many tokens there had been, at any time.

    Args:
        known: moments, and tokens until then; between two of them they come evenly.
    """

    def __init__(self, known: list[tuple[float, float]]) -> None:
        self._at, self._tokens = zip(*known, strict=True)

    def until(self, at: float) -> float:
        """Tokens until a moment."""
        after = min(max(1, bisect_right(self._at, at)), len(self._at) - 1)
        (before_s, before), (after_s, then) = (
            (self._at[index], self._tokens[index]) for index in (after - 1, after)
        )
        return before + (then - before) * min(1.0, max(0.0, (at - before_s) / (after_s - before_s)))

    def began(self) -> float:
        """The last moment without any token."""
        return self._at[max(0, bisect_right(self._tokens, self._tokens[0]) - 1)]

    def seen_from(self, begin: float, end: float) -> tuple[float, float]:
        """Least and most that looks back from all moments between these two show on the average."""
        moments = [begin + (end - begin) * (index + 0.5) / 200 for index in range(200)]
        means = []
        for back_s, late_s in product(LOOKS_BACK_S, LATE_S):
            rates = []
            for at in moments:
                since = max(self.began(), at - late_s - back_s)
                rates.append((self.until(at - late_s) - self.until(since)) / (at - late_s - since))
            means.append(fmean(rates))
        return min(means), max(means)


@dataclass
class Seen:
    """What one client saw."""

    name: str
    arrivals: list[float] = field(default_factory=list)
    """Of each piece of text."""
    done_at: float = 0.0

    def course(self) -> Course:
        """Tokens, by when they came."""
        return Course([(at, float(count)) for count, at in enumerate(self.arrivals)])


async def run(served: Served, name: str, api: str, *, stream: bool, tokens: int = TOKENS) -> Seen:
    """One request to its end."""
    seen = Seen(name)
    path, body = request_of(api, stream=stream, tokens=tokens)
    marks = (b'"content":"', b"text_delta", b"output_text.delta")
    async with served.http.session() as session:
        async with session.post(path, json=body, headers={"X-Session-Id": name}) as answer:
            assert answer.status == 200, await answer.read()
            if stream:
                async for line in answer.content:
                    if line.startswith(b"data: ") and any(mark in line for mark in marks):
                        seen.arrivals.append(monotonic())
            else:
                json.loads(await answer.read())
    seen.done_at = monotonic()
    return seen


@dataclass
class Watch:
    """Everything that the rate stream and the engine said, while requests ran."""

    documents: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    counters: list[tuple[float, dict[str, Any]]] = field(default_factory=list)

    async def follow(self, served: Served) -> None:
        """Read the stream of rates."""
        async with served.http.session() as session:
            async with session.get("/polykv/tps", headers={"Accept": "text/event-stream"}) as answer:
                async for line in answer.content:
                    if line.startswith(b"data: "):
                        self.documents.append((monotonic(), json.loads(line[6:])))

    async def count(self, served: Served) -> None:
        """Read the engine's counters directly, as the truth about answers that come in one piece."""
        while True:
            self.counters.append((monotonic(), await served.counters()))
            await asyncio.sleep(0.2)

    def reported(self, name: str, begin: float, end: float) -> float:
        """Time-mean of what was reported of a session within an interval."""
        return self._mean(
            begin,
            end,
            lambda document: next(
                (each["tps_ewma"] for each in document["sessions"] if each["session_id"] == name), None
            ),
        )

    def mean(self, member: str, begin: float, end: float) -> float:
        """Time-mean of a member of the documents."""
        return self._mean(begin, end, lambda document: document[member])

    def _mean(self, begin: float, end: float, value: Callable[[dict[str, Any]], float | None]) -> float:
        """Each document holds until the next; they may come late on a busy machine."""
        area = time = 0.0
        for (at, document), (until, _) in pairwise(self.documents):
            held = min(until, end) - max(at, begin)
            if held > 0 and (shown := value(document)) is not None:
                area, time = area + shown * held, time + held
        return area / time

    def course(self, slot: int | None = None) -> Course:
        """Tokens of a slot, or of all, by the engine's counters."""
        return Course(
            [
                (at, sum(each["n_gen_total"] for each in document["slots"] if slot in (None, each["id"])))
                for at, document in self.counters
            ]
        )

    def steady(self, sessions: int) -> float:
        """When so many slots were at work and each had generated ``STEADY_AFTER`` tokens."""
        began = {slot["id"]: slot["n_gen_total"] for slot in self.counters[0][1]["slots"]}
        for at, document in self.counters:
            work = [slot for slot in document["slots"] if slot["state"] == "gen"]
            if len(work) == sessions and all(
                slot["n_gen_total"] - began[slot["id"]] >= STEADY_AFTER for slot in work
            ):
                return at
        raise AssertionError("never steady")


async def measured(served: Served, *variants: tuple[str, bool]) -> tuple[Watch, list[Seen]]:
    """Requests side by side, watched; each of a session that is new."""
    await served.quiet()
    watch = Watch()
    watchers = [asyncio.create_task(watch.follow(served)), asyncio.create_task(watch.count(served))]
    try:
        async with asyncio.timeout(2 * PATIENCE_S):
            while not watch.documents or not watch.counters:
                await asyncio.sleep(0.01)
            seen = await asyncio.gather(
                *(
                    run(served, f"{api}-{stream}-{len(variants)}-{at}", api, stream=stream)
                    for at, (api, stream) in enumerate(variants)
                )
            )
    finally:
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
    return watch, list(seen)


async def slots_of(served: Served) -> dict[str, int]:
    """Where each session is."""
    listed = (await served.http.get("/polykv/sessions")).json["sessions"]
    return {session["session_id"]: session["slot"] for session in listed if session["slot"] is not None}


@dataclass
class Part:
    """A part of the time in which requests ran, with their first tokens behind them."""

    watch: Watch
    seen: list[Seen]
    begin: float
    end: float

    def agree(self, reported: float, course: Course) -> None:
        """What was reported is what was counted.

        A mean of looks back is no mean of the time itself where the speed changes, as it does on a machine
        whose cores others take away: what it may be is computed from what was counted.
        """
        low, high = course.seen_from(self.begin, self.end)
        print(f"reported {reported:.2f}, counted {low:.2f} to {high:.2f}")
        assert low * (1 - WITHIN) <= reported <= high * (1 + WITHIN)


async def check(served: Served, part: Part) -> None:
    """What was reported of each session is what its client got, or what its slot did."""
    where = await slots_of(served)
    for each in part.seen:
        course = each.course() if each.arrivals else part.watch.course(where[each.name])
        part.agree(part.watch.reported(each.name, part.begin, part.end), course)


async def steadily(served: Served, *variants: tuple[str, bool]) -> Part:
    """Requests side by side, and the part of their time in which each has its first tokens behind it."""
    watch, seen = await measured(served, *variants)
    return Part(watch, seen, watch.steady(len(variants)), min(each.done_at for each in seen) - 0.1)


@pytest.mark.parametrize(("api", "stream"), VARIANTS)
async def test_one_session_is_told_its_speed(proxy: Served, api: str, *, stream: bool) -> None:
    """On each API, streamed or not: the time-mean of what is reported against what was counted."""
    await check(proxy, await steadily(proxy, (api, stream)))


@pytest.mark.parametrize(
    "variants",
    [
        [("chat", True), ("anthropic", True), ("responses", False), ("chat", False)],
        [("responses", True), ("anthropic", False), ("chat", True), ("responses", True)],
    ],
)
async def test_four_sessions_are_told_theirs(proxy: Served, variants: list[tuple[str, bool]]) -> None:
    """Side by side; their sum is the aggregate, and nobody who is not warm is in the mean."""
    part = await steadily(proxy, *variants)
    await check(proxy, part)
    watch, begin, end = part.watch, part.begin, part.end
    part.agree(watch.mean("aggregate_tps", begin, end), watch.course())
    part.agree(sum(watch.reported(each.name, begin, end) for each in part.seen), watch.course())
    warming = 0
    for _, document in watch.documents:
        known = [each["tps_ewma"] for each in document["sessions"] if each["tps_ewma"] is not None]
        running = [each["tps_ewma"] for each in document["sessions"] if each["state"] == "running"]
        mean = document["mean_active_tps"]
        warming += None in running
        assert mean is None or min(known) - 0.01 <= mean <= max(known) + 0.01
    assert warming


async def test_counters_and_streams_agree(proxy: Served) -> None:
    """Every token is counted once, whatever ended when; and every documented metric is there."""
    await proxy.clear()
    await proxy.http.post("/polykv/pools", {"prompt": "The sea is wide. " * 20, "label": "docs"})

    async def generated() -> float:
        await proxy.quiet()
        counters = await proxy.counters()
        truth = sum(slot["n_gen_total"] for slot in counters["slots"])
        async with asyncio.timeout(PATIENCE_S):
            while True:  # the sampler looks within a second
                found = parsed((await proxy.http.get("/metrics")).body)
                if found["opencoti_polykv:generated_tokens_total",] + proxy_start == truth:
                    return truth
                await asyncio.sleep(0.1)

    found = parsed((await proxy.http.get("/metrics")).body)
    counters = await proxy.counters()
    counted = found["opencoti_polykv:generated_tokens_total",]
    proxy_start = sum(slot["n_gen_total"] for slot in counters["slots"]) - counted  # the self-test's
    assert 0 <= proxy_start <= 8, "what the proxy tried out at its start"
    before = await generated()
    lengths = (1, 3, 20, 7, 2, 11)
    for length in lengths:
        path, body = request_of("chat", stream=length % 2 == 0, tokens=length)
        assert (await proxy.http.post(path, body)).status == 200
    assert await generated() - before == sum(lengths)
    path, body = request_of("chat", stream=True, tokens=90)
    running = asyncio.create_task(proxy.http.post(path, body))
    async with asyncio.timeout(PATIENCE_S):
        while "opencoti_polykv:mean_active_tps" not in {key[0] for key in found}:
            found = parsed((await proxy.http.get("/metrics")).body)
            assert not running.done(), "it was over before it was warm"
    names = {key[0] for key in found}
    for name in documented():
        full = f"opencoti_polykv:{name}"
        assert full in names or f"{full}_count" in names, name
    assert "llamacpp:tokens_predicted_total" in names
    await running


@pytest.mark.parametrize("api", ["chat", "anthropic"])
async def test_signs_of_life_are_no_first_token(proxy: Served, api: str) -> None:
    """The engine sends comments while it computes a long prompt; what follows them is the answer."""
    path, body = request_of(api, stream=True, tokens=4)
    body["messages"] = [{"role": "user", "content": ""}]
    for times in (60, 120, 240, 480):  # until it takes a second
        name = f"{api}-{times}"
        body["messages"][0]["content"] = f"{name}. " + "The river is wide and slow. " * times
        began = monotonic()
        answer = await proxy.http.post(path, body, {"X-Session-Id": name})
        took_ms = 1000 * (monotonic() - began)
        if answer.body.startswith(b":\n\n"):
            break
    assert answer.body.startswith(b":\n\n")
    (record,) = (await proxy.http.get(f"/polykv/requests?session_id={name}")).json["requests"]
    assert record["prompt_tokens"] > 6 * times
    sessions = (await proxy.http.get("/polykv/sessions")).json["sessions"]
    (session,) = (each for each in sessions if each["session_id"] == name)
    assert session["ttft_ms"] == record["ttft_ms"]
    if api == "chat":
        prompt_ms = answer.events[-1]["timings"]["prompt_ms"]
        assert 1000 < prompt_ms <= record["ttft_ms"] < took_ms


async def test_slots_say_whose_they_are(proxy: Served) -> None:
    """On the engine's own document; what we add is all that differs."""
    path, body = request_of("chat", stream=False, tokens=40)
    await proxy.http.post(path, body, {"X-Session-Id": "me"})
    await proxy.quiet()
    answer = await proxy.http.get("/slots")
    plain = (await proxy.engine.get("/slots")).json
    slots = answer.json
    (mine,) = (slot for slot in slots if slot["opencoti"]["session_id"] == "me")
    assert mine["opencoti"]["ctx_used"] == mine["n_prompt_tokens"] > 40
    assert mine["opencoti"]["tps_ewma"] > 0
    for slot in slots:
        del slot["opencoti"]
    assert slots == plain
    ours = (await proxy.http.get("/props")).json["opencoti"]
    assert ours["engine_patch"] is None or len(ours["engine_patch"]) == 12
    assert ours["policy"]["pools"]["auto_match"] is True


async def generated_total(served: Served, at_least: float) -> float:
    """The proxy's own count of tokens, a look after the last answer."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = parsed((await served.http.get("/metrics")).body)
            if found["opencoti_polykv:generated_tokens_total",] >= at_least:
                return found["opencoti_polykv:generated_tokens_total",]
            await asyncio.sleep(0.1)


async def test_a_stock_engine_tells_enough(tmp_path: Any, stock: Any, smollm: Any) -> None:
    """The only request is the only task: its speed is known while it runs, and at its end."""
    env = {"POLYKV_TELEMETRY__TPS_INTERVAL_S": "0.1", "POLYKV_ENGINE__BINARY": str(stock)}
    async with serve(
        tmp_path, "--parallel", "2", "--ctx-size", "4096", "--max-pools", "0", env=env
    ) as served:
        watch = Watch()
        watcher = asyncio.create_task(watch.follow(served))
        seen = await run(served, "stock", "chat", stream=True, tokens=3 * TOKENS)
        watcher.cancel()
        begin, end = seen.arrivals[STEADY_AFTER], seen.arrivals[-1]
        reported = watch.reported("stock", begin, end)
        low, high = seen.course().seen_from(begin, end)
        print(f"stock: reported {reported:.2f}, counted {low:.2f} to {high:.2f}")
        # a token's time is known only as that of the look which saw it
        assert low * (1 - 2 * WITHIN) <= reported <= high * (1 + 2 * WITHIN)
        before = await generated_total(served, at_least=3 * TOKENS)
        assert before == 3 * TOKENS
        for tokens in range(1, 21):  # most of them are over before anybody looks
            api = ("chat", "anthropic", "responses")[tokens % 3]
            path, body = request_of(api, stream=tokens % 2 == 0, tokens=tokens)
            assert (await served.http.post(path, body)).status == 200
        assert await generated_total(served, at_least=before + 210) == before + 210
        path, body = request_of("chat", stream=False, tokens=60)
        answer = (await served.http.post(path, {**body, "session_id": "plain"})).json
        told, whole = answer["opencoti"]["session_tps"], answer["timings"]["predicted_per_second"]
        print(f"stock: told {told:.2f} at the end, {whole:.2f} over all of it")
        assert whole / 4 <= told <= whole * 4, "of its last seconds, in which a busy machine may do anything"
