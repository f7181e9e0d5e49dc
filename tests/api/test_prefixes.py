"""Claims about ``api.prefixes``: what a pool is asked to hold, and what is no pool."""

import pytest

from api.rig import CHAT, POOL, SYSTEM, TOKENS, chat


async def test_messages_become_what_chats_have_in_common(rig):
    """The prefix ends before the user's text, and a chat rides on all of it."""
    made = await rig.pool()
    assert made["prefix_len"] == made["shared_probe_tokens"] == len(f"<|system|>{SYSTEM}<|user|>")
    answer = await rig.ask(CHAT, chat("hi", pool_id=made["pool_id"]))
    assert answer.json["opencoti"]["n_pool_shared"] == made["prefix_len"]


async def test_messages_that_end_with_a_user_are_probed_with_an_answer(rig):
    """Two user turns in a row are an error in some templates."""
    await rig.pool({"messages": [*POOL["messages"], {"role": "user", "content": "q"}], "tools": [1]})
    probes = [request.json for request in rig.engine.requests if request.path.endswith("/input_tokens")]
    assert [message["role"] for message in probes[0]["messages"]] == ["system", "user", "assistant", "user"]
    assert probes[0]["tools"] == [1]
    assert probes[0]["add_generation_prompt"] is False


@pytest.mark.parametrize(
    ("heard", "tools", "warned"), [(True, [1], False), (False, [1], True), (False, [], False)]
)
async def test_tools_that_the_template_leaves_out_are_warned_of(rig, heard, tools, warned):
    """Of a pool and of a fork: both are what they would be without."""
    renders = rig.engine.renders
    if not heard:
        rig.engine.renders = lambda body: renders({**body, "tools": None})
    root = await rig.pool()
    made = await rig.pool(POOL | {"tools": tools})
    forked = (await rig.ask(f"/polykv/pools/{root['pool_id']}/fork", POOL | {"tools": tools})).json
    for answer in (made, forked):
        assert ("leaves tools out" in answer.get("warning", "")) is warned
        if warned:
            assert answer["shared_probe_tokens"] == answer["prefix_len"]


async def test_a_template_that_fails_without_tools_has_them(rig):
    """Nobody is warned, and nothing is refused."""
    renders = rig.engine.renders

    def strict(body):
        return renders(body) if "tools" in body else {}["tools"]

    rig.engine.renders = strict
    assert "warning" not in await rig.pool(POOL | {"tools": [1]})


async def test_template_arguments_are_rendered_with(rig):
    """They are part of the prefix."""
    await rig.pool(POOL | {"chat_template_kwargs": {"a": 1}})
    probe = next(request.json for request in rig.engine.requests if request.path.endswith("/input_tokens"))
    assert probe["chat_template_kwargs"] == {"a": 1}


async def test_a_prompt_and_tokens_make_pools_too(rig):
    """Text is tokenized as a completion would be; both can be cut."""
    prompt = await rig.pool({"prompt": "x" * 50})
    tokens = await rig.pool(TOKENS | {"n_tokens": 35})
    assert (prompt["prefix_len"], tokens["prefix_len"]) == (50, 35)
    assert "shared_probe_tokens" not in tokens
    assert rig.engine.pools[1].tokens == TOKENS["tokens"][:35]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "tokens"),
        ({"tokens": [1], "prompt": "x"}, "tokens"),
        ({"tokens": []}, "tokens"),
        ({"tokens": [-1]}, "tokens"),
        ({"tokens": [1 << 40]}, "tokens"),
        ({"tokens": ["a"]}, "tokens[0]"),
        ({"prompt": ""}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "short"}]}, "messages"),
        (TOKENS | {"n_tokens": 0}, "n_tokens"),
        (TOKENS | {"nonsense": 1}, None),
        (TOKENS | {"label": "a\0b"}, "label"),
        (TOKENS | {"label": "a\n"}, "label"),
        (b"{", None),
        (b'{"prompt":"\xff"}', None),
        (b'{"messages":[{"a":' + b"[" * 5000, None),
        ({"tokens": list(range(1024))}, None),
    ],
)
async def test_a_body_that_makes_no_pool_is_refused(rig, body, param):
    """400 with the field where one is at fault; nothing is entered."""
    answer = await rig.ask("/polykv/pools", body, Content_Type="application/json")
    assert (answer.status, answer.error["param"]) == (400, param)
    assert len(rig.runtime.plane.tree) == 0


async def test_messages_that_share_too_little_say_how_much(rig):
    """A template without a common start is told so."""
    rig.engine.renders = lambda body: body["messages"][-1]["content"] * 9
    answer = await rig.ask("/polykv/pools", POOL)
    assert (answer.error["code"], answer.error["common_tokens"]) == ("prefix_too_short", 0)


async def test_a_chat_that_the_engine_cannot_render_is_the_callers_fault(rig):
    """The engine calls it an internal error."""
    path = "/v1/chat/completions/input_tokens"
    rig.engine.broken[path] = (500, b'{"error":{"message":"no such filter"}}')
    answer = await rig.ask("/polykv/pools", POOL)
    assert (answer.status, answer.error["message"]) == (400, "no such filter")
    rig.engine.broken[path] = (503, b"{}")
    assert (await rig.ask("/polykv/pools", POOL)).status == 503
