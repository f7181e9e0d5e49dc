"""What a request's body says of its size."""

import pytest

from polykv_proxy.api import asked as asking
from polykv_proxy.api.families import INFERENCE
from polykv_proxy.api.sizes import need_of
from polykv_proxy.core.types import as_tokens


def read(body, path="/v1/chat/completions"):
    """A body as it is read, and its API."""
    family = INFERENCE[path]
    return asking.read(body, family, {}), family


@pytest.mark.parametrize(
    ("path", "member"),
    [
        ("/completion", b'"n_predict":9'),
        ("/v1/completions", b'"max_tokens":9'),
        ("/v1/chat/completions", b'"max_completion_tokens":9'),
        ("/v1/responses", b'"max_output_tokens":9'),
        ("/v1/messages", b'"max_tokens":9'),
    ],
)
def test_each_api_has_its_bound(path, member):
    """Whatever it is called."""
    asked, family = read(b"{" + member + b"}", path)
    assert need_of(asked, family, None, None).asked.max_tokens == 9


def test_of_several_bounds_the_largest_counts():
    """Which one the engine takes does not matter then; what is no bound does not count."""
    asked, family = read(b'{"max_tokens":9,"n_predict":12,"max_completion_tokens":-1}')
    assert need_of(asked, family, None, None).asked.max_tokens == 12
    asked, family = read(b'{"max_tokens":null,"n_predict":-1}')
    assert need_of(asked, family, None, None).asked.max_tokens is None


def test_an_uncounted_prompt_is_as_long_as_its_body_and_its_media_may_be():
    """A counted one is as long as it is."""
    asked, family = read(b'{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}')
    need = need_of(asked, family, None, None)
    assert (need.prompt, need.asked.body_bytes, need.asked.media) == (None, len(asked.body), 1)
    need = need_of(asked, family, None, as_tokens(range(7)))
    assert (need.prompt, need.asked.media) == (7, 0)


def test_what_runs_in_several_slots_answers_several_times():
    """Completions of one prompt, or slots of the engine's own choice."""
    asked, family = read(b'{"n":3}')
    assert need_of(asked, family, None, None).asked.answers == 3
    assert need_of(asked, family, None, None, slots=8).asked.answers == 8
