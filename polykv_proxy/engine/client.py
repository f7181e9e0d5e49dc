"""The proxy's own calls to an engine: one method per endpoint, bounded, errors mapped.

Client traffic does not come through here; it is spliced by ``edge``.
"""

from __future__ import annotations

from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any, Self, TypeVar

import aiohttp
import msgspec

from polykv_proxy.engine import patched, wire
from polykv_proxy.errors import BadRequestError, EngineGoneError, NotFoundError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from polykv_proxy.core.stock import SlotLook
    from polykv_proxy.core.types import EngineFacts, EngineSample, PoolNumber, SlotId, Tokens
    from polykv_proxy.engine.address import EngineAddress

T = TypeVar("T")

CONTROL_TIMEOUT_S = 5.0
"""Bound of a read that costs the engine nothing, body included."""

STEP_TIMEOUT_S = 120.0
"""Operations on cells wait for the batch that is being computed; on a small CPU that takes seconds."""

NO_CELLS = "not enough free KV cells"
"""How the engine begins when a pool does not fit beside what is there; it gives up nothing by itself."""

LOADING = "Loading model"
"""All that the engine says until it serves."""

TOKENIZE_TIMEOUT_S = 60.0
"""Rendering and tokenizing a megabyte takes seconds on a small machine."""


class EngineClient:
    """One engine's control side.

    Args:
        address: where it listens.
        api_key: the key it demands, if it does.
    """

    def __init__(self, address: EngineAddress, api_key: str | None) -> None:
        self._base = address.base_url
        self._socket = address.socket
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # no kept-alive connections: the engine closes them when it likes, and a control call that failed
        # for that reason would look like a dead engine
        connector: aiohttp.BaseConnector = (
            aiohttp.TCPConnector(force_close=True)
            if self._socket is None
            else aiohttp.UnixConnector(str(self._socket), force_close=True)
        )
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    # -- reading ---------------------------------------------------------------------------------------

    async def get(self, path: str, *, timeout_s: float = CONTROL_TIMEOUT_S) -> bytes:
        """Body of a GET.

        Raises:
            NotFoundError: the engine does not have this route.
            UnavailableError: it did not answer well, in time, or at all.
        """
        return await self._call("GET", path, None, timeout_s)

    async def describe(self) -> tuple[EngineFacts, bool, dict[str, str]]:
        """Facts, whether the engine has the patch with pools on, and what makes up its identity."""
        props = await self.get("/props")
        try:
            facts, identity = _read(patched.read_info, await self.get("/polykv/engine"))
            has_pools = True
        except NotFoundError:
            facts, identity = _read(wire.read_props, props)
            has_pools = False
        models = await self.get("/v1/models")
        facts = replace(
            facts,
            model_tokens=_read(wire.read_model_tokens, models),
            models=_read(wire.read_model_names, models),
            media=_read(wire.read_media, props),
        )
        identity |= _read(wire.read_model_identity, models)
        return facts, has_pools, identity | _read(wire.read_template_identity, props)

    async def counters(self) -> EngineSample:
        """The counters document; answered by a patched engine also while it decodes."""
        body = await self.get("/polykv/engine/counters")
        return _read(lambda document: patched.read_counters(document, monotonic()), body)

    async def slots(self) -> list[wire.StockSlot]:
        """The slots of any engine."""
        return _read(wire.read_slots, await self.get("/slots"))

    async def adapters(self) -> list[wire.Adapter]:
        """LoRA adapters that the engine has loaded, with the scales in force; 0 for those that are not."""
        return _read(wire.read_adapters, await self.get("/lora-adapters"))

    async def stock_slots(self) -> list[SlotLook]:
        """What the slots of an engine without the patch have done for their tasks."""
        return _read(wire.read_stock_slots, await self.get("/slots"))

    async def tokenize(self, text: str, *, whole: bool = True, special: bool = True) -> Tokens:
        """Token ids of a raw prompt, exactly as a completion would see them.

        Args:
            text: the prompt.
            whole: False for the end of one: without the tokens that every prompt gets.
            special: False: special tokens in it are text.
        """
        body = msgspec.json.encode({"content": text, "add_special": whole, "parse_special": special})
        return _read(wire.read_tokens, await self._call("POST", "/tokenize", body, TOKENIZE_TIMEOUT_S))

    async def pieces(self, text: str) -> list[tuple[int, str]]:
        """Tokens of a text, with what each says; nothing for one that is no text by itself."""
        body = msgspec.json.encode({"content": text, "parse_special": True, "with_pieces": True})
        return _read(wire.read_pieces, await self._call("POST", "/tokenize", body, TOKENIZE_TIMEOUT_S))

    async def count_tokens(self, path: str, body: bytes) -> Tokens:
        """Token ids of a body, as its counting route has them; media are -1. See ``prompt``."""
        return _read(wire.read_tokens, await self._call("POST", f"{path}?tokens=1", body, TOKENIZE_TIMEOUT_S))

    async def prompt(self, path: str, body: bytes, *, text_from: int) -> wire.Prompt:
        """What ``count_tokens`` gives, but text before the first medium as it is, if it is long.

        Args:
            path: the counting route of the body's API.
            body: the request body.
            text_from: bytes that the text has at least.

        Raises:
            BadRequestError: the engine refuses the body; the message is the engine's.
        """
        path = f"{path}?tokens=1&text={text_from}"
        return _read(wire.read_prompt, await self._call("POST", path, body, TOKENIZE_TIMEOUT_S))

    async def media_marker(self) -> str:
        """What stands for an image or sound in a rendered prompt; another one in each load.

        Raises:
            UnavailableError: the engine takes none.
        """
        marker = _read(wire.read_media_marker, await self.get("/props"))
        if not marker:
            raise UnavailableError("the engine takes no images or sounds", code="engine_refused")
        return marker

    async def count(self, path: str, body: bytes) -> int:
        """How many tokens a body has, as the counting route of its API says; on any engine."""
        return _read(wire.read_count, await self._call("POST", path, body, TOKENIZE_TIMEOUT_S))

    async def render(self, body: bytes) -> str:
        """The prompt of a chat body.

        Raises:
            BadRequestError: the engine refuses the body.
        """
        return _read(
            wire.read_rendered, await self._call("POST", "/apply-template", body, TOKENIZE_TIMEOUT_S)
        )

    # -- slots of an engine without pools ----------------------------------------------------------------

    async def prefill(self, tokens: Tokens, slot: SlotId) -> wire.PromptTimings:
        """Compute a prompt in an idle slot and leave it there; takes as long as it takes.

        The engine notices that the call was given up within a second, or after the running batch.
        """
        wanted = {
            "prompt": list(tokens),
            "n_predict": 0,  # it samples a token all the same, which does not stay in the slot
            "temperature": 0,
            "id_slot": slot,
            "cache_prompt": True,
            "response_fields": ["timings"],
        }
        return _read(
            wire.read_computed, await self._call("POST", "/completion", msgspec.json.encode(wanted), None)
        )

    async def save_slot(self, slot: SlotId, filename: str) -> wire.SlotFile:
        """Write an idle slot to a file in the engine's folder; on a slot at work this waits for its end."""
        return await self._move_slot(slot, "save", filename)

    async def restore_slot(self, slot: SlotId, filename: str) -> wire.SlotFile:
        """Fill an idle slot from a file; what it held is gone, also when this fails."""
        return await self._move_slot(slot, "restore", filename)

    async def erase_slot(self, slot: SlotId) -> None:
        """Empty an idle slot."""
        await self._call("POST", f"/slots/{slot}?action=erase", b"{}", STEP_TIMEOUT_S)

    async def _move_slot(self, slot: SlotId, action: str, filename: str) -> wire.SlotFile:
        body = msgspec.json.encode({"filename": filename})
        answer = await self._call("POST", f"/slots/{slot}?action={action}", body, STEP_TIMEOUT_S)
        return _read(wire.read_slot_file, answer)

    # -- pools -----------------------------------------------------------------------------------------

    async def materialize(  # noqa: PLR0913 - the parts of a pool
        self,
        number: PoolNumber,
        tokens: Tokens,
        slot: SlotId,
        tag: int,
        *,
        parent: PoolNumber | None = None,
        branch_pos: int = 0,
    ) -> patched.Materialized:
        """Compute a pool in an idle slot; takes as long as the prefill. Cancelling it stops the engine.

        Args:
            number: a number that no pool has.
            tokens: the whole prefix.
            slot: idle; it is empty afterwards.
            tag: the counters show it for that slot.
            parent: number of the pool that holds [0, ``branch_pos``) already.
            branch_pos: D.

        Raises:
            UnavailableError: no room for it, or the engine went away.
            BadRequestError: tokens the model does not have, or that are not the parent's.
        """
        wanted: dict[str, Any] = {"tokens": list(tokens), "id_slot": slot, "tag": tag}
        if parent is not None:
            wanted |= {"parent": parent, "n_parent": branch_pos}
        path = f"/polykv/engine/pools/{number}?action=materialize"
        return _read(
            patched.read_materialized, await self._call("POST", path, msgspec.json.encode(wanted), None)
        )

    async def snapshot(
        self, number: PoolNumber, slot: SlotId, n_tokens: int | None, parent: PoolNumber | None
    ) -> patched.SnapshotTaken:
        """Make a pool of what a slot holds now; nothing is computed.

        Args:
            number: a number that no pool has.
            slot: any slot, also one that works.
            n_tokens: only so many leading tokens; None: all.
            parent: number of a pool; as much as agrees with it stays its own.

        Raises:
            BadRequestError: there are media among them.
        """
        wanted: dict[str, Any] = {"from_slot": slot}
        if n_tokens is not None:
            wanted["n"] = n_tokens
        if parent is not None:
            wanted["parent"] = parent
        path = f"/polykv/engine/pools/{number}?action=snapshot"
        status, answer = await self._raw("POST", path, msgspec.json.encode(wanted), STEP_TIMEOUT_S)
        if status == 501:
            raise BadRequestError(wire.read_error(answer, status), code="engine_refused")
        self._check(status, answer)
        return _read(patched.read_snapshot, answer)

    async def save_pool(self, number: PoolNumber, filename: str) -> wire.SlotFile:
        """Write a pool to a file in the engine's folder.

        Raises:
            NotFoundError: there is no such pool.
            UnavailableError: the disk refuses.
        """
        path = f"/polykv/engine/pools/{number}?action=save"
        answer = await self._call("POST", path, msgspec.json.encode({"filename": filename}), STEP_TIMEOUT_S)
        return _read(patched.read_pool_file, answer)

    async def restore_pool(
        self, number: PoolNumber, filename: str, parent: PoolNumber | None, branch_pos: int
    ) -> patched.PoolRestored:
        """Make a pool of a file; needs cells for all of it until those of its parent take their place.

        Args:
            number: a number that no pool has.
            filename: in the engine's folder.
            parent: number of the pool that holds [0, ``branch_pos``), if one does.
            branch_pos: D.
        """
        wanted: dict[str, Any] = {"filename": filename}
        if parent is not None:
            wanted |= {"parent": parent, "n_parent": branch_pos}
        path = f"/polykv/engine/pools/{number}?action=restore"
        answer = await self._call("POST", path, msgspec.json.encode(wanted), STEP_TIMEOUT_S)
        return _read(patched.read_pool_restored, answer)

    async def text_of(self, tokens: Iterable[int]) -> str:
        """Text of tokens."""
        body = msgspec.json.encode({"tokens": list(tokens)})
        answer = await self._call("POST", "/detokenize", body, CONTROL_TIMEOUT_S)
        return str(_read(wire.read_object, answer).get("content", ""))

    async def release(self, number: PoolNumber) -> int:
        """Give a pool's sequence id back; returns the cells that nobody else held. 0 if it was gone."""
        try:
            answer = await self._call(
                "POST", f"/polykv/engine/pools/{number}?action=release", b"{}", STEP_TIMEOUT_S
            )
        except NotFoundError:
            return 0
        return _read(patched.read_freed, answer)

    async def cancel(self, slot: SlotId, task: int) -> None:
        """Stop a task at the end of the running step; one that is over or elsewhere is left alone."""
        path = f"/polykv/engine/slots/{slot}?action=cancel&id_task={task}"
        await self._call("POST", path, b"{}", STEP_TIMEOUT_S)

    async def slot_action(self, slot: SlotId, query: str, body: bytes) -> tuple[int, bytes]:
        """A stock slot action (save, restore, erase) as it is; status and body."""
        return await self._raw("POST", f"/slots/{slot}?{query}", body, TOKENIZE_TIMEOUT_S)

    async def complete(
        self, tokens: Tokens, headers: dict[str, str], *, slot: SlotId | None = None
    ) -> dict[str, Any]:
        """A completion of one token; for self-tests."""
        wanted: dict[str, Any] = {"prompt": list(tokens), "n_predict": 1, "temperature": 0}
        if slot is not None:
            wanted |= {"id_slot": slot, "cache_prompt": True, "response_fields": ["timings"]}
        body = msgspec.json.encode(wanted)
        status, answer = await self._raw("POST", "/completion", body, TOKENIZE_TIMEOUT_S, headers)
        self._check(status, answer)
        return _read(wire.read_object, answer)

    # -- one place for the mapping ---------------------------------------------------------------------

    async def _call(self, method: str, path: str, body: bytes | None, timeout_s: float | None) -> bytes:
        status, answer = await self._raw(method, path, body, timeout_s)
        self._check(status, answer)
        return answer

    @staticmethod
    def _check(status: int, answer: bytes) -> None:
        if status == 200:
            return
        message = wire.read_error(answer, status)
        if status == 404:
            raise NotFoundError(message)
        if status in (400, 422):
            raise BadRequestError(message, code="engine_refused")
        if status in (401, 403):
            raise UnavailableError(
                f"the engine refuses the proxy: {message}; set engine.api_key", code="engine_auth"
            )
        if message.startswith(NO_CELLS):
            raise UnavailableError(message, code="cells_exhausted")
        if status == 503 and message == LOADING:  # another engine than was meant, and no verdict on anything
            raise UnavailableError(message, code="engine_loading", retry_after_s=2)
        raise UnavailableError(message, code="engine_refused" if status == 503 else "engine_failed")

    async def _raw(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeout_s: float | None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, bytes]:
        assert self._session is not None, "use as a context manager"
        sent = {"Content-Type": "application/json", **(headers or {})}
        try:
            async with self._session.request(
                method,
                self._base + path,
                data=body,
                headers=sent,
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONTROL_TIMEOUT_S),
            ) as response:
                return response.status, await response.read()
        except TimeoutError:
            raise UnavailableError(
                f"the engine did not answer {path} within {timeout_s} s", code="engine_timeout"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineGoneError(f"the engine cannot be reached: {error}") from None


def _read(reader: Callable[[bytes], T], body: bytes) -> T:
    """What ``reader`` makes of an answer.

    Raises:
        UnavailableError: it is not what this route answers; an engine that the proxy does not understand.
    """
    try:
        return reader(body)
    except (msgspec.DecodeError, OverflowError) as error:
        raise UnavailableError(
            f"the engine's answer is not understood: {error}", code="engine_protocol"
        ) from None
