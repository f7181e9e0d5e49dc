"""Claims about ``saver``: with nobody there, nothing happens and nothing waits."""

from polykv_proxy.core.types import Capability, EngineFacts, Scope, SlotId
from polykv_proxy.saver import NoSaver, model_digest

FACTS = EngineFacts("e", 1, 1, 10, 10, 1, "b")


async def test_nobody_saves():
    """Every call is harmless."""
    saver = NoSaver("off for a test")
    assert await saver.meet(FACTS, Capability.ZERO_COPY, {"a": "b"}) == model_digest({"a": "b"})
    saver.on_ready()
    saver.on_down()
    assert saver.is_settled
    assert await saver.settled(0.0)
    assert not saver.may_help(Scope(""), adapters=False)
    await saver.before_loss(SlotId(0))
    await saver.before_request(None, None, 0)
    saver.on_delivered(None, b"", adapters=False)
    await saver.on_answer(None, 5)
    assert not await saver.on_close(None, keep=True)
    assert saver.status() == {"state": "off", "reason": "off for a test"}


def test_what_an_engine_says_of_its_model_tells_models_apart():
    """In any order."""
    assert model_digest({"a": "1", "b": "2"}) == model_digest({"b": "2", "a": "1"})
    assert model_digest({"a": "1"}) != model_digest({"a": "2"})
