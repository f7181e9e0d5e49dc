"""Claims about ``readings``: one reading serves all who ask, and only looks feed the rates."""

import asyncio

from api.rig import CHAT, chat, until

from polykv_proxy import readings as readings_module
from polykv_proxy.core.slots import Content
from polykv_proxy.core.types import Scope, as_tokens
from polykv_proxy.engine.client import CONTROL_TIMEOUT_S

TOKENS = as_tokens(range(1, 41))
SCOPE = Scope("")


async def test_one_reading_serves_all_who_ask(rig):
    """However many ask at once; a fresh one serves again."""
    before = len(rig.engine.of("/polykv/engine/counters"))
    samples = await asyncio.gather(*(rig.runtime.readings.take(0.0) for _ in range(20)))
    assert len(rig.engine.of("/polykv/engine/counters")) <= before + 2  # the sampler may look, too
    assert len({id(sample) for sample in samples}) == 1
    assert await rig.runtime.readings.take(60.0) is rig.runtime.plane.sample


async def test_a_reading_from_before_an_answer_is_old(rig):
    """However fresh it is: it shows a request at work that is over."""
    one, _ = rig.take_all()
    before = await rig.runtime.readings.take(0.0)
    rig.runtime.finish(one, clean=True, content=Content.NEW)
    assert await rig.runtime.readings.take(60.0) is not before


async def test_a_bad_reading_leaves_the_last_one_published(rig):
    """Nobody hangs, and the next reading is taken again."""
    good = await rig.runtime.readings.take(0.0)
    for broken in ((500, b"?"), (200, b"nonsense"), (200, b'{"epoch":1}')):
        rig.engine.broken["/polykv/engine/counters"] = broken
        assert (await rig.runtime.readings.take(0.0)).epoch == good.epoch
    rig.engine.broken.clear()
    assert (await rig.runtime.readings.take(0.0)).taken_at > good.taken_at


async def test_a_failure_of_ours_while_sampling_reaches_those_who_wait(rig, monkeypatch):
    """They get what was known before; the failure is reported, and the next reading is taken."""
    known = await rig.runtime.readings.take(0.0)

    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(rig.runtime.plane, "on_sample", fail)
    assert (await rig.runtime.readings.take(0.0)).epoch == known.epoch
    monkeypatch.undo()
    assert (await rig.runtime.readings.take(0.0)).taken_at > known.taken_at
    await until(lambda: rig.problems)
    assert isinstance(rig.problems.pop()["exception"], ZeroDivisionError)
    rig.problems.clear()


async def test_an_engine_without_counters_has_no_samples(proxies):
    """None, without a call."""
    rig = await proxies(max_pools=0)
    assert await rig.runtime.readings.take(0.0) is None
    assert not rig.engine.of("/polykv/engine/counters")


# -- rates ------------------------------------------------------------------------------------------------


async def test_tokens_are_counted_from_when_the_engine_is_known(rig):
    """Nothing that it generates for us is missed, however soon, and nothing is that it did before."""
    rig.down()
    rig.engine.restart()
    sequence = rig.engine.sequences[0]
    sequence.gen_total = 500
    await rig.up()
    sequence.gen_total += 20
    await rig.runtime.readings.look(0.0)
    assert rig.runtime.plane.experience.book.generated_total == 20


async def test_only_the_samplers_looks_feed_the_rates(rig):
    """Readings for others publish the picture and leave the rates alone; the same reading counts once."""
    book = rig.runtime.plane.experience.book
    await rig.runtime.readings.look(0.0)
    rig.engine.sequences[0].gen_total += 9
    looked = book.taken_at
    sample = await rig.runtime.readings.take(0.0)
    assert rig.runtime.plane.sample is sample
    assert book.taken_at in (looked, sample.taken_at)  # the sampler runs beside
    await rig.runtime.readings.look(60.0)
    await rig.runtime.readings.look(0.0)
    assert book.generated_total == 9


async def test_looks_in_vain_are_counted(rig, proxies):
    """Where the engine serves; one that is down is not asked."""
    rig.engine.broken["/polykv/engine/counters"] = (500, b"?")
    before = rig.runtime.metrics.stale_samples
    await rig.runtime.readings.look(0.0)
    assert rig.runtime.metrics.stale_samples > before
    rig.down()
    before = rig.runtime.metrics.stale_samples
    await rig.runtime.readings.look(0.0)
    assert rig.runtime.metrics.stale_samples == before
    stock = await proxies(max_pools=0)
    stock.engine.broken["/slots"] = (501, b"{}")
    before = stock.runtime.metrics.stale_samples
    await stock.runtime.readings.look(0.0)
    assert stock.runtime.metrics.stale_samples > before


async def test_an_engine_that_keeps_us_waiting_slows_its_readers_down(rig, monkeypatch):
    """Long before it answers, or fails to."""
    monkeypatch.setattr(readings_module, "SILENCE_S", 0.01)
    rig.engine.script.tokens, rig.engine.script.token_delay_s = 2000, 0.005
    running = rig.start(CHAT, chat("a", stream=True))
    await until(lambda: any(session.rate.warm for session in rig.runtime.plane.sessions))
    (session,) = rig.runtime.plane.sessions
    before = session.rate.tps
    rig.engine.slow["/polykv/engine/counters"] = gate = asyncio.Event()
    await until(lambda: session.rate.tps < before / 2)
    gate.set()
    await until(lambda: session.rate.tps > before / 2)
    running.cancel()


async def test_whoever_only_shows_a_reading_waits_for_it_shortly(rig, monkeypatch):
    """A fresh one if it comes; else the last one serves, and the next who asks gets the one under way."""
    before = await rig.runtime.readings.take(0.0)
    rig.runtime.readings.changed()
    await rig.runtime.readings.glance()
    assert rig.runtime.plane.sample.taken_at > before.taken_at
    monkeypatch.setattr(readings_module, "GLANCE_S", 0.05)
    rig.engine.slow["/polykv/engine/counters"] = hang = asyncio.Event()
    rig.runtime.readings.changed()
    async with asyncio.timeout(CONTROL_TIMEOUT_S / 2):
        await rig.runtime.readings.glance()
    hang.set()
    last = rig.runtime.plane.sample
    assert (await rig.runtime.readings.take(0.0)).taken_at > last.taken_at
