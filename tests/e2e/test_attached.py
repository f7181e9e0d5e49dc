"""OPS-6: an engine that runs as the unit would run it, and a proxy that attaches to its socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from e2e.harness import LOOK_S, PATIENCE_S, Http, Served, bare_engine, serve
from e2e.test_durable import QUICK, ask, saved, state, text, tokens_of
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
    (state,) = [line.rpartition("=")[2] for line in lines if "POLYKV_STATE_DIR=" in line]
    command, run, state = (
        text.replace("%t", str(folder)).replace("%i", "0").replace("%S", str(folder / "lib"))
        for text in (command, run, state)
    )
    runtime, shared = folder / run, folder / "lib" / "polykv-proxy"
    for made in (runtime, shared):
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "RUNTIME_DIRECTORY": str(runtime),
        "STATE_DIRECTORY": str(shared),
        "POLYKV_STATE_DIR": state,
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
            assert (ours["durable_kv"]["state"], ours["durable_kv"]["reason"]) == ("on", None)
            wanted = {"messages": chat["messages"][:1]}
            pool = (await served.http.post("/polykv/pools", wanted)).json
            answer = await served.http.post(CHAT, chat)
            assert answer.json["opencoti"]["n_pool_shared"] == pool["prefix_len"]
            assert answer.json["timings"]["cache_n"] == pool["prefix_len"]
        assert process.returncode is None
        # another proxy finds the model loaded; one that saves nothing computes all anew
        before = (await engine.get("/polykv/engine/counters")).json
        assert len(before["pools"]) == 1
        off = {"POLYKV_DURABLE__ENABLED": "false"}
        async with serve(tmp_path / "two", "--engine-url", url, env=off) as served:
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


URL = "unix:{}/polykv-engine/0/engine.sock"
SEPARATE = ("--parallel", "2", "--ctx-size", "4096", "--max-pools", "2")


async def remembered(served: Served, pool: dict[str, Any], prompt: str) -> str:
    """Go on with a conversation on its pool, both of an earlier proxy or engine; returns the longer prompt.

    Nothing of either may have been computed again but the end of the prompt.
    """
    computed = await served_computed(served)
    longer = f"{prompt} {text(len(prompt), 40)}"  # enough to be saved again
    (listed,) = (await served.http.get("/polykv/pools")).json["pools"]
    assert (listed["pool_id"], listed["residency"]) == (pool["pool_id"], "resident")
    past, whole = [len(await tokens_of(served, each)) for each in (prompt, longer)]
    answer = await ask(served, "mine", longer, opencoti={})
    assert answer["timings"]["cache_n"] >= past - 1
    assert answer["opencoti"]["n_pool_shared"] == pool["prefix_len"]
    assert await served_computed(served) - computed == answer["timings"]["prompt_n"] <= whole - past + 1
    assert (await served.http.get("/polykv/pools")).json["unattributed_cells"] == 0
    return longer


async def served_computed(served: Served) -> int:
    """Prompt tokens that the engine at the unit's socket computed so far."""
    return sum(slot["n_prompt_total"] for slot in (await served.counters())["slots"])


@asynccontextmanager
async def attached(folder: Path, name: str, url: str, **more: Any) -> AsyncIterator[Served]:
    """A proxy at the unit's engine; it saves early, so that it may be killed."""
    async with serve(folder / name, "--engine-url", url, **({"env": QUICK} | more)) as served:
        served.engine = Http("http://localhost", url.removeprefix("unix:"))
        yield served


async def test_kv_of_the_units_engine_outlives_both(patched: Path, smollm: Path, tmp_path: Path) -> None:
    """DUR-3, DUR-4, DUR-6 behind a unit: either is restarted or killed, and nothing is computed again."""
    url, model = URL.format(tmp_path), quick_model(tmp_path, smollm)
    binary = {"POLYKV_ENGINE__BINARY": str(patched), "POLYKV_ENGINE__CTX_SIZE": "2048"}
    binary["POLYKV_ENGINE__PARALLEL"] = "3"
    shared = text(1, 40)
    prompt = f"{shared} {text(2, 30)}"
    async with unit(tmp_path, model, **binary) as (process, engine, _):
        async with attached(tmp_path, "one", url) as served:
            pool = (await served.http.post("/polykv/pools", {"prompt": shared, "pin": True})).json
            await ask(served, "mine", prompt)
            epoch = (await served.counters())["epoch"]
        # stopped, and another begins: the engine is the same, and full of what others left in a slot
        assert process.returncode is None
        filling = await engine.post("/completion", {"prompt": text(5, 325), "n_predict": 1, "id_slot": 1})
        assert filling.status == 200, filling.body
        kv = (await engine.get("/polykv/engine/counters")).json["kv"]
        assert kv["n_cells"] - kv["n_used"] < pool["prefix_len"], kv
        async with attached(tmp_path, "two", url) as served:
            assert (await served.counters())["epoch"] == epoch
            await served.until(lambda: _rebuilt(served))
            prompt = await remembered(served, pool, prompt)
            await served.until(lambda: _has(served, "mine", prompt))
            served.process.kill()
            await served.process.wait()
        # killed
        async with attached(tmp_path, "three", url) as served:
            assert (await served.counters())["epoch"] == epoch
            await served.until(lambda: _rebuilt(served))
            prompt = await remembered(served, pool, prompt)
            await served.until(lambda: _has(served, "mine", prompt))
            process.kill()
            await process.wait()
            await served.until(lambda: _off(served, "the engine has ended"))
            # the engine is killed, and its unit starts it again
            async with unit(tmp_path, model, **binary) as (again, _, _):
                await served.until(lambda: _rebuilt(served, times=2))
                assert (await served.counters())["epoch"] != epoch
                assert again.pid != process.pid
                assert (await state(served))["reason"] is None
                prompt = await remembered(served, pool, prompt)
                await served.until(lambda: _has(served, "mine", prompt))
    # both were stopped
    async with unit(tmp_path, model, **binary), attached(tmp_path, "four", url) as served:
        await served.until(lambda: _rebuilt(served))
        await remembered(served, pool, prompt)
    # what the unit's engine left is of the same model for a proxy that starts its engine itself
    folder = tmp_path / "lib" / "polykv-proxy" / "unit-0"
    env = {"POLYKV_STATE_DIR": str(folder)}
    async with serve(tmp_path / "five", "--model", str(model), *SEPARATE, env=env) as served:
        await served.until(lambda: _rebuilt(served))
        (listed,) = (await served.http.get("/polykv/pools")).json["pools"]
        assert (listed["pool_id"], listed["residency"]) == (pool["pool_id"], "resident")


async def _rebuilt(served: Served, times: int = 1) -> bool:
    """Whether the one pool came back so often, from disk, and requests go in."""
    sources = [event["source"] for event in served.events("pool_rebuilt")]
    assert set(sources) <= {"disk"}
    return len(sources) == times and (await served.http.get("/health")).status == 200


async def _has(served: Served, key: str, prompt: str) -> bool:
    """Whether a conversation is on disk to its end."""
    entry = (await saved(served)).get(key)
    return entry is not None and entry["n_tokens"] >= len(await tokens_of(served, prompt))


async def _off(served: Served, reason: str) -> bool:
    (entry,) = (await served.http.get("/polykv/cache")).json["engines"]
    return (entry["state"], entry["reason"]) == ("off", reason)


async def test_work_that_an_earlier_proxy_left_keeps_nobody_from_saving(
    patched: Path, smollm: Path, tmp_path: Path
) -> None:
    """As of one that was killed: the next one waits for its end, and then finds out what it has to."""
    url = URL.format(tmp_path)
    async with unit(tmp_path, quick_model(tmp_path, smollm), POLYKV_ENGINE__BINARY=str(patched)) as running:
        _, engine, _ = running
        over = asyncio.Event()

        async def work(slot: int) -> None:
            body = {"prompt": "Hello", "n_predict": 1000, "ignore_eos": True, "id_slot": slot}
            while not await _answers(engine):
                await asyncio.sleep(LOOK_S)
            while not over.is_set():
                assert (await engine.post("/completion", body)).status == 200

        async with asyncio.TaskGroup() as tasks:
            for slot in (0, 1):  # so that one is always at work
                tasks.create_task(work(slot))
            try:
                async with attached(tmp_path, "proxy", url, ready=False) as served:
                    await served.until(lambda: _logged(served, "self_test"))
                    await asyncio.sleep(1.0)  # it had time not to wait
                    over.set()
                    await served.until(lambda: _logged(served, "engine_ready"))
                    assert (await state(served))["reason"] is None
            finally:
                over.set()


async def _answers(engine: Http) -> bool:
    try:
        return (await engine.get("/health")).status == 200
    except aiohttp.ClientError:
        return False


async def _logged(served: Served, event: str) -> bool:
    return bool(served.events(event))


async def test_what_is_not_known_for_sure_is_not_believed(
    patched: Path, smollm: Path, tmp_path: Path
) -> None:
    """DUR-4: another proxy's store, a replaced model, an engine started by hand, one at a port."""
    url, model = URL.format(tmp_path), quick_model(tmp_path, smollm)
    binary = {"POLYKV_ENGINE__BINARY": str(patched)}
    async with unit(tmp_path, model, **binary) as (process, _, socket):
        async with attached(tmp_path, "one", url) as first, attached(tmp_path, "two", url) as second:
            assert (await state(first))["state"] == "on"
            told = await state(second)
            assert told["state"] == "off"
            assert "another polykv-proxy works with what is saved there" in told["reason"]
        (tmp_path / "new.gguf").write_bytes(model.read_bytes())
        (tmp_path / "new.gguf").replace(model)
        async with attached(tmp_path, "three", url) as served:
            assert (await state(served))["reason"] == f"{model} was changed since the engine started"
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")[:-1]
        process.kill()
        await process.wait()
    record = json.loads(socket.with_name("engine.sock.json").read_bytes())
    assert record["process"]["pid"] == process.pid
    socket.unlink()
    by_hand = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with attached(tmp_path, "four", url) as served:
            pids = f"process {process.pid}, and {by_hand.pid} answers"
            told = await state(served)
            assert told["reason"] == f"the record beside the engine's socket is of {pids}"
    finally:
        by_hand.terminate()
        await by_hand.wait()
    folder = tmp_path / "slots"
    folder.mkdir()
    args = ("--kv-unified", "--parallel", "2", "--polykv-max-pools", "2", "--cache-ram", "0")
    more = ("--no-cache-idle-slots", "--slots", "--slot-save-path", str(folder))
    async with bare_engine(patched, model, tmp_path, *args, *more) as engine:
        async with serve(tmp_path / "five", "--engine-url", engine.base) as served:
            assert "did not start this engine" in (await state(served))["reason"]
