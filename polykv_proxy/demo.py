"""The main job, side by side: k agents on one long system prompt, with a shared pool and without.

Both runs use the same engine binary, model, slots and cells, one after the other on this machine. The
shared run goes through a proxy of its own; the other one talks to llama-server directly, with its own
defaults for caches and slot choice, as anybody would without us.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import TYPE_CHECKING, Any

import aiohttp
import uvloop

from polykv_proxy.app import Proxy
from polykv_proxy.engine.launch import spec_from
from polykv_proxy.engine.progress import Progress
from polykv_proxy.engine.state import EngineState
from polykv_proxy.engine.supervisor import Supervisor
from polykv_proxy.errors import UnavailableError
from polykv_proxy.telemetry import configure_logging

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from polykv_proxy.engine.state import EngineStatus
    from polykv_proxy.settings import Settings

GENERATED_TOKENS = 64
READY_TIMEOUT_S = 300.0
POLL_S = 0.2
OWN_TOKENS = 64
"""Room for each agent's own question."""

_RULES = (
    "Rule {n}: when a customer asks about order {n}, look it up before you answer and never guess its state.",
    "Rule {n}: a refund above {n} euros needs the consent of a supervisor, whose name you must note down.",
    "Rule {n}: keep answers below {n} words unless the customer asks for the whole story behind a decision.",
    "Rule {n}: shelf {n} of the warehouse holds fragile goods, so offer the padded box and name its price.",
)
_QUESTIONS = (
    "Where is my parcel?",
    "Can I have my money back?",
    "Which box do I need for a vase?",
    "Who decides about refunds?",
    "Please change my address.",
    "What does express delivery cost?",
    "My invoice is wrong.",
    "Tell me about your warehouse.",
)


@dataclass(frozen=True, slots=True)
class AgentRun:
    """What one agent saw."""

    prompt_tokens: int
    generated_tokens: int
    ttft_s: float
    """From the start of the run, before a pool was created, to this agent's first token."""
    tps: float
    """Generated tokens per second between its first and last token."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one setup did."""

    prompt_tokens_computed: int
    ttft_mean_s: float
    wall_s: float
    tps_mean: float
    kv_cells: int
    """Most cells in use at any look during the run."""
    agents: tuple[AgentRun, ...]

    def summary(self) -> dict[str, float | int]:
        """As it stands in the line of JSON."""
        return {
            "prompt_tokens_computed": self.prompt_tokens_computed,
            "ttft_mean_s": round(self.ttft_mean_s, 3),
            "wall_s": round(self.wall_s, 3),
            "tps_mean": round(self.tps_mean, 2),
            "kv_cells": self.kv_cells,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both setups, and what would be ideal."""

    k: int
    prefix_tokens: int
    """L: tokens that all agents share, as the pool has them."""
    ideal_prompt_tokens: int
    """L + Σ (prompt - L): the prefix once, and what is each agent's own."""
    shared: Result
    unshared: Result

    def document(self) -> dict[str, Any]:
        """The line of JSON."""
        return {
            "demo": {
                "k": self.k,
                "prefix_tokens": self.prefix_tokens,
                "ideal_prompt_tokens": self.ideal_prompt_tokens,
                "shared": self.shared.summary(),
                "unshared": self.unshared.summary(),
            }
        }


def run(settings: Settings, *, k: int, prefix_tokens: int, json_only: bool) -> int:
    """Run both setups and print the table and the line of JSON; returns the exit status.

    Args:
        settings: ``engine.binary`` and ``engine.model`` filled in.
        k: agents.
        prefix_tokens: length of the shared system prompt, about.
        json_only: leave the table out.
    """
    configure_logging(settings.log.model_copy(update={"level": "warning"}))

    # what an agent's first token takes has nothing to do with what the others take
    progress = None if json_only else Progress(estimates=False)
    comparison = uvloop.run(compare(settings, k=k, prefix_tokens=prefix_tokens, progress=progress))
    if not json_only:
        print(_table(comparison), flush=True)
    print(json.dumps(comparison.document()))
    return 0


async def compare(
    settings: Settings, *, k: int, prefix_tokens: int, progress: Progress | None = None
) -> Comparison:
    """Run both setups one after the other; ``progress`` counts the tokens of their answers."""
    counted = _Counted(progress, k)
    with tempfile.TemporaryDirectory(prefix="polykv-demo-") as folder:
        settings = _demo_settings(settings, Path(folder), k=k, prefix_tokens=prefix_tokens)
        counted.begin(f"shared: {k} agents through the proxy, one pool; tokens of their answers:")
        system, prefix_len, shared = await _run_shared(settings, counted, prefix_tokens)
        counted.begin(f"unshared: the same {k} agents on llama-server directly:")
        unshared = await _run_unshared(settings, counted, system)
    own = sum(agent.prompt_tokens - prefix_len for agent in shared.agents)
    return Comparison(k, prefix_len, prefix_len + own, shared, unshared)


class _Counted:
    """Tokens that the agents of a run got; shown, unless nobody is to see it.

    Attributes:
        started: when the run began, monotonic seconds.
    """

    def __init__(self, progress: Progress | None, k: int) -> None:
        self.started = 0.0
        self._progress = progress
        self._total = k * GENERATED_TOKENS
        self._tokens = [0] * k
        self.agents = range(k)

    def begin(self, label: str) -> None:
        """Another run is made ready."""
        self._tokens = [0] * len(self._tokens)
        if self._progress is not None:
            self._progress.begin(label)

    def one(self, agent: int) -> None:
        """It got a token; the last one counts when its answer is whole, and some have no text."""
        self._tokens[agent] = min(self._tokens[agent] + 1, GENERATED_TOKENS - 1)

    def whole(self, agent: int) -> None:
        """It has its answer."""
        self._tokens[agent] = GENERATED_TOKENS

    def show(self) -> None:
        """Say how far they are; called now and then, also while all of them are at their prompts."""
        done = sum(self._tokens)
        if self._progress is not None and done < self._total:
            self._progress.count(done, self._total)

    def end(self) -> None:
        """All have their answers."""
        if self._progress is not None:
            self._progress.count(self._total, self._total)
            self._progress.end()


def _demo_settings(settings: Settings, folder: Path, *, k: int, prefix_tokens: int) -> Settings:
    """Folders of its own, a free port, a slot for each agent and cells for the setup that does not share."""
    cells = k * (prefix_tokens + OWN_TOKENS + GENERATED_TOKENS + 64) + 512
    engine = settings.engine.model_copy(
        update={"parallel": k, "ctx_size": -(-cells // 256) * 256, "max_pools": 1, "url": None}
    )
    return settings.model_copy(
        update={
            "engine": engine,
            "engines": (),
            "listen": "127.0.0.1:0",
            "state_dir": folder / "state",
            "runtime_dir": folder / "run",
            "drain_s": 1.0,
        }
    )


# -- the two setups -----------------------------------------------------------------------------------------


async def _run_shared(settings: Settings, counted: _Counted, prefix_tokens: int) -> tuple[str, int, Result]:
    async with (
        Proxy(settings) as proxy,
        aiohttp.ClientSession(f"http://{proxy.address}", timeout=_NO_TIMEOUT) as http,
    ):
        async with asyncio.timeout(READY_TIMEOUT_S):
            await proxy.fleet.first.runtime.serving.wait()
        system = await _system_prompt(http, prefix_tokens)

        async def cells() -> int:
            async with http.get("/polykv/pools") as answer:
                return int((await answer.json())["kv_cells_used"])

        async def prepare() -> dict[str, Any]:
            body = {"messages": [{"role": "system", "content": system}], "pin": True}
            async with http.post("/polykv/pools", json=body) as answer:
                pool = await answer.json()
                if answer.status != 201:
                    raise UnavailableError(f"the pool was not created: {pool['error']['message']}")
            prepared.append(pool["prefix_len"])
            return {"pool_id": pool["pool_id"]}

        prepared: list[int] = []
        result = await _measure(http, system, prepare, cells, counted)
        return system, prepared[0], result


async def _run_unshared(settings: Settings, counted: _Counted, system: str) -> Result:
    async with _plain_engine(settings) as socket:
        connector = aiohttp.UnixConnector(str(socket), force_close=True)
        async with aiohttp.ClientSession(
            "http://localhost", connector=connector, timeout=_NO_TIMEOUT
        ) as http:

            async def cells() -> int:
                # without shared cells the sum over slots is exact
                async with http.get("/slots") as answer:
                    return sum(slot.get("n_prompt_tokens", 0) for slot in await answer.json())

            async def prepare() -> dict[str, Any]:
                return {}

            return await _measure(http, system, prepare, cells, counted)


@asynccontextmanager
async def _plain_engine(settings: Settings) -> AsyncIterator[Path]:
    """llama-server as it comes: its own cache and slot defaults, pools off."""
    spec = spec_from(settings)
    argv = ["-m", str(settings.engine.model), "--host", str(spec.socket), "-c", str(settings.engine.ctx_size)]
    argv += [
        "--kv-unified",
        "--parallel",
        str(settings.engine.parallel),
        "--slots",
        "--metrics",
        *settings.engine.args,
    ]
    ready = asyncio.Event()

    def on_state(status: EngineStatus) -> None:
        if status.state is EngineState.READY:
            ready.set()

    engine = Supervisor(replace(spec, argv=tuple(argv)), on_state)
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run())
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await ready.wait()
            yield spec.socket
        finally:
            await engine.stop(settings.engine.stop_deadline_s)


_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)


# -- one run ------------------------------------------------------------------------------------------------


async def _measure(
    http: aiohttp.ClientSession, system: str, prepare: Any, cells: Any, counted: _Counted
) -> Result:
    """All agents at once, after ``prepare``; counters before and after, cells all along."""
    computed = await _prompt_tokens_total(http)
    peak = 0

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, await cells())
            counted.show()
            await asyncio.sleep(POLL_S)

    counted.started = started = monotonic()
    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(watch())
        extra = await prepare()
        agents = await asyncio.gather(
            *(_agent(http, system, number, extra, counted) for number in counted.agents)
        )
        wall = monotonic() - started
        peak = max(peak, await cells())
        watcher.cancel()
    counted.end()
    computed = await _prompt_tokens_total(http) - computed
    return Result(
        prompt_tokens_computed=computed,
        ttft_mean_s=fmean(agent.ttft_s for agent in agents),
        wall_s=wall,
        tps_mean=fmean(agent.tps for agent in agents),
        kv_cells=peak,
        agents=tuple(agents),
    )


async def _agent(
    http: aiohttp.ClientSession, system: str, number: int, extra: dict[str, Any], counted: _Counted
) -> AgentRun:
    question = f"{_QUESTIONS[number % len(_QUESTIONS)]} My customer number is {1000 + number}."
    body = {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        "max_tokens": GENERATED_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }
    first = last = None
    usage: dict[str, int] | None = None
    async with http.post("/v1/chat/completions", json=body) as answer:
        if answer.status != 200:
            raise UnavailableError(f"agent {number}: status {answer.status}: {await answer.text()}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise UnavailableError(f"agent {number}: {event['error']}")
            usage = event.get("usage") or usage
            if any(choice["delta"].get("content") for choice in event["choices"]):
                last = monotonic()
                first = first or last
                counted.one(number)
    if usage is None or first is None or last is None:
        raise UnavailableError(f"agent {number}: the answer ended early")
    counted.whole(number)
    generated = usage["completion_tokens"]
    tps = (generated - 1) / (last - first) if last > first else 0.0
    return AgentRun(usage["prompt_tokens"], generated, first - counted.started, tps)


async def _prompt_tokens_total(http: aiohttp.ClientSession) -> int:
    """Prompt tokens that the engine has computed since it started, pools included."""
    async with http.get("/metrics") as answer:
        for line in (await answer.text()).splitlines():
            if line.startswith("llamacpp:prompt_tokens_total "):
                return int(float(line.split()[1]))
    raise UnavailableError("the engine does not report its prompt tokens")


async def _system_prompt(http: aiohttp.ClientSession, tokens: int) -> str:
    """A system prompt of about so many tokens, the same every time."""
    text = "You answer the customers of a small mail-order shop. Follow these rules exactly."
    for number in count(1):
        text = f"{text} {_RULES[number % len(_RULES)].format(n=number)}"
        if len(text) < 3 * tokens:
            continue  # a token has four characters or so: not worth a call yet
        async with http.post("/tokenize", json={"content": text}) as answer:
            if len((await answer.json())["tokens"]) >= tokens - 16:
                break
    return text


def _table(comparison: Comparison) -> str:
    shared, unshared = comparison.shared, comparison.unshared
    rows = (
        ("prompt tokens computed", shared.prompt_tokens_computed, unshared.prompt_tokens_computed, "d"),
        ("mean time to first token, s", shared.ttft_mean_s, unshared.ttft_mean_s, ".2f"),
        ("wall time, s", shared.wall_s, unshared.wall_s, ".2f"),
        ("decode tokens/s per agent", shared.tps_mean, unshared.tps_mean, ".1f"),
        ("KV cells at the peak", shared.kv_cells, unshared.kv_cells, "d"),
    )
    title = (
        f"{comparison.k} agents, one system prompt of {comparison.prefix_tokens} tokens, "
        f"{GENERATED_TOKENS} tokens each; ideal: {comparison.ideal_prompt_tokens} prompt tokens"
    )
    lines = [
        "",
        title,
        "",
        f"{'':30}{'shared':>12}{'unshared':>12}{'unshared/shared':>18}",
    ]
    for name, one, other, form in rows:
        ratio = f"{other / one:.2f}" if one else "-"
        lines.append(f"{name:30}{one:>12{form}}{other:>12{form}}{ratio:>18}")
    return "\n".join([*lines, ""])
