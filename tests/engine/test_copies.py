"""Claims about ``engine.copies``, seen through a proxy in front of a fake engine without the patch."""

import asyncio
import json

import pytest
from api.rig import CHAT, SYSTEM, chat, until
from fake_engine import Script
from fake_stock import FakeStock

from polykv_proxy.core.types import Capability, PoolState, Scope
from polykv_proxy.engine import gate
from polykv_proxy.engine.poolfiles import CopyLimits
from polykv_proxy.errors import UnavailableError

PROMPT = "Once upon a time there was a proxy. " * 8
MESSAGES = {"system": SYSTEM, "messages": [{"role": "user", "content": "hi"}]}
APIS = {
    "/completion": {"prompt": PROMPT},
    "/v1/completions": {"prompt": PROMPT},
    CHAT: chat("hi"),
    "/v1/responses": {"instructions": SYSTEM, "input": "hi"},
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Looks at slots follow each other fast."""
    monkeypatch.setattr(gate, "LOOK_S", 0.002)


@pytest.fixture
def start(proxies, tmp_path):
    """Starts a proxy in front of a stock engine, which is changed first by ``change``."""

    async def go(change=lambda _engine: None, *, slots=2, max_pools=3, ours=True, **settings):
        engine = FakeStock(slots=slots)
        engine.folder = tmp_path
        change(engine)
        limits = CopyLimits(max_pools, tmp_path if ours else None)
        return await proxies(stock=engine, copies=limits, **settings)

    return go


@pytest.fixture
async def rig(start):
    """A proxy with two slots and up to three pools."""
    return await start()


def files(rig):
    """Slot files of the engine."""
    return sorted(path.name for path in rig.engine.folder.iterdir())


def begin(rig):
    """Forget what was moved so far."""
    rig.engine.moves.clear()


async def pool_of(rig, text, **more):
    """A pool of a text; its id."""
    return (await rig.pool({"prompt": text, **more}))["pool_id"]


def slot_of(rig):
    """The slot in the body of the last request."""
    return rig.engine.work[-1].json["id_slot"]


# -- the level ----------------------------------------------------------------------------------------------


async def test_it_is_claimed_after_it_was_seen_to_work(rig):
    """The test leaves nothing behind, neither on disk nor in the slots."""
    assert rig.runtime.plane.capability is Capability.COPY
    assert rig.runtime.plane.facts.partial_match
    assert not files(rig)
    assert [slot.tokens for slot in rig.engine.sequences] == [[], []]
    ours = (await rig.ask("/props")).json["opencoti"]
    assert (ours["capability"], ours["max_pools"]) == ("copy", 3)
    assert "polykv_pools_v1" in ours["features"]
    assert ours["engine_epoch"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"folder": None}, "--slot-save-path"),
        ({"clears_idle": True}, "reused 0 of 144"),
        ({"window": 100}, "reused 0 of 144"),
        ({"loaded_adapters": [{"id": 0, "scale": 0.0}]}, "LoRA"),
        ({"broken": {"/slots": (501, b'{"error":{"message":"slots are off"}}')}}, "slots are off"),
    ],
)
async def test_where_it_does_not_work_requests_are_relayed(start, change, reason):
    """With the reason; pools are off, and bodies are left alone."""
    rig = await start(lambda engine: vars(engine).update(change))
    assert rig.runtime.plane.capability is Capability.RELAY
    assert reason in rig.runtime.plane.capability_reason
    assert (await rig.ask("/polykv/pools", {"prompt": PROMPT})).status == 501
    raw = json.dumps(chat("a")).encode()
    assert (await rig.ask(CHAT, raw, Content_Type="application/json")).status == 200
    assert rig.engine.work[-1].body == raw


async def test_it_is_not_tried_where_others_are_at_work(start):
    """A test would take their slots."""

    def work(engine):
        engine.sequences[1].running = True

    rig = await start(work)
    rig.engine.sequences[1].running = False
    assert "others were at work" in rig.runtime.plane.capability_reason


async def test_it_can_be_off(start):
    """With no pools wanted nothing is tried."""
    rig = await start(max_pools=0)
    assert rig.runtime.plane.capability is Capability.RELAY
    assert not rig.engine.moves


async def test_one_slot_will_do(start):
    """The prompt is restored into the slot that it came from."""
    rig = await start(slots=1)
    assert rig.runtime.plane.capability is Capability.COPY


async def test_an_engine_that_was_away_for_a_moment_keeps_its_pools(rig):
    """Its task numbers went on: it is the same load, and not tested again."""
    pool_id = await pool_of(rig, PROMPT)
    begin(rig)
    rig.down()
    await rig.up()
    assert not rig.engine.moves
    assert rig.runtime.plane.pools.find(pool_id, Scope("")).resident


async def test_an_engine_that_does_not_answer_in_time_is_asked_again(start, monkeypatch):
    """That says nothing about what it can do."""
    monkeypatch.setattr("polykv_proxy.runtime.RETRY_READY_S", 0.005)
    rig = await start()
    rig.down()
    rig.engine.restart()
    failing = [
        UnavailableError("slow", code="engine_timeout"),
        UnavailableError("slow", code="engine_timeout"),
    ]
    real = rig.runtime.client.adapters

    async def adapters():
        if failing:
            raise failing.pop()
        return await real()

    monkeypatch.setattr(rig.runtime.client, "adapters", adapters)
    await rig.up()
    assert not failing
    assert rig.runtime.plane.capability is Capability.COPY


@pytest.mark.parametrize("ours", [True, False])
async def test_an_engine_that_was_restarted_has_lost_them(start, ours):
    """What is on its disk is never used again: nobody knows which weights it came from."""
    rig = await start(ours=ours)
    pool_id = await pool_of(rig, PROMPT)
    before, epoch = files(rig), rig.runtime.epoch
    rig.down()
    rig.engine.restart()
    await rig.up()
    assert rig.runtime.epoch != epoch
    assert rig.runtime.plane.pools.find(pool_id, Scope("")).state is PoolState.LOST
    if ours:
        assert not files(rig)
    else:
        listed = (await rig.ask("/polykv/pools")).json["engines"][0]
        assert set(before) <= set(listed["pool_files_left"])
    body = {"prompt": PROMPT + "x", "pool_id": pool_id}
    assert (await rig.ask("/completion", body)).json["opencoti"]["pool_unknown"] is True
    assert await pool_of(rig, PROMPT) == pool_id
    assert (await rig.ask("/completion", body)).json["opencoti"]["n_pool_shared"] == len(PROMPT)


async def test_files_of_an_earlier_proxy_are_tidied_away(start, tmp_path):
    """Those of pools; what else is in the folder is not ours."""
    (tmp_path / "polykv-pool-0badcafe-1.bin").write_bytes(b"old")
    (tmp_path / "session.bin").write_bytes(b"another's")
    rig = await start()
    assert files(rig) == ["session.bin"]


# -- requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_gets_a_copy_of_its_pool(rig, path, stream):
    """Its slot is filled before it is sent; headers and block say what was reused."""
    rendered = PROMPT if "prompt" in APIS[path] else rig.engine.renders(APIS[path])
    made = await rig.pool({"tokens": rig.engine.tokens_of(rendered)[:120]})
    begin(rig)
    body = APIS[path] | {"pool_id": made["pool_id"], "session_id": "me", "stream": stream}
    answer = await rig.ask(path, body)
    documents = [event for _, event in answer.events] if stream else [answer.json]
    (block,) = (document["opencoti"] for document in documents if "opencoti" in document)
    assert block["pool_match"] == block["pool_len"] == 120
    if not stream or path in ("/completion", "/v1/responses"):  # the fake's other streams count too late
        assert block["n_pool_shared"] == 120
    assert answer.headers["x-cached-prefix-tokens"] == "120"
    assert [slot for slot, _ in rig.engine.restores()] == [slot_of(rig)]
    sent = rig.engine.work[-1].json
    assert {key: value for key, value in sent.items() if key != "id_slot"} == APIS[path] | {"stream": stream}
    assert rig.runtime.plane.pools.shortfalls == 0


async def test_every_request_is_pinned_and_keeps_its_other_bytes(rig):
    """The slot stands at the end of the body; a client's own choice is gone, and reported."""
    raw = json.dumps(chat("a"), indent=1).encode()
    await rig.ask(CHAT, raw, Content_Type="application/json")
    assert rig.engine.work[-1].body == raw[:-1] + b',"id_slot":0}'
    answer = await rig.ask("/completion", {"prompt": "a", "id_slot": 1, "session_id": "me"})
    assert rig.engine.work[-1].body.count(b"id_slot") == 1
    assert answer.json["opencoti"]["id_slot_ignored"] is True
    await rig.ask("/infill", {"input_prefix": "a"})
    assert "id_slot" in rig.engine.work[-1].json


async def test_a_body_that_is_no_object_passes(rig):
    """The engine refuses it in its own words."""
    rig.engine.script = Script(fault="error", status=400, error_body={"error": {"message": "no"}})
    answer = await rig.ask("/completion", b"[1]", Content_Type="application/json")
    assert (answer.status, rig.engine.work[-1].body) == (400, b"[1]")
    await rig.quiet()


async def test_a_conversation_is_not_filled_again(rig):
    """Its slot holds more than the pool by now. Where the engine emptied it, it is filled."""
    pool_id = await pool_of(rig, PROMPT)
    begin(rig)
    turn = {"prompt": PROMPT + "One.", "pool_id": pool_id, "session_id": "me"}
    await rig.ask("/completion", turn)
    two = await rig.ask("/completion", turn | {"prompt": PROMPT + "One. Two."})
    assert len(rig.engine.restores()) == 1
    assert two.json["timings"]["cache_n"] == len(PROMPT + "One.")
    for slot in rig.engine.sequences:
        slot.tokens = []  # the engine made room
    three = await rig.ask("/completion", turn | {"prompt": PROMPT + "One. Two. Three."})
    assert len(rig.engine.restores()) == 2
    assert three.json["timings"]["cache_n"] == len(PROMPT)


async def test_what_others_did_to_a_slot_is_not_relied_on(rig):
    """A slot action, a refusal, a request whose tokens are not known: the next one is filled again."""
    pool_id = await pool_of(rig, PROMPT)
    ours = {"prompt": PROMPT + "One.", "pool_id": pool_id, "session_id": "me"}
    await rig.ask("/completion", ours)
    begin(rig)
    slot = slot_of(rig)
    assert (await rig.ask(f"/slots/{slot}?action=erase", {})).status == 200
    rig.engine.sequences[slot].tokens = [0] * 500
    await rig.ask("/slots/0?action=erase", {})  # so that it is the first to be given away
    await rig.ask("/completion", ours)
    assert (slot_of(rig), len(rig.engine.restores())) == (slot, 1)
    rig.engine.script_for = lambda _: Script(fault="error", status=500)
    await rig.ask("/completion", ours)
    rig.engine.script_for = lambda _: None
    for each in rig.engine.sequences:
        each.tokens = [0] * 500
    await rig.ask("/completion", ours)
    assert len(rig.engine.restores()) == 2


@pytest.mark.parametrize("damage", ["deleted", "cut", "unreadable"])
async def test_a_file_that_is_damaged_costs_one_request_its_speed(rig, damage):
    """It computes its prompt, the shortfall is counted, and the pool is computed again for the next one."""
    pool_id = await pool_of(rig, PROMPT, pin=True)
    for name in files(rig):
        path = rig.engine.folder / name
        if damage == "deleted":
            path.unlink()
        else:
            whole = path.read_bytes()
            path.write_bytes(whole[:-1] if damage == "cut" else b"?" * len(whole))
    answer = await rig.ask("/completion", {"prompt": PROMPT + "x", "pool_id": pool_id})
    assert answer.json["opencoti"]["n_pool_shared"] == 0
    assert rig.runtime.plane.pools.shortfalls == 1
    (shown,) = (await rig.ask("/polykv/pools")).json["pools"]
    assert (shown["residency"], shown["pinned"], shown["file_bytes"]) == ("evicted", True, None)
    await until(lambda: not files(rig))
    answer = await rig.ask("/completion", {"prompt": PROMPT + "yz", "pool_id": pool_id})
    assert answer.json["opencoti"]["n_pool_shared"] == len(PROMPT)
    assert rig.runtime.plane.pools.shortfalls == 1
    assert len(files(rig)) == 1


async def test_idle_slots_make_room_for_a_copy(start):
    """The one unused for the longest time is emptied first; its session is not resident any more."""

    def small(engine):
        engine.props["default_generation_settings"]["n_ctx"] = engine.cells = 800

    rig = await start(small, slots=3)
    pool_id = await pool_of(rig, PROMPT)
    for name in ("one", "two", "three"):
        body = {"prompt": PROMPT + name, "pool_id": pool_id, "session_id": name}
        answer = await rig.ask("/completion", body)
        assert answer.json["timings"]["cache_n"] == len(PROMPT)
    sessions = (await rig.ask("/polykv/sessions")).json["sessions"]
    assert {each["session_id"]: each["resident"] for each in sessions} == {
        "one": False,
        "two": True,
        "three": True,
    }
    assert rig.idle == 3


async def test_of_a_chat_with_media_the_text_before_them_is_shared(start):
    """POOL-19: what stands for one in the rendered text is no text, though a pool has the same letters."""

    def sees(engine):
        engine.props |= {"modalities": {"vision": True}, "media_marker": "<m>"}
        engine.renders = lambda _body: PROMPT + "<m>what is it?"

    rig = await start(sees)
    pool_id = await pool_of(rig, PROMPT + "<m>what")
    content = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    body = {"messages": [{"role": "user", "content": content}], "pool_id": pool_id}
    answer = await rig.ask("/v1/chat/completions", body)
    assert answer.json["opencoti"]["pool_match"] == len(PROMPT)


@pytest.mark.parametrize("sees", [False, True])
async def test_what_only_looks_like_media_is_text(start, sees):
    """A tool may describe an image; the prompt has none in it."""

    def like(engine):
        if sees:
            engine.props |= {"modalities": {"vision": True}, "media_marker": "<m>"}
        engine.renders = lambda _body: PROMPT + "what is it?"

    rig = await start(like)
    pool_id = await pool_of(rig, PROMPT + "what")
    parameters = {"type": "object", "examples": [{"type": "image", "url": "x"}]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "pool_id": pool_id}
    answer = await rig.ask("/v1/chat/completions", body)
    assert answer.json["opencoti"]["pool_match"] == len(PROMPT + "what")
    assert [slot.tokens[-1] for slot in rig.runtime.plane.board if slot.tokens] == [ord("?")]


async def test_no_room_at_all_costs_speed_only(start):
    """Everybody else is at work: the request computes its prompt."""

    def small(engine):
        engine.props["default_generation_settings"]["n_ctx"] = engine.cells = 500

    rig = await start(small)
    pool_id = await pool_of(rig, PROMPT)
    rig.engine.gate.clear()
    running = rig.start("/completion", {"prompt": "y" * 300, "session_id": "other"})
    await until(lambda: rig.engine.running)
    asked = rig.start("/completion", {"prompt": PROMPT + "x", "pool_id": pool_id})
    await until(lambda: rig.engine.running == 2)
    rig.engine.gate.set()
    assert (await asked).json["opencoti"]["n_pool_shared"] == 0
    assert (await running).status == 200


async def test_requests_without_a_pool_find_one(rig):
    """And none comes by itself, however much two conversations share."""
    pool_id = await pool_of(rig, PROMPT)
    answer = await rig.ask("/completion", {"prompt": PROMPT + "y" * 200})
    assert answer.headers["x-pool-id"] == pool_id
    assert answer.json["timings"]["cache_n"] == len(PROMPT)
    for end in "ab":
        await rig.ask("/completion", {"prompt": "z" * 600 + end, "session_id": end})
    assert [pool.pool_id for pool in rig.runtime.plane.tree] == [pool_id]


async def test_hints_leave_no_pool_behind(rig):
    """A group that says it begins alike: nothing comes by itself, and the engine is not asked for it."""
    for content in "ab":
        await rig.ask(CHAT, chat(content * 300, prompt_cache_key="group"))
    assert not list(rig.runtime.plane.tree)
    assert not rig.engine.of("/v1/chat/completions/input_tokens")


async def test_tokens_that_cannot_be_had_are_a_reason(rig):
    """A Responses body with more than text, or whose count the engine sees otherwise, runs without."""
    pool_id = await pool_of(rig, PROMPT)
    with_tools = APIS["/v1/responses"] | {"tools": [{"type": "function"}]}
    rig.engine.broken["/v1/responses/input_tokens"] = (200, b'{"input_tokens":3}')
    for body in (with_tools, APIS["/v1/responses"]):
        answer = await rig.ask("/v1/responses", body | {"pool_id": pool_id})
        block = answer.json["opencoti"]
        assert (block["unpooled_reason"], block["n_pool_shared"]) == ("not_tokenizable", None)


async def test_a_restart_while_a_slot_is_filled_ends_the_request(rig):
    """What was restored is gone; it is not sent to the new engine."""
    pool_id = await pool_of(rig, PROMPT)
    begin(rig)
    slow, quick_again = asyncio.Event(), rig.engine.move_gate
    rig.engine.move_gate = slow
    asked = rig.start("/completion", {"prompt": PROMPT + "x", "pool_id": pool_id})
    await until(rig.engine.restores)
    rig.engine.move_gate = quick_again
    rig.down()
    rig.engine.restart()
    await rig.up()
    slow.set()
    assert (await asked).error["code"] == "engine_gone"
    await rig.quiet()


async def test_a_client_that_leaves_while_its_slot_is_filled_gives_it_back(rig, monkeypatch):
    """Once the engine is done with it."""
    monkeypatch.setattr("polykv_proxy.runtime.LAUNCH_GRACE_S", 0.05)
    pool_id = await pool_of(rig, PROMPT)
    begin(rig)
    rig.engine.move_gate.clear()
    asked = rig.start("/completion", {"prompt": PROMPT + "x", "pool_id": pool_id})
    await until(rig.engine.restores)
    asked.cancel()
    rig.engine.move_gate.set()
    await rig.quiet()
    assert not rig.engine.work


async def test_one_that_left_in_its_prefill_is_not_believed_to_be_complete(rig, monkeypatch):
    """Its slot is given away when the engine is done; the next turn gets the pool's copy."""
    monkeypatch.setattr("polykv_proxy.runtime.LAUNCH_GRACE_S", 0.05)
    pool_id = await pool_of(rig, PROMPT)
    begin(rig)
    rig.engine.prefill_gate.clear()
    long = {"prompt": PROMPT + "x" * 300, "pool_id": pool_id, "session_id": "me"}
    asked = rig.start("/completion", long)
    await until(lambda: rig.engine.running)
    asked.cancel()
    await rig.quiet()
    assert [len(held) for held in rig.runtime.backend._held.values()] == [len(PROMPT)]
    rig.engine.prefill_gate.set()
    answer = await rig.ask("/completion", long)
    assert answer.json["timings"]["cache_n"] == len(PROMPT)
    assert rig.runtime.plane.pools.shortfalls == 0


# -- requests that cannot be pinned -------------------------------------------------------------------------


async def test_messages_run_without_and_say_why(rig):
    """Its body stays as it is; the session is where the engine put it."""
    pool_id = await pool_of(rig, PROMPT)
    await rig.ask("/completion", {"prompt": "other", "session_id": "one"})
    one = slot_of(rig)
    rig.engine.sequences[1 - one].tokens = rig.engine.tokens_of(rig.engine.renders(MESSAGES))
    raw = json.dumps(MESSAGES).encode()
    answer = await rig.ask(
        "/v1/messages", raw, Content_Type="application/json", X_PolyKV_Pool=pool_id, X_PolyKV_Session="me"
    )
    assert rig.engine.work[-1].body == raw
    block = answer.json["opencoti"]
    assert (block["unpooled_reason"], block["pool_id"]) == ("not_pinnable", pool_id)
    assert "pool_unknown" not in block
    sessions = {
        each["session_id"]: each["slot"] for each in (await rig.ask("/polykv/sessions")).json["sessions"]
    }
    assert sessions == {"one": one, "me": 1 - one}


async def test_the_engines_choice_displaces_what_was_there(rig):
    """The slot that it took is another conversation's, which is not resident any more."""
    await rig.ask("/completion", {"prompt": "other", "session_id": "one"})
    rig.engine.sequences[0].tokens = rig.engine.tokens_of(rig.engine.renders(MESSAGES))
    await rig.ask("/v1/messages", MESSAGES, X_PolyKV_Session="me")
    sessions = {
        each["session_id"]: each["slot"] for each in (await rig.ask("/polykv/sessions")).json["sessions"]
    }
    assert sessions == {"one": None, "me": 0}
    assert rig.idle == 2


async def test_a_slot_that_was_given_away_is_swapped(rig):
    """One that waits to be sent gets the other slot, and is sent there."""
    rig.engine.launch_gate.clear()
    first = rig.start("/v1/messages", MESSAGES)
    await until(lambda: rig.engine.of("/v1/messages"))
    second = rig.start("/completion", {"prompt": "second", "session_id": "two"})
    await until(lambda: rig.idle == 0)
    assert rig.engine.of("/completion")[-1].json["prompt"] != "second"
    rig.engine.sequences[1].tokens = rig.engine.tokens_of(rig.engine.renders(MESSAGES))
    rig.engine.launch_gate.set()
    answers = await asyncio.gather(first, second)
    assert [answer.status for answer in answers] == [200, 200]
    assert slot_of(rig) == 0
    await rig.quiet()


async def test_several_completions_leave_the_others_alone(rig):
    """The engine chooses slots for all but the first: nothing else is launched meanwhile."""
    pool_id = await pool_of(rig, PROMPT)
    begin(rig)
    answer = await rig.ask("/completion", {"prompt": PROMPT + "x", "n_cmpl": 2, "pool_id": pool_id})
    assert answer.json["timings"]["cache_n"] == len(PROMPT)
    assert "id_slot" in rig.engine.work[-1].json
    await rig.ask("/completion", {"prompt": ["a", "b"]})
    await rig.quiet()


# -- pools --------------------------------------------------------------------------------------------------


async def test_a_pool_is_a_file_and_owns_no_cells(rig):
    """What is listed is what is known."""
    made = await rig.pool({"prompt": PROMPT})
    assert made["prompt_tokens_computed"] == len(PROMPT)
    shown = (await rig.ask(f"/polykv/pools/{made['pool_id']}")).json
    assert (shown["residency"], shown["own_kv_bytes"], shown["file_bytes"]) == (
        "resident",
        0,
        10 * len(PROMPT),
    )
    listed = (await rig.ask("/polykv/pools")).json
    assert listed["kv_cells_used"] is None
    assert listed["engines"][0]["pool_file_bytes"] == 10 * len(PROMPT)
    assert listed["engines"][0]["pool_files_left"] == []
    assert all(not slot.tokens for slot in rig.engine.sequences)


async def test_a_child_goes_on_from_its_parents_file(rig):
    """And is a whole file of its own."""
    parent = await pool_of(rig, PROMPT)
    begin(rig)
    answer = await rig.ask(f"/polykv/pools/{parent}/fork", {"prompt": PROMPT + "child" * 10})
    assert (answer.json["branch_pos"], answer.json["prompt_tokens_computed"]) == (len(PROMPT), 50)
    assert len(files(rig)) == 2
    assert (await rig.ask(f"/polykv/pools/{parent}?recursive=1", method="DELETE")).status == 200
    assert not files(rig)
    assert not rig.runtime.plane.tree.nodes()  # nobody holds cells of theirs: nothing haunts


async def test_an_evicted_pool_comes_back(rig):
    """Its id, its tokens and its place in the tree stay."""
    pool_id = await pool_of(rig, PROMPT)
    await rig.ask(f"/polykv/pools/{pool_id}/evict", {})
    assert not files(rig)
    assert (await rig.ask(f"/polykv/pools/{pool_id}")).json["file_bytes"] is None
    answer = await rig.ask("/completion", {"prompt": PROMPT + "x", "pool_id": pool_id})
    assert answer.json["opencoti"]["n_pool_shared"] == len(PROMPT)


async def test_a_pool_beyond_a_window_is_refused(start):
    """The level was seen to work with a short prompt; each pool proves itself."""

    def narrow(engine):
        engine.window = 200

    rig = await start(narrow)
    refused = await rig.ask("/polykv/pools", {"prompt": PROMPT})
    assert (refused.status, refused.error["code"]) == (501, "copy_ineffective")
    assert not files(rig)
    assert (await rig.pool({"prompt": PROMPT[:150]}))["created"]
    await rig.quiet()


async def test_a_save_that_falls_short_is_no_pool(rig):
    """The engine says that it saved less than it computed."""
    rig.engine.broken["/slots/0"] = (200, b'{"n_saved":3,"n_written":30}')
    refused = await rig.ask("/polykv/pools", {"prompt": PROMPT})
    assert refused.status == 503
    rig.engine.broken.clear()
    assert (await rig.pool({"prompt": PROMPT}))["created"]


async def test_a_pool_that_nobody_waits_for_is_given_up(rig, monkeypatch):
    """Its slot comes back when the engine stopped, and its number with it."""
    monkeypatch.setattr("polykv_proxy.runtime.LAUNCH_GRACE_S", 0.05)
    rig.engine.pool_gate.clear()
    asked = rig.start("/polykv/pools", {"prompt": PROMPT})
    await until(lambda: rig.engine.running)
    asked.cancel()
    rig.engine.pool_gate.set()
    await rig.quiet()
    await until(lambda: rig.runtime.plane.tree.sequences_used == 0)
    assert not files(rig)


async def test_one_too_many_is_refused(rig):
    """The bound is on files."""
    for number in range(3):
        await pool_of(rig, f"{number}{PROMPT}")
    refused = await rig.ask("/polykv/pools", {"prompt": "four" + PROMPT})
    assert (refused.status, refused.error["code"]) == (409, "pool_capacity_exhausted")
    assert "3 files" in refused.error["message"]


async def test_what_cannot_be_deleted_is_listed_and_used_again(start):
    """An engine of somebody else's: the next pool of that number takes the file."""
    rig = await start(ours=False)
    pool_id = await pool_of(rig, PROMPT)
    gone = (await rig.ask(f"/polykv/pools/{pool_id}", method="DELETE")).json
    assert gone["pool_files_left"] == files(rig)
    await pool_of(rig, "other" + PROMPT)
    assert (await rig.ask("/polykv/pools")).json["engines"][0]["pool_files_left"] == []
    assert len(files(rig)) == 1


@pytest.mark.parametrize("near", [True, False])
async def test_a_recurrent_model_copies_whole_pools(start, near):
    """Who has less than the whole pool computes all; of several, the longest that is whole is found."""

    def whole(engine):
        engine.whole_states = True

    rig = await start(whole)
    assert not rig.runtime.plane.facts.partial_match
    short, long = await pool_of(rig, PROMPT[:100]), await pool_of(rig, PROMPT)
    prompt = PROMPT[:150] + "x" * 300 if near else PROMPT[:60] + "x" * 300
    answer = await rig.ask("/completion", {"prompt": prompt})
    if near:
        assert answer.headers["x-pool-id"] == short
        assert answer.json["timings"]["cache_n"] == 100
    else:
        assert "x-pool-id" not in answer.headers
    block = (await rig.ask("/completion", {"prompt": prompt, "pool_id": long})).json["opencoti"]
    assert (block["n_pool_shared"], block["pool_match"]) == (0, 150 if near else 60)
    assert rig.runtime.plane.pools.shortfalls == 0


# -- snapshots ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ours", [True, False])
async def test_a_session_becomes_a_pool(start, ours):
    """Its tokens come from the file, or are those of its prompt; the session stays where it is."""
    rig = await start(ours=ours)
    await rig.ask("/completion", {"prompt": PROMPT, "session_id": "me"})
    rig.engine.sequences[0].tokens += [7, 8]  # generated
    made = await rig.ask("/polykv/pools", {"from_session": "me"})
    assert made.status == 201
    assert made.json["prefix_len"] == len(PROMPT) + (2 if ours else 0)
    assert made.json["prompt_tokens_computed"] == 0
    sessions = (await rig.ask("/polykv/sessions")).json["sessions"]
    assert [(each["session_id"], each["slot"]) for each in sessions] == [("me", 0)]
    assert (await rig.ask("/polykv/pools", {"from_session": "me"})).json["created"] is False
    await until(lambda: len(files(rig)) == 1 or not ours)
    assert (await rig.ask("/completion", {"prompt": PROMPT + "x", "session_id": "me"})).status == 200
    assert rig.idle == 2


async def test_a_snapshot_can_be_cut(rig):
    """The file holds more than the pool offers."""
    await rig.ask("/completion", {"prompt": PROMPT, "session_id": "me"})
    made = await rig.pool({"from_session": "me", "n_tokens": 100})
    assert made["prefix_len"] == 100
    answer = await rig.ask("/completion", {"prompt": PROMPT[:100] + "z" * 300, "pool_id": made["pool_id"]})
    assert answer.json["opencoti"]["n_pool_shared"] == 100


async def test_a_snapshot_can_be_a_child(rig):
    """As far as it agrees with its parent."""
    parent = await pool_of(rig, PROMPT[:100])
    await rig.ask("/completion", {"prompt": PROMPT, "session_id": "me"})
    child = await rig.ask(f"/polykv/pools/{parent}/fork", {"from_session": "me"})
    assert (child.json["parent"], child.json["branch_pos"]) == (parent, 100)


@pytest.mark.parametrize(
    ("n_tokens", "whole", "status", "code"),
    [(0, False, 400, None), (5000, False, 400, None), (100, True, 409, "state_is_whole")],
)
async def test_a_snapshot_that_cannot_be_is_refused(start, n_tokens, whole, status, code):
    """And nothing is left of it: no file, no number, no hold on the slot."""
    rig = await start(lambda engine: setattr(engine, "whole_states", whole))
    await rig.ask("/completion", {"prompt": PROMPT, "session_id": "me"})
    refused = await rig.ask("/polykv/pools", {"from_session": "me", "n_tokens": n_tokens})
    assert refused.status == status
    assert code in (None, refused.error["code"])
    await until(lambda: rig.runtime.plane.tree.sequences_used == 0)
    assert not files(rig)
    assert rig.idle == 2


async def test_a_session_in_a_slot_that_is_borrowed_is_saved_then(rig):
    """What borrows it is ours and over in a moment: nobody outside is told of it."""
    await rig.ask("/completion", {"prompt": PROMPT, "session_id": "me"})
    slot = rig.runtime.plane.sessions.get("me", Scope("")).slot
    lease = rig.runtime.borrow(slot)
    asked = rig.start("/polykv/pools", {"from_session": "me"})
    await asyncio.sleep(0.05)
    assert not asked.done()
    rig.runtime.returned(lease)
    assert (await asked).status == 201
    assert rig.idle == 2


async def test_a_session_at_work_is_not_saved(rig):
    """The engine would save it when it is done."""
    rig.engine.gate.clear()
    running = rig.start("/completion", {"prompt": PROMPT, "session_id": "me"})
    await until(lambda: rig.engine.running)
    refused = await rig.ask("/polykv/pools", {"from_session": "me"})
    assert (refused.status, refused.error["code"]) == (409, "slot_busy")
    rig.engine.gate.set()
    await running
    await until(lambda: rig.runtime.plane.tree.sequences_used == 0)


async def test_a_session_of_unknown_tokens_on_somebody_elses_engine(start):
    """Too short to be matched, so never tokenized; and its file cannot be read."""
    rig = await start(ours=False)
    await rig.ask("/completion", {"prompt": "short", "session_id": "me"})
    refused = await rig.ask("/polykv/pools", {"from_session": "me"})
    assert (refused.status, refused.error["code"]) == (409, "tokens_unknown")


async def test_a_session_whose_slot_is_taken_while_it_is_saved_is_no_pool(rig):
    """The engine put a request without a pin there before the save."""
    await rig.ask("/completion", {"prompt": PROMPT, "session_id": "me"})
    rig.engine.launch_gate.clear()
    other = rig.start("/v1/messages", MESSAGES)
    await until(lambda: rig.engine.of("/v1/messages"))
    saving = rig.start("/polykv/pools", {"from_session": "me"})
    await until(lambda: rig.idle == 0)
    rig.engine.sequences[0].tokens = rig.engine.tokens_of(rig.engine.renders(MESSAGES))
    rig.engine.launch_gate.set()
    assert (await saving).status == 409
    assert (await other).status == 200
    await rig.quiet()
    assert not files(rig)
