"""Claims about ``api.control``: the ``/polykv`` routes."""

import asyncio

import pytest

from api.rig import CHAT, SYSTEM, chat, until

POOL = {"messages": [{"role": "system", "content": SYSTEM}]}
TOKENS = {"tokens": list(range(1, 41))}


# -- creating ---------------------------------------------------------------------------------------------


async def test_a_pool_is_created_once(rig):
    """201, then 200 with the same id and nothing computed."""
    first = await rig.ask("/polykv/pools", POOL | {"label": "tools"})
    again = await rig.ask("/polykv/pools", POOL | {"pin": True})
    assert (first.status, again.status) == (201, 200)
    assert first.json["pool_id"] == again.json["pool_id"]
    assert (first.json["parent"], first.json["branch_pos"], first.json["created"]) == (None, 0, True)
    assert first.json["prompt_tokens_computed"] == first.json["prefix_len"]
    assert (again.json["created"], again.json["prompt_tokens_computed"], again.json["pinned"]) == (
        False,
        0,
        True,
    )
    assert again.json["label"] == "tools"
    assert len(rig.engine.pools) == 1


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


async def test_a_pool_cut_to_less_than_a_chat_shares_warns(rig):
    """``shared_probe_tokens`` is what chats really have of the pool."""
    made = await rig.pool(POOL | {"n_tokens": 5})
    assert made["shared_probe_tokens"] == 5
    assert "warning" not in made


async def test_running_out_of_sequence_ids_names_what_could_go(rig):
    """409 with the counts; nothing is evicted."""
    made = [await rig.pool({"tokens": [number] * 40}) for number in (1, 2)]
    answer = await rig.ask("/polykv/pools", {"tokens": [3] * 40})
    assert (answer.status, answer.error["code"]) == (409, "pool_capacity_exhausted")
    assert answer.error["releasable"] == [each["pool_id"] for each in made]


async def test_what_the_engine_refuses_is_passed_on(rig):
    """Its words, and no trace of the pool; the slot is free."""
    rig.engine.broken["/polykv/engine/pools/0"] = (400, b'{"error":{"message":"no such token"}}')
    answer = await rig.ask("/polykv/pools", TOKENS)
    assert (answer.status, answer.error["message"]) == (400, "no such token")
    rig.engine.broken["/polykv/engine/pools/0"] = (503, b'{"error":{"message":"no cells"}}')
    answer = await rig.ask("/polykv/pools", TOKENS)
    assert (answer.status, answer.error["message"]) == (503, "no cells")
    assert "Retry-After" in answer.headers
    assert len(rig.runtime.plane.tree) == 0
    await rig.quiet()


async def test_those_who_ask_for_the_same_pool_share_its_computation(rig):
    """One prefill; one of them created it. It goes on while one of them is left."""
    rig.engine.pool_gate.clear()
    tasks = [rig.start("/polykv/pools", POOL) for _ in range(3)]
    await until(lambda: rig.engine.running == 1)
    await until(lambda: sum(job.waiters for job in rig.pooling._jobs.values()) == 3)
    tasks.pop(0).cancel()
    await until(lambda: sum(job.waiters for job in rig.pooling._jobs.values()) == 2)
    rig.engine.pool_gate.set()
    answers = await asyncio.gather(*tasks)
    assert {answer.json["pool_id"] for answer in answers} == {next(iter(rig.runtime.plane.tree)).pool_id}
    assert rig.engine._next_uid == 3  # the self-test's and this one
    await rig.quiet()


async def test_a_pool_that_nobody_wants_any_more_is_given_up(rig):
    """Its computation stops, and slot and sequence id come back."""
    rig.engine.pool_gate.clear()
    task = rig.start("/polykv/pools", POOL)
    await until(lambda: rig.engine.running == 1)
    task.cancel()
    await rig.quiet()
    await until(lambda: rig.runtime.plane.tree.sequences_used == 0)
    assert len(rig.runtime.plane.tree) == 0
    rig.engine.pool_gate.set()
    assert (await rig.ask("/polykv/pools", POOL)).status == 201


# -- looking ----------------------------------------------------------------------------------------------


async def test_the_list_accounts_for_every_cell(rig):
    """Own, private suffixes, unpooled and draining add up to the used cells."""
    made = await rig.pool()
    gone = await rig.pool({"tokens": rig.engine.tokens_of("hello " * 10)})
    await rig.ask(CHAT, chat("hi", pool_id=made["pool_id"], session_id="me"))
    await rig.ask("/completion", {"prompt": "hello " * 20, "pool_id": gone["pool_id"]})
    released = (await rig.ask(f"/polykv/pools/{gone['pool_id']}", method="DELETE")).json
    assert (released["cells_freed"], released["cells_draining"], released["holders"]) == (0, 60, 1)
    listing = (await rig.ask("/polykv/pools")).json
    (pool,) = listing["pools"]
    (session,) = pool["sessions"]
    assert pool["own_kv_bytes"] == pool["subtree_kv_bytes"] == 10 * made["prefix_len"]
    assert (session["session_id"], session["state"], session["tps_ewma"]) == ("me", "idle", None)
    assert session["marginal_kv_bytes"] == 10 * session["suffix_n_tokens"]
    assert [rest["cells"] for rest in listing["draining"]] == [60]
    assert listing["unattributed_cells"] == 0
    suffixes = session["suffix_n_tokens"] + 60
    assert made["prefix_len"] + suffixes + 60 == listing["kv_cells_used"]
    assert (listing["pool_seq_ids_used"], listing["seq_ids_used"], listing["seq_ids_max"]) == (1, 3, 4)


async def test_one_pool_is_shown_with_what_is_below(rig):
    """404 for an id that was never seen."""
    made = await rig.pool()
    shown = (await rig.ask(f"/polykv/pools/{made['pool_id']}")).json
    assert (shown["pool_id"], shown["subtree"], shown["residency"]) == (made["pool_id"], [], "resident")
    missing = await rig.ask("/polykv/pools/nonsense")
    assert (missing.status, missing.error["code"]) == (404, "pool_not_found")


async def test_sessions_are_listed(rig):
    """The last used first, with what they use."""
    await rig.ask(CHAT, chat("a", session_id="one"))
    await rig.ask(CHAT, chat("b", session_id="two"))
    listed = (await rig.ask("/polykv/sessions")).json["sessions"]
    assert [session["session_id"] for session in listed] == ["two", "one"]
    assert listed[0]["ttft_ms"] > 0
    assert (listed[0]["state"], listed[0]["resident"], listed[0]["turns"]) == ("idle", True, 1)


async def test_tokens_can_be_asked_for(rig):
    """The same ids, and the same pool id, as creating the pool would give; nothing is created."""
    tokens = (await rig.ask("/polykv/tokenize", POOL)).json
    assert len(rig.runtime.plane.tree) == 0
    made = await rig.pool()
    assert (tokens["pool_id"], tokens["n_tokens"]) == (made["pool_id"], made["prefix_len"])
    assert len(tokens["tokens"]) == tokens["n_tokens"] < tokens["probe_tokens"]
    assert (await rig.ask("/polykv/tokenize", TOKENS)).json["probe_tokens"] is None


# -- pins and release -------------------------------------------------------------------------------------


async def test_pins_are_idempotent(rig):
    """Both verbs answer with the state they leave."""
    made = await rig.pool()
    for verb, pinned in (("pin", True), ("pin", True), ("unpin", False), ("unpin", False)):
        answer = await rig.ask(f"/polykv/pools/{made['pool_id']}/{verb}", {})
        assert answer.json == {"pool_id": made["pool_id"], "pinned": pinned}
        assert rig.runtime.plane.find_pool(made["pool_id"], "").pinned is pinned


async def test_release_is_idempotent(rig):
    """Freed cells first, then ``already_released``; an id never seen is 404."""
    made = await rig.pool()
    path = f"/polykv/pools/{made['pool_id']}"
    first = await rig.ask(path, method="DELETE")
    assert (first.status, first.json["cells_freed"]) == (200, made["prefix_len"])
    assert first.json["released"] == [made["pool_id"]]
    again = await rig.ask(f"{path}/release", {})
    assert (again.status, again.json["already_released"]) == (200, True)
    assert (await rig.ask("/polykv/pools/nonsense", method="DELETE")).status == 404
    assert not rig.engine.pools
    assert rig.runtime.plane.tree.sequences_used == 0


async def test_a_pool_being_computed_is_not_released(rig):
    """409; it is computed to its end."""
    rig.engine.pool_gate.clear()
    task = rig.start("/polykv/pools", TOKENS)
    await until(lambda: rig.engine.running == 1)
    pool_id = next(iter(rig.runtime.plane.tree)).pool_id
    answer = await rig.ask(f"/polykv/pools/{pool_id}", method="DELETE")
    assert (answer.status, answer.error["code"]) == (409, "pool_materializing")
    rig.engine.pool_gate.set()
    assert (await task).status == 201


async def test_a_lost_pool_lives_again_under_its_id(rig):
    """After a restart it is listed as lost, and creating the content brings the id back."""
    made = await rig.pool()
    rig.down()
    rig.engine.restart()
    await rig.up()
    assert (await rig.ask("/polykv/pools")).json["pools"][0]["residency"] == "lost"
    again = await rig.ask("/polykv/pools", POOL)
    assert (again.status, again.json["pool_id"]) == (201, made["pool_id"])


# -- who --------------------------------------------------------------------------------------------------


async def test_keys_do_not_see_one_another(rig):
    """Pools and sessions of another key do not exist, nor can they be touched; not even their names show."""
    made = await rig.pool(None, Authorization="Bearer mine")
    mine = {"Authorization": "Bearer mine"}
    await rig.ask(CHAT, chat("hi", pool_id=made["pool_id"], session_id="secret"), **mine)
    await rig.ask("/completion", {"prompt": "x", "session_id": "hidden"}, **mine)
    path = f"/polykv/pools/{made['pool_id']}"
    theirs = {"Authorization": "Bearer theirs"}
    listing = await rig.ask("/polykv/pools", **theirs)
    assert listing.json["pools"] == []
    assert (await rig.ask("/polykv/sessions", **theirs)).json["sessions"] == []
    assert (await rig.ask(path, **theirs)).status == 404
    assert (await rig.ask(path, method="DELETE", **theirs)).status == 404
    assert (await rig.ask(f"{path}/pin", {}, **theirs)).status == 404
    await rig.ask(path, method="DELETE", **mine)
    listing = await rig.ask("/polykv/pools", **theirs)
    assert made["pool_id"].encode() not in listing.body
    assert b"secret" not in listing.body
    assert b"hidden" not in listing.body
    assert [rest["pool_id"] for rest in (await rig.ask("/polykv/pools", **mine)).json["draining"]] == [
        made["pool_id"]
    ]


async def test_sharing_across_keys_is_a_choice(proxies):
    """Then everybody sees and uses everything."""
    rig = await proxies(share_across_keys=True)
    made = await rig.pool(None, Authorization="Bearer mine")
    answer = await rig.ask(CHAT, chat("hi", pool_id=made["pool_id"]), X_Api_Key="theirs")
    assert answer.json["opencoti"]["n_pool_shared"] == made["prefix_len"]
    assert len((await rig.ask("/polykv/pools")).json["pools"]) == 1


async def test_an_administrator_sees_everything_and_owns_what_the_client_key_says(proxies):
    """The admin key opens the door; whose pool it is, the client's key says."""
    rig = await proxies(admin="k")
    admin = {"Authorization": "Bearer k"}
    assert (await rig.ask("/polykv/pools")).status == 401
    assert (await rig.ask("/polykv/pools", POOL)).status == 401
    made = await rig.pool(None, **admin, X_Api_Key="client")
    assert len((await rig.ask("/polykv/pools", **admin)).json["pools"]) == 1
    answer = await rig.ask(CHAT, chat("hi", pool_id=made["pool_id"]), Authorization="Bearer client")
    assert answer.json["opencoti"]["n_pool_shared"] == made["prefix_len"]
    other = await rig.ask("/polykv/pools", X_Polykv_Admin_Key="k", Authorization="Bearer somebody")
    assert len(other.json["pools"]) == 1


# -- errors -----------------------------------------------------------------------------------------------


async def test_pages_of_others_drive_nothing(rig):
    """A foreign Host or Origin, a form's content type: refused in our envelope before anything is read."""
    assert (await rig.ask("/polykv/pools", Host="evil.example")).error["code"] == "foreign_host"
    assert (await rig.ask("/polykv/pools", Host="[::1")).status == 403
    assert (await rig.ask("/polykv/pools", POOL, Origin="http://evil.example")).status == 403
    assert (await rig.ask("/polykv/pools", b"{}", Content_Type="text/plain")).status == 415
    assert len(rig.runtime.plane.tree) == 0


async def test_unknown_routes_and_methods_have_the_envelope(rig):
    """404, 405 and 413 are errors like ours."""
    assert (await rig.ask("/polykv/nonsense")).error["code"] == "route_not_found"
    assert (await rig.ask("/polykv/sessions", {})).error["code"] == "method_not_allowed"
    large = await rig.ask("/polykv/pools", {"prompt": "x" * (1 << 20)})
    assert (large.status, large.error["code"]) == (413, "body_too_large")


async def test_pools_that_are_off_say_so(proxies):
    """501 with the reason on a stock engine; what needs no pools works."""
    rig = await proxies(max_pools=0)
    for path, body in (("/polykv/pools", None), ("/polykv/pools", POOL), ("/polykv/tokenize", POOL)):
        answer = await rig.ask(path, body)
        assert (answer.status, answer.error["code"]) == (501, "polykv_disabled")
    assert (await rig.ask("/polykv/pools/x", method="DELETE")).status == 501
    assert (await rig.ask("/polykv/sessions")).status == 200
