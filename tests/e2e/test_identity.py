"""Bytes that must not change: a patched engine with pools off, and the proxy in front of any engine."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from e2e.conversation import REQUESTS
from e2e.harness import bare_engine, serve
from e2e.masking import kept_headers, masked_body

if TYPE_CHECKING:
    from pathlib import Path

    from e2e.harness import Answer, Http

ARGS = ("-c", "1024", "--parallel", "2", "--kv-unified", "--slots", "--metrics", "--no-ui")


async def conversation(http: Http) -> list[Answer]:
    """Send the fixed requests one at a time."""
    return [await http(method, path, body) for method, path, body in REQUESTS]


async def test_patched_engine_without_pools_answers_like_stock(
    patched: Path, stock: Path, smollm: Path, tmp_path: Path
) -> None:
    """ENG-12: with pools off the patch changes no status, no header and no byte of any answer."""
    answers = []
    for name, binary in (("stock", stock), ("patched", patched)):
        async with bare_engine(binary, smollm, tmp_path / name, *ARGS) as http:
            answers.append(await conversation(http))
            assert (await http.get("/polykv/engine")).status == 404
            ignored = {"X-PolyKV-Slot": "77", "X-PolyKV-Attach": "nonsense", "X-PolyKV-Tag": "x"}
            assert (await http.post("/completion", {"prompt": "a", "n_predict": 1}, ignored)).status == 200
    for (method, path, _), one, other in zip(REQUESTS, *answers, strict=True):
        assert one.status == other.status, (method, path)
        assert kept_headers(one.headers) == kept_headers(other.headers), (method, path)
        assert masked_body(one.body) == masked_body(other.body), (method, path)


async def test_proxy_in_front_changes_no_byte(stock: Path, smollm: Path, tmp_path: Path) -> None:
    """PROD-1: a client that uses nothing of ours gets from the proxy what the engine itself answers.

    Only an overflow and each slot get figures of ours, behind all that the engine said.
    """
    async with bare_engine(stock, smollm, tmp_path / "direct", *ARGS) as http:
        direct = await conversation(http)
    async with (
        bare_engine(stock, smollm, tmp_path / "behind", *ARGS) as engine,
        serve(tmp_path, "--engine-url", engine.base) as served,
    ):
        proxied = await conversation(served.http)
    overflows = 0
    for (method, path, _), one, other in zip(REQUESTS, direct, proxied, strict=True):
        assert one.status == other.status, (method, path, other.body)
        assert kept_headers(one.headers) == kept_headers(other.headers), (method, path)
        body = re.sub(rb',"opencoti":\{"required_tokens":[^}]*\}', b"", other.body)
        overflows += body != other.body
        if path == "/slots":
            body = re.sub(rb',"opencoti":\{"pool_id":[^}]*\}', b"", body)
        assert masked_body(one.body) == masked_body(body), (method, path)
    assert overflows == 1


async def test_proxy_reports_relay_on_an_engine_without_pools(
    stock: Path, smollm: Path, tmp_path: Path
) -> None:
    """PROD-3: attached to a stock engine, the proxy finds out by itself, says why, and serves."""
    async with (
        bare_engine(stock, smollm, tmp_path / "engine", *ARGS) as engine,
        serve(tmp_path, "--engine-url", engine.base) as served,
    ):
        ours = (await served.http.get("/props")).json["opencoti"]
        assert ours["capability"] == "relay"
        assert "not patched" in ours["capability_reason"]
        assert ours["features"] == []
        refused = await served.http.post("/polykv/pools", {"prompt": "x " * 100})
        assert refused.status == 501
        assert refused.json["error"]["code"] == "polykv_disabled"
        body = {"prompt": "a", "n_predict": 2, "pool_id": "some"}
        answer = await served.http.post("/completion", body)
        assert answer.status == 200
        assert answer.json["opencoti"]["pool_unknown"] is True


async def test_proxy_finds_the_patch_behind_a_url(patched: Path, smollm: Path, tmp_path: Path) -> None:
    """PROD-3: attached to a patched engine that others started, pools work without any setting."""
    args = (*ARGS, "--polykv-max-pools", "2")
    async with (
        bare_engine(patched, smollm, tmp_path / "engine", *args) as engine,
        serve(tmp_path, "--engine-url", engine.base) as served,
    ):
        assert "polykv_pools_v1" in (await served.http.get("/props")).json["opencoti"]["features"]
        pool = (await served.http.post("/polykv/pools", {"prompt": "word " * 60})).json
        body = {"prompt": "word " * 60 + "and more", "n_predict": 1, "pool_id": pool["pool_id"]}
        answer = (await served.http.post("/completion", body)).json
        assert answer["timings"]["cache_n"] >= pool["prefix_len"] - 1
