"""``FakePolykv`` with a folder: its slots and pools are saved to files and come back from them.

::

    async with Rig(saving=FakeDurable(tmp_path, slots=1)) as rig:
        ...

Files have the real engine's head, and a byte of "KV" for each token.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from aiohttp import web
from durable.files import gguf_bytes
from fake_engine import _request
from fake_polykv import FakePolykv, _refuse, agreeing
from fake_stock import slot_file

if TYPE_CHECKING:
    from pathlib import Path

    from fake_polykv import Pool


class FakeDurable(FakePolykv):
    """A patched engine that saves.

    Args:
        folder: where the model's file is, and the slot files below it.

    Attributes:
        folder: of the slot files.
        model_file: a small GGUF.
        moves: saves and restores so far: (what, slot or pool number, file).
        window: it does not go on from more tokens than these after a restore.
        adapters: LoRA adapters, as ``/lora-adapters`` tells.
        full: the disk is.
        version: of the files that it writes.
    """

    def __init__(self, folder: Path, *, slots: int = 2, max_pools: int = 2) -> None:
        super().__init__(slots=slots, max_pools=max_pools)
        self.reuses = True
        self.folder = folder / "slots-0"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.model_file = folder / "m.gguf"
        self.model_file.write_bytes(gguf_bytes())
        self.moves: list[tuple[str, int, str]] = []
        self.window: int | None = None
        self.adapters: list[dict[str, Any]] = []
        self.full = False
        self.version = 4

    def _app(self) -> web.Application:
        app = super()._app()
        app.router.add_get("/lora-adapters", self._adapters)
        return app

    def moved(self, what: str) -> list[tuple[int, str]]:
        """Saves or restores since the canary."""
        return [(number, name) for action, number, name in self.moves if action == what]

    async def _adapters(self, _request: web.Request) -> web.Response:
        return web.json_response(self.adapters)

    def _write(self, name: str, tokens: list[int]) -> int:
        raw = slot_file(tokens, version=self.version) + bytes(len(tokens))
        (self.folder / name).write_bytes(raw)
        return len(raw)

    def _read(self, name: str) -> list[int]:
        try:
            raw = (self.folder / name).read_bytes()
            count = struct.unpack("<i", raw[8:12])[0]
            return list(struct.unpack(f"<{count}i", raw[12 : 12 + 4 * count])[3:])
        except (OSError, struct.error):
            return []

    async def _slot_action(self, request: web.Request) -> web.StreamResponse:
        number, action = int(request.match_info["slot"]), request.query["action"]
        if action == "erase":
            return await super()._slot_action(request)
        name = json.loads(_request.get().body)["filename"]
        slot = self.sequences[number]
        self.moves.append((action, number, name))
        if action == "save":
            if self.full:
                return _refuse(500, "Unable to save slot")
            size = self._write(name, slot.tokens)
            return web.json_response({"n_saved": len(slot.tokens), "n_written": size})
        slot.empty()
        tokens = self._read(name)
        if not tokens or len(tokens) > self.cells - self.used:
            return _refuse(400, "Unable to restore slot")
        kept = tokens if self.window is None else tokens[: self.window]
        slot.tokens, slot.cells = kept, self.new_cells(len(kept))
        return web.json_response({"n_restored": len(tokens), "n_read": len(tokens)})

    async def _pool(self, request: web.Request) -> web.Response:
        number, action = int(request.match_info["number"]), request.query.get("action")
        if action not in ("save", "restore"):
            return await super()._pool(request)
        body = await request.json()
        self.moves.append((f"{action}_pool", number, body["filename"]))
        if action == "save":
            pool = self.pools.get(number)
            if pool is None:
                return _refuse(404, f"pool {number} does not exist")
            if self.full:
                return _refuse(500, "Unable to save pool")
            size = self._write(body["filename"], pool.tokens)
            return web.json_response({"n_tokens": len(pool.tokens), "n_written": size})
        tokens = self._read(body["filename"])
        if not tokens or len(tokens) > self.cells - self.used:
            return _refuse(503, "no room in the KV cache, or not a saved state of this model")
        parent: Pool | None = self.pools.get(body["parent"]) if "parent" in body else None
        above = [] if parent is None else parent.cells[: body["n_parent"]]
        assert parent is None or agreeing(parent.tokens, tokens) >= body["n_parent"]
        pool = self.pools[number] = self.holding(tokens, above)
        return web.json_response({"uid": pool.uid, "n_tokens": len(tokens)})
