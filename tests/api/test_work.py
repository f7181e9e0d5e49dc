"""Claims about ``api.work``: what a request knows of itself on its way."""

from types import SimpleNamespace

from polykv_proxy.api.work import Work
from polykv_proxy.core.slots import Content
from polykv_proxy.core.types import as_tokens


def test_what_a_request_rides_on_is_what_its_plan_matched():
    """Nothing without a plan."""
    work = Work(None, None, None, None, None, None)
    assert work.matched == 0
    work.plan = SimpleNamespace(matched=7)
    assert work.matched == 7


def test_an_attempt_that_came_to_nothing_is_forgotten():
    """But not what the prompt is made of."""
    tokens = as_tokens([1, 2])
    work = Work(None, None, None, None, None, None, tokens=tokens)
    work.plan = work.lease = SimpleNamespace(matched=7)
    work.pool_unknown, work.unpooled, work.countable, work.told = True, "not_tokenizable", False, True
    work.content, work.clean = Content.NEW, False
    work.start_over()
    assert work == Work(None, None, None, None, None, None, tokens=tokens)
