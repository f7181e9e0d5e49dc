"""Claims about ``api.tps``: a document, a stream of them, and readers that cost nobody anything."""

import asyncio
import copy
import json
import socket

import pytest

from api.rig import CHAT, chat, until
from polykv_proxy.api import tps
from polykv_proxy.core.rates import Progress

STREAM = {"Accept": "text/event-stream"}


async def documents(answer, count):
    """The next documents of a stream."""
    found = []
    async with asyncio.timeout(20.0):
        async for line in answer.content:
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:]))
                if len(found) == count:
                    break
    return found


@pytest.fixture
async def quick(proxies):
    """A proxy whose streams are fast."""
    return await proxies(telemetry={"tps_interval_s": 0.01})


@pytest.mark.parametrize(
    ("query", "headers"), [("", {}), ("?once=1", STREAM), ("", {"Accept": "application/json"})]
)
async def test_one_document_for_those_who_want_one(rig, query, headers):
    """JSON, and the end."""
    await rig.ask(CHAT, chat("a", session_id="one"))
    await rig.runtime.readings.take(0.0)
    answer = await rig.ask(f"/polykv/tps{query}", **headers)
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json; charset=utf-8")
    (session,) = answer.json["sessions"]
    assert set(session) == {
        "engine",
        "session_id",
        "name",
        "request_id",
        "scope",
        "pool_id",
        "state",
        "tps_ewma",
        "ctx_used",
        "ctx_total",
        "ctx_headroom_tokens",
    }
    assert (session["session_id"], session["state"], session["tps_ewma"]) == ("one", "idle", None)
    assert session["ctx_used"] + session["ctx_headroom_tokens"] == session["ctx_total"] == 1024
    assert {"ts", "aggregate_tps", "mean_active_tps"} <= set(answer.json)


async def test_a_stream_goes_on(quick):
    """A document at once and one after each interval, with the present state in it."""
    async with quick.open("/polykv/tps", **STREAM) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        first, second = await documents(answer, 2)
        assert first["sessions"] == []
        assert second["ts"] > first["ts"]
        await quick.ask(CHAT, chat("a", session_id="one"))
        async with asyncio.timeout(20.0):
            while not (await documents(answer, 1))[0]["sessions"]:
                pass
    await until(lambda: quick.tps.readers == 0)


async def test_what_a_session_experiences_is_shown_while_it_does(quick):
    """Its rate is that of the engine's counters; the sum is the aggregate."""
    quick.engine.script.tokens, quick.engine.script.token_delay_s = 2000, 0.005
    running = [
        quick.start(CHAT, chat("x", str(number), session_id=f"s{number}", stream=True)) for number in (0, 1)
    ]

    plane = quick.runtime.plane
    await until(lambda: sum(session.rate.warm for session in plane.sessions) == 2)
    async with quick.open("/polykv/tps", **STREAM) as answer:
        (document,) = await documents(answer, 1)
    shown = [session["tps_ewma"] for session in document["sessions"]]
    assert all(rate > 0 for rate in shown)
    assert document["mean_active_tps"] == pytest.approx(sum(shown) / 2, rel=0.01)
    assert {session["state"] for session in document["sessions"]} == {"running"}
    for task in running:
        task.cancel()


async def test_readers_share_what_they_may_both_see(proxies, monkeypatch):
    """However many they are, one document is made; another key's is another."""
    made = []
    rates = tps.views.rates
    monkeypatch.setattr(tps.views, "rates", lambda *seen: made.append(seen[1]) or rates(*seen))
    monkeypatch.setattr(tps, "SHARED_S", 60.0)
    rig = await proxies(telemetry={"tps_interval_s": 3600.0})
    for name, key in (("mine", "k1"), ("other", "k2")):
        await rig.ask(CHAT, chat(name, session_id=name), Authorization=f"Bearer {key}")
    for name, key in (("mine", "k1"), ("mine", "k1"), ("other", "k2"), ("mine", "k1")):
        async with rig.open("/polykv/tps", Authorization=f"Bearer {key}", **STREAM) as answer:
            (document,) = await documents(answer, 1)
        assert [session["session_id"] for session in document["sessions"]] == [name]
    assert len(made) == len(set(made)) == 2
    await rig.ask("/polykv/tps", Authorization="Bearer k1")
    assert len(made) == 3, "one document is of the present"


async def test_keepalive_comments(proxies, monkeypatch):
    """Between documents that are far apart."""
    monkeypatch.setattr(tps, "HEARTBEAT_S", 0.02)
    rig = await proxies(telemetry={"tps_interval_s": 3600.0})
    async with rig.open("/polykv/tps", **STREAM) as answer:
        async with asyncio.timeout(20.0):
            while not (await answer.content.readline()).startswith(b": ping"):
                pass


async def test_who_sees_what(proxies):
    """A key sees its own sessions, the admin key all; without the admin key, where one is set, nothing."""
    rig = await proxies(admin="boss")
    await rig.ask(CHAT, chat("a", session_id="mine"), Authorization="Bearer k1")
    await rig.ask(CHAT, chat("b", session_id="other"), Authorization="Bearer k2")
    assert (await rig.ask("/polykv/tps")).status == 401
    seen = (await rig.ask("/polykv/tps", X_Polykv_Admin_Key="boss")).json["sessions"]
    assert {session["session_id"] for session in seen} == {"mine", "other"}
    open_rig = await proxies()
    for name, key in (("mine", "k1"), ("other", "k2")):
        await open_rig.ask(CHAT, chat(name, session_id=name), Authorization=f"Bearer {key}")
    seen = (await open_rig.ask("/polykv/tps", Authorization="Bearer k1")).json["sessions"]
    assert [session["session_id"] for session in seen] == ["mine"]


async def test_pages_of_others_are_kept_out(rig):
    """As on every route of ours."""
    assert (await rig.ask("/polykv/tps", Origin="http://evil.example")).status == 403
    assert (await rig.ask("/polykv/tps", method="HEAD")).status == 405


async def test_a_client_that_leaves_is_forgotten(quick):
    """Its stream ends here too."""
    async with quick.open("/polykv/tps", **STREAM) as answer:
        await documents(answer, 1)
        assert quick.tps.readers == 1
    await until(lambda: quick.tps.readers == 0)


async def test_a_reader_that_stalls_is_dropped(proxies, monkeypatch):
    """It gets no more than the sockets hold, its connection ends, and others notice nothing."""
    monkeypatch.setattr(tps, "STALL_S", 0.2)
    rig = await proxies(telemetry={"tps_interval_s": 0.0001})
    for number in range(300):  # a document of some 40 kB
        rig.runtime.plane.sessions.begin("", f"session-{number}", 0.0)
    listener = socket.create_connection(("127.0.0.1", rig.port))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    listener.setblocking(False)
    loop = asyncio.get_running_loop()
    request = f"GET /polykv/tps HTTP/1.1\r\nHost: 127.0.0.1:{rig.port}\r\nAccept: text/event-stream\r\n\r\n"
    await loop.sock_sendall(listener, request.encode())
    await until(lambda: rig.tps.readers == 1)
    stalled = list(rig.edge.connections)
    async with rig.open("/polykv/tps", **STREAM) as answer:
        before = await documents(answer, 1)
        await until(lambda: rig.tps.readers == 1)
        after = await documents(answer, 1)
        assert after[0]["ts"] > before[0]["ts"]
        await until(lambda: not any(connection in rig.edge.connections for connection in stalled))
    listener.close()
    await until(lambda: rig.tps.readers == 0)


async def test_streams_end_when_the_proxy_stops(quick):
    """They would last for ever, and hold the stop up."""
    async with quick.open("/polykv/tps", **STREAM) as answer:
        await documents(answer, 1)
        quick.tps.close()
        async with asyncio.timeout(20.0):
            await answer.read()
    assert quick.tps.readers == 0


def learned(book):
    """All that a book of rates knows, but for the sessions' own rates."""
    names = [name for name in type(book).__slots__ if name != "_slots"]
    values = [copy.copy(getattr(book, name)) for name in names]
    return [*values, [(slot.last, slot.since, slot.tokens, slot.seconds) for slot in book._slots.values()]]


async def test_reading_changes_nothing_that_was_learned(rig):
    """A hundred readings a second of every status document, while nobody else reads the engine."""
    rig.engine.script.tokens, rig.engine.script.token_delay_s = 60, 0.01
    await rig.ask(CHAT, chat("a", session_id="one", stream=True))
    plane = rig.runtime.plane
    await until(lambda: plane.experience.book.decoding_count == 0)
    await asyncio.sleep(0.3)
    plane.on_counters = lambda _: Progress()  # the sampler is silenced: what moves now was moved by readers
    (session,) = plane.sessions
    rates = [getattr(session.rate, name) for name in type(session.rate).__slots__]
    before = learned(plane.experience.book)
    for _ in range(30):
        for path in ("/polykv/tps", "/polykv/sessions", "/slots", "/metrics", "/props", "/polykv/pools"):
            assert (await rig.ask(path)).status == 200
    assert learned(plane.experience.book) == before
    assert [getattr(session.rate, name) for name in type(session.rate).__slots__] == rates
    assert session.rate.tps is not None


async def test_readers_do_not_make_the_proxy_ask_the_engine(rig):
    """The document is made of what is known."""
    await asyncio.sleep(0.2)
    before = len(rig.engine.requests)
    for _ in range(50):
        await rig.ask("/polykv/tps")
    assert len(rig.engine.requests) - before <= 2  # the sampler's own


@pytest.mark.parametrize(
    ("accept", "streamed"),
    [
        ("text/event-stream", True),
        ("application/json;q=0.5, Text/Event-Stream; charset=utf-8", True),
        ("text/event-streams", False),
        ("*/*", False),
    ],
)
async def test_the_media_type_decides(rig, accept, streamed):
    """In any case, among others, and not by a part of a name."""
    async with rig.open("/polykv/tps", Accept=accept) as answer:
        assert (answer.content_type == "text/event-stream") is streamed


async def test_once_is_yes_or_no(rig):
    """As every flag; nobody gets a stream for a word that was not understood."""
    answer = await rig.ask("/polykv/tps?once=TRUE", **STREAM)
    assert (answer.status, answer.error["param"]) == (400, "once")
