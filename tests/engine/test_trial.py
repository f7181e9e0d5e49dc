"""Claims about ``engine.trial``: what an engine does with a slot file is seen, not believed."""

import pytest
from fake_stock import FakeStock

from polykv_proxy.core.types import SlotId
from polykv_proxy.engine import slotfile, trial
from polykv_proxy.engine.address import EngineAddress
from polykv_proxy.engine.client import EngineClient
from polykv_proxy.errors import UnavailableError

BOTH, ONE = (SlotId(0), SlotId(1)), (SlotId(0), SlotId(0))


@pytest.fixture
async def tried(tmp_path):
    """Tries an engine that was changed by ``options``."""

    async def go(slots=BOTH, ctx_tokens=4096, **options):
        async with FakeStock() as engine:
            engine.folder = tmp_path
            vars(engine).update(options)
            async with EngineClient(EngineAddress.parse(engine.address), None) as client:
                result = await trial.restore_works(client, "f.bin", slots, ctx_tokens)
            assert engine.broken or [slot.tokens for slot in engine.sequences] == [[], []]
            return result

    return go


@pytest.mark.parametrize("slots", [BOTH, ONE])
async def test_an_engine_that_goes_on_from_a_file(tried, slots):
    """From its end and from before; with one slot, too."""
    assert await tried(slots) == (True, None)


async def test_a_small_window_is_enough(tried):
    """Half of it is used."""
    assert await tried(ctx_tokens=64) == (True, None)


async def test_a_state_without_parts(tried):
    """It works from the end only."""
    assert await tried(whole_states=True) == (False, None)


@pytest.mark.parametrize("damage", [{"window": 100}, {"clears_idle": True}])
async def test_what_was_restored_is_not_there(tried, damage):
    """Beyond a window, or because another slot ran."""
    _, reason = await tried(**damage)
    assert "reused 0 of 144" in reason


@pytest.mark.parametrize("reach", [7, 8, 100])
async def test_a_file_that_has_only_the_last_window(tried, reach):
    """A request that leaves it before that window computes everything."""
    assert await tried(reach=reach) == (False, None)


@pytest.mark.parametrize(("window", "early"), [(0, 50), (64, 50), (184, 8)])
async def test_it_is_left_before_the_window(tmp_path, window, early):
    """Whatever that is, if the prompt is longer."""
    seen = []
    async with FakeStock() as engine:
        engine.folder = tmp_path
        async with EngineClient(EngineAddress.parse(engine.address), None) as client:
            complete = client.complete

            async def note(tokens, *more, **named):
                answer = await complete(tokens, *more, **named)
                seen.append(answer["timings"]["cache_n"])
                return answer

            client.complete = note
            result = await trial.restore_works(client, "f.bin", ONE, 4096, length=200, window=window)
    assert result == (True, None)
    assert seen == [200, 192, early]


async def test_what_was_saved_is_too_little(tried):
    """The engine says so itself."""
    _, reason = await tried(broken={"/slots/0": (200, b'{"n_saved":3}')})
    assert "3 of 144" in reason


async def test_an_engine_without_a_folder(tried):
    """It refuses, with its reason."""
    with pytest.raises(UnavailableError, match="slot-save-path"):
        await tried(folder=None)


@pytest.mark.parametrize("length", [16, 144, 145, 150, 333, 700])
async def test_as_long_a_prompt_as_is_wanted(tmp_path, length):
    """And left where its text differs: a file is looked at while it is there."""
    seen = []
    async with FakeStock() as engine:
        engine.folder = tmp_path

        async def look():
            seen.append(slotfile.read_file(tmp_path / "f.bin"))

        async with EngineClient(EngineAddress.parse(engine.address), None) as client:
            result = await trial.restore_works(client, "f.bin", ONE, 4096, length=length, on_saved=look)
    assert result == (True, None)
    assert [len(tokens) for tokens in seen] == [length]
