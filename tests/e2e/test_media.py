"""Requests with images on the real engine: text before the first one is shared, and nothing else of them.

Two tiny models with projectors. To the one an image is as many positions as tokens, to the other fewer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from e2e.audit import Picture
from e2e.harness import Served, serve
from e2e.test_requests import SYSTEM
from e2e.tiny_models import llama, qwen2vl
from e2e.tiny_projectors import base64_png, data_url, dynamic, fixed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
COUNT = {
    CHAT: f"{CHAT}/input_tokens?tokens=1",
    MESSAGES: f"{MESSAGES}/count_tokens?tokens=1",
    RESPONSES: f"{RESPONSES}/input_tokens?tokens=1",
}
MEDIUM = -1
SIZE = (112, 84)
"""Pixels of an image."""
TELLING = 1e-3
"""Log probabilities that differ by so much are of other prompts."""


@dataclass(frozen=True, slots=True)
class Sight:
    """How a model sees."""

    text_model: Callable[..., None]
    projector: Callable[[Path], None]
    image_tokens: int
    """That an image of ``SIZE`` takes."""
    options: tuple[str, ...] = ()


SIGHTS = {
    "fixed": Sight(llama, fixed, 16),
    "positions": Sight(qwen2vl, dynamic, 12, ("--image-min-tokens", "1", "--image-max-tokens", "16")),
}


@pytest.fixture(scope="module", params=list(SIGHTS))
def sight(request: pytest.FixtureRequest) -> Sight:
    """Each of them."""
    return SIGHTS[request.param]


def arguments(folder: Path, sight: Sight, smollm: Path, *, slots: int = 3) -> tuple[str, ...]:
    """Of a proxy whose engine sees."""
    model, projector = folder / "model.gguf", folder / "projector.gguf"
    sight.text_model(model, smollm, context=4096)
    sight.projector(projector)
    words = ("--mmproj", str(projector), "--threads", "1", *sight.options)
    engine = [part for word in words for part in ("--engine-arg", word)]
    sizes = ("--parallel", str(slots), "--ctx-size", "8192", "--max-pools", "6")
    return ("--model", str(model), *sizes, *engine)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    tmp_path_factory: pytest.TempPathFactory, patched: Path, smollm: Path, sight: Sight
) -> AsyncIterator[Served]:
    """A proxy whose engine sees; three slots, six pools, no grace."""
    assert patched.exists()
    folder = tmp_path_factory.mktemp("media")
    async with serve(folder, *arguments(folder, sight, smollm), env={"POLYKV_POOLS__GRACE_S": "0"}) as proxy:
        yield proxy
        assert len(proxy.events("engine_ready")) == 1  # no request ended the engine


def image(seed: int) -> dict[str, Any]:
    """A part of a chat's message."""
    return {"type": "image_url", "image_url": {"url": data_url(seed, *SIZE)}}


def say(text: str) -> dict[str, Any]:
    """Another."""
    return {"type": "text", "text": text}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": list(parts)}


QUESTION = say("What is wrong with this parcel?")
RULES = {"role": "system", "content": SYSTEM}


TALK = (
    {"role": "user", "content": "A parcel came in the rain this morning."},
    {"role": "assistant", "content": "I am sorry to hear that. Show it to me."},
)
"""By which a conversation is known, whatever comes next."""


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A short greedy chat."""
    fixed_answer = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": True}
    return {"messages": [RULES, *messages], **fixed_answer, **more}


async def ids(served: Served, body: dict[str, Any], path: str = CHAT) -> list[int]:
    """A body's tokens, from the engine itself; media are -1."""
    ours = ("session_id", "pool_id", "opencoti")
    plain = {key: value for key, value in body.items() if key not in ours}
    answer = await served.engine.post(COUNT[path], plain)
    assert answer.status == 200, answer.body
    return answer.json["tokens"]


async def ask(served: Served, body: dict[str, Any], path: str = CHAT) -> Any:
    """An answer."""
    answer = await served.http.post(path, body)
    assert answer.status == 200, answer.body
    return answer.json


async def pool(served: Served, body: dict[str, Any]) -> dict[str, Any]:
    """A new pool."""
    answer = await served.http.post("/polykv/pools", body)
    assert answer.status == 201, answer.body
    return answer.json


async def latest(served: Served) -> dict[str, Any]:
    """The last request's record."""
    await served.quiet()
    return (await served.http.get("/polykv/requests?limit=1")).json["requests"][0]


async def audit(served: Served) -> None:
    """Nothing runs, and every cell has one owner: the proxy's figures are the engine's."""
    listed = await served.listing()
    sessions = (await served.http.get("/polykv/sessions")).json["sessions"]
    info = (await served.engine.get("/polykv/engine")).json
    assert Picture(await served.counters(), listed, sessions, info["bytes_per_cell"]).problems() == []


async def slot_of(served: Served, session: str) -> dict[str, Any]:
    """The engine's counters of the slot that holds a session."""
    sessions = (await served.http.get("/polykv/sessions")).json["sessions"]
    number = next(each["slot"] for each in sessions if each["session_id"] == session)
    return (await served.quiet())["slots"][number]


def said(answer: Any) -> str:
    """What a chat's answer says."""
    return answer["choices"][0]["message"]["content"]


def felt(answer: Any) -> list[float]:
    """How sure the model was of it, token by token: another image shows there, whatever it says."""
    return [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]


# -- pools ---------------------------------------------------------------------------------------------------


async def test_the_text_before_an_image_rides_on_a_pool(clean: Served, sight: Sight) -> None:
    """POOL-19: exactly as far as it is the pool's; cells by ownership are the engine's own figure."""
    made = await pool(clean, {"messages": [RULES]})
    body = chat(user(QUESTION, image(1)), session_id="a", pool_id=made["pool_id"])
    tokens = await ids(clean, body)
    assert tokens.count(MEDIUM) == sight.image_tokens
    computed = await clean.computed()
    answer = await ask(clean, body)
    length = made["prefix_len"]
    assert length < tokens.index(MEDIUM)
    block = answer["opencoti"]
    assert (block["pool_match"], block["n_pool_shared"]) == (length, length)
    assert answer["timings"]["cache_n"] == length
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    assert await clean.computed() - computed == len(tokens) - length
    slot = await slot_of(clean, "a")
    assert slot["n_pool_shared"] == length
    assert await clean.cells_used() == slot["n_tokens"]
    await audit(clean)


async def test_a_pool_of_more_text_is_shared_up_to_the_image(clean: Served, sight: Sight) -> None:
    """POOL-19: what the pool has at the image's place is something else."""
    body = chat(user(QUESTION, image(1), say("Be brief.")), session_id="a")
    tokens = await ids(clean, body)
    before = tokens.index(MEDIUM)
    made = await pool(clean, {"tokens": tokens[:before] + tokens[:40]})
    answer = await ask(clean, body | {"pool_id": made["pool_id"]})
    block = answer["opencoti"]
    assert (block["pool_match"], block["n_pool_shared"], block["pool_len"]) == (before, before, before + 40)
    assert answer["timings"]["cache_n"] == before
    slot = await slot_of(clean, "a")
    assert slot["n_pool_shared"] == before
    assert slot["n_tokens"] >= len(tokens)
    assert await clean.cells_used() == before + 40 + slot["n_tokens"] - before
    await audit(clean)


@pytest.mark.parametrize("named", [True, False])
async def test_a_prompt_that_begins_with_an_image_shares_nothing(clean: Served, *, named: bool) -> None:
    """POOL-19: unpooled, reason media; but for models that announce an image with a word of their own."""
    made = await pool(clean, {"messages": [RULES]})
    marker = (await clean.engine.get("/props")).json["media_marker"]
    prompt = {"prompt_string": f"{marker} {SYSTEM}", "multimodal_data": [base64_png(1, *SIZE)]}
    ours = {"pool_id": made["pool_id"]} if named else {"opencoti": {"session_id": "a"}}
    announced = (await ids(clean, {"prompt": prompt}))[0] != MEDIUM
    answer = await ask(clean, {"prompt": prompt, "n_predict": 4, **ours}, "/completion")
    block = answer["opencoti"]
    assert block.get("unpooled_reason") == ("media" if named and not announced else None)
    assert block["pool_match"] == (0 if named else None)
    assert answer["timings"]["cache_n"] == 0
    assert all(slot["n_pool_shared"] == 0 for slot in (await clean.quiet())["slots"])
    await audit(clean)


# -- images are told apart -----------------------------------------------------------------------------------


async def test_another_image_behind_the_same_text_is_computed(clean: Served) -> None:
    """POOL-19: text is reused, an image only by a request that shows the same; answers tell."""
    first, second = (chat(*TALK, user(QUESTION, image(seed))) for seed in (1, 2))
    tokens = await ids(clean, first)
    assert tokens == await ids(clean, second)
    before = tokens.index(MEDIUM)

    cold = {}
    for seed, body in ((1, first), (2, second)):
        answer = await ask(clean, body | {"session_id": f"cold-{seed}", "cache_prompt": False})
        cold[seed] = felt(answer)
        assert answer["timings"]["cache_n"] == 0
    assert cold[1] != pytest.approx(cold[2], abs=TELLING)
    await clean.clear()

    for seed, body, reused in (
        (1, first, 0),
        (1, first, len(tokens) - 1),
        (2, second, before),
        (2, second, len(tokens) - 1),
        (1, first, before),
    ):
        answer = await ask(clean, body | {"session_id": "a"})
        assert answer["timings"]["cache_n"] == reused
        assert felt(answer) == pytest.approx(cold[seed], abs=TELLING)
    await audit(clean)


async def test_why_another_image_is_computed_is_named(clean: Served) -> None:
    """POOL-17: the cause is media; the token is the first of the image."""
    first, second = (chat(*TALK, user(QUESTION, image(seed)), session_id="a") for seed in (1, 2))
    before = (await ids(clean, first)).index(MEDIUM)
    await ask(clean, first)
    answer = await ask(clean, second)
    assert answer["opencoti"]["divergence"]["cause"] == "media"
    found = (await latest(clean))["divergence"]
    assert (found["cause"], found["token_index"], found["message_index"]) == ("media", before, 3)


# -- pools that come from slots ------------------------------------------------------------------------------


async def test_a_snapshot_ends_before_the_image(clean: Served) -> None:
    """POOL-11, POOL-19: also where only a later turn brought one."""
    early = chat(user(QUESTION, image(1)), session_id="early")
    await ask(clean, early)
    made = await pool(clean, {"from_session": "early"})
    assert made["prefix_len"] == (await ids(clean, early)).index(MEDIUM)
    await audit(clean)

    talk = [user(say("Is the shop open?"))]
    answer = await ask(clean, chat(*talk, session_id="late"))
    talk += [{"role": "assistant", "content": said(answer)}, user(QUESTION, image(2))]
    late = chat(*talk, session_id="late")
    await ask(clean, late)
    made = await pool(clean, {"from_session": "late"})
    assert made["prefix_len"] == (await ids(clean, late)).index(MEDIUM)
    await audit(clean)


async def test_a_pool_that_comes_by_itself_ends_before_the_image(clean: Served) -> None:
    """POOL-15, POOL-19: two agents with the same text and the same image share the text."""
    bodies = [chat(user(QUESTION, image(3)), session_id=name) for name in ("a", "b", "c")]
    before = (await ids(clean, bodies[0])).index(MEDIUM)
    answers = [await ask(clean, body) for body in bodies]
    assert [answer["timings"]["cache_n"] for answer in answers] == [0, before, before]
    (made,) = (await clean.listing())["pools"]
    assert (made["origin"], made["prefix_len"]) == ("auto", before)
    await audit(clean)


async def test_a_wave_shares_text_and_no_image(clean: Served) -> None:
    """POOL-15, POOL-19: three at once, each with an image of its own; no answer is of another's."""
    bodies = [chat(user(QUESTION, image(seed)), session_id=f"w{seed}") for seed in range(3)]
    before = (await ids(clean, bodies[0])).index(MEDIUM)
    answers = await asyncio.gather(*(ask(clean, body) for body in bodies))
    assert {answer["timings"]["cache_n"] for answer in answers} <= {0, before}
    assert {pool["prefix_len"] for pool in (await clean.listing())["pools"]} <= {before}
    await audit(clean)
    await clean.clear()
    for body, answer in zip(bodies, answers, strict=True):
        alone = await ask(clean, body | {"cache_prompt": False})
        assert felt(answer) == pytest.approx(felt(alone), abs=TELLING)
    assert felt(answers[0]) != pytest.approx(felt(answers[1]), abs=TELLING)


# -- KV on disk ----------------------------------------------------------------------------------------------


async def test_what_holds_an_image_is_never_on_disk(
    patched: Path, smollm: Path, tmp_path: Path, sight: Sight
) -> None:
    """DUR-3, POOL-19: without an attempt, and without an error; conversations in text come and go as ever."""
    assert patched.exists()
    env = {"POLYKV_DURABLE__IDLE_SAVE_S": "0.2", "POLYKV_DURABLE__MIN_TOKENS": "32"}
    async with serve(tmp_path, *arguments(tmp_path, sight, smollm, slots=1), env=env) as served:
        seen = chat(user(QUESTION, image(1)), session_id="seen")
        text = chat(user(say("What do parcels cost?")), session_id="text", opencoti={"auto_match": False})
        await ask(served, seen)  # idle for longer than it takes to be saved
        await ask(served, text)  # displaces it
        await served.until(lambda: _is_saved(served, "text"))
        again = await ask(served, seen | {"opencoti": {"auto_match": False}})
        assert again["timings"]["cache_n"] < len(await ids(served, seen)) - 1  # no more than the slot shared
        assert again["opencoti"]["divergence"]["cause"] == "evicted"
        back = await ask(served, text)
        length = len(await ids(served, text))
        assert (back["opencoti"]["restored_tokens"], back["timings"]["cache_n"]) == (length, length - 1)
        status = (await served.http.get("/props")).json["opencoti"]["durable_kv"]
        assert (status["state"], status["last_error"]) == ("on", None)
        entries = (await served.http.get("/polykv/cache")).json["entries"]
        assert {entry["key"] for entry in entries} == {"text"}
        assert not served.events("kv_save_failed")
        await audit(served)


async def _is_saved(served: Served, key: str) -> bool:
    entries = (await served.http.get("/polykv/cache")).json["entries"]
    return any(entry["key"] == key for entry in entries)


# -- without the patch ---------------------------------------------------------------------------------------


async def test_a_stock_engine_shares_the_text_before_an_image(
    stock: Path, smollm: Path, tmp_path: Path, sight: Sight
) -> None:
    """POOL-19: as a copy. A slot file with an image cannot be a pool."""
    env = {"POLYKV_ENGINE__BINARY": str(stock), "POLYKV_ENGINE__STOCK": "true"}
    async with serve(tmp_path, *arguments(tmp_path, sight, smollm), env=env) as served:
        made = await pool(served, {"messages": [RULES]})
        cold = await ask(served, chat(*TALK, user(QUESTION, image(1)), cache_prompt=False))
        for seed, session in ((1, "a"), (2, "b")):
            body = chat(*TALK, user(QUESTION, image(seed)), pool_id=made["pool_id"], session_id=session)
            answer = await ask(served, body)
            block = answer["opencoti"]
            assert (block["pool_match"], block["n_pool_shared"]) == (made["prefix_len"], made["prefix_len"])
            assert (felt(answer) == pytest.approx(felt(cold), abs=TELLING)) == (seed == 1)
        longer = [RULES, user(say("Who are you? " * 20), image(1), QUESTION)]
        seen = await pool(served, {"messages": longer})
        text = await pool(served, {"messages": [RULES, user(say("Who are you? " * 20), QUESTION)]})
        assert made["prefix_len"] < seen["prefix_len"] < text["prefix_len"]
        refused = await served.http.post("/polykv/pools", {"from_session": "a"})
        assert (refused.status, refused.json["error"]["code"]) == (503, "slot_file")
        made_of_text = await pool(served, {"prompt": f"{SYSTEM} Look"})
        body = {"prompt": await plain(served, 1), "pool_id": made_of_text["pool_id"], "session_id": "c"}
        answer = await ask(served, body | {"n_predict": 4}, "/completion")
        assert answer["opencoti"]["n_pool_shared"] == made_of_text["prefix_len"]


# -- other APIs ----------------------------------------------------------------------------------------------


def anthropic(seed: int, **more: Any) -> dict[str, Any]:
    """The same to Anthropic's API."""
    source = {"type": "base64", "media_type": "image/png", "data": base64_png(seed, *SIZE)}
    messages = [*TALK, user(QUESTION, {"type": "image", "source": source})]
    return {"system": SYSTEM, "messages": messages, "max_tokens": 4, **more}


def responses(seed: int, **more: Any) -> dict[str, Any]:
    """The same to the Responses API."""
    parts = [
        {"type": "input_text", "text": QUESTION["text"]},
        {"type": "input_image", "image_url": data_url(seed, *SIZE)},
    ]
    asked, answered = (message["content"] for message in TALK)
    past = {"role": "assistant", "type": "message", "content": [{"type": "output_text", "text": answered}]}
    given = [user({"type": "input_text", "text": asked}), past, user(*parts)]
    return {"instructions": SYSTEM, "input": given, "max_output_tokens": 4, **more}


@pytest.mark.parametrize(("path", "body"), [(MESSAGES, anthropic), (RESPONSES, responses)])
async def test_other_apis_share_the_text_before_an_image(
    clean: Served, sight: Sight, path: str, body: Callable[..., dict[str, Any]]
) -> None:
    """POOL-19: as in chats; another image is computed, the same one is not."""
    tokens = await ids(clean, body(1), path)
    before = tokens.index(MEDIUM)
    assert tokens.count(MEDIUM) == sight.image_tokens
    made = await pool(clean, {"messages": [RULES]})
    wanted = {"pool_id": made["pool_id"], "session_id": "a"}
    block = (await ask(clean, body(1, **wanted), path))["opencoti"]
    assert (block["pool_match"], block["n_pool_shared"]) == (made["prefix_len"], made["prefix_len"])
    for seed, reused in ((1, len(tokens) - 1), (2, before)):
        await ask(clean, body(seed, **wanted), path)
        record = await latest(clean)
        assert (record["cached_tokens"], record["prompt_tokens"]) == (reused, len(tokens))
    assert record["divergence"]["cause"] == "media"
    await audit(clean)


async def plain(served: Served, seed: int, text: str = " What is it?") -> dict[str, Any]:
    """A prompt of text, an image and text."""
    marker = (await served.engine.get("/props")).json["media_marker"]
    return {"prompt_string": f"{SYSTEM} Look: {marker}{text}", "multimodal_data": [base64_png(seed, *SIZE)]}


@pytest.mark.parametrize("listed", [False, True])
async def test_a_plain_prompt_shares_the_text_before_an_image(
    clean: Served, sight: Sight, *, listed: bool
) -> None:
    """POOL-19: as in chats, alone or as a list of one; one with another image is another conversation."""
    made = await pool(clean, {"prompt": f"{SYSTEM} Look"})
    tokens = await ids(clean, {"prompt": await plain(clean, 1)})
    assert made["prefix_len"] < tokens.index(MEDIUM)
    assert tokens.count(MEDIUM) == sight.image_tokens
    for seed, reused in ((1, made["prefix_len"]), (1, len(tokens) - 1), (2, made["prefix_len"])):
        prompt = await plain(clean, seed)
        body = {"prompt": [prompt] if listed else prompt, "n_predict": 4, "session_id": "a"}
        answer = await ask(clean, body | {"pool_id": made["pool_id"]}, "/completion")
        block = answer["opencoti"]
        assert (block["pool_match"], block["n_pool_shared"]) == (made["prefix_len"], made["prefix_len"])
        assert answer["timings"]["cache_n"] == reused
        assert answer["tokens_evaluated"] == len(tokens)
    await audit(clean)


async def test_plain_prompts_with_images_share_by_themselves(clean: Served) -> None:
    """POOL-15, POOL-19: the pool, and a snapshot, end before the image."""
    before = (await ids(clean, {"prompt": await plain(clean, 1)})).index(MEDIUM)
    for name, reused in (("a", 0), ("b", before), ("c", before)):
        body = {"prompt": await plain(clean, 1, f" Say {name}."), "n_predict": 4, "session_id": name}
        assert (await ask(clean, body, "/completion"))["timings"]["cache_n"] == reused
    (auto,) = (await clean.listing())["pools"]
    assert (auto["origin"], auto["prefix_len"]) == ("auto", before)
    await audit(clean)
