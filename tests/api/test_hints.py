"""Claims about ``api.hints``: pools that come of marks and groups, and that they cost others nothing."""

import json

import pytest

from api.rig import CHAT, until
from polykv_proxy.api import hints
from polykv_proxy.core.types import PoolOrigin

MARK = {"cache_control": {"type": "ephemeral"}}
RULES = "You are an agent of the house and follow its rules. "
"""Fewer tokens than a prefix has to have that becomes a pool by itself."""
COMMON = f"<system>{RULES}</><user>"
MESSAGES = "/v1/messages"


def rendered(body):
    """A template, one token for each character."""

    def text(content):
        return content if isinstance(content, str) else "".join(part["text"] for part in content)

    system = f"<system>{text(body['system'])}</>" if "system" in body else ""
    return system + "".join(f"<{each['role']}>{text(each['content'])}</>" for each in body["messages"])


def ask(question, mark=MARK, **more):
    """A request of an agent: marked rules, then a task of its own."""
    task = {"role": "user", "content": f"{question} " * 20}
    return {"system": [{"type": "text", "text": RULES, **mark}], "messages": [task], **more}


def grouped(question, group="agents", **more):
    """A chat that says only which group it belongs to."""
    messages = [{"role": "system", "content": RULES}, {"role": "user", "content": f"{question} " * 40}]
    return {"messages": messages, "prompt_cache_key": group, **more}


def unrelated(number):
    """A conversation that takes a slot."""
    return {"messages": [{"role": "user", "content": f"{number} other things " * 20}]}


@pytest.fixture
async def house(proxies):
    """Two slots, four pools of which two may come by themselves, and a template."""
    rig = await proxies(max_pools=4)
    rig.engine.renders = rendered
    return rig


def counted(rig):
    """Renderings that the engine was asked for."""
    return sum(request.path.endswith(("count_tokens", "input_tokens")) for request in rig.engine.requests)


def pools(rig):
    """What the pools hold."""
    return ["".join(map(chr, pool.tokens)) for pool in rig.runtime.plane.tree]


async def done(rig, path, body, **headers):
    """Ask, and wait until the slot is free again, which it is a moment after the answer."""
    answer = await rig.ask(path, body, **headers)
    assert answer.status == 200
    await rig.quiet()
    return answer


async def take_all_slots(rig):
    """Other conversations run in every slot."""
    for number in range(len(rig.engine.sequences)):
        assert (await rig.ask(CHAT, unrelated(number))).status == 200


async def test_the_first_request_behind_a_mark_leaves_a_pool(house):
    """It ends at the mark; those who come later find it although others have taken the slot since."""
    first = await done(house, MESSAGES, ask("One"))
    assert "x-pool-id" not in first.headers
    assert pools(house) == [COMMON]
    assert [pool.origin for pool in house.runtime.plane.tree] == [PoolOrigin.AUTO]
    await take_all_slots(house)
    second = await done(house, MESSAGES, ask("Two", session_id="second"))
    assert second.json["opencoti"]["n_pool_shared"] == len(COMMON)
    assert (await house.ask("/polykv/pools")).json["unattributed_cells"] == 0


async def test_a_mark_is_placed_once(house):
    """Two renderings for the first of a prefix; none for others behind the same mark, or without one."""
    await done(house, MESSAGES, ask("One"))
    assert counted(house) == 1 + 2
    await done(house, MESSAGES, ask("Two"))
    assert counted(house) == 3 + 1
    await done(house, CHAT, unrelated(1))
    assert counted(house) == 4 + 1


async def test_a_conversation_that_goes_on_asks_for_nothing(house):
    """Its slot holds what its marks mean."""
    body = ask("One")
    await done(house, MESSAGES, body)
    before = counted(house)
    turns = [*body["messages"], {"role": "assistant", "content": "A"}, {"role": "user", "content": "B"}]
    await done(house, MESSAGES, {**body, "messages": turns})
    assert counted(house) == before


async def test_without_a_mark_so_short_a_prefix_is_no_pool(house):
    """Neither of the first nor of the second."""
    await done(house, MESSAGES, ask("One", mark={}))
    await done(house, MESSAGES, ask("Two", mark={}))
    assert pools(house) == []


async def test_a_first_wave_shares_what_precedes_the_mark(proxies):
    """Those who come while the first computes wait for the marked prefix, and compute only their own part."""
    rig = await proxies(slots=3, max_pools=4)
    rig.engine.renders = rendered
    rig.engine.prefilled = 10
    rig.engine.prefill_gate.clear()
    leader = rig.start(MESSAGES, ask("One", session_id="one"))
    await until(lambda: rig.engine.running == 1)
    followers = [rig.start(MESSAGES, ask(name, session_id=name)) for name in ("Two", "Ten")]
    await until(lambda: rig.idle == 0)
    assert len(rig.engine.work) == 1
    rig.engine.prefill_gate.set()
    answers = [await task for task in (leader, *followers)]
    assert [each.json["opencoti"]["n_pool_shared"] for each in answers] == [None, len(COMMON), len(COMMON)]
    assert pools(rig) == [COMMON]  # and not "…T", which the two followers share by chance
    assert (await rig.ask("/polykv/pools")).json["unattributed_cells"] == 0


async def test_a_longer_common_part_becomes_a_pool_below(house):
    """The mark's pool is its parent."""
    more = {
        "messages": [{"role": "user", "content": "The same long document. " * 20 + end} for end in ("?",)]
    }
    await done(house, MESSAGES, ask("", **more))
    more["messages"][0]["content"] += " Really?"
    await done(house, MESSAGES, ask("", **more))
    child = next(pool for pool in house.runtime.plane.tree if pool.parent is not None)
    assert (child.branch_pos, pools(house)[0]) == (len(COMMON), COMMON)
    assert child.prefix_len > len(COMMON) + 300


async def test_a_group_leaves_a_pool_with_its_second_conversation(house):
    """The first is alone; from the second on the common part is kept, whoever has the slots."""
    await done(house, CHAT, grouped("One"))
    assert pools(house) == []
    await take_all_slots(house)
    await done(house, CHAT, grouped("Two"))
    assert pools(house) == [COMMON]
    await take_all_slots(house)
    third = await done(house, CHAT, grouped("Six", session_id="third"))
    assert third.json["opencoti"]["n_pool_shared"] == len(COMMON)


async def test_a_group_whose_slot_is_there_shares_at_once(house):
    """The second conversation rides already."""
    await done(house, CHAT, grouped("One"))
    second = await done(house, CHAT, grouped("Two", session_id="second"))
    assert second.json["opencoti"]["n_pool_shared"] == len(COMMON)


async def test_groups_of_other_names_and_keys_share_nothing(house):
    """A name is a hint, and holds for its API key."""
    await done(house, CHAT, grouped("One"))
    await done(house, CHAT, grouped("Two", group="others"))
    await done(house, CHAT, grouped("Six"), Authorization="Bearer theirs")
    assert pools(house) == []


async def test_pools_of_other_keys_are_not_found_behind_a_mark(house):
    """Each key leaves its own."""
    await done(house, MESSAGES, ask("One"))
    answer = await done(house, MESSAGES, ask("Two"), X_Api_Key="theirs")
    assert "x-pool-id" not in answer.headers
    assert pools(house) == [COMMON, COMMON]


async def test_pools_that_are_left_behind_stay_within_their_share_of_ids(house):
    """Two of four; the third prefix leaves none, and an explicit pool finds its place all the same."""
    for name in "ABC":
        system = [{"type": "text", "text": f"{name} {RULES}", **MARK}]
        await done(house, MESSAGES, ask("One", system=system))
    assert len(pools(house)) == 2
    for number in range(2):
        await house.pool({"tokens": [number + 1] * 50})
    assert house.runtime.plane.tree.sequences_used == 4


async def test_pools_that_are_left_behind_stay_within_their_share_of_cells(proxies):
    """What has saved nothing yet takes nothing from those who run."""
    rig = await proxies(max_pools=4, pools={"auto_share": 0.25})
    rig.engine.renders = rendered
    for name in "AB":
        system = [{"type": "text", "text": name * 700, **MARK}]
        await done(rig, MESSAGES, ask("One", system=system))
    assert [len(text) for text in pools(rig)] == [700 + len("<system></><user>")]


@pytest.mark.parametrize("setting", [{"auto_pools": False}, {"auto_match": False}, {"min_match_tokens": 200}])
async def test_hints_follow_the_policy(proxies, setting):
    """No pools by themselves, no matching, or a prefix below what is worth an attach."""
    rig = await proxies(max_pools=4, pools=setting)
    rig.engine.renders = rendered
    for name in ("One", "Two"):
        await done(rig, MESSAGES, ask(name))
    assert pools(rig) == []


@pytest.mark.parametrize(
    "more", [{"opencoti": {"cache": False}}, {"opencoti": {"auto_match": False}}, {"n": 2}]
)
async def test_a_request_that_is_not_to_share_leaves_nothing(house, more):
    """Its own wish, or several completions that the engine places itself."""
    await done(house, MESSAGES, ask("One", **more))
    assert pools(house) == []


async def test_a_mark_that_cannot_be_placed_is_done_without(house):
    """The engine refuses the cut body; it is asked again by the next request."""
    whole = house.engine.renders

    def refuses(body):
        text = whole(body)
        assert "One" in text or "Two" in text, "a cut body"
        return text

    house.engine.renders = refuses
    await done(house, MESSAGES, ask("One"))
    assert pools(house) == []
    house.engine.renders = whole
    await done(house, MESSAGES, ask("Two"))
    assert pools(house) == [COMMON]


async def test_a_snapshot_that_hangs_keeps_the_slot_no_longer_than_its_bound(house, monkeypatch):
    """The client has its answer, others the slot; the pool is there once the engine answers."""
    monkeypatch.setattr(hints, "SETTLE_S", 0.05)
    house.engine.snapshot_gate.clear()
    await done(house, MESSAGES, ask("One"))
    await house.quiet()
    assert pools(house) == []
    house.engine.snapshot_gate.set()
    await until(lambda: pools(house) == [COMMON])


async def test_a_pool_is_left_though_another_waits_for_the_slot(proxies):
    """The slot goes on to it only then."""
    rig = await proxies(slots=1, max_pools=4)
    rig.engine.renders = rendered
    rig.engine.gate.clear()
    first = rig.start(MESSAGES, ask("One"))
    await until(lambda: rig.engine.running == 1)
    others = [rig.start(CHAT, unrelated(number)) for number in range(3)]
    await until(lambda: rig.waiting == 3)
    rig.engine.gate.set()
    assert [(await task).status for task in (first, *others)] == [200] * 4
    assert pools(rig) == [COMMON]


async def test_media_end_a_boundary(house):
    """What stands before the first picture can be shared; the picture cannot be told from another."""
    picture = len(COMMON) - 8
    tokens_of = house.engine.tokens_of
    house.engine.tokens_of = lambda text: [
        -1 if at == picture else token for at, token in enumerate(tokens_of(text))
    ]
    await done(house, MESSAGES, ask("One"))
    assert pools(house) == [COMMON[:picture]]


async def test_known_prefixes_are_bounded(house, monkeypatch):
    """The one that was met longest ago is forgotten."""
    monkeypatch.setattr(hints, "MAX_KNOWN", 1)
    other = ask("One", system=[{"type": "text", "text": "B " + RULES, **MARK}])
    for body, asked in ((ask("One"), 3), (other, 3), (ask("Two"), 3), (ask("Six"), 1)):
        before = counted(house)
        await done(house, MESSAGES, body)
        assert counted(house) == before + asked


async def test_the_body_keeps_its_bytes(house):
    """A hint is read, never taken out."""
    raw = json.dumps(ask("One"), indent=1).encode()
    await done(house, MESSAGES, raw, Content_Type="application/json")
    assert house.engine.work[-1].body == raw
