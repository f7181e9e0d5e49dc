"""Claims about ``durable.service``: when KV is saved at all, and what model it is of."""

import asyncio
import threading

import pytest
from api.rig import CHAT, chat, until

from durable.files import PAIRS, gguf_bytes
from durable.test_sessions import keys, prompt_of, turn
from polykv_proxy.core.plane import ControlPlane
from polykv_proxy.core.types import Capability, EngineFacts
from polykv_proxy.durable.service import MAX_TRIES, Durable
from polykv_proxy.durable.store import Store
from polykv_proxy.engine import started
from polykv_proxy.engine.origin import Fixed, Start
from polykv_proxy.errors import EngineGoneError, UnavailableError
from polykv_proxy.runtime import Runtime


async def test_it_can_be_switched_off(proxies):
    """Then nothing is tried."""
    rig = await proxies(enabled=False)
    assert rig.durable.status()["reason"] == "durable.enabled is false"
    assert rig.engine.moves == []
    await turn(rig, "a", "first")
    await turn(rig, "b", "first")
    await rig.durable.round()
    await rig.durable.drain()
    assert keys(rig) == []


async def test_an_engine_without_pools_saves_nothing(proxies):
    """Its slots are its own business."""
    rig = await proxies(max_pools=0)
    assert rig.durable.status()["reason"] == "the engine has no prefix pools"


async def test_a_model_that_cannot_be_read_has_no_saved_state(proxies):
    """Nobody can tell which one it is."""
    rig = await proxies(prepare=lambda fake: fake.model_file.write_bytes(b"no model"))
    assert "cannot be read" in rig.durable.status()["reason"]


async def test_another_model_has_nothing_of_it(proxies):
    """And the first finds its own again."""
    rig = await proxies()
    await turn(rig, "a", "first")
    await rig.durable.drain()
    pairs = [("general.architecture", "other"), *PAIRS[1:]]
    other = await proxies(prepare=lambda fake: fake.model_file.write_bytes(gguf_bytes(pairs)))
    assert await turn(other, "a", "first", "second") == 0
    again = await proxies()
    assert await turn(again, "a", "first", "second") == prompt_of(again, "a", "first")
    assert rig.durable.shelf.model_id == again.durable.shelf.model_id != other.durable.shelf.model_id


async def test_adapters_are_part_of_the_model(proxies, tmp_path):
    """With their scales; a change while the engine runs ends it."""
    (tmp_path / "l.gguf").write_bytes(gguf_bytes([("general.type", "adapter")]))

    def with_scale(scale):
        return lambda fake: fake.adapters.append({"id": 0, "path": str(tmp_path / "l.gguf"), "scale": scale})

    plain, half = await proxies(), await proxies(prepare=with_scale(0.5))
    full = await proxies(prepare=with_scale(1.0))
    ids = {rig.durable.shelf.model_id for rig in (plain, half, full)}
    assert len(ids) == 3
    await turn(half, "a", "first")
    await turn(half, "b", "first")
    assert keys(half) == ["a"]
    half.engine.adapters[0]["scale"] = 0.7
    await turn(half, "c", "first")
    assert keys(half) == ["a"]
    assert "adapters were changed" in half.durable.status()["reason"]


async def test_an_adapter_that_cannot_be_read(proxies):
    """No saved state is of it."""
    rig = await proxies(prepare=lambda fake: fake.adapters.append({"path": "none.gguf", "scale": 1.0}))
    assert "cannot be read" in rig.durable.status()["reason"]


async def test_adapters_that_changed_while_nobody_looked(proxies, tmp_path):
    """The supervisor lost sight of the engine, which is the same: what is in its slots is of the old ones."""
    (tmp_path / "l.gguf").write_bytes(gguf_bytes([("general.type", "adapter")]))
    adapter = {"path": str(tmp_path / "l.gguf"), "scale": 0.5}
    rig = await proxies(prepare=lambda fake: fake.adapters.append(adapter))
    before = rig.durable.shelf.model_id
    rig.down()
    rig.engine.adapters[0]["scale"] = 1.0
    await rig.up()
    assert rig.durable.shelf.model_id == before
    assert "adapters were changed" in rig.durable.status()["reason"]


async def test_the_same_load_is_not_tried_twice(proxies):
    """A supervisor that lost sight of it for a moment."""
    rig = await proxies()
    moves = list(rig.engine.moves)
    rig.down()
    await rig.up()
    assert rig.engine.moves == moves
    rig.down()
    rig.engine.restart()
    await rig.up()
    assert len(rig.engine.moves) == 2 * len(moves)


async def test_an_engine_of_somebody_elses_is_on_another_host():
    """As far as anybody can tell."""
    runtime = Runtime.__new__(Runtime)
    plane = ControlPlane(max_waiting=1)
    runtime.plane, runtime.name, runtime.client = plane, "e", None
    from polykv_proxy.metrics import Metrics  # noqa: PLC0415
    from polykv_proxy.settings import DurableSettings  # noqa: PLC0415

    runtime.metrics = Metrics(plane)
    durable = Durable(runtime, None, DurableSettings(), Fixed(None))
    facts = EngineFacts("e", 1, 1, 10, 10, 1, "b")
    known = await durable.meet(facts, Capability.ZERO_COPY, {"a": "b"})
    assert known
    assert "did not start this engine" in durable.status()["reason"]
    assert durable.is_settled


async def test_requests_are_answered_whatever_the_disk_says(proxies):
    """The folder is gone."""
    rig = await proxies()
    await turn(rig, "a", "first")
    rig.engine.full = True
    for name in ("b", "c", "a"):
        answer = await rig.ask(CHAT, chat(name, "first", "second", session_id=name))
        assert answer.status == 200
    await rig.durable.round()
    await rig.durable.drain()
    assert rig.durable.status()["last_error"]
    rig.down()
    await rig.durable.round()
    await rig.durable.drain()


@pytest.mark.parametrize("folder", ["files", "none"])
async def test_the_gate_is_open_where_nothing_can_come_back(proxies, folder, tmp_path):
    """And closed at a start with files, until they were looked at."""
    rig = await proxies()
    if folder == "files":
        await turn(rig, "a", "first")
        await rig.durable.drain()
    fresh = Durable(
        rig.runtime,
        rig.pooling,
        rig.settings.durable,
        Fixed(Start(folder=rig.engine.folder if folder == "files" else tmp_path / "none", model=None)),
    )
    assert fresh.is_settled is (folder == "none")
    assert await fresh.settled(0.0) is (True if folder == "none" else None)


async def test_relative_paths_are_the_engines(proxies, tmp_path, monkeypatch):
    """It runs where the proxy does, and not where its model is."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "l.gguf").write_bytes(gguf_bytes([("general.type", "adapter")]))
    monkeypatch.chdir(tmp_path / "here")
    rig = await proxies(prepare=lambda fake: fake.adapters.append({"path": "l.gguf", "scale": 1.0}))
    assert rig.durable.shelf.on


@pytest.mark.parametrize("call", ["counters", "restore_slot"])
async def test_a_look_that_failed_is_no_verdict(proxies, call):
    """The next one tries; until then nothing is saved."""
    rig = await proxies()
    rig.down()
    rig.engine.restart()
    client, durable = rig.runtime.client, rig.durable
    facts, _, reported = await client.describe()
    was = getattr(client, call)

    async def slow(*_):
        raise UnavailableError("the engine did not answer within 5 s", code="engine_timeout")

    setattr(client, call, slow)
    with pytest.raises(UnavailableError):
        await durable.meet(facts, Capability.ZERO_COPY, reported)
    assert not durable.shelf.on
    setattr(client, call, was)
    before = len(rig.engine.moves)
    await durable.meet(facts, Capability.ZERO_COPY, reported)
    assert durable.shelf.on
    assert len(rig.engine.moves) > before


async def test_an_engine_that_never_answers_the_canary_serves_without(proxies, monkeypatch):
    """Requests do not wait for ever for what is only worth something to them."""
    monkeypatch.setattr("polykv_proxy.runtime.RETRY_READY_S", 0.0)
    rig = await proxies()
    rig.down()
    rig.engine.restart()
    tries = []

    async def slow(*_):
        tries.append(1)
        raise UnavailableError("the engine did not answer within 5 s", code="engine_timeout")

    rig.runtime.client.restore_slot = slow
    await rig.up()
    assert len(tries) == MAX_TRIES
    assert "did not answer" in rig.durable.status()["reason"]
    await turn(rig, "a", "first")


async def test_a_folder_that_does_not_answer_keeps_nobody_from_the_engine(proxies, monkeypatch):
    """It serves, and the status says why nothing is saved."""
    go_on = threading.Event()
    monkeypatch.setattr(Store, "open", lambda _: go_on.wait(20))
    rig = await proxies(disk_wait_s=1.0)
    assert "did not answer" in rig.durable.status()["reason"]
    assert (await rig.ask(CHAT, chat("a", "first", session_id="a"))).status == 200
    go_on.set()


async def test_an_empty_model_file_is_none_that_can_be_identified(proxies):
    """The engine has it open, and somebody writes it anew."""
    rig = await proxies()
    rig.down()
    rig.engine.model_file.write_bytes(b"")
    rig.engine.restart()
    await rig.up()
    assert "cannot be read" in rig.durable.status()["reason"]


async def test_a_fault_of_ours_ends_saving_and_not_serving(proxies, monkeypatch):
    """Whatever it is; the log and the status tell."""

    async def fails(*_):
        raise ValueError("a fault")

    monkeypatch.setattr("polykv_proxy.durable.canary.sings", fails)
    rig = await proxies()
    assert "a fault" in rig.durable.status()["reason"]
    await turn(rig, "a", "first")


async def test_a_fault_of_ours_does_not_end_the_rounds(proxies, monkeypatch):
    """It is told, and the next one comes."""
    monkeypatch.setattr("polykv_proxy.durable.service.ROUND_S", 0.0)
    rig = await proxies()
    rounds = []

    async def fails():
        rounds.append(1)
        raise ValueError("a fault")

    rig.durable.round = fails
    running = asyncio.create_task(rig.durable.run())
    await until(lambda: len(rounds) > 2)
    running.cancel()
    assert "a fault" in rig.durable.status()["last_error"]


class Elsewhere:
    """What is known of an engine that somebody else started."""

    hopeful, folder, gone = True, None, False

    def __init__(self):
        self.start = self.doubt = self.claimed = None

    def note(self, fake):
        """It is started now."""
        folder = fake.folder.parent
        marks = started.marks_of(["m.gguf", "l.gguf"], folder)
        self.start = Start(folder=fake.folder, model=fake.model_file, cwd=folder, marks=marks)

    def find(self, reported):
        """The start, or the doubt."""
        assert reported["model_path"]
        return self.doubt or self.start

    def claim(self, folder):
        """Why not."""
        assert folder == self.start.folder
        return self.claimed


async def test_an_engine_of_which_enough_is_known_saves_as_our_own_does(proxies):
    """Under the same id of its model: what either saved comes back with the other."""
    own, origin = await proxies(), Elsewhere()
    await turn(own, "a", "first")
    await own.durable.drain()
    rig = await proxies(origin=origin, prepare=origin.note)
    assert rig.durable.status()["state"] == "on"
    assert rig.durable.shelf.model_id == own.durable.shelf.model_id
    assert await turn(rig, "a", "first", "second") == prompt_of(rig, "a", "first")


async def test_requests_wait_until_it_is_known_what_comes_back(proxies):
    """Where such an engine saves is not known before it runs; where it never is, they go on all the same."""
    rig, origin = await proxies(), Elsewhere()
    origin.note(rig.engine)
    for doubt in (None, "for a test"):
        origin.doubt = doubt
        fresh = Durable(rig.runtime, rig.pooling, rig.settings.durable, origin)
        assert not fresh.is_settled
        rig.runtime.saver = fresh
        rig.down()
        rig.engine.restart()
        await rig.up()
        assert await fresh.settled(20.0)
        assert fresh.status()["reason"] == doubt


@pytest.mark.parametrize("why", ["doubt", "claimed"])
async def test_a_doubt_is_a_reason_to_save_nothing(proxies, why):
    """It is said, and the folder is not looked at; the next engine may be known."""
    origin = Elsewhere()
    setattr(origin, why, "for a test")
    rig = await proxies(origin=origin, prepare=origin.note)
    assert rig.durable.status()["reason"] == "for a test"
    await turn(rig, "a", "first")
    await rig.durable.drain()
    assert list(rig.engine.folder.iterdir()) == []
    setattr(origin, why, None)
    rig.down()
    rig.engine.restart()
    await rig.up()
    assert rig.durable.status()["state"] == "on"


@pytest.mark.parametrize("name", ["m.gguf", "l.gguf"])
async def test_files_must_be_what_the_engine_loaded(proxies, tmp_path, name):
    """Else KV of the old ones would be taken for the new ones' from then on."""
    origin = Elsewhere()
    (tmp_path / "l.gguf").write_bytes(gguf_bytes([("general.type", "adapter")]))

    def start(fake):
        fake.adapters.append({"id": 0, "path": "l.gguf", "scale": 1.0})
        origin.note(fake)

    def replaced(fake):
        start(fake)
        (tmp_path / "new").write_bytes((tmp_path / name).read_bytes())
        (tmp_path / "new").replace(tmp_path / name)

    rig = await proxies(origin=origin, prepare=start)
    assert rig.durable.status()["state"] == "on"
    rig = await proxies(origin=origin, prepare=replaced)
    assert rig.durable.status()["reason"] == f"{tmp_path / name} was changed since the engine started"


async def test_what_is_replaced_on_disk_later_is_not_in_the_engine(proxies, tmp_path):
    """The same load is of what it was; the next one is of the new file."""
    origin = Elsewhere()
    rig = await proxies(origin=origin, prepare=origin.note)
    before = rig.durable.shelf.model_id
    pairs = [("general.architecture", "other"), *PAIRS[1:]]
    (tmp_path / "new").write_bytes(gguf_bytes(pairs))
    (tmp_path / "new").replace(rig.engine.model_file)
    rig.down()
    await rig.up()
    assert (rig.durable.shelf.model_id, rig.durable.status()["state"]) == (before, "on")
    rig.down()
    rig.engine.restart()
    origin.note(rig.engine)
    await rig.up()
    assert rig.durable.status()["state"] == "on"
    assert rig.durable.shelf.model_id != before


async def test_nothing_is_read_or_written_once_the_engine_ended(proxies):
    """Who answers at its address next may have another model; that is found out before it is used."""
    origin = Elsewhere()
    rig = await proxies(origin=origin, prepare=origin.note)
    await turn(rig, "a", "first")
    await turn(rig, "b", "first")
    assert keys(rig) == ["a"]
    moves = list(rig.engine.moves)
    origin.gone = True
    assert rig.durable.status()["reason"] == "the engine has ended"
    await turn(rig, "a", "first", "second")
    await rig.durable.round()
    assert rig.engine.moves == moves


async def test_the_engine_that_is_tried_is_the_one_that_was_looked_at(proxies):
    """One that was restarted in between is looked at anew."""
    origin = Elsewhere()
    rig = await proxies(origin=origin, prepare=origin.note)
    rig.down()
    rig.engine.restart()
    facts, _, reported = await rig.runtime.client.describe()
    rig.engine.restart()
    with pytest.raises(EngineGoneError):
        await rig.durable.meet(facts, Capability.ZERO_COPY, reported)
    assert rig.durable.status()["state"] == "off"
    facts, _, reported = await rig.runtime.client.describe()
    await rig.durable.meet(facts, Capability.ZERO_COPY, reported)
    assert rig.durable.status()["state"] == "on"
