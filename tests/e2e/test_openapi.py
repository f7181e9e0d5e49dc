"""OPS-8: a real proxy answers on its own routes as the OpenAPI document says, on engines of both kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from api import contract
from api.rig import Answer

from e2e.harness import serve
from e2e.test_pools import SYSTEM
from e2e.tiny_models import llama
from polykv_proxy.api.operations import OPERATIONS

if TYPE_CHECKING:
    from pathlib import Path

    from e2e.harness import Served


class Asker:
    """Asks a proxy, holds each answer to the document, and notes what was asked."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.asked: set[tuple[str, str]] = set()

    async def __call__(self, method: str, path: str, body: Any = None, **names: str) -> Any:
        """One request to the route of a template, with the names that stand in it."""
        plain = path.partition("?")[0]
        self.asked.add((method.lower(), plain))
        target = path.format(**{name: quote(value, safe="") for name, value in names.items()})
        found = await self._served.http(method, target, {} if body is None and method == "POST" else body)
        contract.check(method, target, Answer(found.status, found.headers, found.body))
        assert found.status in (200, 201), (target, found.body)
        return found.json


@pytest.mark.parametrize("kind", ["patched", "stock"])
async def test_every_route_answers_as_told(
    patched: Path, stock: Path, smollm: Path, tmp_path: Path, kind: str
) -> None:
    """Each operation of the document, with something there to tell of; a stock engine's KV is not on disk."""
    env = {"POLYKV_ENGINE__STOCK": "true", "POLYKV_ENGINE__BINARY": str(stock)} if kind == "stock" else {}
    llama(tmp_path / "llama.gguf", smollm)
    sizes = ("--parallel", "2", "--ctx-size", "4096", "--max-pools", "4")
    async with serve(tmp_path, "--model", str(tmp_path / "llama.gguf"), *sizes, env=env) as served:
        ask = Asker(served)
        root = await ask("POST", "/polykv/pools", {"prompt": SYSTEM, "pin": True})
        longer = (await ask("POST", "/polykv/tokenize", {"prompt": SYSTEM + " And more."}))["tokens"]
        one = {"pool_id": root["pool_id"]}
        child = await ask("POST", "/polykv/pools/{pool_id}/fork", {"tokens": longer}, **one)
        two = {"pool_id": child["pool_id"]}
        for name in ("run/a", "b"):
            body = {"prompt": SYSTEM + f" I am {name}." * 20, "max_tokens": 2, "session_id": name, **one}
            assert (await served.http.post("/v1/completions", body)).status == 200
        for path in ("/polykv/pools", "/polykv/sessions", "/polykv/tps?once=1", "/polykv/advice", "/health"):
            await ask("GET", path)
        for path in ("/props", "/slots", "/polykv/cache", "/polykv/openapi.json"):
            await ask("GET", path)
        for path in ("/polykv/capacity", "/polykv/admission"):
            await ask("GET", path)
        request = (await ask("GET", "/polykv/requests"))["requests"][0]
        await ask("GET", "/polykv/requests/{request_id}", request_id=request["request_id"])
        await ask("GET", "/polykv/pools/{pool_id}", **one)
        await ask("GET", "/polykv/pools/{pool_id}/capacity?expected_tokens=9", **one)
        await ask("POST", "/polykv/pools/{pool_id}/admission", {"target_tps_per_session": 1}, **one)
        in_force = await ask("GET", "/polykv/pools/{pool_id}/admission", **one)
        assert in_force["effective"]["target_tps_per_session"] == 1
        await ask("POST", "/polykv/pools/{pool_id}/reserve", {"sessions": 1, "ttl_s": 1}, **one)
        await served.until(lambda: idle(served))
        await ask("POST", "/polykv/sessions/{session_id}/migrate", two, session_id="b")
        kept = await ask("POST", "/polykv/sessions/{session_id}/close?keep=1", session_id="run/a")
        assert kept["kept"] == (kind == "patched")
        if kept["kept"]:
            assert (await ask("GET", "/polykv/cache/{key}", key="run"))["entries"]
            await ask("DELETE", "/polykv/cache/{key}", key="run/a")
        await ask("POST", "/slots/{id_slot}?action=erase", id_slot="0")
        await ask("POST", "/polykv/pools/{pool_id}/evict", **two)
        await ask("POST", "/polykv/pools/{pool_id}/unpin", **one)
        await ask("POST", "/polykv/pools/{pool_id}/flush", **one)
        await ask("POST", "/polykv/pools/{pool_id}/pin", **one)
        await ask("POST", "/polykv/pools/{pool_id}/release", **two)
        await ask("DELETE", "/polykv/pools/{pool_id}", **one)
        told = {(each.method, each.path) for each in OPERATIONS}
        of_files = {("get", "/polykv/cache/{key}"), ("delete", "/polykv/cache/{key}")}
        assert ask.asked == told - (of_files if kind == "stock" else set())


async def idle(served: Served) -> bool:
    """Nothing runs."""
    sessions = (await served.http.get("/polykv/sessions")).json["sessions"]
    return all(each["state"] == "idle" for each in sessions)
