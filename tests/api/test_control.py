"""Claims about ``api.control``: the ``/polykv`` routes."""

import asyncio

import pytest

from api.rig import CHAT, POOL, TOKENS, chat, until
from polykv_proxy.api.identity import scope_of_keys
from polykv_proxy.core.types import PoolOrigin, PoolState

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
    await until(lambda: rig.pooling.materializer.waiting == 3)
    tasks.pop(0).cancel()
    await until(lambda: rig.pooling.materializer.waiting == 2)
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


async def test_the_list_accounts_for_every_cell(proxies):
    """Own, private suffixes, unpooled and draining add up to the used cells."""
    rig = await proxies(pools={"grace_s": 0.0})
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
    await rig.ask(CHAT, chat("b", session_id="two", stream=True))
    listed = (await rig.ask("/polykv/sessions")).json["sessions"]
    assert [session["session_id"] for session in listed] == ["two", "one"]
    assert listed[0]["ttft_ms"] > 0
    assert listed[1]["ttft_ms"] is None, "an answer in one piece has no first token for its client"
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
        assert rig.runtime.plane.pools.find(made["pool_id"], "").pinned is pinned


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


# -- forking ----------------------------------------------------------------------------------------------


def ids(*runs):
    """Token ids: so many of each."""
    return [number for number, count in runs for _ in range(count)]


ROOT = ids((1, 40))


async def fork(rig, parent, **body):
    """Fork a pool."""
    return await rig.ask(f"/polykv/pools/{parent['pool_id']}/fork", body)


async def test_a_fork_extends_or_branches(proxies):
    """201 with parent and D, 200 for the same again; only what is new is computed and stored."""
    rig = await proxies(max_pools=4)
    root = await rig.pool({"tokens": ROOT})
    longer = await fork(rig, root, tokens=ROOT + ids((2, 5)), label="more")
    branch = await fork(rig, root, tokens=ids((1, 30), (3, 6)))
    early = await fork(rig, root, tokens=ROOT + ids((4, 2)), branch_pos=10, pin=True)
    for answer, branch_pos, computed in ((longer, 40, 5), (branch, 30, 6), (early, 10, 32)):
        assert (answer.status, answer.json["parent"]) == (201, root["pool_id"])
        assert (answer.json["branch_pos"], answer.json["prompt_tokens_computed"]) == (branch_pos, computed)
    assert (longer.json["label"], early.json["pinned"]) == ("more", True)
    again = await fork(rig, root, tokens=ROOT + ids((2, 5)))
    assert (again.status, again.json["pool_id"]) == (200, longer.json["pool_id"])
    assert rig.engine.used == 40 + 5 + 6 + 32
    listed = (await rig.ask("/polykv/pools")).json
    assert (listed["unattributed_cells"], listed["tree_depth"]) == (0, 2)
    shown = (await rig.ask(f"/polykv/pools/{root['pool_id']}")).json
    assert {each["pool_id"] for each in shown["subtree"]} == set(shown["children"])
    assert shown["subtree_kv_bytes"] == 10 * rig.engine.used


async def test_a_fork_by_messages_is_the_prefix_that_chats_share(rig):
    """As for a pool of its own, but below the parent."""
    root = await rig.pool()
    messages = [*POOL["messages"], {"role": "user", "content": "q"}]
    made = (await fork(rig, root, messages=messages)).json
    assert (made["parent"], made["branch_pos"]) == (root["pool_id"], root["prefix_len"])
    assert made["shared_probe_tokens"] == made["prefix_len"]


@pytest.mark.parametrize(
    ("body", "mismatch", "tokens", "texts", "suffix_only"),
    [
        ({"tokens": ids((65, 20), (66, 20)), "branch_pos": 30}, 20, (65, 66), ("A", "B"), False),
        ({"tokens": ids((67, 30))}, 0, (65, 67), ("A", "C"), True),
    ],
)
async def test_a_broken_contract_is_spelled_out(rig, body, mismatch, tokens, texts, suffix_only):
    """409 with the first token that differs, both texts, and what to do instead; nothing is entered."""
    root = await rig.pool({"tokens": ids((65, 40))})
    answer = await fork(rig, root, **body)
    error = answer.error
    assert (answer.status, error["code"], error["first_mismatch"]) == (409, "prefix_mismatch", mismatch)
    assert (error["expected_token"], error["got_token"]) == tokens
    assert (error["expected_text"], error["got_text"]) == texts
    assert (error["suffix_only"], error["parent_len"]) == (suffix_only, 40)
    assert set(error["next_moves"]) == {"re_root", "full_prefill"}
    assert len(rig.runtime.plane.tree) == 1


@pytest.mark.parametrize("branch_pos", [0, -1, 31, 41])
async def test_a_branch_beyond_either_end_is_refused(rig, branch_pos):
    """400 with the field: D is within the parent and within the child."""
    root = await rig.pool({"tokens": ROOT})
    answer = await fork(rig, root, tokens=ROOT[:30], branch_pos=branch_pos)
    assert (answer.status, answer.error["param"], answer.error["parent_len"]) == (400, "branch_pos", 40)


async def test_a_fork_needs_a_parent_that_can_be_had(rig):
    """404 for none; an evicted one comes back; a lost one is a conflict."""
    assert (await fork(rig, {"pool_id": "nonsense"}, tokens=ROOT)).status == 404
    root = await rig.pool({"tokens": ROOT})
    await rig.ask(f"/polykv/pools/{root['pool_id']}/evict", {})
    made = await fork(rig, root, tokens=ROOT + ids((2, 5)))
    assert (made.status, made.json["parent"], made.json["branch_pos"]) == (201, root["pool_id"], 40)
    rig.down()
    rig.engine.restart()
    await rig.up()
    lost = await fork(rig, root, tokens=ROOT + ids((3, 5)))
    assert (lost.status, lost.error["code"]) == (409, "pool_lost")


async def test_a_fork_says_why_its_parent_does_not_come_back(rig):
    """No sequence id for it: that error, with what to release, and not that the pool is lost."""
    root = await rig.pool({"tokens": ROOT})
    await rig.ask(f"/polykv/pools/{root['pool_id']}/evict", {})
    for n in range(2):
        await rig.pool({"tokens": ids((60 + n, 40))})
    answer = await fork(rig, root, tokens=ROOT + ids((2, 5)))
    assert (answer.status, len(answer.error["releasable"])) == (409, 2)
    assert answer.error["code"] != "pool_lost"


async def test_a_mismatch_is_told_also_where_a_token_has_no_text(rig):
    """One that the model does not have, say."""
    root = await rig.pool({"tokens": ROOT})
    rig.engine.broken["/detokenize"] = (500, b"?")
    error = (await fork(rig, root, tokens=[ROOT[0], 10**9], branch_pos=2)).error
    assert (error["code"], error["first_mismatch"], "got_text" in error) == ("prefix_mismatch", 1, False)


# -- from sessions ----------------------------------------------------------------------------------------


async def test_a_session_becomes_a_pool_without_computing_anything(rig):
    """All of it or its first tokens; the same again is the same pool, and every cell has its owner."""
    await rig.ask("/completion", {"prompt": ids((1, 50)), "session_id": "me"})
    made = await rig.ask("/polykv/pools", {"from_session": "me", "label": "x", "pin": True})
    assert (made.status, made.json["prefix_len"], made.json["prompt_tokens_computed"]) == (201, 50, 0)
    assert (made.json["parent"], made.json["label"], made.json["pinned"]) == (None, "x", True)
    first = await rig.ask("/polykv/pools", {"from_session": "me", "n_tokens": 20})
    assert (first.json["prefix_len"], first.json["parent"]) == (20, made.json["pool_id"])
    await until(lambda: rig.runtime.plane.tree.sequences_used == 2)
    assert rig.engine.used == 50
    listed = (await rig.ask("/polykv/pools")).json
    assert listed["unattributed_cells"] == 0
    assert {pool["origin"] for pool in listed["pools"]} == {"snapshot"}


async def test_a_snapshot_of_what_is_a_pool_already_is_given_back(rig):
    """200 with that pool; its number comes back, and the slot's cells are still accounted for."""
    body = {"prompt": ids((1, 40), (2, 10)), "session_id": "me", "opencoti": {"auto_match": False}}
    root = await rig.pool({"tokens": ROOT})
    await rig.ask("/completion", body | {"pool_id": root["pool_id"]})
    made = await fork(rig, root, tokens=body["prompt"])
    await rig.ask(f"/polykv/pools/{made.json['pool_id']}/unpin", {})
    again = await fork(rig, root, from_session="me")
    assert rig.runtime.plane.tree.max_pools == 2
    assert (again.status, again.error["code"]) == (409, "pool_capacity_exhausted")  # not even for a moment


async def test_a_duplicate_snapshot_leaves_no_cell_unexplained(proxies):
    """Its slot shares with a pool that nobody has: a ghost, until the slot is used for something else."""
    rig = await proxies(max_pools=3)
    prompt = ids((1, 40), (2, 10))
    root = await rig.pool({"tokens": ROOT})
    await rig.ask("/completion", {"prompt": prompt, "pool_id": root["pool_id"], "session_id": "me"})
    made = (await fork(rig, root, tokens=prompt)).json
    again = await fork(rig, root, from_session="me")
    assert (again.status, again.json["pool_id"], again.json["created"]) == (200, made["pool_id"], False)
    await until(lambda: rig.runtime.plane.tree.sequences_used == 2)
    assert len(rig.engine.pools) == 2
    listed = (await rig.ask("/polykv/pools")).json
    assert listed["unattributed_cells"] == 0
    assert [rest["cells"] for rest in listed["draining"]] == [10]
    await rig.ask("/slots/0?action=erase", {})
    await rig.ask("/slots/1?action=erase", {})
    await rig.runtime.readings.take(max_age_s=0.0)
    listed = (await rig.ask("/polykv/pools")).json
    assert (listed["unattributed_cells"], listed["draining"]) == (0, [])


async def test_sessions_that_cannot_be_had(rig):
    """404 for none and for another key's; 409 once others took the slot; 400 with content beside it."""
    body = {"prompt": ids((1, 50)), "session_id": "me"}
    await rig.ask("/completion", body, Authorization="Bearer mine")
    theirs = await rig.ask("/polykv/pools", {"from_session": "me"}, Authorization="Bearer theirs")
    none = await rig.ask("/polykv/pools", {"from_session": "you"}, Authorization="Bearer mine")
    for answer in (theirs, none):
        assert (answer.status, answer.error["code"]) == (404, "session_not_found")
    both = await rig.ask("/polykv/pools", {"from_session": "me", "tokens": ROOT})
    assert (both.status, both.error["param"]) == (400, "from_session")
    for number in range(2):
        await rig.ask("/completion", {"prompt": "x", "session_id": f"s{number}"})
    taken = await rig.ask("/polykv/pools", {"from_session": "me"}, Authorization="Bearer mine")
    assert (taken.status, taken.error["code"]) == (409, "session_not_resident")
    assert len(rig.runtime.plane.tree) == rig.runtime.plane.tree.sequences_used == 0


async def test_a_fork_from_a_session_is_below_the_pool_it_rides_on(proxies):
    """And below the one that was named where that holds the same tokens; nothing in common is a 409."""
    rig = await proxies(max_pools=7)
    root = await rig.pool({"tokens": ROOT})
    child = (await fork(rig, root, tokens=ROOT + ids((2, 10)))).json
    other = await rig.pool({"tokens": ids((1, 20), (9, 20))})
    alien = await rig.pool({"tokens": ids((8, 40))})
    prompt = ROOT + ids((2, 10), (3, 10))
    await rig.ask("/completion", {"prompt": prompt, "pool_id": child["pool_id"], "session_id": "me"})
    # the session shares 50 tokens' cells with the child, and only 20 tokens agree with the other
    made = await fork(rig, other, from_session="me", n_tokens=55)
    assert (made.status, made.json["parent"], made.json["branch_pos"]) == (201, child["pool_id"], 50)
    named = await fork(rig, root, from_session="me")
    assert (named.status, named.json["prefix_len"]) == (201, 60)
    listed = (await rig.ask("/polykv/pools")).json
    assert listed["unattributed_cells"] == 0
    assert rig.engine.used == 40 + 10 + 40 + 40 + 10
    refused = await fork(rig, alien, from_session="me")
    assert (refused.status, refused.error["code"]) == (409, "prefix_mismatch")
    await until(lambda: rig.runtime.plane.tree.sequences_used == 6)
    assert (await rig.ask("/polykv/pools")).json["unattributed_cells"] == 0


async def test_a_fork_of_an_evicted_pool_from_a_session_brings_it_back(rig):
    """The child is below it, although the session still rides on what is left of it."""
    root = await rig.pool({"tokens": ROOT})
    body = {"prompt": ROOT + ids((2, 10)), "pool_id": root["pool_id"], "session_id": "me"}
    await rig.ask("/completion", body)
    await rig.ask(f"/polykv/pools/{root['pool_id']}/evict", {})
    made = await fork(rig, root, from_session="me")
    assert (made.status, made.json["parent"], made.json["branch_pos"]) == (201, root["pool_id"], 40)
    assert (await rig.ask("/polykv/pools")).json["unattributed_cells"] == 0


# -- evict, flush, and room -------------------------------------------------------------------------------


async def test_an_eviction_keeps_id_and_tokens(rig):
    """The cells come back at once, or when their holder leaves; the next attach computes it again."""
    root = await rig.pool({"tokens": ROOT})
    path = f"/polykv/pools/{root['pool_id']}"
    gone = (await rig.ask(f"{path}/evict", {})).json
    assert (gone["evicted"], gone["cells_freed"], gone["cells_draining"]) == ([root["pool_id"]], 40, 0)
    assert (await rig.ask(f"{path}/evict", {})).json["evicted"] == []
    assert (await rig.ask(path)).json["residency"] == "evicted"
    assert rig.runtime.plane.tree.sequences_used == 0
    body = {"prompt": ROOT + ids((2, 10)), "pool_id": root["pool_id"]}
    answer = await rig.ask("/completion", body)
    assert answer.json["opencoti"]["n_pool_shared"] == 40
    held = (await rig.ask(f"{path}/evict", {})).json
    assert (held["cells_freed"], held["cells_draining"], held["holders"]) == (0, 40, 1)
    again = await rig.ask("/polykv/pools", {"tokens": ROOT})
    assert (again.status, again.json["pool_id"]) == (201, root["pool_id"])


async def test_what_stands_in_the_way_of_an_eviction(proxies):
    """409 with a code for each: a pin, a resident child, a computation."""
    rig = await proxies(max_pools=3)
    root = await rig.pool({"tokens": ROOT})
    path = f"/polykv/pools/{root['pool_id']}"
    child = (await fork(rig, root, tokens=ROOT + ids((2, 10)), pin=True)).json
    answer = await rig.ask(f"{path}/evict", {})
    assert (answer.status, answer.error["code"]) == (409, "pool_has_children")
    assert answer.error["children"] == [child["pool_id"]]
    answer = await rig.ask(f"{path}/flush", {})
    assert (answer.error["code"], answer.error["pinned"]) == ("pool_pinned", [child["pool_id"]])
    await rig.ask(f"/polykv/pools/{child['pool_id']}/unpin", {})
    rig.engine.pool_gate.clear()
    late = rig.start(f"{path}/fork", {"tokens": ROOT + ids((3, 10))})
    await until(lambda: rig.engine.running == 1)
    assert (await rig.ask(f"{path}/flush", {})).error["code"] == "pool_materializing"
    rig.engine.pool_gate.set()
    leaf = (await late).json
    gone = (await rig.ask(f"{path}/flush", {})).json
    assert set(gone["evicted"]) == {root["pool_id"], child["pool_id"], leaf["pool_id"]}
    assert gone["evicted"][-1] == root["pool_id"]
    assert rig.engine.used == 0


async def test_a_child_that_is_needed_brings_its_parents_back(proxies):
    """After a flush an attach to a grandchild computes the chain, each its own part."""
    rig = await proxies(max_pools=3)
    root = await rig.pool({"tokens": ROOT})
    child = (await fork(rig, root, tokens=ids((1, 30), (2, 10)))).json
    leaf = (await fork(rig, child, tokens=ids((1, 30), (2, 10), (3, 5)))).json
    await rig.ask(f"/polykv/pools/{root['pool_id']}/flush", {})
    body = {"prompt": ids((1, 30), (2, 10), (3, 5), (4, 5)), "pool_id": leaf["pool_id"]}
    answer = await rig.ask("/completion", body)
    assert answer.json["opencoti"]["n_pool_shared"] == 45
    shown = {pool["pool_id"]: pool for pool in (await rig.ask("/polykv/pools")).json["pools"]}
    assert {pool["residency"] for pool in shown.values()} == {"resident"}
    assert (shown[leaf["pool_id"]]["parent"], shown[leaf["pool_id"]]["branch_pos"]) == (child["pool_id"], 40)
    assert (shown[child["pool_id"]]["parent"], shown[child["pool_id"]]["branch_pos"]) == (
        root["pool_id"],
        30,
    )
    assert rig.engine.used == 40 + 10 + 5 + 5


async def test_an_explicit_pool_makes_room_among_automatic_ones_only(proxies):
    """Idle and unpinned ones go, least valuable first; nothing that somebody asked for does."""
    rig = await proxies(pools={"grace_s": 0.0})
    made = [await rig.pool({"tokens": ids((number, 40))}) for number in (1, 2)]
    one, two = (rig.runtime.plane.pools.find(each["pool_id"], "") for each in made)
    three = {"tokens": ids((3, 40))}
    assert (await rig.ask("/polykv/pools", three)).status == 409  # both explicit
    one.origin = two.origin = PoolOrigin.AUTO
    two.pinned = True
    assert (await rig.ask("/polykv/pools", three)).status == 201
    assert rig.runtime.plane.pools.find(one.pool_id, "").state is PoolState.EVICTED
    assert two.resident
    assert (await rig.ask("/polykv/pools", {"tokens": ids((4, 40))})).status == 409
    # who asks for an automatic pool keeps it from going silently
    await rig.pool({"tokens": ids((2, 40))})
    two.pinned = False
    assert (await rig.ask("/polykv/pools", {"tokens": ids((4, 40))})).status == 409


async def test_a_full_house_names_no_pools_of_others(rig):
    """What could be released is what the caller can release."""
    await rig.pool({"tokens": ids((1, 40))}, Authorization="Bearer mine")
    theirs = await rig.pool({"tokens": ids((2, 40))}, Authorization="Bearer theirs")
    answer = await rig.ask("/polykv/pools", {"tokens": ids((3, 40))}, Authorization="Bearer theirs")
    assert (answer.status, answer.error["releasable"]) == (409, [theirs["pool_id"]])


async def test_a_release_of_a_tree_goes_leaves_first(proxies):
    """Refused with the children's ids, or recursive."""
    rig = await proxies(max_pools=3)
    root = await rig.pool({"tokens": ROOT})
    child = (await fork(rig, root, tokens=ROOT + ids((2, 10)))).json
    path = f"/polykv/pools/{root['pool_id']}"
    refused = await rig.ask(path, method="DELETE")
    assert (refused.status, refused.error["children"]) == (409, [child["pool_id"]])
    gone = (await rig.ask(f"{path}/release?recursive=1", {})).json
    assert (gone["released"], gone["cells_freed"]) == ([child["pool_id"], root["pool_id"]], 50)


@pytest.mark.parametrize("given", ["yes", "", "2", "True"])
async def test_a_flag_in_the_query_is_one_or_nought(rig, given):
    """Anything else is a mistake, and named; nothing was released."""
    root = await rig.pool({"tokens": ROOT})
    answer = await rig.ask(f"/polykv/pools/{root['pool_id']}?recursive={given}", method="DELETE")
    assert (answer.status, answer.error["param"]) == (400, "recursive")
    answer = await rig.ask(f"/polykv/pools/{root['pool_id']}?recursive=0", method="DELETE")
    assert answer.json["released"] == [root["pool_id"]]


@pytest.mark.parametrize("verb", ["pin", "unpin", "evict", "flush", "release"])
async def test_verbs_need_no_body_and_do_no_harm_twice(rig, verb):
    """The content type is what a form cannot send; the second answer frees nothing and holds nothing."""
    root = await rig.pool({"tokens": ROOT})
    path = f"/polykv/pools/{root['pool_id']}/{verb}"
    refused = await rig.ask(path, b"", Content_Type="application/x-www-form-urlencoded")
    assert refused.status == 415
    first, again = [await rig.ask(path, b"", Content_Type="application/json") for _ in range(2)]
    assert (first.status, again.status) == (200, 200)
    assert again.json.get("cells_freed", 0) == again.json.get("holders", 0) == 0


async def test_a_lifetime_is_given_and_shown(rig):
    """With the moment at which it ends, as long as nothing holds the pool."""
    made = await rig.pool({"tokens": ROOT, "ttl_s": 100.5})
    path = f"/polykv/pools/{made['pool_id']}"
    shown = (await rig.ask(path)).json
    assert (shown["ttl_s"], shown["expires_ts"]) == (100.5, shown["last_access_ts"] + 100.5)
    await rig.ask(f"{path}/pin", {})
    assert (await rig.ask(path)).json["expires_ts"] is None
    for wrong in (0, -1, "x"):
        answer = await rig.ask("/polykv/pools", {"tokens": ROOT, "ttl_s": wrong})
        assert (answer.status, answer.error["param"]) == (400, "ttl_s")


async def test_what_hangs_on_a_pool_pins_it_and_all_above(proxies):
    """Shown apart from the pin that somebody asked for; gone with the last of them."""
    rig = await proxies(max_pools=3)
    root = await rig.pool({"tokens": ROOT})
    child = (await fork(rig, root, tokens=ROOT + ids((2, 10)))).json

    async def pins():
        listed = (await rig.ask("/polykv/pools")).json["pools"]
        assert not any(pool["pinned"] for pool in listed)
        return [pool["pinned_by_descendants"] for pool in listed]

    assert await pins() == [True, False]
    body = {"prompt": ROOT + ids((2, 10), (3, 3)), "pool_id": child["pool_id"], "session_id": "me"}
    assert (await rig.ask("/completion", body)).status == 200
    assert await pins() == [True, True]
    await rig.ask("/polykv/sessions/me/close", {})
    await rig.runtime.readings.take(max_age_s=0.0)
    assert await pins() == [True, False]
    await rig.ask(f"/polykv/pools/{child['pool_id']}", method="DELETE")
    assert await pins() == [False]


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


async def test_only_the_admin_key_sees_through_the_eyes_of_another(proxies):
    """``?scope=`` shows an administrator what one key sees, and nobody else more than its own."""
    rig, admin = await proxies(admin="k"), {"X_Polykv_Admin_Key": "k"}
    scopes = [scope_of_keys(key, None, shared=False) for key in ("one", "")]
    for key in ("one", ""):
        await rig.ask(CHAT, chat("hi"), X_Api_Key=key)
    assert len((await rig.ask("/polykv/sessions", **admin)).json["sessions"]) == 2
    for scope in scopes:
        found = (await rig.ask(f"/polykv/sessions?scope={scope}", **admin)).json
        assert [each["scope"] for each in found["sessions"]] == [scope]
        assert found["other_keys_sessions"] == 1
        made = await rig.ask(f"/polykv/pools?scope={scope}", POOL, **admin, X_Api_Key="two")
        (pool,) = (await rig.ask(f"/polykv/pools?scope={scope}", **admin)).json["pools"]
        assert (pool["pool_id"], pool["scope"]) == (made.json["pool_id"], scope)
    answer = await rig.ask("/polykv/sessions?scope=one", **admin)
    assert (answer.status, answer.error["param"]) == (400, "scope")


async def test_a_scope_is_no_key(rig):
    """Who knows another's sees nothing by it; its own changes nothing."""
    mine, other = (scope_of_keys(key, None, shared=False) for key in ("mine", "other"))
    await rig.ask(CHAT, chat("hi"), X_Api_Key="mine")
    found = await rig.ask(f"/polykv/sessions?scope={mine}", X_Api_Key="mine")
    assert [each["scope"] for each in found.json["sessions"]] == [mine]
    for scope, key in ((mine, "other"), (other, "mine"), ("", "mine")):
        answer = await rig.ask(f"/polykv/sessions?scope={scope}", X_Api_Key=key)
        assert (answer.status, answer.error["code"]) == (401, "admin_key_required")


# -- without pools ----------------------------------------------------------------------------------------


async def test_pools_that_are_off_say_so(proxies):
    """501 with the reason on a stock engine; what needs no pools works."""
    rig = await proxies(max_pools=0)
    for path, body in (("/polykv/pools", None), ("/polykv/pools", POOL), ("/polykv/tokenize", POOL)):
        answer = await rig.ask(path, body)
        assert (answer.status, answer.error["code"]) == (501, "polykv_disabled")
    assert (await rig.ask("/polykv/pools/x", method="DELETE")).status == 501
    assert (await rig.ask("/polykv/sessions")).status == 200
