"""Requests are what the routes want."""

import json

import pytest

from polykv_proxy.client import calls

SYSTEM = {"role": "system", "content": "é"}


def test_a_pool_is_its_content_and_what_else_was_given():
    """Nothing that was left out is sent; the key travels as a header."""
    call = calls.create_pool(messages=[SYSTEM], tools=[], pin=True, label=None, idempotency_key="k")
    assert (call.method, call.path) == ("POST", "/polykv/pools")
    assert json.loads(call.content) == {"messages": [SYSTEM], "pin": True}
    assert call.all_headers == {"Content-Type": "application/json", "Idempotency-Key": "k"}
    assert call.idempotent


def test_a_fork_names_its_parent():
    """Ids are quoted; the branch position may be 0."""
    call = calls.fork_pool("a/b", tokens=range(1, 3), branch_pos=2, ttl_s=5.0)
    assert call.path == "/polykv/pools/a%2Fb/fork"
    assert json.loads(call.content) == {"tokens": [1, 2], "branch_pos": 2, "ttl_s": 5.0}


def test_what_makes_no_sense_is_the_servers_to_refuse():
    """A zero is said, not left out."""
    call = calls.fork_pool("p", tokens=[1], branch_pos=0, n_tokens=0, pin=False)
    assert call.body == {"tokens": [1], "branch_pos": 0, "n_tokens": 0}


def test_a_post_without_a_body_declares_json_all_the_same():
    """The proxy takes no other state-changing request."""
    call = calls.pin_pool("p", pinned=False)
    assert (call.path, call.content) == ("/polykv/pools/p/unpin", b"")
    assert call.all_headers == {"Content-Type": "application/json"}
    assert call.read({"pinned": False}) is False


def test_a_get_has_neither_body_nor_content_type():
    """Only what is asked for."""
    call = calls.capacity("p", expected_tokens=7)
    assert (call.path, call.params) == ("/polykv/pools/p/capacity", {"expected_tokens": "7"})
    assert (call.content, call.all_headers) == (None, {})
    assert calls.capacity().path == "/polykv/capacity"


def test_names_of_sessions_are_quoted():
    """A second conversation under one name has a # in it."""
    call = calls.migrate_session("A#2", "p")
    assert call.path == "/polykv/sessions/A%232/migrate"
    assert json.loads(call.content) == {"pool_id": "p"}


def test_an_administrator_says_whose_session_is_meant():
    """With the scope that listings show; without, nothing is said."""
    for make in (calls.close_session, lambda name, **more: calls.migrate_session(name, "p", **more)):
        assert make("A").params == {}
        assert make("A", scope="").params == {"scope": ""}
        assert make("A", scope="ab").params == {"scope": "ab"}


def test_a_reservation_always_has_a_key():
    """So that a repeated request does not reserve twice."""
    call = calls.reserve("p", sessions=2, ttl_s=9.0, idempotency_key="k")
    assert call.headers == {"Idempotency-Key": "k"}
    assert json.loads(call.content) == {"sessions": 2, "ttl_s": 9.0}


@pytest.mark.parametrize(
    ("call", "method", "path"),
    [
        (calls.list_pools(), "GET", "/polykv/pools"),
        (calls.show_pool("p"), "GET", "/polykv/pools/p"),
        (calls.release_pool("p", recursive=True), "DELETE", "/polykv/pools/p"),
        (calls.evict_pool("p"), "POST", "/polykv/pools/p/evict"),
        (calls.evict_pool("p", subtree=True), "POST", "/polykv/pools/p/flush"),
        (calls.set_admission("p", {"mode": "advisory"}), "POST", "/polykv/pools/p/admission"),
        (calls.list_sessions(), "GET", "/polykv/sessions"),
        (calls.rates(), "GET", "/polykv/tps"),
        (calls.props(), "GET", "/props"),
        (calls.tokenize(prompt="x"), "POST", "/polykv/tokenize"),
        (calls.count_tokens({}), "POST", "/v1/chat/completions/input_tokens"),
    ],
)
def test_routes_that_may_be_asked_twice(call, method, path):
    """Reading, and what is named by its content."""
    assert (call.method, call.path, call.idempotent) == (method, path, True)


@pytest.mark.parametrize("call", [calls.chat({"messages": []}), calls.close_session("a")])
def test_routes_that_may_not(call):
    """A chat begins to decode; a session that is closed is gone."""
    assert not call.idempotent
