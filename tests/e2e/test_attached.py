"""OPS-6: an engine that runs as the unit would run it, and a proxy that attaches to its socket."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from e2e.harness import LOOK_S, PATIENCE_S, Http, serve
from e2e.test_pools import SYSTEM
from e2e.tiny_models import llama

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

UNIT = Path(__file__).parents[2] / "deploy" / "polykv-engine@.service"
CHAT = "/v1/chat/completions"


@asynccontextmanager
async def unit(folder: Path, model: Path, **variables: str) -> AsyncIterator[tuple[Any, Http, Path]]:
    """The unit's command in the folders that systemd would make for instance 0, as its own user would."""
    lines = UNIT.read_text().splitlines()
    (command,) = [line.removeprefix("ExecStart=") for line in lines if line.startswith("ExecStart=")]
    (mask,) = [line.removeprefix("UMask=") for line in lines if line.startswith("UMask=")]
    (run,) = [
        line.removeprefix("RuntimeDirectory=") for line in lines if line.startswith("RuntimeDirectory=")
    ]
    command, run = (text.replace("%t", str(folder)).replace("%i", "0") for text in (command, run))
    runtime, state = folder / run, folder / "state-of-the-engine"
    for made in (runtime, state):
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "RUNTIME_DIRECTORY": str(runtime),
        "STATE_DIRECTORY": str(state),
        "POLYKV_ENGINE__MODEL": str(model),
        "POLYKV_ENGINE__PARALLEL": "2",
        "POLYKV_ENGINE__CTX_SIZE": "4096",
        "POLYKV_ENGINE__MAX_POOLS": "2",
        **variables,
    }
    program, *words = command.split()
    assert program.endswith("/bin/polykv-proxy")
    with (folder / "engine.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "polykv_proxy", *words),
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            umask=int(mask, 8),
        )
    socket = Path(words[-1])
    try:
        yield process, Http("http://localhost", str(socket)), socket
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE_S):
                await process.wait()


def quick_model(folder: Path, smollm: Path) -> Path:
    """One that answers with noise, at once."""
    llama(folder / "llama.gguf", smollm)
    return folder / "llama.gguf"


async def test_a_proxy_attaches_to_the_units_engine(patched: Path, smollm: Path, tmp_path: Path) -> None:
    """Pools work, the socket is its user's alone, and the engine outlives its proxy; one SIGTERM ends it."""
    url = f"unix:{tmp_path}/polykv-engine/0/engine.sock"
    chat = {
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello."}],
        "max_tokens": 4,
        "opencoti": {},
    }
    model = quick_model(tmp_path, smollm)
    async with unit(tmp_path, model, POLYKV_ENGINE__BINARY=str(patched)) as (process, engine, socket):
        async with serve(tmp_path / "one", "--engine-url", url) as served:
            assert (socket.stat().st_mode & 0o077) == 0
            ours = (await served.http.get("/props")).json["opencoti"]
            assert (ours["capability"], ours["max_pools"]) == ("zero_copy", 2)
            assert ours["durable_kv"]["state"] == "off"
            assert "did not start this engine" in ours["durable_kv"]["reason"]
            wanted = {"messages": chat["messages"][:1]}
            pool = (await served.http.post("/polykv/pools", wanted)).json
            answer = await served.http.post(CHAT, chat)
            assert answer.json["opencoti"]["n_pool_shared"] == pool["prefix_len"]
            assert answer.json["timings"]["cache_n"] == pool["prefix_len"]
        assert process.returncode is None
        # another proxy finds the model loaded; what the first one left is nobody's
        before = (await engine.get("/polykv/engine/counters")).json
        assert len(before["pools"]) == 1
        async with serve(tmp_path / "two", "--engine-url", url) as served:
            after = (await engine.get("/polykv/engine/counters")).json
            assert (after["epoch"], after["pools"]) == (before["epoch"], [])
            again = (await served.http.post("/polykv/pools", wanted)).json
            assert again["prompt_tokens_computed"] == again["prefix_len"] == pool["prefix_len"]
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0


async def test_an_attached_engine_may_die_and_come_back(patched: Path, smollm: Path, tmp_path: Path) -> None:
    """Requests wait for it, or hear why not; its pools are computed again under the same ids."""
    url = f"unix:{tmp_path}/polykv-engine/0/engine.sock"
    env = {"POLYKV_QUEUE__MAX_WAIT_S": "60"}
    body = {"prompt": SYSTEM + "Hello.", "n_predict": 2, "opencoti": {}}
    binary = {"POLYKV_ENGINE__BINARY": str(patched)}
    model = quick_model(tmp_path, smollm)
    async with unit(tmp_path, model, **binary) as (process, _, _):
        async with serve(tmp_path / "proxy", "--engine-url", url, env=env) as served:
            pool = (await served.http.post("/polykv/pools", {"prompt": SYSTEM})).json
            process.send_signal(signal.SIGKILL)
            await process.wait()

            async def noticed() -> bool:
                health = await served.http.get("/health")
                assert (health.status, health.headers["Retry-After"] != "") == (503, True)
                return "the engine is down: cannot be reached" in health.json["error"]["message"]

            await served.until(noticed)
            waiting = asyncio.create_task(served.http.post("/completion", body))
            await asyncio.sleep(LOOK_S)
            async with unit(tmp_path, model, **binary):
                answer = await waiting
                assert answer.status == 200

                async def back() -> bool:
                    listed = (await served.http.get("/polykv/pools")).json["pools"]
                    return [(each["pool_id"], each["residency"]) for each in listed] == [
                        (pool["pool_id"], "resident")
                    ]

                await served.until(back)
                shared = (await served.http.post("/completion", body)).json
                assert shared["timings"]["cache_n"] >= pool["prefix_len"] - 1
