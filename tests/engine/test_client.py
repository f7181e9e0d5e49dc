"""Claims about ``engine.client``: every call is bounded, and every failure has a name of ours."""

import asyncio
import json

import pytest
from aiohttp import web

from polykv_proxy.core.stock import SlotLook
from polykv_proxy.core.types import PoolNumber, SlotId, as_tokens
from polykv_proxy.engine import client as client_module
from polykv_proxy.engine.address import EngineAddress
from polykv_proxy.engine.client import EngineClient
from polykv_proxy.errors import BadRequestError, EngineGoneError, NotFoundError, UnavailableError


class Engine:
    """Answers every request with ``status`` and ``body``; ``silent`` does not answer at all."""

    def __init__(self):
        self.status = 200
        self.body = b"{}"
        self.silent = False
        self.dies = False
        self.seen = []
        self.left = asyncio.Event()

    async def handle(self, request):
        """Record the request, then do as told."""
        self.seen.append((request.method, str(request.rel_url), request.headers, await request.read()))
        if self.dies:
            request.transport.abort()
        if self.silent:
            try:
                await asyncio.sleep(3600.0)
            finally:
                self.left.set()
        return web.Response(status=self.status, body=self.body)


@pytest.fixture
async def engine():
    """What is at the other end."""
    return Engine()


@pytest.fixture
async def client(engine, tmp_path):
    """A client of it, over a Unix socket."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    path = tmp_path / "s"
    await web.UnixSite(runner, str(path)).start()
    async with EngineClient(EngineAddress.of_socket(path), "key") as client:
        yield client
    await runner.cleanup()


async def test_the_text_of_tokens(engine, client):
    """One call for all of them."""
    engine.body = b'{"content":" world"}'
    assert await client.text_of(as_tokens([5, 6])) == " world"
    assert [json.loads(body) for *_, body in engine.seen] == [{"tokens": [5, 6]}]


# -- failures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (400, BadRequestError, "engine_refused"),
        (422, BadRequestError, "engine_refused"),
        (404, NotFoundError, "not_found"),
        (401, UnavailableError, "engine_auth"),
        (403, UnavailableError, "engine_auth"),
        (503, UnavailableError, "engine_refused"),
        (500, UnavailableError, "engine_failed"),
        (302, UnavailableError, "engine_failed"),
    ],
)
async def test_every_status_has_its_error(engine, client, status, kind, code):
    """With the engine's sentence in it."""
    engine.status, engine.body = status, b'{"error":{"message":"because"}}'
    with pytest.raises(kind, match="because") as caught:
        await client.get("/x")
    assert caught.value.code == code


async def test_an_engine_that_loads_says_nothing_of_what_it_is_asked(engine, client):
    """It is another one than was meant, and is to be asked again."""
    engine.status = 503
    engine.body = b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}'
    with pytest.raises(UnavailableError) as caught:
        await client.get("/x")
    assert (caught.value.code, caught.value.retry_after_s) == ("engine_loading", 2)


async def test_a_slot_with_media_cannot_be_a_pool(engine, client):
    """That is the caller's mistake, and no failure of the engine."""
    engine.status, engine.body = 501, b'{"error":{"message":"a pool holds text only"}}'
    with pytest.raises(BadRequestError, match="text only"):
        await client.snapshot(PoolNumber(0), SlotId(0), None, None)
    engine.status = 404
    with pytest.raises(NotFoundError):
        await client.snapshot(PoolNumber(0), SlotId(0), None, None)


@pytest.mark.parametrize(
    "body", [b"", b"nonsense", b"[]", b"null", b'{"tokens":[99999999999]}', b'{"n_cells_freed":"x"}']
)
async def test_an_answer_that_makes_no_sense_is_an_unavailable_engine(engine, client, body):
    """On every call that reads one; no other exception escapes."""
    engine.body = body
    calls = [
        client.counters(),
        client.tokenize("x"),
        client.count_tokens("/c", b"{}"),
        client.materialize(PoolNumber(0), as_tokens([1]), SlotId(0), 1),
        client.release(PoolNumber(0)),
        client.describe(),
        client.slots() if body != b"[]" else client.counters(),
        client.render(b"{}"),
        client.count("/c", b"{}"),
        client.prefill(as_tokens([1]), SlotId(0)),
    ]
    for call in calls:
        with pytest.raises(UnavailableError) as caught:
            await call
        assert caught.value.code == "engine_protocol"


async def test_an_engine_that_is_not_there_is_gone(tmp_path):
    """Nobody listens."""
    async with EngineClient(EngineAddress.of_socket(tmp_path / "nobody"), None) as client:
        with pytest.raises(EngineGoneError):
            await client.get("/x")


async def test_an_engine_that_dies_is_gone(engine, client):
    """The connection ended without an answer."""
    engine.dies = True
    with pytest.raises(EngineGoneError):
        await client.counters()


async def test_a_silent_engine_is_not_waited_for_for_ever(engine, client):
    """A timeout of its own code."""
    engine.silent = True
    with pytest.raises(UnavailableError) as caught:
        await client.get("/x", timeout_s=0.05)
    assert caught.value.code == "engine_timeout"


async def test_a_tcp_engine_is_reached_by_its_url(unused_tcp_port):
    """Nobody listens there either; the address is in use."""
    address = EngineAddress.parse(f"http://127.0.0.1:{unused_tcp_port}")
    async with EngineClient(address, None) as client:
        with pytest.raises(EngineGoneError):
            await client.slots()


async def test_leaving_without_entering_is_no_error():
    """A client that was never opened has nothing to close."""
    await EngineClient(EngineAddress.parse("http://127.0.0.1:1"), None).__aexit__()


# -- calls ------------------------------------------------------------------------------------------------


async def test_calls_carry_the_engines_key(engine, client):
    """As a bearer token."""
    await client.get("/x")
    assert engine.seen[0][2]["Authorization"] == "Bearer key"


async def test_a_pool_is_computed_as_told(engine, client):
    """Tokens, slot and tag; there is no limit on how long it takes, but leaving stops it."""
    engine.body = b'{"uid":7,"n_tokens":2,"timings":{"cache_n":0,"prompt_n":2,"prompt_ms":1.5}}'
    made = await client.materialize(PoolNumber(3), as_tokens([1, 2]), SlotId(1), 9)
    assert made.uid == 7
    method, url, _, body = engine.seen[0]
    assert (method, url) == ("POST", "/polykv/engine/pools/3?action=materialize")
    assert json.loads(body) == {"tokens": [1, 2], "id_slot": 1, "tag": 9}
    engine.silent = True
    task = asyncio.get_running_loop().create_task(
        client.materialize(PoolNumber(3), as_tokens([1]), SlotId(1), 9)
    )
    while len(engine.seen) < 2:
        await asyncio.sleep(0.001)
    task.cancel()
    async with asyncio.timeout(20.0):
        await engine.left.wait()


async def test_releasing_what_is_gone_frees_nothing(engine, client):
    """It is no error."""
    engine.body = b'{"id_pool":0,"n_cells_freed":5}'
    assert await client.release(PoolNumber(0)) == 5
    engine.status = 404
    assert await client.release(PoolNumber(0)) == 0


async def test_tasks_are_cancelled_by_slot_and_number(engine, client):
    """Both, so that another task in that slot is left alone."""
    await client.cancel(SlotId(2), 55)
    assert engine.seen[0][1] == "/polykv/engine/slots/2?action=cancel&id_task=55"


async def test_prompts_are_tokenized_as_a_completion_sees_them(engine, client):
    """With special tokens, both added and parsed; a body to count goes as it is."""
    engine.body = b'{"tokens":[1,2]}'
    assert list(await client.tokenize("x")) == [1, 2]
    assert json.loads(engine.seen[0][3]) == {"content": "x", "add_special": True, "parse_special": True}
    assert list(await client.count_tokens("/v1/x", b'{"raw" : 1}')) == [1, 2]
    assert engine.seen[1][1::2] == ("/v1/x?tokens=1", b'{"raw" : 1}')


async def test_a_prompt_may_be_shown_as_text(engine, client):
    """From so many bytes on; the body goes as it is."""
    engine.body = b'{"text":"x","tokens":[-1,2]}'
    shown = await client.prompt("/v1/x", b'{"raw" : 1}', text_from=9)
    assert (shown.text, list(shown.tokens)) == ("x", [-1, 2])
    assert engine.seen[0][1::2] == ("/v1/x?tokens=1&text=9", b'{"raw" : 1}')


async def test_a_slot_action_passes_as_it_is(engine, client):
    """Status and body are the engine's, also where it refuses."""
    engine.status, engine.body = 400, b"no"
    assert await client.slot_action(SlotId(1), "action=save", b"{}") == (400, b"no")
    assert engine.seen[0][1] == "/slots/1?action=save"


async def test_a_completion_for_a_test_is_one_token(engine, client):
    """Its headers are the test's, and a refusal is an error."""
    engine.body = b'{"timings":{"cache_n":3}}'
    answer = await client.complete(as_tokens([1, 2]), {"X-PolyKV-Slot": "0"})
    assert answer["timings"]["cache_n"] == 3
    assert json.loads(engine.seen[0][3])["n_predict"] == 1
    assert engine.seen[0][2]["X-PolyKV-Slot"] == "0"
    engine.status = 500
    with pytest.raises(UnavailableError):
        await client.complete(as_tokens([1]), {})


async def test_slots_of_any_engine_are_read(engine, client):
    """With what runs there, and what ran last."""
    engine.body = b'[{"id":0,"is_processing":true,"id_task":4},{"id":1,"is_processing":false}]'
    one, two = await client.slots()
    assert (one.is_processing, one.id_task, two.is_processing) == (True, 4, False)


async def test_slots_are_moved_to_files_and_back(engine, client):
    """By a name in the engine's folder; an adapter list and an erased slot on the way."""
    engine.body = b'{"n_saved":5,"n_written":50}'
    assert (await client.save_slot(SlotId(1), "f.bin")).n_tokens == 5
    await client.restore_slot(SlotId(2), "f.bin")
    await client.erase_slot(SlotId(3))
    assert [(method, path) for method, path, _, _ in engine.seen] == [
        ("POST", "/slots/1?action=save"),
        ("POST", "/slots/2?action=restore"),
        ("POST", "/slots/3?action=erase"),
    ]
    assert json.loads(engine.seen[1][3]) == {"filename": "f.bin"}
    engine.body = b'[{"id":0}]'
    assert len(await client.adapters()) == 1


async def test_pools_are_moved_to_files_and_back(engine, client):
    """With the parent whose cells a child takes up again."""
    engine.body = b'{"id_pool":2,"uid":9,"n_tokens":5,"n_written":50,"filename":"f.bin"}'
    saved = await client.save_pool(PoolNumber(2), "f.bin")
    assert (saved.n_tokens, saved.n_bytes) == (5, 50)
    restored = await client.restore_pool(PoolNumber(2), "f.bin", PoolNumber(1), 3)
    assert (restored.uid, restored.n_tokens) == (9, 5)
    await client.restore_pool(PoolNumber(2), "f.bin", None, 0)
    assert [path for _, path, _, _ in engine.seen] == [
        "/polykv/engine/pools/2?action=save",
        "/polykv/engine/pools/2?action=restore",
        "/polykv/engine/pools/2?action=restore",
    ]
    assert json.loads(engine.seen[1][3]) == {"filename": "f.bin", "parent": 1, "n_parent": 3}
    assert json.loads(engine.seen[2][3]) == {"filename": "f.bin"}
    engine.body = b'[{"id":0,"path":"l.gguf","scale":0.5}]'
    assert [(each.path, each.scale) for each in await client.adapters()] == [("l.gguf", 0.5)]


async def test_a_prompt_is_computed_in_a_slot(engine, client):
    """Nothing is generated, and what the slot has in common with it is used."""
    engine.body = b'{"timings":{"cache_n":1,"prompt_n":2,"prompt_ms":3.5}}'
    assert (await client.prefill(as_tokens([1, 2, 3]), SlotId(1))).prompt_n == 2
    sent = json.loads(engine.seen[0][3])
    assert (sent["prompt"], sent["n_predict"], sent["id_slot"], sent["cache_prompt"]) == (
        [1, 2, 3],
        0,
        1,
        True,
    )
    engine.body = b'{"timings":{"cache_n":3}}'
    await client.complete(as_tokens([1]), {}, slot=SlotId(1))
    assert json.loads(engine.seen[1][3])["id_slot"] == 1


async def test_an_engine_is_described_by_all_that_changes_kv(engine, client, monkeypatch):
    """Patched or not, with a template and a model in its identity."""
    info = {"version": 1, "epoch": "e", "build_info": "b", "n_slots": 1, "max_pools": 2, "n_cells": 3}
    info |= {"n_ctx_slot": 4, "bytes_per_cell": 5, "type_k": "f16", "type_v": "q8_0"}
    answers = {
        "/props": {"model_path": "m", "chat_template": "t", "total_slots": 6},
        "/polykv/engine": info,
        "/v1/models": {"data": [{"meta": {"n_vocab": 7}}]},
    }

    async def get(path):
        if answers[path] is None:
            raise NotFoundError(path)
        return json.dumps(answers[path]).encode()

    monkeypatch.setattr(client, "get", get)
    facts, patched, identity = await client.describe()
    assert (facts.slots, facts.max_pools, patched) == (1, 2, True)
    assert (identity["type_v"], identity["n_vocab"], identity["model_path"]) == ("q8_0", "7", "m")
    answers["/polykv/engine"] = None
    facts, patched, identity = await client.describe()
    assert (facts.slots, facts.max_pools, patched) == (6, 0, False)
    assert "type_k" not in identity


def test_reads_are_bounded():
    """A call that costs the engine nothing may not take long."""
    assert 0 < client_module.CONTROL_TIMEOUT_S < client_module.TOKENIZE_TIMEOUT_S


async def test_a_stock_engines_slots_are_read(engine, client):
    """Through its public route; what is no such list is not understood."""
    engine.body = b'[{"id":1,"is_processing":true,"id_task":4,"next_token":[{"n_decoded":2}]}]'
    assert await client.stock_slots() == [SlotLook(slot=SlotId(1), working=True, task=4, generated=2)]
    assert engine.seen[-1][:2] == ("GET", "/slots")
    engine.body = b'[{"id":"x"}]'
    with pytest.raises(UnavailableError) as caught:
        await client.stock_slots()
    assert caught.value.code == "engine_protocol"
