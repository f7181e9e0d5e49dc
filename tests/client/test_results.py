"""Documents become values."""

from polykv_proxy.client import results


def test_what_is_not_known_here_is_left_out():
    """A newer proxy may say more."""
    pool = results.Pool.read({"pool_id": "p", "prefix_len": 9, "created": False, "colour": "red"})
    assert (pool.pool_id, pool.prefix_len, pool.created, pool.parent) == ("p", 9, False, None)


def test_a_pool_has_its_riders_and_its_subtree():
    """Nested documents are values too."""
    below = {"pool_id": "c", "prefix_len": 5}
    rider = {"session_id": "s", "slot": 1, "suffix_n_tokens": 3}
    status = results.PoolStatus.read(
        {"pool_id": "p", "prefix_len": 3, "children": ["c"], "sessions": [rider], "subtree": [below]}
    )
    assert status.children == ("c",)
    assert status.sessions == (results.Rider(session_id="s", slot=1, suffix_n_tokens=3),)
    assert status.subtree[0].prefix_len == 5


def test_a_listing_keeps_the_whole_document():
    """What has no value of its own is there all the same."""
    document = {"pools": [{"pool_id": "p", "prefix_len": 3}], "kv_cells_used": 3, "draining": []}
    listing = results.PoolListing.read(document)
    assert ([pool.pool_id for pool in listing.pools], listing.kv_cells_used) == (["p"], 3)
    assert listing.document is document


def test_room_for_several():
    """None limits nobody; a refusal refuses all."""
    assert results.Capacity(can_admit=True).has_room_for(100)
    assert results.Capacity(can_admit=True, headroom_sessions=2).has_room_for(2)
    assert not results.Capacity(can_admit=True, headroom_sessions=2).has_room_for(3)
    assert not results.Capacity(can_admit=False, headroom_sessions=9).has_room_for(1)


def test_a_wait_for_a_slot_is_no_refusal():
    """The reason why nobody comes in is only that."""
    assert results.Capacity(can_admit=True, reason="no slot free").why_not is None
    assert results.Capacity(can_admit=False, reason="settling").why_not == "settling"


def test_lists_become_tuples():
    """Frozen all the way."""
    assert results.Released.read({"pool_id": "p", "released": ["p"]}).released == ("p",)
    assert results.Released.read({"pool_id": "p", "already_released": True}).released == ()
    assert results.Evicted.read({"pool_id": "p", "evicted": ["p"]}).evicted == ("p",)
    assert results.Reservation.read({"pool_id": "p", "leases": ["a"], "expires_in_s": 1.0}).leases == ("a",)
    assert results.Tokens.read({"tokens": [1, 2], "n_tokens": 2}).tokens == (1, 2)


def test_rates_are_found_by_session():
    """None for one that is not there."""
    rates = results.Rates.read({"ts": 1.0, "sessions": [{"session_id": "a", "tps_ewma": 9.5}]})
    assert rates.of("a").tps_ewma == 9.5
    assert rates.of("b") is None
    two = [{"session_id": "a", "scope": scope, "tps_ewma": tps} for scope, tps in (("x", 1.0), ("", 2.0))]
    rates = results.Rates.read({"ts": 1.0, "sessions": two})
    assert [rates.of("a", scope).tps_ewma for scope in ("x", "", None)] == [1.0, 2.0, 1.0]
    assert rates.of("a", "y") is None


def test_a_chat_is_read_with_and_without_the_proxy():
    """Usage and our block may be missing."""
    plain = results.Chat.read({"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]})
    assert (plain.text, plain.finish_reason, plain.cached_tokens, plain.opencoti) == ("hi", "stop", None, {})
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 7}}
    full = results.Chat.read({"choices": [], "usage": usage, "opencoti": {"pool_id": "p"}})
    assert (full.text, full.prompt_tokens, full.completion_tokens, full.cached_tokens) == ("", 9, 1, 7)
    assert full.opencoti == {"pool_id": "p"}
