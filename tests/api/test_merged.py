"""Claims about ``api.merged``: several engines answer as one."""

import asyncio
import json

import pytest

from polykv_proxy.api import status


async def test_health_is_good_while_one_engine_serves(proxies):
    """With a list of all; nothing is asked of the engines."""
    rig = await proxies(models=("a", "b"))
    rig.down()
    seen = [len(engine.of("/health")) for engine in rig.engines]
    answer = await rig.ask("/health")
    assert answer.status == 200
    assert answer.json["status"] == "ok"
    first, second = answer.json["engines"]
    assert (first["name"], first["state"], first["serving"], first["reason"]) == (
        "engine-0",
        "down",
        False,
        "test",
    )
    assert (second["serving"], second["models"], second["capability"]) == (True, ["b"], "zero_copy")
    assert [len(engine.of("/health")) for engine in rig.engines] == seen


async def test_without_any_engine_health_is_what_llama_server_says_while_it_loads(proxies):
    """Clients wait for these very words."""
    rig = await proxies(models=("a", "b"))
    for engine in rig.fleet:
        engine.plane.on_engine_down()
    answer = await rig.ask("/health")
    assert (answer.status, answer.error["message"]) == (503, "Loading model")
    assert answer.headers["Retry-After"] == "2"


async def test_the_health_of_an_engine_that_is_named(proxies):
    """Its own answer while it serves, however the others are, and that it does not while it does not."""
    rig = await proxies(models=("a", "b"))
    rig.down()
    for path in ("/health", "/v1/health"):
        assert (await rig.ask(f"{path}?engine=engine-1")).body == b'{"status": "ok"}'
        answer = await rig.ask(f"{path}?engine=engine-0")
        assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
        assert (await rig.ask(f"{path}?engine=no")).error["code"] == "no_such_engine"
        assert "engines" in (await rig.ask(f"{path}?model=a")).json
    rig.engines[1].broken["/health"] = (503, b'{"error":{"message":"Loading model"}}')
    assert (await rig.ask("/health?engine=engine-1")).status == 503


async def test_the_health_of_one_engine_is_its_own_answer(rig):
    """Byte for byte."""
    assert (await rig.ask("/health")).body == b'{"status": "ok"}'


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
async def test_models_are_listed_together_each_once(proxies, path):
    """Values that we do not know stay as they are."""
    rig = await proxies(models=("a", "b", "a"))
    raw = b'{"object":"list","data":[{"id":"b","meta":{"n":1e400}}],"models":[{"name":"b"}]}'
    rig.engines[1].broken[path] = (200, raw)
    answer = await rig.ask(path)
    assert answer.status == 200
    assert b'{"id":"b","meta":{"n":1e400}}' in answer.body
    document = json.loads(answer.body)
    assert document["object"] == "list"
    assert [model["id"] for model in document["data"]] == ["a", "b"]
    assert document["models"] == [{"name": "b"}]


async def test_models_of_engines_that_do_not_answer_are_left_out(proxies):
    """What is not understood, too; a refusal passes only if there is nothing else to say."""
    rig = await proxies(models=("a", "b"))
    rig.engines[0].broken["/v1/models"] = (200, b"[]")
    assert [model["id"] for model in (await rig.ask("/v1/models")).json["data"]] == ["b"]
    rig.engines[0].broken["/v1/models"] = (401, b'{"error":{"message":"Invalid API Key"}}')
    assert [model["id"] for model in (await rig.ask("/v1/models")).json["data"]] == ["b"]
    rig.engines[1].broken["/v1/models"] = (401, b'{"error":{"message":"Invalid API Key"}}')
    answer = await rig.ask("/v1/models", Authorization="Bearer x")
    assert (answer.status, answer.error["message"]) == (401, "Invalid API Key")
    assert rig.engines[0].requests[-1].path != "/polykv/engine"
    assert rig.engines[0].of("/v1/models")[-1].header("authorization") == "Bearer x"


async def test_an_engine_that_hangs_holds_nobody_up(proxies, monkeypatch):
    """It is waited for only so long, and the others meanwhile."""
    monkeypatch.setattr(status, "CONTROL_TIMEOUT_S", 0.1)
    rig = await proxies(models=("a", "b", "c"))
    for engine in rig.engines[:2]:
        engine.slow["/v1/models"] = asyncio.Event()
    assert [model["id"] for model in (await rig.ask("/v1/models")).json["data"]] == ["c"]
    for engine in rig.engines[:2]:
        engine.slow["/v1/models"].set()


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/v1/models", "/models", "/metrics"])
async def test_a_head_is_what_the_get_is(proxies, path):
    """Without its body: whoever probes with it hears of all engines, and waits for none that is down."""
    rig = await proxies(models=("a", "b"))
    rig.down()
    seen = len(rig.engines[0].of(path))
    got, told = await rig.ask(path), await rig.ask(path, method="HEAD")
    assert (got.status, told.status, told.body) == (200, 200, b"")
    if path != "/metrics":
        assert told.headers["Content-Length"] == got.headers["Content-Length"]
    assert len(rig.engines[0].of(path)) == seen


async def test_a_query_that_names_no_engine_asks_all_for_their_models(proxies):
    """Whatever else it says."""
    rig = await proxies(models=("a", "b"))
    rig.down()
    assert [model["id"] for model in (await rig.ask("/v1/models?x=1")).json["data"]] == ["b"]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/props", "/slots"])
async def test_one_engine_that_hangs_is_waited_for_shortly(rig, monkeypatch, path):
    """Its status is 503 then, not silence."""
    monkeypatch.setattr(status, "CONTROL_TIMEOUT_S", 0.1)
    rig.engine.slow[path] = hang = asyncio.Event()
    async with asyncio.timeout(10):
        answer = await rig.ask(path)
    hang.set()
    assert (answer.status, answer.error["code"]) == (503, "engine_timeout")


async def test_models_of_nobody(proxies):
    """All engines are down: the client may ask again."""
    rig = await proxies(models=("a", "b"))
    for engine in rig.fleet:
        engine.plane.on_engine_down()
    answer = await rig.ask("/v1/models")
    assert (answer.status, answer.error["code"]) == (503, "engine_loading")


async def test_one_engines_models_can_be_asked_for(proxies):
    """A query names it; then the answer is that engine's own."""
    rig = await proxies(models=("a", "b"))
    answer = await rig.ask("/v1/models?engine=engine-1")
    assert [model["id"] for model in answer.json["data"]] == ["b"]
