"""The admission routes, and what policies do to requests."""

import asyncio
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import pytest_asyncio
from fake_engine import Script
from fake_polykv import FakePolykv

from api.rig import CHAT, Rig, chat, until
from polykv_proxy.api import shapes
from polykv_proxy.core.decisions import StopRunning
from polykv_proxy.core.headroom import Capacity
from polykv_proxy.core.types import SlotId

DOCS = Path(__file__).parents[2] / "docs"

HEADROOM = {"kv_headroom_ratio": 0.5, "settle_max_ms": 0}
"""Half of the cells must stay free: while one session runs, there is no room for another."""


@pytest_asyncio.fixture
async def full():
    """A proxy with a pool, on which one session runs that takes half of the cells."""
    async with Rig(slots=3, cells=2048) as rig:
        pool = await rig.pool()
        rig.engine.gate.clear()
        running = rig.start(CHAT, chat("first", pool_id=pool["pool_id"], session_id="one"))
        await until(lambda: rig.engine.running == 1)
        yield rig, pool["pool_id"]
        rig.engine.gate.set()
        assert (await running).status == 200
        await rig.quiet()


async def post(rig, pool, **keys):
    """Say what holds for a pool."""
    return await rig.ask(f"/polykv/pools/{pool}/admission", {**HEADROOM, **keys})


async def test_a_posted_policy_is_echoed_and_inherited(full):
    """What was left out has its default; a child has what its parent has."""
    rig, pool = full
    answer = await post(rig, pool, mode="enforced")
    assert answer.status == 200
    said = answer.json["effective"]
    assert (said["mode"], said["on_saturation"], said["kv_headroom_ratio"]) == ("enforced", "reject", 0.5)
    child = rig.runtime.plane.tree.get(pool)
    assert rig.runtime.gatekeeper.policy(child).enforced


async def test_what_is_in_force_can_be_read(full):
    """Of a pool and of sessions that name none, with where each value is from; asking changes nothing."""
    rig, pool = full
    path = f"/polykv/pools/{pool}/admission"
    posted = (await post(rig, pool, mode="enforced")).json
    found = (await rig.ask(path)).json
    assert found == posted == (await rig.ask(path)).json
    assert (found["pool_id"], found["effective"]["mode"]) == (pool, "enforced")
    said = f"pools.{pool}"
    assert (found["sources"]["mode"], found["sources"]["settle_max_ms"]) == (said, said)
    assert found["sources"]["priority"] == "built_in"
    assert found["sources"].keys() == found["effective"].keys()
    default = (await rig.ask("/polykv/admission")).json
    assert (default["engine"], default["pool_id"]) == ("engine-0", None)
    assert default["effective"]["mode"] == "advisory"
    assert set(default["sources"].values()) == {"built_in"}
    other = await rig.ask(path, Authorization="Bearer other")
    assert other.error["code"] == "pool_not_found"


async def test_the_files_default_can_be_read(tmp_path):
    """By the section that it is from, of the engine that is named."""
    file = tmp_path / "policies.yaml"
    file.write_text("default: {mode: enforced, target_tps_per_session: 5}\nmodels: {two: {mode: advisory}}")
    async with Rig(policy_file=file, models=("one", "two")) as rig:
        assert (await rig.ask("/polykv/admission?engine=none")).error["code"] == "no_such_engine"
        second = (await rig.ask("/polykv/admission?engine=engine-1")).json
        assert (second["effective"]["mode"], second["sources"]["mode"]) == ("advisory", "models.two")
        found = (await rig.ask("/polykv/admission")).json
        assert (found["effective"]["mode"], found["sources"]["mode"]) == ("enforced", "default")
        assert found["sources"]["priority"] == "built_in"


@pytest.mark.parametrize(
    ("body", "param"), [({"mode": "x"}, "mode"), ({"never": 1}, "never"), ({"kv_headroom_ratio": 2}, None)]
)
async def test_a_policy_that_cannot_work_is_refused(full, body, param):
    """And changes nothing."""
    rig, pool = full
    answer = await rig.ask(f"/polykv/pools/{pool}/admission", body)
    assert (answer.status, answer.error["code"]) == (400, "invalid_policy")
    assert param is None or answer.error["param"] == param
    assert rig.runtime.gatekeeper.posted == {}


async def test_an_advisory_policy_refuses_nobody_and_says_so(full):
    """The answer names the arm that would have refused."""
    rig, pool = full
    await post(rig, pool)
    waiting = rig.start(CHAT, chat("second", pool_id=pool, session_id="two"))
    await until(lambda: rig.waiting or rig.engine.running == 2)
    rig.engine.gate.set()
    answer = await waiting
    assert (answer.status, answer.json["opencoti"]["backpressure"]) == (200, "cells")


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_an_enforced_policy_refuses_a_session_that_comes_in(full, path):
    """Status, type and body agree; the numbers are there, and when to come again."""
    rig, pool = full
    await post(rig, pool, mode="enforced")
    answer = await rig.ask(path, chat("second", max_tokens=9, pool_id=pool, session_id="two"))
    assert (answer.status, answer.error["type"]) == (429, "pool_saturated")
    assert (answer.error["arm"], answer.error["reason"]) == ("cells", "kv headroom exhausted")
    told = answer.error["capacity"]
    assert (told["can_admit"], told["engine"]) == (False, "engine-0")
    assert int(answer.headers["Retry-After"]) >= 1
    assert answer.headers["x-should-retry"] == "true"
    assert (answer.json.get("type") == "error") == (path == "/v1/messages")


async def test_who_is_inside_is_never_refused(full):
    """ADM-1: the next turn of a session that ran before is no admission."""
    rig, pool = full
    rig.engine.gate.set()
    await rig.quiet()
    rig.engine.gate.clear()
    other = rig.start(CHAT, chat("other", session_id="three"))
    await until(lambda: rig.engine.running == 1)
    await post(rig, pool, mode="enforced")
    again = rig.start(CHAT, chat("first", "second", pool_id=pool, session_id="one"))
    await until(lambda: rig.engine.running == 2)
    rig.engine.gate.set()
    assert [(await each).status for each in (other, again)] == [200, 200]


async def test_warn_lets_in_and_counts_down(full):
    """200, with a header."""
    rig, pool = full
    await post(rig, pool, mode="enforced", on_saturation="warn")
    rig.engine.gate.set()
    await rig.quiet()
    answer = await rig.ask(CHAT, chat("second", pool_id=pool, session_id="two"))
    assert answer.status == 200
    assert int(answer.headers["X-Sessions-Remaining"]) >= 0


async def test_queue_holds_until_there_is_room(full):
    """The one that waits comes in when the other is over; it was not sent before."""
    rig, pool = full
    await post(rig, pool, mode="enforced", on_saturation="queue")
    held = rig.start(CHAT, chat("second", pool_id=pool, session_id="two"))
    await until(lambda: rig.runtime.gatekeeper.gate.waiting == 1)
    assert len(rig.engine.work) == 1
    rig.engine.gate.set()
    assert (await held).status == 200
    assert rig.runtime.gatekeeper.waiting == {}


async def test_who_leaves_the_queue_is_gone_at_once(full):
    """Nobody waits any more, and nothing is sent for it."""
    rig, pool = full
    await post(rig, pool, mode="enforced", on_saturation="queue")
    held = rig.start(CHAT, chat("second", pool_id=pool, session_id="two"))
    await until(lambda: rig.runtime.gatekeeper.gate.waiting == 1)
    held.cancel()
    await until(lambda: rig.runtime.gatekeeper.gate.waiting == 0)
    assert (len(rig.engine.work), rig.runtime.gatekeeper.waiting) == (1, {})


async def test_a_wait_that_is_too_long_ends_with_429(full):
    """And a stream whose head went out by then gets it as its last event."""
    rig, pool = full
    await post(rig, pool, mode="enforced", on_saturation="queue", queue_max_wait_s=0.05)
    answer = await rig.ask(CHAT, chat("second", pool_id=pool, session_id="two"))
    assert (answer.status, answer.error["type"]) == (429, "pool_saturated")


async def test_a_held_stream_is_refused_in_its_last_event():
    """ADM-8: after the grace the status is spent; the type is the same."""
    async with Rig(slots=3, cells=2048, queue={"hold_grace_s": 0.0}) as rig:
        pool = (await rig.pool())["pool_id"]
        await post(rig, pool, mode="enforced", on_saturation="queue", queue_max_wait_s=0.2)
        rig.engine.gate.clear()
        running = rig.start(CHAT, chat("first", pool_id=pool, session_id="one"))
        await until(lambda: rig.engine.running == 1)
        answer = await rig.ask(CHAT, chat("second", pool_id=pool, session_id="two", stream=True))
        assert answer.status == 200
        assert answer.events[-1][1]["error"]["type"] == "pool_saturated"
        rig.engine.gate.set()
        assert (await running).status == 200


async def test_capacity_tells_and_changes_nothing(full):
    """Of a pool and of the engine; asked twice, it says the same."""
    rig, pool = full
    await post(rig, pool, mode="enforced")
    path = f"/polykv/pools/{pool}/capacity"
    first, second = [(await rig.ask(path)).json for _ in range(2)]
    assert (first["can_admit"], first["reason"]) == (False, "kv headroom exhausted")
    assert first["n_active_sessions"] == second["n_active_sessions"] == 1
    assert first["kv_cells_total"] == 2048
    engine = (await rig.ask("/polykv/capacity")).json
    assert (engine["can_admit"], engine["engine"]) == (True, "engine-0")
    too_long = (await rig.ask(f"{path}?expected_tokens=999999")).json
    assert too_long["reason"] == "context headroom exhausted"
    assert (await rig.ask(f"{path}?expected_tokens=x")).error["param"] == "expected_tokens"


@pytest.mark.parametrize("patched", [True, False])
async def test_nobody_can_tell_of_an_engine_that_does_not_serve(patched):
    """Not that there is room: neither before it was ready nor after it went away."""
    async with Rig(stock=None if patched else FakePolykv(max_pools=0)) as rig:
        assert (await rig.ask("/polykv/capacity")).json["can_admit"] is True
        for gone in (rig.down, rig.loading):
            gone()
            found = (await rig.ask("/polykv/capacity")).json
            assert (found["can_admit"], found["reason"]) == (False, "samples stale")
            assert (found["headroom_sessions"], found["retry_after_s"]) == (0, 2)


async def test_pressure_is_one_figure(full):
    """In the rates and in the capacity: cells in use, however many a running answer is expected to take."""
    rig, _ = full
    await until(lambda: rig.runtime.plane.sample.cells_used)
    figures = rig.runtime.plane.cells.ledger.figures()
    rates, room = [(await rig.ask(f"/polykv/{name}")).json["pressure"] for name in ("tps", "capacity")]
    assert rates == pytest.approx(room, abs=0.001)
    assert 0.0 < rates < figures.used / figures.total


async def test_a_full_engine_does_not_look_empty():
    """Who asks for room is told that no slot is free and who waits, in the words of the metrics."""
    async with Rig(slots=2, cells=16384) as rig:
        rig.engine.gate.clear()
        tasks = [rig.start(CHAT, chat("go", session_id=f"s{number}")) for number in range(4)]
        await until(lambda: rig.engine.running == rig.waiting == 2)
        found = (await rig.ask("/polykv/capacity")).json
        assert (found["can_admit"], found["reason"]) == (True, "no slot free")
        assert (found["slots_free"], found["queue_depth"], found["sessions_waiting"]) == (0, 2, 0)
        told = [(await rig.ask(f"/polykv/capacity?expected_tokens={n}")).json for n in (100, 1)]
        wanted = rig.runtime.plane.leases.wanted[0]
        assert wanted > 2 * 200  # two prompts, at least
        spare = rig.runtime.plane.cells.ledger.figures().admissible - wanted
        assert [each["headroom_sessions"] for each in told] == [spare // 100, spare]
        metrics = (await rig.ask("/metrics")).body.decode()
        assert "opencoti_polykv:queue_depth 2.0" in metrics
        rig.engine.gate.set()
        assert {answer.status for answer in await asyncio.gather(*tasks)} == {200}


async def test_who_waits_at_the_gate_is_counted_alike(full):
    """In the document and in the metrics."""
    rig, pool = full
    await post(rig, pool, mode="enforced", on_saturation="queue")
    waiting = rig.start(CHAT, chat("second", pool_id=pool, session_id="two"))
    await until(lambda: rig.runtime.gatekeeper.gate.waiting)
    for path in (f"/polykv/pools/{pool}/capacity", "/polykv/capacity"):
        found = (await rig.ask(path)).json
        assert (found["queue_depth"], found["sessions_waiting"]) == (1, 1)
    metrics = (await rig.ask("/metrics")).body.decode()
    assert "opencoti_polykv:queue_depth 1.0" in metrics
    assert "opencoti_polykv:sessions_waiting 1.0" in metrics
    rig.engine.gate.set()
    assert (await waiting).status == 200


async def test_a_wait_at_the_gate_is_a_wait(full):
    """Also of who comes in and finds a slot at once; it counts once."""
    rig, pool = full
    await post(rig, pool, mode="enforced", on_saturation="queue")
    waiting = rig.start(CHAT, chat("second", pool_id=pool, session_id="two"))
    await until(lambda: rig.runtime.gatekeeper.gate.waiting)
    before = await at_once(rig)
    await rig.ask(f"/polykv/pools/{pool}/admission", {"mode": "advisory"})
    rig.engine.gate.set()
    assert (await waiting).status == 200
    assert await at_once(rig) == (before[0], before[1] + 1)
    assert rig.runtime.gatekeeper.gate.counts["queued"] == 1


async def at_once(rig):
    """Requests that got slots without a wait, and all that got them."""
    metrics = (await rig.ask("/metrics")).body.decode()
    found = re.findall(r"queue_wait_seconds_(?:bucket\{le=\"0.0\"\}|count) (\d+)", metrics)
    return tuple(map(int, found))


async def test_who_waits_at_the_gate_is_listed(full):
    """As a session that has no id yet, by the name that its client gave; once in, it has one."""
    rig, pool = full
    await post(rig, pool, mode="enforced", on_saturation="queue")
    waiting = rig.start(CHAT, chat("second", pool_id=pool, session_id="two"))
    await until(lambda: rig.runtime.gatekeeper.gate.waiting)
    for path in ("/polykv/sessions", "/polykv/tps"):
        first, one = (await rig.ask(path)).json["sessions"]
        assert (first["session_id"], first["name"], first["state"]) == (None, "two", "waiting")
        assert (one["session_id"], one["state"]) == ("one", "running")
    rig.engine.gate.set()
    assert (await waiting).status == 200
    listed = {
        each["session_id"]: each["state"] for each in (await rig.ask("/polykv/sessions")).json["sessions"]
    }
    assert set(listed) == {"one", "two"}
    assert listed["two"] == "idle"


def test_every_member_of_the_capacity_document_is_described():
    """In its shape, and in a row of the reference."""
    members = {each.name for each in fields(Capacity)} | {"engine"}
    assert set(shapes.Capacity.__annotations__) == members
    section = (
        (DOCS / "reference" / "http-api.md").read_text().partition("## Admission")[2].partition("\n## ")[0]
    )
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert members <= set(re.findall(r"`(\w+)`", " ".join(rows)))


async def test_a_promised_place_is_redeemed_once(full):
    """The lease lets one session in where others are refused; the same key names the same leases."""
    rig, pool = full
    path = f"/polykv/pools/{pool}/reserve"
    body = {"sessions": 1, "ttl_s": 60}
    first, again = [(await rig.ask(path, body, Idempotency_Key="k")).json for _ in range(2)]
    assert first["leases"] == again["leases"]
    await post(rig, pool, mode="enforced")
    lease = {"lease_id": first["leases"][0]}
    promised = rig.start(CHAT, chat("second", pool_id=pool, session_id="two", opencoti=lease))
    await until(lambda: len(rig.runtime.gatekeeper.gate.presence) == 2)
    refused = await rig.ask(CHAT, chat("third", pool_id=pool, session_id="three", opencoti=lease))
    assert refused.status == 429
    rig.engine.gate.set()
    assert (await promised).status == 200


@pytest.mark.parametrize("body", [{"sessions": 0, "ttl_s": 1}, {"sessions": 1, "ttl_s": 0}, {"sessions": 1}])
async def test_places_that_cannot_be_promised(full, body):
    """400, and no place is kept."""
    rig, pool = full
    assert (await rig.ask(f"/polykv/pools/{pool}/reserve", body)).status == 400


async def test_a_pool_of_nobody_has_no_capacity(full):
    """404, as anywhere."""
    rig, _ = full
    assert (await rig.ask("/polykv/pools/none/capacity")).error["code"] == "pool_not_found"


# -- requests that are stopped for their cells ------------------------------------------------------------


def stop(rig):
    """The ledger wants the one that runs to be stopped."""
    (lease,) = rig.runtime.plane.leases._running
    rig.runtime._perform([StopRunning(lease)])


@pytest_asyncio.fixture
async def one():
    """A proxy with one slot."""
    async with Rig(slots=1) as rig:
        yield rig
        assert rig.runtime.stoppable == {}
        assert rig.runtime.plane.cells.ledger.figures().running == 0


async def test_who_is_stopped_again_and_again_is_told_that_it_does_not_fit(one):
    """Three times it could not be finished: it would be so for ever."""
    one.engine.gate.clear()
    asking = one.start(CHAT, chat("a"))
    for attempt in range(3):
        await until(lambda least=attempt + 1: len(one.engine.work) == least and one.engine.running == 1)
        stop(one)
    answer = await asking
    assert (answer.status, answer.error["type"]) == (400, "exceed_context_size_error")
    assert len(one.engine.work) == 3
    await one.quiet()


async def test_who_is_stopped_before_it_was_sent_is_stopped(proxies):
    """The ledger counts on it; and it gets another chance."""
    rig = await proxies(slots=2)
    async with rig.runtime.stillness.of(SlotId(0)):
        asking = rig.start(CHAT, chat("a"))
        await until(lambda: rig.runtime.stoppable)
        (first,) = rig.runtime.plane.leases._running
        rig.runtime._perform([StopRunning(first)])
        await until(lambda: first not in rig.runtime.plane.leases._running)
    assert (await asking).status == 200
    await rig.quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_who_got_nothing_yet_starts_over(one, stream):
    """The engine's work for it is cancelled; the client gets one whole answer."""
    one.engine.gate.clear()
    asking = one.start(CHAT, chat("a", stream=stream))
    await until(lambda: one.engine.running == 1)
    stop(one)
    await until(lambda: len(one.engine.work) == 2)
    one.engine.gate.set()
    answer = await asking
    assert answer.status == 200
    assert "error" not in answer.body.decode()
    assert one.engine.overlaps == []  # the slot was idle by then
    await one.quiet()


async def test_who_got_a_part_is_told_that_there_is_no_room(one):
    """CTX-4: the last event of its stream says so; it is not sent again."""
    one.engine.script = Script(tokens=400, token_delay_s=0.05)
    async with one.open(CHAT, chat("a", stream=True)) as answer:
        await answer.content.readuntil(b"\n\n")
        await until(lambda: one.engine.running == 1)
        stop(one)
        rest = await answer.content.read()
    (error,) = [json.loads(line[6:])["error"] for line in rest.split(b"\n") if b'"error"' in line]
    assert (error["type"], error["code"]) == ("exceed_context_size_error", "no_room")
    assert error["opencoti"]["ctx_kind"] == "cells"
    assert len(one.engine.work) == 1
    await one.quiet()
