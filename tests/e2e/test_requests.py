"""Why did this prefill? On the real engine: each cause, with the token and the text where prompts part."""

from __future__ import annotations

import copy
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from e2e.harness import Served, serve

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
SYSTEM = "You are a careful assistant of a small shop. " + " ".join(
    f"Rule {number}: never promise more than {number} parcels a day." for number in range(1, 13)
)
BILLING = "x-anthropic-billing-header: cc_version=2.1.{}; cc_entrypoint=cli; cch=0a1b2;"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tells the {name} of a parcel.",
            "parameters": {"type": "object", "properties": {"parcel": {"type": "string"}}},
        },
    }
    for name in ("weight", "place", "price")
]
TEMPLATE = """{%- if tools %}Tools: {{ tools | tojson }}
{% endif %}{% for message in messages %}<|im_start|>{{ message.role -}}
{%- if not loop.last %} (earlier){% endif %}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Shows tools, and which message is the last."""
HISTORY = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "Where is my parcel? I sent it on Monday, from the harbour."},
    {"role": "assistant", "content": "It is on the ferry and will arrive tomorrow."},
    {"role": "user", "content": "And how heavy is it? The label came off in the rain."},
    {"role": "assistant", "content": "It weighs two kilograms."},
    {"role": "user", "content": "Thank you. Who will bring it to my door?"},
]


def body(session: str | None, messages: list[Any] | None = None, **more: Any) -> dict[str, Any]:
    """A short greedy chat with a history of its own."""
    named = {} if session is None else {"session_id": session}
    return {"messages": messages or HISTORY, "max_tokens": 3, "temperature": 0, **named, **more}


def changed(index: int, content: str) -> list[Any]:
    """The history with one message replaced."""
    messages = copy.deepcopy(HISTORY)
    messages[index]["content"] = content
    return messages


async def ask(served: Served, sent: dict[str, Any], path: str = CHAT) -> Any:
    """A request's answer, and its record once nothing is added to it any more."""
    answer = await served.http.post(path, sent)
    assert answer.status == 200, answer.body
    await served.quiet()
    return answer.json, await latest(served)


async def latest(served: Served) -> dict[str, Any]:
    """The last request's record."""
    return (await served.http.get("/polykv/requests?limit=1")).json["requests"][0]


async def located(served: Served) -> dict[str, Any]:
    """The last record's divergence, once its token is known: that may take until after the answer."""

    async def known() -> bool:
        return (await latest(served))["divergence"]["token_index"] is not None

    await served.until(known)
    return (await latest(served))["divergence"]


async def common(served: Served, one: dict[str, Any], other: dict[str, Any], path: str = CHAT) -> int:
    """Where the tokens of two requests part, from the engine itself."""
    route = "/v1/messages/count_tokens" if path == "/v1/messages" else f"{path}/input_tokens"
    first, second = [
        (await served.engine.post(f"{route}?tokens=1", sent)).json["tokens"] for sent in (one, other)
    ]
    return next(at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)


async def test_a_new_session_and_one_that_goes_on(clean: Served) -> None:
    """POOL-17: the first request of a session has nobody to share with; the next one reuses all there is."""
    answer, record = await ask(clean, body("fresh"))
    assert record["divergence"] == {
        "cause": "new_session",
        "token_index": None,
        "message_index": None,
        "section": None,
        "expected_text": None,
        "got_text": None,
    }
    assert "divergence" not in answer["opencoti"]
    assert answer["opencoti"]["request_id"] == record["request_id"]
    assert (record["session_id"], record["state"], record["continued"]) == ("fresh", "done", False)
    assert record["cached_tokens"] == 0
    assert record["computed_tokens"] == record["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert record["generated_tokens"] == 3
    assert (record["ttft_ms"], record["duration_ms"] > 0) == (None, True)

    again, record = await ask(clean, body("fresh"))
    assert record["continued"] is True
    assert record["divergence"] is None
    assert record["cached_tokens"] == again["timings"]["cache_n"] == record["prompt_tokens"] - 1
    shown = await clean.http.get(f"/polykv/requests/{record['request_id']}")
    assert shown.json == record


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_without_our_members_are_recorded_too(clean: Served, *, stream: bool) -> None:
    """POOL-17: planned and actual reuse of every API's answers, which pass untouched."""
    texts = {
        CHAT: body(None),
        "/v1/messages": {"system": SYSTEM, "messages": HISTORY[1:], "max_tokens": 3},
        "/v1/responses": {"instructions": SYSTEM, "input": "Where is it?", "max_output_tokens": 3},
        "/v1/completions": {"prompt": SYSTEM, "max_tokens": 3},
        "/completion": {"prompt": SYSTEM + " And now?", "n_predict": 3},
    }
    for path, sent in texts.items():
        before = await clean.quiet()
        answer = await clean.http.post(path, {**sent, "stream": stream})
        assert answer.status == 200
        assert b"opencoti" not in answer.body
        after = await clean.quiet()
        record = await latest(clean)
        grown = {
            key: sum(slot[key] for slot in after["slots"]) - sum(slot[key] for slot in before["slots"])
            for key in ("n_prompt_total", "n_cached_total")
        }
        assert record["path"] == path
        assert record["cached_tokens"] == grown["n_cached_total"]
        assert record["computed_tokens"] == grown["n_prompt_total"]
        assert record["generated_tokens"] == 3


async def test_an_edited_history(clean: Served) -> None:
    """POOL-17: the message, its first differing token and its text; the block says so at once."""
    first = body("editor")
    await ask(clean, first)
    edited = body("editor", changed(3, "And how heavy is it? The label came off in the snow."))
    answer, record = await ask(clean, edited)
    found = record["divergence"]
    assert found == answer["opencoti"]["divergence"]
    assert (found["cause"], found["section"], found["message_index"]) == ("history_edited", "messages", 3)
    assert found["token_index"] == await common(clean, first, edited) == answer["timings"]["cache_n"]
    assert found["expected_text"].endswith("in the rain.")
    assert found["got_text"].endswith("in the snow.")


async def test_a_changed_system_prompt(clean: Served) -> None:
    """POOL-17: although the request runs in another slot, it is known whose history it is."""
    first = body("shop")
    await ask(clean, first)
    other = body("shop", changed(0, SYSTEM.replace("small shop", "large shop")))
    answer, record = await ask(clean, other)
    found = await located(clean)
    assert (found["cause"], found["section"], found["message_index"]) == ("system_changed", "system", 0)
    assert answer["opencoti"]["divergence"]["cause"] == "system_changed"
    assert found["token_index"] == await common(clean, first, other)
    assert "of a small shop" in found["expected_text"]
    assert "of a large shop" in found["got_text"]
    assert len(found["expected_text"]) <= 80
    assert record["computed_tokens"] > 0


async def test_what_the_template_shows(
    patched: Path, smollm: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """POOL-17: tools in another order, other tools, and the same messages rendered otherwise."""
    assert patched.exists()
    assert smollm.exists()
    folder = tmp_path_factory.mktemp("template")
    (folder / "template.jinja").write_text(TEMPLATE)
    args = ("--engine-arg", "--chat-template-file", "--engine-arg", str(folder / "template.jinja"))
    async with serve(folder, "--parallel", "4", "--ctx-size", "8192", *args) as served:
        first = body("tools", tools=TOOLS)
        await ask(served, first)
        for tools, cause, expected, got in (
            (TOOLS[::-1], "tools_reordered", "weight", "price"),
            (TOOLS[1:], "tools_changed", "price", "place"),
        ):
            other = body("tools", tools=tools)
            await ask(served, other)
            found = await located(served)
            assert (found["cause"], found["section"], found["message_index"]) == (cause, "tools", None)
            assert found["token_index"] == await common(served, first, other)
            assert expected in found["expected_text"]
            assert got in found["got_text"]
            first = other

        first = body("template", HISTORY[:2])
        await ask(served, first)
        other = body("template", HISTORY[:4])
        await ask(served, other)
        found = await located(served)
        assert (found["cause"], found["section"]) == ("template_rewrote_history", "messages")
        assert found["token_index"] == await common(served, first, other)

        async def shown() -> bool:
            return (await latest(served))["divergence"]["got_text"] is not None

        await served.until(shown)
        found = (await latest(served))["divergence"]
        assert found["got_text"].startswith(" (earlier)")
        assert "(earlier)" not in found["expected_text"]


async def test_a_billing_header(clean: Served) -> None:
    """POOL-17: nothing but a header that changes with each request differs."""

    def sent(version: str) -> dict[str, Any]:
        blocks = [{"type": "text", "text": text} for text in (BILLING.format(version), SYSTEM)]
        return {"system": blocks, "messages": HISTORY[1:], "max_tokens": 3, "session_id": "code"}

    await ask(clean, sent("177.01c"), "/v1/messages")
    await ask(clean, sent("177.9fe"), "/v1/messages")
    found = await located(clean)
    assert (found["cause"], found["section"]) == ("volatile_header", "system")
    assert found["token_index"] == await common(clean, sent("177.01c"), sent("177.9fe"), "/v1/messages")
    assert "177.01c" in found["expected_text"]
    assert "177.9fe" in found["got_text"]


async def test_a_client_that_wants_no_cache(clean: Served) -> None:
    """POOL-17, 19: it gets none, and is told that it asked for that."""
    await ask(clean, body("plain"))
    _, record = await ask(clean, body("plain", cache_prompt=False))
    assert record["cached_tokens"] == 0
    assert record["divergence"]["cause"] == "cache_disabled"


async def test_a_slot_that_was_emptied(clean: Served) -> None:
    """POOL-17: through the proxy, and behind its back."""
    await ask(clean, body("lost"))
    for entry in (await clean.http.get("/polykv/cache")).json["entries"]:  # of others that say the same
        answer = await clean.http("DELETE", f"/polykv/cache/{entry['key']}")
        assert answer.status in (200, 404)  # it may have gone with one of its name
    await clean.empty_slots()
    _, record = await ask(clean, body("lost"))
    assert (record["continued"], record["divergence"]["cause"]) == (False, "slot_lost")
    for slot in (await clean.counters())["slots"]:
        assert (await clean.engine.post(f"/slots/{slot['id']}?action=erase", {})).status == 200
    _, record = await ask(clean, body("lost"))
    assert (record["continued"], record["divergence"]["cause"]) == (True, "slot_lost")
    assert record["divergence"]["section"] is None


async def test_an_answer_that_came_back_otherwise(clean: Served) -> None:
    """POOL-17: the prompt was reused; the client sent back another answer than it got."""
    answer, record = await ask(clean, body("answer", max_tokens=12, ignore_eos=True))
    reply = answer["choices"][0]["message"]["content"]
    prompt = record["prompt_tokens"]
    rewritten = {"role": "assistant", "content": "Zebra " + reply}
    more = [*HISTORY, rewritten, {"role": "user", "content": "And when?"}]
    _, record = await ask(clean, body("answer", more))
    found = record["divergence"]
    assert (found["cause"], found["section"]) == ("history_edited", "messages")
    assert (found["token_index"], found["message_index"]) == (prompt, len(HISTORY))
    assert found["got_text"].startswith("Zebra ")
    assert reply.startswith(found["expected_text"])


async def test_an_answer_in_other_tokens(clean: Served) -> None:
    """POOL-17: the client sends the answer back as it was, but its text is not cut as it was generated."""
    (world,) = (await clean.engine.post("/tokenize", {"content": " world"})).json["tokens"]
    forced = {"grammar": 'root ::= "one two three four world and more"', "logit_bias": [[world, False]]}
    answer, record = await ask(clean, body("cut", **forced, max_tokens=40))
    reply = answer["choices"][0]["message"]
    assert reply["content"] == "one two three four world and more"
    prompt = record["prompt_tokens"]
    more = [*HISTORY, reply, {"role": "user", "content": "And when?"}]
    await ask(clean, body("cut", more))

    async def shown() -> bool:
        return (await latest(clean))["divergence"]["got_text"] is not None

    await clean.until(shown)
    found = (await latest(clean))["divergence"]
    assert (found["cause"], found["message_index"]) == ("retokenised", len(HISTORY))
    assert found["token_index"] >= prompt
    assert found["got_text"].endswith("world and more<|im_end|>\n<|im_start|>user\nAnd when?<|im_end|>")


async def test_evicted_and_restarted(
    patched: Path, smollm: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """POOL-17: the pool and the slot are given away, then the engine dies. The same request tells both.

    With KV on disk it would have nothing to tell.
    """
    assert patched.exists()
    assert smollm.exists()
    sizes = ("--parallel", "1", "--ctx-size", "4096", "--max-pools", "2")
    env = {"POLYKV_DURABLE__ENABLED": "false"}
    async with serve(tmp_path_factory.mktemp("one"), *sizes, env=env) as served:
        pool = (await served.http.post("/polykv/pools", {"messages": HISTORY[:1]})).json
        mine = body(None)
        _, record = await ask(served, mine)
        assert (record["pool_id"], record["planned_tokens"]) == (pool["pool_id"], pool["prefix_len"])
        assert record["cached_tokens"] == pool["prefix_len"]
        assert (await served.http.post(f"/polykv/pools/{pool['pool_id']}/evict", {})).status == 200
        await ask(served, {"messages": [{"role": "user", "content": "Another one."}], "max_tokens": 2})
        _, record = await ask(served, mine)
        assert (record["divergence"]["cause"], record["pool_id"]) == ("evicted", None)
        assert record["cached_tokens"] < pool["prefix_len"]

        os.kill(served.engine_pid, signal.SIGKILL)

        async def back() -> bool:
            return len(served.events("engine_ready")) == 2

        await served.until(back)
        _, record = await ask(served, mine)
        assert (record["divergence"]["cause"], record["cached_tokens"]) == ("restarted", 0)


async def test_a_request_that_runs_is_known(clean: Served) -> None:
    """Its pool, how long it waited and its first token, while it streams; also once its client left."""
    made = (await clean.http.post("/polykv/pools", {"messages": HISTORY[:1]})).json
    pool_id = made["pool_id"]
    sent = body("runs", stream=True, ignore_eos=True, pool_id=pool_id) | {"max_tokens": 400}
    async with clean.http.session() as session, session.post(CHAT, json=sent) as answer:
        seen = b""
        while seen.count(b"content") < 3:
            seen += await answer.content.readany()
        record = await latest(clean)
        listed = (await clean.http.get("/polykv/sessions")).json["sessions"]
        slots = (await clean.counters())["slots"]
        metrics = (await clean.http.get("/metrics")).body.decode()
    (one,) = (each for each in listed if each["session_id"] == "runs")
    assert (record["state"], one["state"]) == ("running", "running")
    assert (one["pool_id"], record["pool_id"]) == (pool_id, pool_id)
    assert slots[one["slot"]]["n_pool_shared"] == made["prefix_len"]
    assert 'opencoti_polykv:pool_sessions{pool="explicit"} 1.0' in metrics
    assert 0 < record["waited_ms"] < record["ttft_ms"] == one["ttft_ms"]
    assert record["prompt_tokens"] > made["prefix_len"]
    await clean.quiet()
    (one,) = (
        each
        for each in (await clean.http.get("/polykv/sessions")).json["sessions"]
        if each["session_id"] == "runs"
    )
    assert (one["pool_id"], one["ttft_ms"]) == (pool_id, record["ttft_ms"])
    assert (await clean.http("DELETE", f"/polykv/pools/{pool_id}")).status == 200


async def test_what_a_client_that_left_cost_is_in_its_record(clean: Served) -> None:
    """How long it waited, and tokens as the engine's own totals have them."""

    async def totals() -> list[int]:
        slots = (await clean.counters())["slots"]
        names = ("n_gen_total", "n_prompt_total", "n_cached_total")
        return [sum(slot[name] for slot in slots) for name in names]

    await ask(clean, body("before"))
    before = await totals()
    sent = body("leaves", stream=True, ignore_eos=True) | {"max_tokens": 400}
    async with clean.http.session() as session, session.post(CHAT, json=sent) as answer:
        seen = b""
        while seen.count(b"content") < 3:
            seen += await answer.content.readany()

    async def counted() -> bool:
        return (await latest(clean))["generated_tokens"] is not None

    await clean.until(counted)
    await clean.quiet()
    record = await latest(clean)
    assert (record["state"], record["error_code"]) == ("cancelled", None)
    assert 0 < record["ttft_ms"] < record["duration_ms"]
    took = [now - then for now, then in zip(await totals(), before, strict=True)]
    told = [record["generated_tokens"], record["computed_tokens"], record["cached_tokens"]]
    assert told == took
    assert 0 < took[0] < 400
