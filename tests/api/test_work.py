"""Claims about ``api.work``: what a request knows of itself on its way."""

from types import SimpleNamespace

from polykv_proxy.api.work import Work


def test_what_a_request_rides_on_is_what_its_plan_matched():
    """Nothing without a plan."""
    work = Work(None, None, None, None, None, None)
    assert work.matched == 0
    work.plan = SimpleNamespace(matched=7)
    assert work.matched == 7
