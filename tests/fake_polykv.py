"""``FakeEngine`` with the patch: pools, slots, counters, token ids from the counting routes.

::

    async with FakePolykv(slots=2) as engine:
        engine.gate.clear()                 # generations wait before their first byte
        ...
        engine.gate.set()

Every pool and every slot has a list of cells; as on the real engine, those that several hold are one.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from aiohttp import web
from fake_engine import (
    _GENERATING,
    FakeEngine,
    Recorded,
    Script,
    _die,
    _event,
    _request,
    token_events,
    whole_answer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

CELLS = 65_536
"""Cells of an engine, unless a test wants to see them run out."""
_COUNTING = {
    "/v1/chat/completions/input_tokens",
    "/v1/responses/input_tokens",
    "/v1/messages/count_tokens",
}


@dataclass
class Pool:
    """A pool that the engine holds."""

    uid: int
    tokens: list[int]
    cells: list[int]


@dataclass
class Slot:
    """A slot and what its sequence holds."""

    tokens: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    shared: int = 0
    pool_uid: int = 0
    task: int = -1
    tag: int = 0
    running: bool = False
    decoded: int = 0
    """Tokens of the current or last task."""
    computed: int = 0
    reused: int = 0
    gen_total: int = 0
    prompt_total: int = 0
    cached_total: int = 0
    last_token_us: int = 0

    def empty(self) -> None:
        """Nothing is held any more; what was counted stays."""
        self.tokens, self.cells, self.shared, self.pool_uid = [], [], 0, 0

    def count(self) -> None:
        """One token more."""
        self.decoded += 1
        self.gen_total += 1
        self.last_token_us = _now_us()


class FakePolykv(FakeEngine):
    """A patched engine on a Unix socket.

    Args:
        slots: how many slots it has.
        max_pools: pools it can hold; 0 is an engine without the patch.

    Attributes:
        epoch: changes with ``restart``.
        gate: generations wait for it before they answer.
        pool_gate: so do computations of pools.
        prefill_gate: prompts are computed only up to ``prefilled`` tokens until it is set.
        prefilled: see there.
        token_gate: streams wait for it before their first event; their heads, and comments, are out by then.
        snapshot_gate: snapshots are taken, but not answered until it is set.
        pools: by number.
        sequences: the slots.
        overlaps: requests that came to a slot that was at work.
        cancelled: tasks that were cancelled on purpose.
        broken: routes, by path, with what they answer instead: (status, body).
        slow: routes, by path, that wait for an event before they answer.
        cells: those that a pool may find.
        renders: how a chat body becomes text.
        shows_text: whether its counting routes do; those of an older patch give tokens only.
        reuses: whether slots keep what a next prompt agrees with; off, they are always computed anew.
        cells: how many it says that it has.
        damage: what attaching gets wrong: ``reuse``, ``share`` or ``leak``.
    """

    def __init__(self, *, slots: int = 2, max_pools: int = 2) -> None:
        super().__init__(unix=True)
        self.max_pools = max_pools
        self.cells = CELLS
        self.epoch = "epoch-1"
        self.gate = asyncio.Event()
        self.gate.set()
        self.pool_gate = asyncio.Event()
        self.pool_gate.set()
        self.prefill_gate = asyncio.Event()
        self.prefill_gate.set()
        self.prefilled = 0
        self.token_gate = asyncio.Event()
        self.token_gate.set()
        self.snapshot_gate = asyncio.Event()
        self.snapshot_gate.set()
        self.pools: dict[int, Pool] = {}
        self.sequences = [Slot() for _ in range(slots)]
        self.overlaps: list[Recorded] = []
        self.cancelled: list[int] = []
        self.broken: dict[str, tuple[int, bytes]] = {}
        self.slow: dict[str, asyncio.Event] = {}
        self.renders: Callable[[dict[str, Any]], str] = _render
        self.shows_text = True
        self.props |= {"total_slots": slots}
        self.reuses = False
        self.damage: str | None = None
        self.cells = CELLS
        self._next_uid = 1
        self._next_task = 1
        self._next_cell = 0

    def restart(self) -> None:
        """The model is loaded again: everything it held is gone."""
        self.epoch += "+"
        self.pools.clear()
        self.sequences = [Slot() for _ in self.sequences]

    @property
    def work(self) -> list[Recorded]:
        """Generations that arrived, those of the self-test left out."""
        return [
            request
            for request in self.requests
            if request.path in _GENERATING and (request.header("x-polykv-tag") or not self.max_pools)
        ]

    @property
    def running(self) -> int:
        """Slots at work."""
        return sum(slot.running for slot in self.sequences)

    def _app(self) -> web.Application:
        app = super()._app()
        app.middlewares.append(self._break)
        app.router.add_get("/polykv/engine", self._info)
        app.router.add_get("/polykv/engine/counters", self._counters)
        app.router.add_post("/polykv/engine/pools/{number}", self._pool)
        app.router.add_post("/polykv/engine/slots/{slot}", self._cancel)
        for path in _COUNTING:
            app.router.add_post(path, self._count)
        return app

    @web.middleware
    async def _break(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path in self.slow:
            await self.slow[request.path].wait()
        if request.path in self.broken:
            status, body = self.broken[request.path]
            return web.Response(status=status, body=body, content_type="application/json")
        if request.path.startswith("/polykv/") and not self.max_pools:
            return _refuse(404, "File Not Found")
        answer: web.StreamResponse = await handler(request)
        return answer

    # -- documents ---------------------------------------------------------------------------------------

    async def _info(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {
                "version": 1,
                "epoch": self.epoch,
                "build_info": "fake",
                "n_slots": len(self.sequences),
                "max_pools": self.max_pools,
                "n_cells": self.cells,
                "n_ctx_slot": 1024,
                "bytes_per_cell": 10,
                "type_k": "f16",
                "type_v": "f16",
            }
        )

    async def _counters(self, _request: web.Request) -> web.Response:
        used = self.used + (self._next_uid if self.damage == "leak" else 0)
        slots = [
            {
                "id": number,
                "state": self._state(slot),
                "id_task": slot.task,
                "tag": slot.tag,
                "n_gen_total": slot.gen_total,
                "n_prompt_total": slot.prompt_total,
                "n_cached_total": slot.cached_total,
                "t_gen_last_us": slot.last_token_us,
                "n_tokens": len(slot.tokens),
                "n_pool_shared": slot.shared,
                "n_ctx": 1024,
                "pool_uid": slot.pool_uid,
            }
            for number, slot in enumerate(self.sequences)
        ]
        pools = [
            {"id_pool": number, "uid": pool.uid, "n_tokens": len(pool.tokens)}
            for number, pool in self.pools.items()
        ]
        kv = {"n_cells": self.cells, "n_used": used}
        return web.json_response(
            {
                "t_us": _now_us(),
                "epoch": self.epoch,
                "n_deferred": 0,
                "kv": kv,
                "slots": slots,
                "pools": pools,
            }
        )

    @staticmethod
    def _state(slot: Slot) -> str:
        if not slot.running:
            return "idle"
        return "gen" if slot.decoded else "prompt"

    async def _slots(self, _request: web.Request) -> web.Response:
        return web.json_response(
            [
                {
                    "id": number,
                    "n_ctx": 1024,
                    "is_processing": slot.running,
                    "id_task": slot.task,
                    "n_prompt_tokens": len(slot.tokens),
                    "n_prompt_tokens_processed": slot.computed if slot.running else 0,
                    "n_prompt_tokens_cache": slot.reused if slot.running else 0,
                    "next_token": [{"n_decoded": slot.decoded if slot.running else 0}],
                }
                if slot.task >= 0
                else {"id": number, "n_ctx": 1024, "is_processing": False}
                for number, slot in enumerate(self.sequences)
            ],
            headers=self.script.headers,
        )

    async def _count(self, request: web.Request) -> web.Response:
        body = await request.json()
        if isinstance(body.get("prompt"), list):
            return web.json_response({"tokens": self._ids(body["prompt"])})
        text = self._text(body)
        tokens = self.tokens_of(text)
        before = tokens.index(-1) if -1 in tokens else len(tokens)
        if self.shows_text and before >= int(request.query.get("text", 1 << 30)):
            return web.json_response({"text": text[:before], "tokens": tokens[before:]})
        return web.json_response({"input_tokens": len(tokens), "tokens": tokens})

    async def _apply_template(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": self.renders(await request.json())})

    # -- orders ------------------------------------------------------------------------------------------

    async def _pool(self, request: web.Request) -> web.Response:
        number, action = int(request.match_info["number"]), request.query.get("action")
        if action == "release":
            before = self.used
            if self.pools.pop(number, None) is None:
                return _refuse(404, f"pool {number} does not exist")
            return web.json_response({"id_pool": number, "n_cells_freed": before - self.used})
        body = await request.json()
        if number in self.pools:
            return _refuse(400, f"pool {number} is taken")
        parent = self.pools.get(body["parent"]) if "parent" in body else None
        if "parent" in body and parent is None:
            return _refuse(404, f"pool {body['parent']} does not exist")
        return await (self._snapshot if action == "snapshot" else self._materialize)(number, body, parent)

    async def _materialize(self, number: int, body: dict[str, Any], parent: Pool | None) -> web.Response:
        tokens, slot = body["tokens"], self.sequences[body["id_slot"]]
        above = [] if parent is None else parent.cells[: body["n_parent"]]
        if parent is not None and agreeing(parent.tokens, tokens) < body["n_parent"]:
            return _refuse(400, "the tokens are not the parent's")
        need = len(tokens) - max(len(above), agreeing(slot.tokens, tokens))
        free = self.cells - self.used
        if need > free + len(slot.tokens) - slot.shared:
            return _refuse(503, f"not enough free KV cells: {need} needed, {free} free")
        kept = slot.cells[: agreeing(slot.tokens, tokens)]  # the engine goes on from what the slot holds
        self._begin(slot, body["tag"])
        try:
            await self.pool_gate.wait()
            cells = above + kept[len(above) :]
            computed = len(tokens) - len(cells)
            self.pools[number] = self.holding(tokens, cells)
        finally:
            slot.running = False
        timings = {"cache_n": len(cells), "prompt_n": computed, "prompt_ms": 1.0}
        return web.json_response({"uid": self.pools[number].uid, "n_tokens": len(tokens), "timings": timings})

    async def _snapshot(self, number: int, body: dict[str, Any], parent: Pool | None) -> web.Response:
        slot = self.sequences[body["from_slot"]]
        n = body.get("n", len(slot.tokens))
        if not 0 < n <= len(slot.tokens):
            return _refuse(400, f"n must be between 1 and the {len(slot.tokens)} tokens of the slot")
        tokens = slot.tokens[:n]
        n_parent = 0 if parent is None else agreeing(parent.tokens, tokens)
        above = [] if parent is None else parent.cells[:n_parent]
        pool = self.pools[number] = self.holding(tokens, above + slot.cells[n_parent:n])
        if slot.shared < n:
            slot.cells, slot.shared, slot.pool_uid = pool.cells + slot.cells[n:], n, pool.uid
        await self.snapshot_gate.wait()
        return web.json_response({"uid": pool.uid, "n_parent": n_parent, "tokens": tokens})

    async def _cancel(self, request: web.Request) -> web.Response:
        slot = self.sequences[int(request.match_info["slot"])]
        if slot.running and slot.task == int(request.query["id_task"]):
            self.cancelled.append(slot.task)
            slot.running = False
        return web.json_response({})

    async def _slot_action(self, request: web.Request) -> web.Response:
        answer = await super()._slot_action(request)
        if request.query.get("action") == "erase":
            self.sequences[int(request.match_info["slot"])].empty()
        return answer

    @property
    def used(self) -> int:
        """Cells that somebody holds."""
        holders = [*self.pools.values(), *self.sequences]
        return len({cell for holder in holders for cell in holder.cells})

    def new_cells(self, count: int) -> list[int]:
        """Cells that nobody had before."""
        self._next_cell += count
        return list(range(self._next_cell - count, self._next_cell))

    def holding(self, tokens: list[int], cells: list[int] | None = None) -> Pool:
        """A pool of these tokens, the first in these cells, under a uid that none had before."""
        self._next_uid += 1
        held = list(cells or [])
        return Pool(self._next_uid - 1, tokens, held + self.new_cells(len(tokens) - len(held)))

    def _begin(self, slot: Slot, tag: int) -> None:
        slot.task, slot.tag, slot.running = self._next_task, tag, True
        slot.decoded = slot.computed = slot.reused = 0
        slot.empty()
        self._next_task += 1

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        recorded = _request.get()
        chosen = recorded.header("x-polykv-slot")
        if chosen is None and b'"id_slot"' in recorded.body:
            chosen = str(recorded.json["id_slot"])
        if not self.max_pools or chosen is None:
            slot = next((one for one in self.sequences if not one.running), self.sequences[0])
        else:
            slot = self.sequences[int(chosen)]
        script = self.script_for(recorded) or self.script
        if script.fault == "error" or self.loading:
            await self.gate.wait()
            return await super()._generate(request)  # refused before it took its slot
        if slot.running:
            self.overlaps.append(recorded)
        had = (slot.tokens, slot.cells)
        self._begin(slot, int(recorded.header("x-polykv-tag") or 0))
        task = slot.task
        try:
            tokens = self._prompt(recorded)
            cached = self._attach(slot, recorded, tokens)
            kept = min(agreeing(had[0], tokens), len(tokens) - 1) if self._may_reuse(recorded) else 0
            if kept > cached:
                cached, slot.tokens, slot.cells = kept, tokens[:kept], had[1][:kept]
            self._compute(slot, tokens[: max(len(slot.tokens), self.prefilled)])
            await self.prefill_gate.wait()
            if script.fault == "die_in_prompt":
                return _die(request)
            self._compute(slot, tokens)
            slot.computed, slot.reused = len(tokens) - cached, cached
            slot.prompt_total += slot.computed
            slot.cached_total += slot.reused
            script = replace(script, cache_n=cached, prompt_n=len(tokens) - cached)
            if recorded in self.work:  # not the self-test
                await self.gate.wait()
            return await self._answer(request, recorded, script, slot)
        finally:
            if slot.task == task:
                slot.running = False

    async def _answer(
        self, request: web.Request, recorded: Recorded, script: Script, slot: Slot
    ) -> web.StreamResponse:
        if script.fault == "die_before_head":
            return _die(request)
        body = recorded.json if recorded.body.startswith(b"{") else {}
        if not body.get("stream"):
            for _ in range(script.tokens):
                slot.count()
                if script.token_delay_s:
                    await asyncio.sleep(script.token_delay_s)
            return web.json_response(_whole(recorded.path, script) | script.extra)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for _ in range(script.pings):
            await answer.write(b":\n\n")
        await self.token_gate.wait()
        for number, event in enumerate(_events(recorded.path, script)):
            if script.fault == "die_mid_stream" and number == (0 if script.pings else 2):
                return _die(request)
            if script.fault == "error_mid_stream" and number == 2:
                await answer.write(b"data: " + json.dumps(script.error_body).encode() + b"\n\n")
                break
            if number and script.token_delay_s:
                await asyncio.sleep(script.token_delay_s)
            if number < script.tokens:
                slot.count()
            await answer.write(event)
        await answer.write_eof()
        return answer

    def _prompt(self, recorded: Recorded) -> list[int]:
        try:
            body = json.loads(recorded.body)
        except ValueError:
            return []
        prompt = body.get("prompt")
        if isinstance(prompt, list) and not any(isinstance(item, dict) for item in prompt):
            return self._ids(prompt)
        return self.tokens_of(self._text(body))

    def _ids(self, prompt: list[int | str]) -> list[int]:
        """Ids, with texts among them."""
        parts = [[one] if isinstance(one, int) else self.tokens_of(one) for one in prompt]
        return [token for part in parts for token in part]

    def _text(self, body: dict[str, Any]) -> str:
        """What a request's prompt says."""
        prompt = body.get("prompt")
        one = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
        if isinstance(one, dict):
            return str(one["prompt_string"])
        return one if isinstance(one, str) else self.renders(body)

    def _may_reuse(self, recorded: Recorded) -> bool:
        return self.reuses and recorded.json.get("cache_prompt") is not False

    def _compute(self, slot: Slot, tokens: list[int]) -> None:
        slot.cells += self.new_cells(len(tokens) - len(slot.cells))
        slot.tokens = tokens

    def _attach(self, slot: Slot, recorded: Recorded, tokens: list[int]) -> int:
        number, _, most = (recorded.header("x-polykv-attach") or "").partition(":")
        pool = self.pools.get(int(number)) if number else None
        if pool is None:
            return 0
        cached = min(agreeing(pool.tokens, tokens), int(most or len(tokens)))
        slot.tokens, slot.cells = tokens[:cached], pool.cells[:cached]
        if self.damage != "share":
            slot.shared, slot.pool_uid = cached, pool.uid if cached else 0
        return 0 if self.damage == "reuse" else cached


def _now_us() -> int:
    return int(time.monotonic() * 1e6)


def agreeing(one: list[int], other: list[int]) -> int:
    """Leading tokens on which both agree."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _refuse(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"code": status, "message": message}}, status=status)


def _render(body: dict[str, Any]) -> str:
    """A chat template: system text, tools, then each message; whatever the API."""
    parts = [f"[{key}]{body[key]}" for key in ("system", "instructions", "tools") if key in body]
    messages = body.get("messages", body.get("input", []))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    parts += [f"<|{message['role']}|>{message['content']}" for message in messages]
    return "".join(parts)


def _usage(script: Script) -> dict[str, Any]:
    return {
        "cache_read_input_tokens": script.cache_n,
        "input_tokens": script.prompt_n,
        "output_tokens": script.tokens,
    }


def _response(script: Script) -> dict[str, Any]:
    details = {"cached_tokens": script.cache_n}
    usage = {"input_tokens": script.prompt_n + script.cache_n, "output_tokens": script.tokens}
    return {"id": "resp_fake", "object": "response", "usage": usage | {"input_tokens_details": details}}


def _whole(path: str, script: Script) -> dict[str, Any]:
    """An answer that is not streamed."""
    if path == "/v1/responses":
        return _response(script)
    answer = whole_answer(path, script)
    return answer | {"usage": _usage(script)} if path == "/v1/messages" else answer


def _events(path: str, script: Script) -> list[bytes]:
    """The events of a stream."""
    if path == "/v1/messages":
        start = {"type": "message_start", "message": {"id": "msg_fake", "usage": _usage(script)}}
        _, *rest = token_events(path, script)
        return [_event(start, "message_start"), *rest]
    if path == "/v1/responses":
        delta = {"type": "response.output_text.delta", "delta": script.text}
        done = {"type": "response.completed", "response": _response(script)}
        return [
            _event({"type": "response.created"}, "response.created"),
            *(_event(delta, "response.output_text.delta") for _ in range(script.tokens)),
            _event(done, "response.completed"),
        ]
    return token_events(path, script)
