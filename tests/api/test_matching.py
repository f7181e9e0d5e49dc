"""Claims about ``api.matching``: which pool a request rides on, and what it waits for."""

import asyncio

import pytest
from fake_engine import Script

from api.bodies import pool_for, spy, text
from api.rig import CHAT, chat, until
from polykv_proxy.core.keeping import riding
from polykv_proxy.core.types import PoolOrigin, as_tokens
from polykv_proxy.pooling import share

# -- pools that requests name --------------------------------------------------------------------------------


async def test_an_unknown_pool_is_no_error(rig):
    """The request runs unpooled, and says so; so it is with a foreign key's pool and with a released one."""
    pool_id = await pool_for(rig, CHAT)
    foreign = await rig.ask(CHAT, chat("hi", pool_id=pool_id), Authorization="Bearer other")
    await rig.ask(f"/polykv/pools/{pool_id}", method="DELETE")
    for answer in (
        foreign,
        await rig.ask(CHAT, chat("hi", pool_id=pool_id)),
        await rig.ask(CHAT, chat("hi", pool_id="nonsense")),
        await rig.ask(CHAT, chat("hi"), X_PolyKV_Pool="nonsense"),
    ):
        assert answer.status == 200
        block = answer.json["opencoti"]
        assert (block["pool_unknown"], block["n_pool_shared"], block["pool_match"]) == (True, None, None)
        assert "x-pool-id" not in answer.headers
    assert spy(rig).header("x-polykv-attach") is None


async def test_a_cap_lowers_what_is_shared(rig):
    """Above the match it is lowered in silence, with ``strict`` it is refused before anything ran."""
    pool_id = await pool_for(rig, CHAT)
    capped = await rig.ask(CHAT, chat("hi", pool_id=pool_id, shared_prefix_n_tokens=20))
    assert capped.headers["x-cached-prefix-tokens"] == "20"
    assert capped.json["opencoti"]["pool_match"] == 60
    wanted = {"pool_id": pool_id, "shared_prefix_n_tokens": 61}
    assert (await rig.ask(CHAT, chat("hi", opencoti=wanted))).json["opencoti"]["n_pool_shared"] == 60
    before = len(rig.engine.work)
    refused = await rig.ask(CHAT, chat("hi", opencoti=wanted | {"strict": True}))
    assert (refused.status, refused.error["code"]) == (400, "shared_prefix_too_long")
    assert (refused.error["matched_tokens"], refused.error["param"]) == (60, "shared_prefix_n_tokens")
    assert len(rig.engine.work) == before


async def test_without_cache_nothing_is_attached(rig):
    """Neither a lookup nor a pin."""
    pool_id = await pool_for(rig, CHAT)
    for more in (
        {"cache_prompt": False, "pool_id": pool_id},
        {"opencoti": {"cache": False, "pool_id": pool_id}},
    ):
        answer = await rig.ask(CHAT, chat("hi") | more)
        assert answer.json["opencoti"]["pool_match"] is None
    assert spy(rig).header("x-polykv-attach") is None


async def test_a_body_that_cannot_be_counted_is_the_engines_to_refuse(rig):
    """Whatever goes wrong with its tokens, the request runs as it is."""
    pool_id = await pool_for(rig, CHAT)
    for broken in ((400, b'{"error":{"message":"no"}}'), (500, b"?"), (200, b'{"input_tokens":3}')):
        rig.engine.broken["/v1/chat/completions/input_tokens"] = broken
        answer = await rig.ask(CHAT, chat("hi", pool_id=pool_id))
        assert (answer.status, answer.json["opencoti"]["pool_match"]) == (200, None)


async def test_a_mixed_prompt_is_the_engines_to_read(rig):
    """Text among ids; several prompts are none that could ride on a pool."""
    pool_id = await pool_for(rig, "/completion")
    tokens = list(rig.runtime.plane.tree.get(pool_id).tokens)
    text = "".join(map(chr, tokens[2:40]))
    answer = await rig.ask("/completion", {"prompt": [*tokens[:2], text], "pool_id": pool_id})
    assert answer.json["opencoti"]["n_pool_shared"] == 40
    answer = await rig.ask("/completion", {"prompt": ["a", "b"], "pool_id": pool_id})
    assert answer.json["opencoti"]["n_pool_shared"] is None


async def test_a_pool_that_went_while_its_request_waited_is_not_attached(rig):
    """Its number may be another pool's by then: the other one's cells are not shared by mistake."""
    pool_id = await pool_for(rig, CHAT)
    rig.engine.gate.clear()
    running = [rig.start(CHAT, chat(name)) for name in "ab"]
    await until(lambda: rig.engine.running == 2)
    waiting = rig.start(CHAT, chat("hi", pool_id=pool_id))
    await until(lambda: rig.waiting == 1)
    assert (await rig.ask(f"/polykv/pools/{pool_id}", method="DELETE")).status == 200
    rig.engine.gate.set()
    answer = await waiting
    assert answer.json["opencoti"]["pool_unknown"] is True
    assert spy(rig).header("x-polykv-attach") is None
    await asyncio.gather(*running)


# -- pools that requests find by themselves ---------------------------------------------------------------

LONG = "The agents of this test have many words in common, and only then a question of their own. " * 4
"""Enough for a pool to come by itself."""

LEADER = text(prompt=LONG + "One", session_id="leader")
DYING = Script(fault="die_in_prompt")
FOLLOWERS = [text(prompt=LONG + end, session_id=end) for end in ("Two", "Three")]


def plain(body):
    """A body without a member of ours."""
    return {key: value for key, value in body.items() if key != "session_id"}


async def led(proxies, leads=None, **options):
    """A proxy with a request that has computed 50 tokens of its prompt and goes no further."""
    rig = await proxies(slots=3, max_pools=4, **options)
    rig.engine.prefilled = 50
    rig.engine.prefill_gate.clear()
    rig.engine.script_for = lambda request: leads if b"One" in request.body else None
    leader = rig.start("/completion", LEADER)
    await until(lambda: rig.engine.running == 1)
    return rig, leader


async def following(rig, *bodies):
    """Requests that look at what the leader computes."""
    tasks = [rig.start("/completion", body) for body in bodies or FOLLOWERS]
    await until(lambda: rig.idle == 2 - len(tasks))
    await until(lambda: rig.pooling.sharing.waiting)
    return tasks


async def test_a_request_finds_the_longest_match(rig):
    """Headers tell; the body is untouched; a pool of another key is not found."""
    short = await rig.pool({"tokens": rig.engine.tokens_of(LONG)[:100]})
    long = await rig.pool({"tokens": rig.engine.tokens_of(LONG)[:200]})
    answer = await rig.ask("/completion", text(prompt=LONG))
    assert answer.headers["x-pool-id"] == long["pool_id"]
    assert answer.headers["x-cached-prefix-tokens"] == "200"
    assert b"opencoti" not in answer.body
    assert spy(rig).header("x-polykv-attach") == "1:200"
    partly = await rig.ask("/completion", text(prompt=LONG[:150] + "x" * 200, session_id="me"))
    assert partly.json["opencoti"]["pool_match"] == 150
    assert short["pool_id"] != partly.headers["x-pool-id"]
    theirs = await rig.ask("/completion", text(prompt=LONG), Authorization="Bearer theirs")
    assert "x-pool-id" not in theirs.headers
    assert (await rig.ask("/polykv/pools")).json["unattributed_cells"] == 0


@pytest.mark.parametrize(
    "body",
    [
        text(prompt=LONG, opencoti={"auto_match": False}),
        text(prompt=LONG, opencoti={"cache": False}),
        text(prompt=LONG, cache_prompt=False),
        text(prompt=[LONG, LONG]),
        text(prompt=LONG[:100]),
        text(prompt=LONG[:20], stop=["x" * 300]),
        text(prompt="different " * 30),
    ],
    ids=["no auto_match", "no cache", "no cache_prompt", "many prompts", "short", "short text", "no match"],
)
async def test_a_request_that_finds_nothing_runs_plain(rig, body):
    """Because it is not to look, or because there is nothing to gain; no header says otherwise."""
    await rig.pool({"tokens": rig.engine.tokens_of(LONG)[:200]})
    answer = await rig.ask("/completion", body)
    assert answer.status == 200
    assert "x-pool-id" not in answer.headers
    assert spy(rig).header("x-polykv-attach") is None


async def test_matching_can_be_switched_off(proxies):
    """Then only a named pool is used."""
    rig = await proxies(pools={"auto_match": False})
    await rig.pool({"tokens": rig.engine.tokens_of(LONG)[:200]})
    assert "x-pool-id" not in (await rig.ask("/completion", text(prompt=LONG))).headers


def tokenized(rig):
    """How often the engine was asked for tokens."""
    counting = ("/tokenize", "/v1/chat/completions/input_tokens")
    return sum(request.path in counting for request in rig.engine.requests)


async def test_what_has_nothing_to_gain_is_not_tokenized(rig):
    """A conversation that goes on in its slot, a short body, one that is not to be matched."""
    await rig.ask(CHAT, chat("a" * 300))
    before = tokenized(rig)
    await rig.ask(CHAT, chat("a" * 300, "b" * 300))
    await rig.ask("/completion", text(prompt="x" * 50))
    await rig.ask("/completion", text(prompt="x" * 500, opencoti={"auto_match": False}))
    assert tokenized(rig) == before
    await rig.ask("/completion", text(prompt="y" * 500))
    assert tokenized(rig) == before + 1


# -- pools that come by themselves ------------------------------------------------------------------------


async def test_a_second_conversation_makes_a_pool_of_what_it_shares(rig):
    """It rides on it already; the cells are there once, and every one has its owner."""
    await rig.ask("/completion", plain(LEADER))
    answer = await rig.ask("/completion", FOLLOWERS[0])
    (pool,) = (await rig.ask("/polykv/pools")).json["pools"]
    assert (pool["origin"], pool["prefix_len"]) == ("auto", len(LONG))
    assert answer.json["opencoti"]["n_pool_shared"] == len(LONG)
    assert rig.engine.used == len(LONG) + len("One") + len("Two")
    assert (await rig.ask("/polykv/pools")).json["unattributed_cells"] == 0


async def test_conversations_of_other_keys_are_not_shared_with(rig):
    """Neither slots nor pools of another key are looked at."""
    await rig.ask("/completion", LEADER, Authorization="Bearer mine")
    answer = await rig.ask("/completion", FOLLOWERS[0], Authorization="Bearer theirs")
    assert "x-pool-id" not in answer.headers
    assert len(rig.runtime.plane.tree) == 0


@pytest.mark.parametrize("setting", [{"auto_pools": False}, {"auto_min_tokens": 1000}])
async def test_no_pool_comes_where_none_is_wanted(proxies, setting):
    """The policy is off, or the common part is too short."""
    rig = await proxies(pools=setting)
    await rig.ask("/completion", LEADER)
    await rig.ask("/completion", FOLLOWERS[0])
    assert len(rig.runtime.plane.tree) == 0


async def test_automatic_pools_take_no_more_than_their_share(proxies):
    """One of two sequence ids; another comes only when the first is out of use: nobody rests on it."""
    rig = await proxies(slots=4, pools={"grace_s": 0.0})
    for letter in "ab":
        for end in "12":
            body = text(prompt=letter * 300 + end * 30, session_id=letter + end)
            assert (await rig.ask("/completion", body)).status == 200
    assert [pool.origin for pool in rig.runtime.plane.tree] == [PoolOrigin.AUTO]
    for name in ("a1", "a2"):
        assert (await rig.ask(f"/polykv/sessions/{name}/close", {})).status == 200
    await until(lambda: not riding(rig.runtime.plane.sample))
    answer = await rig.ask("/completion", text(prompt="b" * 300 + "3" * 30))
    assert answer.headers["x-cached-prefix-tokens"] == "300"
    assert [pool.state.value for pool in rig.runtime.plane.tree] == ["evicted", "resident"]


async def test_a_first_wave_computes_the_common_part_once(proxies):
    """Those who come while the leader computes wait until it has passed what they share, then ride on it."""
    rig, leader = await led(proxies)
    followers = await following(rig)
    assert len(rig.engine.work) == 1
    assert not rig.engine.pools
    rig.engine.prefill_gate.set()
    answers = [await task for task in (leader, *followers)]
    assert [answer.json["opencoti"]["n_pool_shared"] for answer in answers] == [None, len(LONG), len(LONG)]
    assert len(rig.engine.pools) == 1
    assert (await rig.ask("/polykv/pools")).json["unattributed_cells"] == 0
    await rig.quiet()


async def test_a_wave_that_comes_at_once_has_one_leader(proxies, monkeypatch):
    """Whoever finds nobody to share with leads at once, whatever has to happen yet before it is sent."""
    rig = await proxies(slots=4)
    saver, sent = rig.runtime.saver, asyncio.Event()
    before = saver.before_request

    async def slow(*args):
        await sent.wait()
        await before(*args)

    monkeypatch.setattr(saver, "before_request", slow)
    wave = [rig.start("/completion", body) for body in (LEADER, *FOLLOWERS)]
    await until(lambda: rig.pooling.sharing.waiting == 1 and rig.idle == 1)
    await asyncio.sleep(0.05)
    sent.set()
    answers = [await task for task in wave]
    shared = [answer.json["opencoti"]["n_pool_shared"] for answer in answers]
    assert sorted(shared, key=str) == [len(LONG), len(LONG), None]
    await rig.quiet()


async def test_a_leader_that_leaves_holds_nobody_up(proxies):
    """Those who waited carry on; one of them does the work."""
    rig, leader = await led(proxies)
    followers = await following(rig)
    leader.cancel()
    await until(lambda: len(rig.engine.work) > 1)
    rig.engine.prefill_gate.set()
    assert [(await task).status for task in followers] == [200, 200]
    await rig.quiet()


async def test_a_leader_that_fails_holds_nobody_up(proxies):
    """The engine breaks off before the common part is there; its followers are answered."""
    rig, leader = await led(proxies, DYING)
    followers = await following(rig)
    rig.engine.prefill_gate.set()
    assert (await leader).status == 503
    assert [(await task).status for task in followers] == [200, 200]
    await rig.quiet()


async def test_a_leader_without_progress_is_not_waited_for(proxies, monkeypatch):
    """After a while its followers run on what there is, although it still holds its slot."""
    monkeypatch.setattr(share, "NO_PROGRESS_S", 0.1)
    rig, leader = await led(proxies)
    followers = await following(rig)
    await until(lambda: len(rig.engine.work) == 3)
    assert not rig.engine.pools
    rig.engine.prefill_gate.set()
    assert [(await task).status for task in (leader, *followers)] == [200] * 3
    await rig.quiet()


async def test_a_follower_that_leaves_disturbs_nobody(proxies):
    """The wait that it shared goes on for the others."""
    rig, leader = await led(proxies)
    one, two = await following(rig)
    one.cancel()
    await until(lambda: rig.idle == 1)
    rig.engine.prefill_gate.set()
    assert (await two).json["opencoti"]["n_pool_shared"] == len(LONG)
    assert (await leader).status == 200
    await rig.quiet()


async def test_a_stream_that_waits_for_a_leader_is_kept_alive(proxies):
    """Comments until the common part is there, then the answer."""
    rig, leader = await led(proxies, queue={"hold_grace_s": 0.01, "keepalive_s": 0.01})
    async with rig.open("/completion", FOLLOWERS[0] | {"stream": True}) as answer:
        seen = b""
        while seen.count(b":\n\n") < 3:
            seen += await answer.content.readany()
        assert seen.replace(b":\n\n", b"") == b""
        rig.engine.prefill_gate.set()
        rest = await answer.content.read()
    assert b'"n_pool_shared":%d' % len(LONG) in rest
    assert (await leader).status == 200
    await rig.quiet()


async def test_a_wait_for_a_leader_ends_with_the_queue_time(proxies):
    """It counts as one in line; but the request has a slot, and computes its prompt itself."""
    rig, leader = await led(proxies, queue={"max_wait_s": 0.3})
    follower = rig.start("/completion", FOLLOWERS[0])
    await until(lambda: len(rig.engine.work) == 2)
    rig.engine.prefill_gate.set()
    assert (await follower).json["opencoti"]["n_pool_shared"] is None
    assert (await leader).status == 200
    await rig.quiet()


async def test_a_pool_that_cannot_be_made_is_done_without(rig):
    """The engine refuses the snapshot: the request runs as if there were nobody to share with."""
    await rig.ask("/completion", LEADER)
    rig.engine.broken["/polykv/engine/pools/0"] = (500, b"{}")
    answer = await rig.ask("/completion", FOLLOWERS[0])
    assert (answer.status, answer.json["opencoti"]["n_pool_shared"]) == (200, None)
    rig.engine.broken.clear()
    await until(lambda: rig.runtime.plane.tree.sequences_used == 0)
    await rig.quiet()


# -- pools that come back ---------------------------------------------------------------------------------


async def test_an_evicted_pool_comes_back_for_its_request(rig):
    """It is computed first, once for all who want it; a stream is kept alive meanwhile."""
    pool_id = await pool_for(rig, "/completion")
    await rig.ask(f"/polykv/pools/{pool_id}/evict", {})
    rig.engine.pool_gate.clear()
    tasks = [rig.start("/completion", text(pool_id=pool_id, session_id=name)) for name in "ab"]
    await until(lambda: rig.pooling.materializer.waiting == 2)
    rig.engine.pool_gate.set()
    assert [(await task).json["opencoti"]["n_pool_shared"] for task in tasks] == [60, 60]
    assert len(rig.engine.pools) == 1
    await rig.quiet()


async def test_a_pool_that_does_not_come_back_is_unknown(rig):
    """The request runs all the same; the pool stays evicted."""
    pool_id = await pool_for(rig, "/completion")
    await rig.ask(f"/polykv/pools/{pool_id}/evict", {})
    rig.engine.broken["/polykv/engine/pools/0"] = (503, b"{}")
    answer = await rig.ask("/completion", text(pool_id=pool_id))
    assert (answer.status, answer.json["opencoti"]["pool_unknown"]) == (200, True)
    assert (await rig.ask(f"/polykv/pools/{pool_id}")).json["residency"] == "evicted"
    await rig.quiet()


# -- media ---------------------------------------------------------------------------------------------------

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def sees(rig, picture):
    """The engine's prompts have a picture at that position, which pool tokens have not."""
    tokens_of = rig.engine.tokens_of
    rig.engine.tokens_of = lambda text: [
        -1 if at == picture else one for at, one in enumerate(tokens_of(text))
    ]


@pytest.mark.parametrize("picture", [0, 30])
async def test_only_text_before_a_picture_is_shared(rig, picture):
    """POOL-19: as far as the first one; a prompt that begins with it says why it shares nothing."""
    pool_id = await pool_for(rig, CHAT)
    sees(rig, picture)
    block = (await rig.ask(CHAT, chat("hi", pool_id=pool_id))).json["opencoti"]
    assert block["pool_match"] == picture
    assert block.get("unpooled_reason") == (None if picture else "media")
    planned = spy(rig).header("x-polykv-attach")
    assert (planned is None) == (picture == 0)


async def test_a_picture_that_nobody_can_count_is_the_reason(rig):
    """POOL-19: an engine without a projector refuses to count it, and then to answer, in its own words."""
    pool_id = await pool_for(rig, CHAT)
    rig.engine.broken[f"{CHAT}/input_tokens"] = (500, b'{"error": {"message": "no image input"}}')
    body = chat("hi", pool_id=pool_id)
    body["messages"][-1]["content"] = [PICTURE]
    assert (await rig.ask(CHAT, body)).json["opencoti"]["unpooled_reason"] == "media"
    body["messages"][-1]["content"] = "hi"
    assert (await rig.ask(CHAT, body)).json["opencoti"]["unpooled_reason"] == "not_tokenizable"


async def test_two_conversations_share_the_text_before_their_pictures(proxies):
    """POOL-19: the pool that comes by itself ends there, though both prompts have the same beyond it."""
    rig = await proxies(pools={"auto_min_tokens": 64, "auto_gain_tokens": 16})
    sees(rig, 100)
    await rig.ask(CHAT, chat("one " * 40))
    await rig.ask(CHAT, chat("two " * 40))
    await rig.quiet()
    assert [pool.prefix_len for pool in rig.runtime.plane.tree] == [100]


async def test_pools_of_messages_and_sessions_end_before_a_picture(rig):
    """POOL-19: and where nothing stands before it, there is none."""
    sees(rig, 100)
    assert (await rig.pool())["prefix_len"] == 100
    await rig.ask(CHAT, chat("hi", session_id="me"))
    made = await rig.ask("/polykv/pools", {"from_session": "me"})
    assert made.json["prefix_len"] == 100
    await rig.ask(CHAT, chat("hi", session_id="you", opencoti={"auto_match": False}))
    slot = rig.runtime.plane.resident_slot("you", None)
    slot.tokens = as_tokens([-1, 1])
    refused = await rig.ask("/polykv/pools", {"from_session": "you"})
    assert (refused.status, refused.error["param"]) == (400, "from_session")


@pytest.mark.parametrize("sees_them", [True, False])
async def test_media_of_a_later_turn_are_counted(rig, sees_them):
    """POOL-19: text that goes on in its slot is not asked about, nor an engine that takes no media."""
    rig.down()
    rig.engine.props["modalities"] = {"vision": sees_them}
    await rig.up()
    await rig.ask(CHAT, chat("one", session_id="me"))
    counted = len(rig.engine.of(f"{CHAT}/input_tokens"))
    await rig.ask(CHAT, chat("one", "two", session_id="me"))
    assert len(rig.engine.of(f"{CHAT}/input_tokens")) == counted
    body = chat("one", "two", "three", "", session_id="me")
    body["messages"][-1]["content"] = [PICTURE]
    sees(rig, 70)
    await rig.ask(CHAT, body)
    assert len(rig.engine.of(f"{CHAT}/input_tokens")) == counted + sees_them
    if sees_them:
        made = await rig.ask("/polykv/pools", {"from_session": "me"})
        assert made.json["prefix_len"] == 70


# -- what a refusal leaves -----------------------------------------------------------------------------------


async def test_a_prompt_beyond_the_window_is_not_attached(rig):
    """CTX-5: the engine attaches before it refuses, and the slot's conversation would be gone for nothing."""
    made = await rig.pool()
    body = chat("x" * 2000, pool_id=made["pool_id"])
    await rig.ask(CHAT, body)
    assert spy(rig).header("x-polykv-attach") is None
    await rig.ask(CHAT, chat("x", pool_id=made["pool_id"]))
    assert spy(rig).header("x-polykv-attach") is not None
