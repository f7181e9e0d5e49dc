"""Claims about ``api.advice``: what operators are told of their clients' prompts, and a header's mask."""

import json

import pytest
from structlog.testing import capture_logs

from api.rig import CHAT
from polykv_proxy.api.advice import REMEDIES, opening_of
from polykv_proxy.api.families import INFERENCE
from polykv_proxy.core.volatile import VolatileKind

RULES = " ".join(f"Rule {number} of the house is long." for number in range(30))
HEADER = "x-anthropic-billing-header: cc_version=2.1.101.{}; cc_entrypoint=cli; cch={};"
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("read", "write")]
MASK = {"mask_billing_header": True}


def chat(system=RULES, question="hi", **more):
    """A chat of one turn."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"messages": messages, **more}


def billed(stamp, build="e51"):
    """A system prompt as Claude Code sends it."""
    return HEADER.format(build, stamp) + RULES


async def advice(rig, **headers):
    """The document."""
    answer = await rig.ask("/polykv/advice", **headers)
    assert answer.status == 200
    return answer.json


CASES = {
    "clock": (
        [chat(f"Today's date is {day}. {RULES}") for day in ("2026-11-30", "2026-12-01")],
        ("clock", "system", "2026-11-30", "2026-12-01"),
    ),
    "tools": (
        [chat(tools=TOOLS), chat(tools=TOOLS[::-1])],
        ("tools_reordered", "tools", "read", "write"),
    ),
    "billing": (
        [chat(billed("a5145")), chat(billed("00000"))],
        ("billing_header", "system", "cch=a5145", "cch=00000"),
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_what_keeps_conversations_from_sharing_is_named(rig, case):
    """In the log once, and in the document with what to do about it."""
    bodies, expected = CASES[case]
    with capture_logs() as logged:
        for body in (*bodies, bodies[0]):
            assert (await rig.ask(CHAT, body)).status == 200
    (finding,) = (await advice(rig))["volatile"]
    assert tuple(finding[name] for name in ("kind", "section", "old", "new")) == expected
    assert finding["api"] == "openai_chat"
    assert finding["remedy"] == REMEDIES[VolatileKind(finding["kind"])]
    assert finding["lost_bytes"] > 0
    assert finding["times"] == 1  # an opening that was seen is not looked at again
    (event,) = [entry for entry in logged if entry["event"] == "volatile_prefix"]
    assert (event["kind"], event["old"], event["log_level"]) == (expected[0], expected[2], "warning")


async def test_ordinary_conversations_give_no_advice(rig):
    """The same prompt with other questions, another prompt, a turn that follows, a plain prompt."""
    for body in (chat(), chat(question="else"), chat("Another one. " * 30), chat(RULES + " More.")):
        await rig.ask(CHAT, body)
    await rig.ask("/completion", {"prompt": "2026-11-30 " + RULES})
    await rig.ask("/completion", {"prompt": "2026-12-01 " + RULES})
    assert await advice(rig) == {
        "volatile": [],
        "billing_header": {"masked": False, "requests_masked": 0},
    }


async def test_the_stamp_that_the_engine_masks_itself_is_no_advice(rig):
    """On its Anthropic route only what is left of the header is: its version's last part."""

    async def ask(stamp, build):
        body = {"system": billed(stamp, build), "messages": [{"role": "user", "content": stamp + build}]}
        assert (await rig.ask("/v1/messages", body)).status == 200

    await ask("a5145", "e51")
    await ask("00000", "e51")
    assert (await advice(rig))["volatile"] == []
    await ask("11111", "e52")
    (finding,) = (await advice(rig))["volatile"]
    assert (finding["old"], finding["new"]) == ("cc_version=2.1.101.e51", "cc_version=2.1.101.e52")


async def test_advice_is_for_the_key_that_it_is_about(proxies):
    """Prompts of others are nobody's business but an administrator's."""
    rig = await proxies(admin="secret")
    for body in CASES["clock"][0]:
        await rig.ask(CHAT, body, Authorization="Bearer mine")
    admin = {"X_PolyKV_Admin_Key": "secret"}
    assert len((await advice(rig, **admin))["volatile"]) == 1
    assert (await rig.ask("/polykv/advice", Authorization="Bearer mine")).status == 401
    rig = await proxies()
    for body in CASES["clock"][0]:
        await rig.ask(CHAT, body, Authorization="Bearer mine")
    assert len((await advice(rig, Authorization="Bearer mine"))["volatile"]) == 1
    assert (await advice(rig, Authorization="Bearer theirs"))["volatile"] == []


# -- the billing header's mask ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/messages", CHAT])
async def test_off_the_body_keeps_its_bytes(rig, path):
    """As shipped."""
    body = {"system": billed("a5145"), **chat(billed("a5145"))}
    raw = json.dumps(body, indent=1).encode()
    answer = await rig.ask(path, raw, Content_Type="application/json")
    assert rig.engine.work[-1].body == raw
    assert answer.headers["x-session-id"]
    assert (await advice(rig))["billing_header"] == {"masked": False, "requests_masked": 0}


@pytest.mark.parametrize("path", ["/v1/messages", CHAT])
async def test_on_two_requests_that_differ_in_it_share(proxies, path):
    """Only the values change; the second rides on all that both have in common."""
    rig = await proxies(pools=MASK, max_pools=4)

    def body(stamp, build, question):
        system = billed(stamp, build)
        if path == CHAT:
            return chat(system, question)
        return {"system": system, "messages": [{"role": "user", "content": question}]}

    first = json.dumps(body("a5145", "e51", "Why?"), indent=1).encode()
    await rig.ask(path, first, Content_Type="application/json")
    assert rig.engine.work[-1].body == first.replace(b"a5145", b"fffff").replace(b"e51", b"000")
    second = await rig.ask(path, body("00000", "e52", "What for?"))
    shared = int(second.headers["x-cached-prefix-tokens"])
    assert shared > len(billed("a5145"))
    assert (await advice(rig))["volatile"] == []


async def test_it_reports_when_it_acts(proxies):
    """In the block of those who ask for one, in the document, once in the log; never without cause."""
    rig = await proxies(pools=MASK)
    with capture_logs() as logged:
        acted = await rig.ask(CHAT, chat(billed("a5145"), session_id="a"))
        again = await rig.ask(CHAT, chat(billed("a5146"), session_id="a"))
        plain = await rig.ask(CHAT, chat(session_id="b"))
        silent = await rig.ask(CHAT, chat(billed("a5147")))
    assert acted.json["opencoti"]["billing_header_masked"] is True
    assert again.json["opencoti"]["billing_header_masked"] is True
    assert "billing_header_masked" not in plain.json["opencoti"]
    assert "opencoti" not in silent.json
    assert (await advice(rig))["billing_header"] == {"masked": True, "requests_masked": 3}
    assert [entry["event"] for entry in logged].count("billing_header_masked") == 1


def test_an_opening_is_what_precedes_the_conversation():
    """System texts of every API, and the tools, as they stand in the body; nothing of what is no chat."""
    body = {
        "system": "A",
        "instructions": "B",
        "input": [
            {"role": "developer", "content": "C"},
            {"role": "user"},
            {"role": "system", "content": "D"},
        ],
        "tools": [1],
    }
    opening = opening_of(json.dumps(body).encode(), INFERENCE["/v1/responses"])
    assert opening.system == b'"A"\n"B"\n{"role": "developer", "content": "C"}'
    assert (opening.api, opening.tools) == ("responses", b"[1]")
    for odd in (b"", b"[]", b'{"messages": [5]}', b'{"messages": ' + b"[" * 5000):
        assert opening_of(odd, INFERENCE[CHAT]).system == b""
