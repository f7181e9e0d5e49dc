"""What the engine does when its KV cells run out: one task pays, everyone else goes on. Without the proxy.

The unpatched engine answers HTTP 500 to everybody and drops all that they hold; the proxy's admission keeps
clear of the edge, and this is what happens beyond it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from e2e.harness import PATIENCE_S, Answer, Http, bare_engine
from e2e.tiny_models import llama

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

CELLS = 1024
SLOTS = 4
PROMPT = 130
NEW = 700
FEW_CELLS = 256
"""For the built-in model, so that it gets there soon."""
CAP = 8
ARGS = (
    *("--parallel", str(SLOTS), "--kv-unified", "--polykv-max-pools", "4", "--cache-ram", "0"),
    # one thread: two that wait for each other are very slow where others want the CPU too
    *("--slots", "--metrics", "--no-ui", "--threads", "1"),
)
TOLERANCE = 0.01
"""Of a log-probability, in a model of single precision."""


class Engine:
    """An engine under pressure, and what its counters say."""

    def __init__(self, http: Http, folder: Path) -> None:
        self.http = http
        self._log = folder / "engine.log"

    @property
    def log(self) -> str:
        """What the engine has written so far."""
        return self._log.read_text(errors="replace")

    async def counters(self) -> dict[str, Any]:
        """The counters document."""
        return (await self.http.get("/polykv/engine/counters")).json

    async def overflow(self) -> dict[str, int]:
        """How often each thing has happened so far."""
        return (await self.counters())["overflow"]

    async def slot(self, number: int) -> dict[str, Any]:
        """One slot's counters."""
        return (await self.counters())["slots"][number]

    async def until(self, number: int, **members: Any) -> dict[str, Any]:
        """The counters of a slot once they have these values."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                slot = await self.slot(number)
                if all(slot[name] == value for name, value in members.items()):
                    return slot
                await asyncio.sleep(0.005)

    async def complete(self, prompt: list[int], new: int, slot: int | None = None, **more: Any) -> Answer:
        """One greedy completion of exactly ``new`` tokens, if nothing ends it."""
        headers = {} if slot is None else {"X-PolyKV-Slot": str(slot)}
        headers |= more.pop("headers", {})
        body = {"prompt": prompt, "n_predict": new, "temperature": 0, "ignore_eos": True, **more}
        return await self.http.post("/completion", body, headers)

    async def pool(self, number: int, action: str, **body: Any) -> Answer:
        """An operation on a pool."""
        return await self.http.post(f"/polykv/engine/pools/{number}?action={action}", body)

    async def empty(self) -> int:
        """Release every pool, clear every slot; cells that are used then."""
        for pool in (await self.counters())["pools"]:
            assert (await self.pool(pool["id_pool"], "release")).status == 200
        for number in range(SLOTS):
            await self.until(number, state="idle")
            assert (await self.http.post(f"/slots/{number}?action=erase", {})).status == 200
        return int((await self.counters())["kv"]["n_used"])


def ids(seed: int, length: int) -> list[int]:
    """Token ids that agree with another seed's nowhere."""
    return [50 + (seed * 131 + at * (7 + seed % 5)) % 900 for at in range(length)]


def delta(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What happened in between, what did not left out."""
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tiny(
    tmp_path_factory: pytest.TempPathFactory, patched: Path, smollm: Path
) -> AsyncIterator[Engine]:
    """A model that decodes thousands of tokens a second and computes precisely."""
    folder = tmp_path_factory.mktemp("tiny")
    llama(folder / "llama.gguf", smollm)
    args = (*ARGS, "-c", str(CELLS), "--slot-save-path", str(folder))
    async with bare_engine(patched, folder / "llama.gguf", folder, *args) as http:
        yield Engine(http, folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def slow(
    tmp_path_factory: pytest.TempPathFactory, patched: Path, smollm: Path
) -> AsyncIterator[Engine]:
    """The built-in model with few cells and small batches: time enough to look at what it is doing."""
    folder = tmp_path_factory.mktemp("slow")
    sizes = ("-c", str(FEW_CELLS), "-b", "64", "-ub", "64", "--polykv-prefill-cap", str(CAP))
    args = (*ARGS, *sizes, "--slot-save-path", str(folder))
    async with bare_engine(patched, smollm, folder, *args) as http:
        yield Engine(http, folder)


@pytest_asyncio.fixture(loop_scope="module")
async def fast(tiny: Engine) -> Engine:
    """The tiny model with no cell in use."""
    assert await tiny.empty() == 0
    return tiny


@pytest_asyncio.fixture(loop_scope="module")
async def real(slow: Engine) -> Engine:
    """The built-in model with no cell in use."""
    assert await slow.empty() == 0
    return slow


async def likeliest(engine: Engine, prompt: list[int], **more: Any) -> tuple[dict[int, float], int]:
    """Log-probabilities of the next token, and how many tokens of the prompt were not computed for it."""
    # half a character has no probabilities; which token is taken does not change those of the others
    answer = (await engine.complete(prompt, 1, n_probs=10, grammar="root ::= [a-z]+", **more)).json
    found = answer["completion_probabilities"][0]["top_logprobs"]
    return {each["id"]: each["logprob"] for each in found}, answer["timings"]["cache_n"]


def agree(one: dict[int, float], other: dict[int, float]) -> bool:
    """Whether the first five of one are among the other's, with the same numbers."""
    first = sorted(one, key=one.__getitem__)[-5:]
    return all(token in other and abs(one[token] - other[token]) < TOLERANCE for token in first)


async def check_round(engine: Engine, answers: list[Answer], ended: int) -> list[dict[str, Any]]:
    """One overflowing round: who was ended, youngest first, and that the others have all they asked for."""
    assert [answer.status for answer in answers] == [200] * len(answers), [each.body for each in answers]
    finals = [answer.json for answer in answers]
    assert all(final["stop_type"] == "limit" for final in finals)
    victims = [final for final in finals if final["truncated"]]
    others = [final for final in finals if not final["truncated"]]
    assert len(victims) == ended > 0
    assert [final["tokens_predicted"] for final in others] == [NEW] * len(others)
    assert others
    tasks = {slot["id"]: slot["id_task"] for slot in (await engine.counters())["slots"]}
    victims.sort(key=lambda final: -tasks[final["id_slot"]])
    # the youngest first, one at a time: whoever came before it got further
    lengths = [final["tokens_predicted"] for final in victims]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) == len(lengths)
    assert min(tasks[final["id_slot"]] for final in victims) > min(
        tasks[final["id_slot"]] for final in others
    )
    for final in victims:
        assert len(final["tokens"]) == final["tokens_predicted"] > 0
        assert final["content"]
    return finals


async def test_four_that_do_not_fit_lose_one_at_a_time(fast: Engine) -> None:
    """ENG-8: four requests of 830 tokens in 1,024 cells, many rounds: only the victims' rest is lost."""
    shared = ids(99, 100)
    assert (await fast.pool(0, "materialize", tokens=shared)).status == 200
    asked = [*shared, *ids(98, 20)]
    attach = {"headers": {"X-PolyKV-Attach": "0"}}
    reference, cached = await likeliest(fast, asked, **attach)
    assert cached == 100
    for number in range(25):
        before = await fast.overflow()
        prompts = [ids(4 * number + each, PROMPT) for each in range(SLOTS)]
        answers = await asyncio.gather(
            *(fast.complete(prompt, NEW, return_tokens=True) for prompt in prompts)
        )
        counted = delta(before, await fast.overflow())
        finals = await check_round(fast, answers, counted["n_ended"])
        assert "n_refused" not in counted
        assert (await fast.counters())["kv"]["n_used"] <= CELLS

        # what a survivor holds is right, and so is the pool, although cells changed hands around them
        at = next(index for index, final in enumerate(finals) if not final["truncated"])
        slot = finals[at]["id_slot"]
        longer = [*prompts[at], *finals[at]["tokens"]]
        held, cached = await likeliest(fast, longer, slot=slot)
        assert cached >= PROMPT + NEW - 1
        alone, cached = await likeliest(fast, longer, slot=slot, cache_prompt=False)
        assert cached == 0
        assert agree(held, alone)
        again, cached = await likeliest(fast, asked, slot=slot, **attach)
        assert cached == 100
        assert agree(reference, again)
    assert await fast.empty() == 0


async def test_attached_requests_overflow_the_same_way(fast: Engine) -> None:
    """ENG-8: four on one pool; what a victim gives back is its own part, the pool stays for the others."""
    shared = ids(7, 100)
    assert (await fast.pool(1, "materialize", tokens=shared)).status == 200
    headers = {"X-PolyKV-Attach": "1"}
    before = await fast.overflow()
    answers = await asyncio.gather(
        *(fast.complete([*shared, *ids(each, 30)], NEW, return_tokens=True, headers=headers)
          for each in range(SLOTS))
    )  # fmt: skip
    await check_round(fast, answers, delta(before, await fast.overflow())["n_ended"])
    assert all(answer.json["timings"]["cache_n"] == 100 for answer in answers)
    for number in range(SLOTS):
        assert (await fast.http.post(f"/slots/{number}?action=erase", {})).status == 200
    assert (await fast.counters())["kv"]["n_used"] == 100


async def test_several_completions_of_one_prompt_overflow(fast: Engine) -> None:
    """ENG-8: n=4 shares its prompt; each completion ends for itself and the request is answered once."""
    answer = await fast.http.post(
        "/v1/completions",
        {"prompt": ids(5, PROMPT), "max_tokens": NEW, "n": SLOTS, "temperature": 0, "ignore_eos": True},
    )
    assert answer.status == 200, answer.body
    assert [choice["finish_reason"] for choice in answer.json["choices"]] == ["length"] * SLOTS
    assert all(choice["text"] for choice in answer.json["choices"])
    assert (await fast.overflow())["n_ended"] > 0


async def test_random_pressure(fast: Engine) -> None:
    """ENG-8: whatever comes, every request gets an answer of its own kind, and no decode ever lacks cells."""
    dice = random.Random(11)
    assert (await fast.pool(0, "materialize", tokens=ids(0, 120))).status == 200
    seen: Counter[str] = Counter()

    async def request(seed: int) -> None:
        own = ids(seed, dice.choice((5, 40, 150, 400, 950)))
        attached = dice.random() < 0.4
        more: dict[str, Any] = {"stream": dice.random() < 0.3, "n": dice.choice((1, 1, 1, 2))}
        new = dice.choice((1, 30, 200, 800))
        headers = {"headers": {"X-PolyKV-Attach": "0"}} if attached else {}
        prompt = [*ids(0, 120), *own] if attached else own
        sent = asyncio.create_task(fast.complete(prompt, new, **more, **headers))
        if dice.random() < 0.1:
            done, _ = await asyncio.wait({sent}, timeout=dice.random() / 10)
            if not done:
                sent.cancel()
                await asyncio.gather(sent, return_exceptions=True)
                seen["left"] += 1
                return
        answer = await sent
        finals = answer.events[-1:] if more["stream"] else answer.json
        for final in finals if isinstance(finals, list) else [finals]:
            if "error" in final:
                assert final["error"]["type"] in ("kv_cache_full_error", "exceed_context_size_error")
                seen[final["error"]["type"]] += 1
            elif final["truncated"]:
                seen["cut"] += 1
            else:
                assert final["tokens_predicted"] == new
                seen["whole"] += 1

    async def client(number: int) -> None:
        for turn in range(40):
            kind = dice.random()
            if kind < 0.1:
                evictable = dice.random() < 0.7
                path = f"/polykv/engine/slots/{dice.randrange(SLOTS)}?action=mark"
                assert (await fast.http.post(path, {"evictable": evictable})).status == 200
            elif kind < 0.2:
                made = await fast.pool(number % 3 + 1, "materialize", tokens=ids(1000 + number, 200))
                assert made.status in (200, 400, 503), made.body
                await fast.pool(number % 3 + 1, "mark", evictable=True)
            else:
                await request(number * 100 + turn)

    await asyncio.gather(*(client(number) for number in range(6)))
    assert all(seen[kind] for kind in ("whole", "cut", "left", "kv_cache_full_error")), seen
    # what the unpatched engine does first when a decode finds no cells
    assert "failed to find free space" not in fast.log
    assert "purging slot" not in fast.log
    counters = await fast.counters()
    assert counters["overflow"]["n_pools_released"] > 0
    assert 0 in [pool["id_pool"] for pool in counters["pools"]]  # it was never marked
    assert await fast.empty() == 0


async def test_drafts_take_only_what_is_left(patched: Path, smollm: Path, tmp_path: Path) -> None:
    """ENG-8: with speculation on, a long draft neither overflows the cache nor ends anybody early."""
    llama(tmp_path / "llama.gguf", smollm)
    args = (*ARGS, "-c", str(CELLS), "--spec-type", "ngram-simple", "--slot-save-path", str(tmp_path))
    async with bare_engine(patched, tmp_path / "llama.gguf", tmp_path, *args) as http:
        engine = Engine(http, tmp_path)
        body = {"grammar": 'root ::= "ab"*'}  # easy to guess
        answers = await asyncio.gather(
            *(engine.complete(ids(each, PROMPT), NEW, **body) for each in range(SLOTS))
        )
        assert [answer.status for answer in answers] == [200] * SLOTS
        finals = [answer.json for answer in answers]
        assert sum(final["timings"].get("draft_n", 0) for final in finals) > 0
        whole = [final for final in finals if not final["truncated"]]
        assert whole
        assert {final["tokens_predicted"] for final in whole} == {NEW}
        assert len(finals) - len(whole) == (await engine.overflow())["n_ended"] > 0
        assert "failed to find free space" not in engine.log
        assert await engine.empty() == 0


async def test_stream_gets_what_was_held_back(fast: Engine) -> None:
    """ENG-8: text that may be the beginning of a stop word is a victim's as well."""
    body = {"grammar": 'root ::= "a"*', "stop": ["a" * 10 * NEW], "stream": True}
    answers = await asyncio.gather(*(fast.complete(ids(each, PROMPT), NEW, **body) for each in range(SLOTS)))
    ended = 0
    for answer in answers:
        assert answer.status == 200
        *chunks, final = answer.events
        assert final["stop_type"] == "limit"
        if final["truncated"]:
            ended += 1
            text = "".join(chunk["content"] for chunk in chunks)
            assert set(text) == {"a"}
            assert len(text) >= final["tokens_predicted"] > 0
    assert ended > 0


async def test_alone_at_the_wall(fast: Engine) -> None:
    """ENG-8: a pool that nobody marked is not given up; who has no other cells left keeps the text so far."""
    assert (await fast.pool(0, "materialize", tokens=ids(1, 600))).status == 200
    final = (await fast.complete(ids(2, 200), NEW)).json
    assert (final["truncated"], final["stop_type"]) == (True, "limit")
    # the last token needs no cell
    assert final["tokens_predicted"] == CELLS - 600 - 200 + 1
    assert [pool["n_tokens"] for pool in (await fast.counters())["pools"]] == [600]


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_that_can_never_fit_is_refused(fast: Engine, *, stream: bool) -> None:
    """ENG-8: beside pools that stay there is no room for it: 503 of its own type before the first byte."""
    assert (await fast.pool(0, "materialize", tokens=ids(1, 800))).status == 200
    before = await fast.overflow()
    refused = await fast.complete(ids(2, 300), 5, stream=stream)
    assert refused.status == 503
    assert refused.json["error"]["type"] == "kv_cache_full_error"
    assert refused.json["error"]["code"] == 503
    assert delta(before, await fast.overflow()) == {"n_refused": 1}
    too_long = await fast.complete(ids(2, CELLS), 5, stream=stream)
    assert (too_long.status, too_long.json["error"]["type"]) == (400, "exceed_context_size_error")
    # attached, the same prompt needs cells for its own part only
    fits = await fast.complete([*ids(1, 800), *ids(2, 100)], 5, headers={"X-PolyKV-Attach": "0"})
    assert (fits.status, fits.json["timings"]["cache_n"]) == (200, 800)
    assert (await fast.pool(1, "materialize", tokens=ids(3, 300))).json["error"][
        "type"
    ] == "unavailable_error"


async def test_marked_pools_go_before_a_task_does(fast: Engine) -> None:
    """ENG-8: pools are given up only if marked, the longest unused first, and no more than needed."""
    for number in range(3):
        assert (await fast.pool(number, "materialize", tokens=ids(number, 250))).status == 200
    for number in (2, 1):
        marked = await fast.pool(number, "mark", evictable=True)
        assert (marked.status, marked.json["evictable"]) == (200, True)
    before = await fast.overflow()
    final = (await fast.complete(ids(9, 200), 200)).json
    assert (final["truncated"], final["tokens_predicted"]) == (False, 200)
    assert delta(before, await fast.overflow()) == {"n_pools_released": 1}
    assert [pool["id_pool"] for pool in (await fast.counters())["pools"]] == [0, 2]
    assert (await fast.pool(2, "mark", evictable=False)).json["evictable"] is False
    final = (await fast.complete(ids(9, 200), NEW)).json
    assert final["truncated"] is True
    assert [pool["id_pool"] for pool in (await fast.counters())["pools"]] == [0, 2]
    assert (await fast.pool(3, "mark", evictable=True)).status == 404
    assert (await fast.pool(2, "mark")).status == 400


async def test_idle_slots_go_by_age_unless_kept(fast: Engine) -> None:
    """ENG-8: what idle slots hold goes longest unused first; a kept one stays until its next task."""
    for slot in (1, 2, 0):
        assert (await fast.complete(ids(slot, 250), 1, slot)).status == 200
    kept = await fast.http.post("/polykv/engine/slots/1?action=mark", {"evictable": False})
    assert (kept.status, kept.json["evictable"]) == (200, False)
    before = await fast.overflow()
    assert (await fast.complete(ids(8, 400), 1, 3)).json["truncated"] is False
    assert delta(before, await fast.overflow()) == {"n_slots_cleared": 1}
    held = [slot["n_tokens"] for slot in (await fast.counters())["slots"]]
    assert held == [250, 250, 0, 400]
    assert (await fast.complete(ids(1, 250), 1, 1)).json["timings"]["cache_n"] == 249
    assert (await fast.slot(1))["evictable"] is True
    for bad in ("/polykv/engine/slots/9?action=mark", "/polykv/engine/slots/0?action=other"):
        assert (await fast.http.post(bad, {"evictable": True})).status == 400


async def test_prompts_wait_in_order_and_run_later(real: Engine) -> None:
    """ENG-8: a prompt without room waits, a younger one behind it too; both run in full, nobody is ended."""
    before = await real.overflow()
    first = asyncio.create_task(real.complete(ids(1, 100), 40, 0))
    await real.until(0, state="gen")
    large = asyncio.create_task(real.complete(ids(2, 160), 5, 1, stream=True))
    await real.until(1, waits=True)
    small = asyncio.create_task(real.complete(ids(3, 10), 5, 2))
    waiting = await real.until(2, waits=True)
    assert (waiting["state"], waiting["n_tokens"]) == ("prompt", 0)
    assert (await real.slot(0))["state"] == "gen"
    finals = [(await first).json, (await large).events[-1], (await small).json]
    assert [final["tokens_predicted"] for final in finals] == [40, 5, 5]
    assert not any(final["truncated"] for final in finals)
    assert [final["timings"]["prompt_n"] for final in finals] == [100, 160, 10]
    assert delta(before, await real.overflow()) == {"n_waited": 2, "n_slots_cleared": 1}


async def test_cancelled_wait_leaves_no_trace(real: Engine) -> None:
    """ENG-8, 10: a waiting client that leaves frees its slot while the other one generates on."""
    first = asyncio.create_task(real.complete(ids(1, 100), 60, 0))
    await real.until(0, state="gen")
    waiting = asyncio.create_task(real.complete(ids(2, 160), 5, 1))
    slot = await real.until(1, waits=True)
    path = f"/polykv/engine/slots/1?action=cancel&id_task={slot['id_task']}"
    assert (await real.http.post(path, {})).json == {"cancelled": True}
    assert (await waiting).status == 503
    assert (await real.until(1, state="idle"))["waits"] is False
    assert (await first).json["tokens_predicted"] == 60


@pytest.mark.parametrize("stream", [False, True])
async def test_victim_in_its_prompt_is_refused(real: Engine, *, stream: bool) -> None:
    """ENG-8: cells that a half-computed prompt counted on went elsewhere: 503, and who generates goes on."""
    assert (await real.pool(0, "materialize", tokens=ids(5, 75))).status == 200
    assert (await real.pool(0, "save", filename="pool.bin")).status == 200
    assert (await real.pool(0, "release")).status == 200
    before = await real.overflow()
    first = asyncio.create_task(real.complete(ids(1, 5), 120, 0))
    await real.until(0, state="gen")
    second = asyncio.create_task(real.complete(ids(2, 172), 5, 1, stream=stream))
    async with asyncio.timeout(PATIENCE_S):
        while (await real.slot(1))["n_tokens"] < 90:
            await asyncio.sleep(0.005)
    assert (await real.pool(1, "restore", filename="pool.bin")).status == 200
    refused = await second
    if stream:  # its head was sent when its prompt began
        assert refused.status == 200
        error = refused.events[-1]["error"]
        assert refused.events == [{"error": error}]
    else:
        assert refused.status == 503
        error = refused.json["error"]
    assert (error["code"], error["type"]) == (503, "kv_cache_full_error")
    final = (await first).json
    assert (final["truncated"], final["tokens_predicted"]) == (False, 120)
    counted = delta(before, await real.overflow())
    assert counted.pop("n_slots_cleared") >= 1
    assert counted == {"n_waited": 1, "n_refused": 1}


async def test_chat_is_cut_like_at_a_context_wall(real: Engine) -> None:
    """ENG-8: on the built-in model and through the chat API a victim's finish reason is length."""
    before = await real.overflow()
    words = " ".join(f"number {each}" for each in range(5))
    new = 100
    body = {"max_tokens": new, "temperature": 0, "ignore_eos": True}
    answers = await asyncio.gather(
        *(
            real.http.post(
                "/v1/chat/completions",
                {**body, "messages": [{"role": "user", "content": f"Agent {each}: {words}"}]},
            )
            for each in range(SLOTS)
        )
    )
    assert [answer.status for answer in answers] == [200] * SLOTS
    choices = [answer.json["choices"][0] for answer in answers]
    assert [choice["finish_reason"] for choice in choices] == ["length"] * SLOTS
    assert all(choice["message"]["content"] for choice in choices)
    counted = delta(before, await real.overflow())
    short = [answer for answer in answers if answer.json["usage"]["completion_tokens"] < new]
    assert len(short) == counted["n_ended"] > 0
    assert "n_refused" not in counted


async def test_prompts_are_capped_while_somebody_generates(real: Engine) -> None:
    """ENG-9: computing a pool leaves who generates a token for every 8 of the pool's, and none the worse."""
    assert (await real.http.get("/polykv/engine")).json["prefill_cap"] == CAP
    first = asyncio.create_task(real.complete(ids(1, 20), 60, 0))
    await real.until(0, state="gen")
    before = (await real.slot(0))["n_gen_total"]
    assert (await real.pool(0, "materialize", tokens=ids(2, 128))).status == 200
    assert (await real.slot(0))["n_gen_total"] - before >= 128 // CAP
    assert (await first).json["tokens_predicted"] == 60


async def test_prompts_are_not_capped_when_nobody_generates(real: Engine) -> None:
    """ENG-9: without anybody to protect, batches are as large as ever."""

    async def decodes() -> int:
        lines = (await real.http.get("/metrics")).body.decode().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("llamacpp:n_decode_total")))

    before = await decodes()
    assert (await real.pool(0, "materialize", tokens=ids(2, 128))).status == 200
    assert await decodes() - before == 128 // 64
