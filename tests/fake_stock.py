"""``FakePolykv`` without the patch: slots that a body can name, slot files, a template route, no counters.

::

    engine = FakeStock(slots=2)
    engine.folder = tmp_path            # as with --slot-save-path; without it slot actions are off
"""

from __future__ import annotations

import asyncio
import json
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiohttp import web
from fake_engine import FakeEngine, Recorded, _die, _request
from fake_polykv import FakePolykv, Slot, _refuse, agreeing

if TYPE_CHECKING:
    from pathlib import Path

BYTES_PER_TOKEN = 10


class FakeStock(FakePolykv):
    """A stock engine on a Unix socket.

    Args:
        slots: how many slots it has.

    Attributes:
        folder: where its slot files are.
        moves: slot actions that arrived: action, slot, file name.
        move_gate: slot actions wait for it.
        launch_gate: requests without a slot of their own wait for it before they take one.
        whole_states: it goes on from the end of what a slot holds only, as a recurrent model does.
        window: it does not go on from more tokens than these after a restore, as with a sliding window.
        reach: it goes back no further than that after a restore: the file has only the last window.
        clears_idle: a request that starts empties all idle slots, as with the RAM cache on.
        cells: how many there are for all slots; a restore that does not fit fails.
        loaded_adapters: LoRA adapters that it has.
    """

    def __init__(self, *, slots: int = 2) -> None:
        super().__init__(slots=slots, max_pools=0)
        self.folder: Path | None = None
        self.moves: list[tuple[str, int, str]] = []
        self.move_gate = asyncio.Event()
        self.move_gate.set()
        self.launch_gate = asyncio.Event()
        self.launch_gate.set()
        self.whole_states = False
        self.window: int | None = None
        self.reach: int | None = None
        self.clears_idle = False
        self.cells = 1 << 30
        self.loaded_adapters: list[dict[str, Any]] = []
        self.renders = _render
        self._restored: set[int] = set()

    def restart(self) -> None:
        """Another process: task numbers begin anew."""
        super().restart()
        self._next_task = 1

    @property
    def work(self) -> list[Recorded]:
        """Generations that arrived, the proxy's own left out."""
        return [request for request in super().work if b"response_fields" not in request.body]

    def restores(self) -> list[tuple[int, str]]:
        """Slots that were filled, and from which file; those of the self-test left out."""
        return [(slot, name) for action, slot, name in self.moves if action == "restore"]

    async def _adapters(self, _request: web.Request) -> web.Response:
        return web.json_response(self.loaded_adapters)

    async def _apply_template(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": self.renders(await request.json())})

    async def _count(self, request: web.Request) -> web.Response:
        tokens = self.tokens_of(self.renders(await request.json()))
        return web.json_response({"input_tokens": len(tokens)})

    async def _slots(self, _request: web.Request) -> web.Response:
        shown = []
        for number, slot in enumerate(self.sequences):
            shown.append({"id": number, "is_processing": slot.running, "n_prompt_tokens": len(slot.tokens)})
            if slot.task >= 0:
                shown[-1]["id_task"] = slot.task
                shown[-1]["next_token"] = [{"n_decoded": slot.decoded if slot.running else 0}]
        return web.json_response(shown)

    # -- slot files --------------------------------------------------------------------------------------

    async def _slot_action(self, request: web.Request) -> web.Response:
        if self.folder is None:
            return _refuse(501, "This server does not support slots action. Start it with `--slot-save-path`")
        number, action = int(request.match_info["slot"]), request.query["action"]
        name = json.loads(_request.get().body or b"{}").get("filename", "")
        self.moves.append((action, number, name))
        await self.move_gate.wait()  # the one that was there when it came
        slot = self.sequences[number]
        await self._idle(slot)
        if action == "erase":
            count, slot.tokens = len(slot.tokens), []
            return web.json_response({"id_slot": number, "n_erased": count})
        path = self.folder / name
        if action == "save":
            written = slot_file(slot.tokens).ljust(len(slot.tokens) * BYTES_PER_TOKEN, b"\0")
            path.write_bytes(written)
            return web.json_response({"n_saved": len(slot.tokens), "n_written": len(written)})
        slot.tokens = []
        used = sum(len(each.tokens) for each in self.sequences)
        whole = path.read_bytes() if path.exists() else b""
        count = struct.unpack("<i", whole[8:12])[0] if whole[:4] == slot_file([])[:4] else 0
        if not count or used + count - 3 > self.cells:
            return _refuse(400, "Unable to restore slot: No available space or invalid slot save file")
        words = struct.unpack(f"<{count}i", whole[12 : 12 + 4 * count])
        slot.tokens = list(words[3:])
        self._restored.add(number)
        return web.json_response(
            {"n_restored": len(slot.tokens), "n_read": len(slot.tokens) * BYTES_PER_TOKEN}
        )

    # -- generation --------------------------------------------------------------------------------------

    async def _idle(self, slot: Slot) -> None:
        while slot.running:
            await asyncio.sleep(0.001)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        recorded = _request.get()
        script = self.script_for(recorded) or self.script
        if script.fault == "error" or self.loading:
            await self.gate.wait()
            return await FakeEngine._generate(self, request)
        try:
            body = json.loads(recorded.body)
        except ValueError:
            body = {}
        tokens = self._prompt(recorded)
        number = -1 if recorded.path == "/v1/messages" else body.get("id_slot", -1)
        if number < 0:
            await self.launch_gate.wait()
            number = self._choose(tokens)
        slot = self.sequences[number]
        if slot.running:
            self.overlaps.append(recorded)
            await self._idle(slot)
        cached = self._reused(number, tokens) if body.get("cache_prompt", True) else 0
        task = self._launch(slot, tokens[:cached])
        try:
            if body.get("n_predict") == 0:
                await self.pool_gate.wait()
            elif recorded in self.work:
                slot.tokens = tokens[: max(cached, self.prefilled)]
                await self.prefill_gate.wait()
            if script.fault == "die_in_prompt":
                return _die(request)
            slot.tokens = tokens
            if recorded in self.work:
                await self.gate.wait()
            else:
                script = replace(script, tokens=1)
            slot.computed, slot.reused = len(tokens) - cached, cached
            script = replace(script, cache_n=cached, prompt_n=len(tokens) - cached)
            return await self._answer(request, recorded, script, slot)
        finally:
            if slot.task == task:
                slot.running = False

    def _launch(self, slot: Slot, tokens: list[int]) -> int:
        slot.task, slot.running, slot.tokens = self._next_task, True, tokens
        slot.decoded = slot.computed = slot.reused = 0
        self._next_task += 1
        if self.clears_idle:
            for other in self.sequences:
                other.tokens = other.tokens if other.running else []
        return slot.task

    def _choose(self, tokens: list[int]) -> int:
        """The idle slot with most in common; the lowest of equals."""
        idle = [number for number, slot in enumerate(self.sequences) if not slot.running] or [0]
        return max(idle, key=lambda number: (agreeing(self.sequences[number].tokens, tokens), -number))

    def _reused(self, number: int, tokens: list[int]) -> int:
        held = self.sequences[number].tokens
        common = min(agreeing(held, tokens), len(tokens) - 1)
        if self.whole_states and common < len(held):
            return 0
        if self.window is not None and number in self._restored and len(held) > self.window:
            return 0
        if self.reach is not None and number in self._restored and common < len(held) - self.reach:
            return 0
        return common


def slot_file(tokens: list[int], *, version: int = 4) -> bytes:
    """The head of a slot file; no KV follows."""
    words = [-1, 1, len(tokens), *tokens]
    return struct.pack(f"<4sII{len(words)}i", b"qsgg", version, len(words), *words)


def _render(body: dict[str, Any]) -> str:
    """A chat template; a Responses body is the chat that it means."""
    messages = list(body.get("messages", []))
    if "instructions" in body:
        messages.append({"role": "system", "content": body["instructions"]})
    given = body.get("input", [])
    messages += [{"role": "user", "content": given}] if isinstance(given, str) else given
    parts = [f"[{key}]{body[key]}" for key in ("system", "tools") if key in body]
    return "".join([*parts, *(f"<|{each['role']}|>{_text(each['content'])}" for each in messages)])


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
