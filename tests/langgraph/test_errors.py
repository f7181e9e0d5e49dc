"""Errors are caught by either name."""

import pickle

import pytest
from langchain_core import exceptions as core

from polykv_proxy.client import errors as client
from polykv_proxy.langgraph import errors


@pytest.mark.parametrize(
    ("error", "kind", "known_as", "retryable"),
    [
        (client.PoolSaturatedError("x"), errors.PoolSaturatedError, core.ModelRateLimitError, True),
        (client.ContextOverflowError("x"), errors.ContextOverflowError, core.ContextOverflowError, False),
        (client.PoolNotFoundError("x"), errors.PoolNotFoundError, core.ModelNotFoundError, False),
        (client.BadRequestError("x"), errors.BadRequestError, core.ModelInvalidRequestError, False),
        (client.AuthenticationError("x"), errors.AuthenticationError, core.ModelAuthenticationError, False),
        (client.UnavailableError("x"), errors.UnavailableError, core.ModelAPIError, True),
        (client.ServerError("x"), errors.ServerError, core.ModelAPIError, True),
        (
            client.ConnectionFailedError("x", sent=True),
            errors.ConnectionFailedError,
            core.ModelConnectionError,
            True,
        ),
        (client.TimedOutError("x", sent=True), errors.TimedOutError, core.ModelTimeoutError, True),
        (client.TruncatedStreamError("x"), errors.TruncatedStreamError, core.ModelConnectionError, True),
    ],
)
def test_each_is_an_error_of_the_client_and_one_of_langchain(error, kind, known_as, retryable):
    """With everything that the client's error knew."""
    error.retry_after = 3.0
    twin = errors.as_model_error(error)
    assert type(twin) is kind
    assert isinstance(twin, type(error))
    assert isinstance(twin, known_as)
    assert twin.is_retryable is retryable
    assert (twin.message, twin.retry_after) == (error.message, 3.0)
    assert vars(twin) == vars(error)


def test_what_langchain_has_no_name_for_stays():
    """A prefix that does not match is nothing that a model call raises."""
    error = client.PrefixMismatchError("x")
    assert errors.as_model_error(error) is error


def test_a_block_translates():
    """And keeps the original as the cause."""

    def work(error):
        with errors.model_errors():
            raise error

    original = client.PoolSaturatedError("full", retry_after=7.0)
    with pytest.raises(errors.PoolSaturatedError) as caught:
        work(original)
    assert caught.value.__cause__ is original
    with pytest.raises(client.ConflictError):
        work(client.ConflictError("x"))


def test_errors_survive_a_process_boundary():
    """Some executors pickle what a node raised."""
    for original in (
        client.PoolSaturatedError("full", retry_after=7.0),
        client.ConnectionFailedError("refused", sent=False),
        client.TruncatedStreamError("cut"),
    ):
        error = errors.as_model_error(original)
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), copy.message) == (type(error), original.message)
        assert vars(copy) == vars(error)
