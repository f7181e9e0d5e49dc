"""Answers become the right errors, with their figures."""

import json

import pytest

from polykv_proxy.client import errors
from polykv_proxy.client.errors import error_from_answer, error_from_event


def answer(status, headers=None, **error):
    """An error of the proxy."""
    return error_from_answer(status, headers or {}, json.dumps({"error": error}).encode())


@pytest.mark.parametrize(
    ("status", "members", "kind"),
    [
        (400, {"code": "invalid_request"}, errors.BadRequestError),
        (400, {"code": 400, "type": "exceed_context_size_error"}, errors.ContextOverflowError),
        (401, {"code": "admin_key_required"}, errors.AuthenticationError),
        (403, {"code": "foreign_host"}, errors.AuthenticationError),
        (404, {"code": "pool_not_found"}, errors.PoolNotFoundError),
        (404, {"code": "session_not_found"}, errors.NotFoundError),
        (409, {"code": "pool_lost"}, errors.PoolNotFoundError),
        (409, {"code": "prefix_mismatch"}, errors.PrefixMismatchError),
        (409, {"code": "pool_capacity_exhausted"}, errors.PoolCapacityError),
        (409, {"code": "session_running"}, errors.ConflictError),
        (413, {"code": "body_too_large"}, errors.BadRequestError),
        (429, {"code": "queue_full"}, errors.PoolSaturatedError),
        (500, {"code": "internal_error"}, errors.ServerError),
        (501, {"code": "polykv_disabled"}, errors.DisabledError),
        (502, {"code": "engine_gone"}, errors.UnavailableError),
        (503, {"code": "engine_loading"}, errors.UnavailableError),
    ],
)
def test_an_answer_is_one_kind_of_error(status, members, kind):
    """By its type or code, else by its status."""
    found = answer(status, message="why", **members)
    assert type(found) is kind
    assert (found.status, found.code) == (status, members["code"])
    assert "why" in found.message


def test_saturation_says_when_and_why():
    """Retry-After, the arm, and how many would have room."""
    found = answer(
        429,
        {"retry-after": "7", "x-should-retry": "false"},
        code="pool_saturated",
        arm="cells",
        reason="kv headroom exhausted",
        capacity={"headroom_sessions": 0},
    )
    assert isinstance(found, errors.PoolSaturatedError)
    assert (found.retry_after, found.should_retry) == (7.0, False)
    assert (found.arm, found.reason, found.headroom_sessions) == ("cells", "kv headroom exhausted", 0)


def test_an_overflow_has_figures_of_the_proxy_or_of_the_engine():
    """The proxy's come first; a plain engine's are read too."""
    ours = {"required_tokens": 9000, "cached_tokens": 5, "ctx_size": 8192, "ctx_kind": "window"}
    found = answer(400, type="exceed_context_size_error", n_prompt_tokens=1, n_ctx=2, opencoti=ours)
    assert isinstance(found, errors.ContextOverflowError)
    assert (found.required_tokens, found.cached_tokens, found.ctx_size) == (9000, 5, 8192)
    assert found.ctx_kind == "window"
    plain = answer(400, type="exceed_context_size_error", n_prompt_tokens=9000, n_ctx=8192)
    assert isinstance(plain, errors.ContextOverflowError)
    assert (plain.required_tokens, plain.ctx_size, plain.ctx_kind) == (9000, 8192, None)


def test_a_mismatch_says_where_and_what():
    """The first token that differs, both texts, and what would work."""
    found = answer(
        409,
        code="prefix_mismatch",
        first_mismatch=3,
        expected_token=5,
        got_token=6,
        expected_text=" a",
        got_text=" b",
        next_moves=[{"move": "branch"}],
    )
    assert isinstance(found, errors.PrefixMismatchError)
    assert (found.first_mismatch, found.expected, found.got) == (3, (5, " a"), (6, " b"))
    assert found.next_moves == [{"move": "branch"}]


def test_what_is_no_error_object_is_an_error_too():
    """A gateway's page, or nothing."""
    assert "<html>" in error_from_answer(502, {}, b"<html>Bad gateway").message
    assert error_from_answer(500, {}, b"").message.startswith("no message")
    assert error_from_answer(400, {"retry-after": "soon"}, b'{"error": "flat"}').message.startswith("flat")


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ({"code": 400, "type": "exceed_context_size_error"}, errors.ContextOverflowError),
        ({"code": 500, "message": "engine"}, errors.ServerError),
        ({"code": "engine_gone", "type": "unavailable_error"}, errors.UnavailableError),
        ({"code": "queue_timeout", "type": "pool_saturated"}, errors.PoolSaturatedError),
        ("text", errors.ServerError),
    ],
)
def test_an_event_of_a_stream_is_an_error_of_the_same_tree(event, kind):
    """The status is in the engine's code, or follows from the proxy's type."""
    assert type(error_from_event(event)) is kind


def test_whether_a_request_may_have_arrived():
    """A stream that broke off did."""
    assert errors.TruncatedStreamError("cut").sent
    assert not errors.ConnectionFailedError("refused", sent=False).sent


def test_the_tree_in_the_docstring_is_the_tree():
    """Every class is drawn, and nothing else."""
    drawn = {word for word in errors.__doc__.split() if word.endswith("Error")}
    classes = {
        name for name, each in vars(errors).items() if isinstance(each, type) and name.endswith("Error")
    }
    assert drawn == classes
