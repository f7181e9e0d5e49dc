"""A scriptable stand-in for llama-server: answers its routes, runs no model, misbehaves on demand.

::

    async with FakeEngine() as engine:                      # a TCP port on 127.0.0.1
        engine.script = Script(tokens=20, token_delay_s=0.01)
        ...                                                 # point the thing under test at engine.address
        assert engine.requests[-1].json["stream"] is True
        await engine.requests[-1].disconnected.wait()

``script`` holds for every generation that starts after it was set; ``script_for`` chooses one per request.
Everything is recorded in ``requests``, in order of arrival. Answers have the members that clients read,
with fixed ids and times, so that two runs give the same bytes.
"""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable

Fault = Literal["die_before_head", "die_in_prompt", "die_mid_stream", "error", "error_mid_stream"]

_CREATED = 1_760_000_000
_GENERATING = (
    "/v1/chat/completions",
    "/chat/completions",
    "/v1/completions",
    "/completion",
    "/completions",
    "/infill",
    "/v1/messages",
    "/v1/responses",
)


@dataclass
class Script:
    """What one generation does.

    Attributes:
        tokens: tokens to produce.
        text: the text of each token.
        prefill_s: silence before the first byte of the answer.
        token_delay_s: pause before each token but the first.
        pings: comments with which a stream begins; ``die_mid_stream`` leaves no more of it then (only
            ``FakePolykv``).
        prompt_n: prompt tokens that the timings report as computed.
        cache_n: prompt tokens that the timings report as cached.
        fault: ``die_before_head`` closes the connection after the prefill, ``die_in_prompt`` within it (only
            ``FakePolykv`` has one), ``die_mid_stream`` after half of the tokens, ``error`` answers ``status``
            with ``error_body``, ``error_mid_stream`` ends a stream with it (only ``FakePolykv`` does).
        status: for the fault ``error``.
        error_body: for the fault ``error``.
        headers: added to the answer.
        extra: added to the last event, or to the answer's JSON.
    """

    tokens: int = 8
    text: str = " token"
    prefill_s: float = 0.0
    token_delay_s: float = 0.0
    pings: int = 0
    prompt_n: int = 12
    cache_n: int = 0
    fault: Fault | None = None
    status: int = 503
    error_body: dict[str, Any] = field(
        default_factory=lambda: {
            "error": {"message": "Loading model", "type": "unavailable_error", "code": 503}
        }
    )
    headers: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def timings(self) -> dict[str, Any]:
        """The ``timings`` object of an answer."""
        return {
            "cache_n": self.cache_n,
            "prompt_n": self.prompt_n,
            "prompt_ms": 10.0 * self.prompt_n,
            "prompt_per_second": 100.0,
            "predicted_n": self.tokens,
            "predicted_ms": 20.0 * self.tokens,
            "predicted_per_second": 50.0,
        }

    def usage(self) -> dict[str, Any]:
        """The OpenAI ``usage`` object of an answer."""
        prompt = self.prompt_n + self.cache_n
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.tokens,
            "total_tokens": prompt + self.tokens,
            "prompt_tokens_details": {"cached_tokens": self.cache_n},
        }


@dataclass
class Recorded:
    """A request as it arrived.

    Attributes:
        started: set when its script begins to run.
        disconnected: set when its client left before the answer was complete.
        finished: set when the answer was complete.
    """

    method: str
    path: str
    query: str
    headers: list[tuple[str, str]]
    body: bytes
    started: asyncio.Event = field(default_factory=asyncio.Event)
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        """First value of a field."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


_request: ContextVar[Recorded] = ContextVar("request")


class FakeEngine:
    """The engine; an async context manager.

    Args:
        unix: listen on a Unix socket in a temporary folder instead of a TCP port.

    Attributes:
        address: where it listens, in a form that ``Upstream`` takes.
        url: the same for HTTP clients; empty with ``unix``.
        script: what generations do.
        script_for: chooses a script per request; None leaves it to ``script``.
        requests: what arrived.
        loading: /health and generations answer 503 "Loading model".
        model: the name under which it answers.
        props: the answer of /props.
        slots: the answer of GET /slots.
        metrics: the answer of /metrics.
        tokens_of: how /tokenize splits text; one token a character unless replaced.
        special: characters that are special tokens.
    """

    def __init__(self, *, unix: bool = False) -> None:
        self.script = Script()
        self.script_for: Callable[[Recorded], Script | None] = lambda _request: None
        self.requests: list[Recorded] = []
        self.loading = False
        self.model = "fake"
        self.props: dict[str, Any] = {
            "default_generation_settings": {"n_ctx": 4096},
            "total_slots": 4,
            "model_path": "fake.gguf",
            "chat_template": "",
            "build_info": "b11434-fake",
        }
        self.slots: list[dict[str, Any]] = [
            {"id": slot, "n_ctx": 1024, "is_processing": False} for slot in range(4)
        ]
        self.metrics = "# HELP llamacpp:requests_processing n\nllamacpp:requests_processing 0\n"
        self.tokens_of: Callable[[str], list[int]] = lambda text: [ord(char) for char in text]
        self.special = ""
        self.address = ""
        self.url = ""
        self._folder = tempfile.TemporaryDirectory(prefix="fake-engine-") if unix else None
        self._runner = web.AppRunner(
            self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )

    async def __aenter__(self) -> Self:
        """Start listening."""
        await self._runner.setup()
        if self._folder is not None:
            path = str(Path(self._folder.name) / "engine.sock")
            await web.UnixSite(self._runner, path).start()
            self.address = f"unix:{path}"
        else:
            listener = socket.create_server(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            await web.SockSite(self._runner, listener).start()
            self.address = f"127.0.0.1:{port}"
            self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_exc: object) -> None:
        """Break running answers off and stop; the address can be used again."""
        await self._runner.cleanup()
        if self._folder is not None:
            self._folder.cleanup()

    def of(self, path: str) -> list[Recorded]:
        """What arrived for a path."""
        return [request for request in self.requests if request.path == path]

    async def arrived(self, count: int) -> Recorded:
        """Wait for the ``count``-th request and for its script to begin."""
        while len(self.requests) < count:
            await asyncio.sleep(0.001)
        request = self.requests[count - 1]
        await request.started.wait()
        return request

    # -- routes ------------------------------------------------------------------------------------------

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30, middlewares=[self._record])
        for path in _GENERATING:
            app.router.add_post(path, self._generate)
        for prefix in ("", "/v1"):
            app.router.add_get(f"{prefix}/health", self._health)
            app.router.add_get(f"{prefix}/models", self._models)
            app.router.add_post(f"{prefix}/embeddings", self._embeddings)
        app.router.add_get("/props", self._props)
        app.router.add_get("/slots", self._slots)
        app.router.add_post("/slots/{slot}", self._slot_action)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/lora-adapters", self._adapters)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/apply-template", self._apply_template)
        app.router.add_route("*", "/echo", self._echo)
        return app

    @web.middleware
    async def _record(self, request: web.Request, handler: Any) -> web.StreamResponse:
        recorded = Recorded(
            method=request.method,
            path=request.path,
            query=request.query_string,
            headers=[(key.decode("latin-1"), value.decode("latin-1")) for key, value in request.raw_headers],
            body=await request.read(),
        )
        self.requests.append(recorded)
        _request.set(recorded)
        recorded.started.set()
        try:
            answer: web.StreamResponse = await handler(request)
        except (asyncio.CancelledError, ConnectionError):
            recorded.disconnected.set()
            raise
        recorded.finished.set()
        return answer

    @staticmethod
    async def _json(value: Any, status: int = 200) -> web.Response:
        return web.json_response(value, status=status)

    async def _health(self, _request: web.Request) -> web.Response:
        if self.loading:
            return await self._json(Script().error_body, 503)
        return await self._json({"status": "ok"})

    async def _props(self, _request: web.Request) -> web.Response:
        return web.json_response(self.props, headers=self.script.headers)

    async def _slots(self, _request: web.Request) -> web.Response:
        return web.json_response(self.slots, headers=self.script.headers)

    async def _adapters(self, _request: web.Request) -> web.Response:
        return await self._json([])

    async def _models(self, _request: web.Request) -> web.Response:
        model = {"id": self.model, "object": "model", "created": _CREATED, "owned_by": "llamacpp"}
        return await self._json({"object": "list", "data": [model]})

    async def _embeddings(self, _request: web.Request) -> web.Response:
        return await self._json({"object": "list", "data": [{"index": 0, "embedding": [0.0, 1.0]}]})

    async def _metrics(self, _request: web.Request) -> web.Response:
        fields = {
            "Process-Start-Time-Unix": "1700000000",
            "Access-Control-Allow-Origin": "*",
        } | self.script.headers
        return web.Response(text=self.metrics, content_type="text/plain", headers=fields)

    async def _slot_action(self, request: web.Request) -> web.Response:
        action = request.query.get("action", "")
        counts = {"save": "n_saved", "restore": "n_restored", "erase": "n_erased"}
        if action not in counts:
            return await self._json({"error": {"message": "Invalid action", "code": 400}}, 400)
        answer = {"id_slot": int(request.match_info["slot"]), counts[action]: self.script.prompt_n}
        return await self._json(answer)

    async def _tokenize(self, request: web.Request) -> web.Response:
        asked = await request.json()
        tokens = self.tokens_of(asked["content"])
        if not asked.get("parse_special", True):
            tokens = [token + 1_000_000 if chr(token) in self.special else token for token in tokens]
        if asked.get("with_pieces"):
            return await self._json({"tokens": [{"id": token, "piece": chr(token)} for token in tokens]})
        return await self._json({"tokens": tokens})

    async def _detokenize(self, request: web.Request) -> web.Response:
        return await self._json({"content": "".join(map(chr, (await request.json())["tokens"]))})

    async def _apply_template(self, request: web.Request) -> web.Response:
        messages = (await request.json())["messages"]
        prompt = "".join(f"<|{message['role']}|>{message['content']}" for message in messages)
        return await self._json({"prompt": prompt})

    async def _echo(self, request: web.Request) -> web.Response:
        """Sends a body back, with its type."""
        return web.Response(body=_request.get().body, content_type=request.content_type)

    # -- generation --------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        recorded = _request.get()
        script = self.script_for(recorded) or self.script
        if self.loading:
            return await self._json(Script().error_body, 503)
        if script.prefill_s:
            await asyncio.sleep(script.prefill_s)
        if script.fault == "die_before_head":
            return _die(request)
        if script.fault == "error":
            return web.json_response(script.error_body, status=script.status, headers=script.headers)
        if recorded.json.get("stream"):
            return await self._stream(request, script)
        for _ in range(script.tokens - 1):
            await asyncio.sleep(script.token_delay_s)
        answer = whole_answer(recorded.path, script) | script.extra
        return web.json_response(answer, headers=script.headers)

    async def _stream(self, request: web.Request, script: Script) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", **script.headers})
        await answer.prepare(request)
        *tokens, last = token_events(request.path, script)
        for number, event in enumerate(tokens):
            if script.fault == "die_mid_stream" and number >= len(tokens) // 2:
                return _die(request)
            if number:
                await asyncio.sleep(script.token_delay_s)
            await answer.write(event)
        await answer.write(last)
        await answer.write_eof()
        return answer


def _die(request: web.Request) -> web.StreamResponse:
    """Close the connection as a crashed process does."""
    transport = request.transport
    assert transport is not None
    transport.abort()
    return web.Response()


def _event(value: dict[str, Any], name: str | None = None) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def token_events(path: str, script: Script) -> list[bytes]:
    """The events of a stream: one a token, then everything that ends it as one last piece."""
    if path == "/v1/messages":
        return _messages_events(script)
    if path in ("/completion", "/infill"):
        events = [
            _event({"index": 0, "content": script.text, "stop": False, "tokens": [number]})
            for number in range(script.tokens)
        ]
        return [*events, _event(whole_answer(path, script) | {"content": ""} | script.extra)]
    base = {"id": "chatcmpl-fake", "object": "chat.completion.chunk", "created": _CREATED, "model": "fake"}
    delta = {"delta": {"content": script.text}} if "chat" in path else {"text": script.text}
    events = [
        _event({"choices": [{"index": 0, "finish_reason": None, **delta}], **base})
        for _ in range(script.tokens)
    ]
    stop = {"choices": [{"index": 0, "finish_reason": "stop", "delta": {}}], **base}
    usage = {"choices": [], **base, "usage": script.usage(), "timings": script.timings(), **script.extra}
    return [*events, _event(stop) + _event(usage) + b"data: [DONE]\n\n"]


def _messages_events(script: Script) -> list[bytes]:
    start = {
        "type": "message_start",
        "message": {"id": "msg_fake", "type": "message", "role": "assistant", "content": []},
    }
    block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    delta = {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": script.text},
    }
    stop = {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn"},
        "usage": {"output_tokens": script.tokens},
        **script.extra,
    }
    first = _event(start, "message_start") + _event(block, "content_block_start")
    tokens = [_event(delta, "content_block_delta") for _ in range(script.tokens)]
    last = (
        _event({"type": "content_block_stop", "index": 0}, "content_block_stop")
        + _event(stop, "message_delta")
        + _event({"type": "message_stop"}, "message_stop")
    )
    return [first, *tokens, last]


def whole_answer(path: str, script: Script) -> dict[str, Any]:
    """The JSON of an answer that is not streamed."""
    text = script.text * script.tokens
    if path in ("/completion", "/infill"):
        return {
            "index": 0,
            "content": text,
            "stop": True,
            "id_slot": 0,
            "tokens_predicted": script.tokens,
            "tokens_evaluated": script.prompt_n + script.cache_n,
            "tokens_cached": script.prompt_n + script.cache_n + script.tokens,
            "timings": script.timings(),
        }
    if path == "/v1/messages":
        return {
            "id": "msg_fake",
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": text}],
            "stop_reason": "end_turn",
            "usage": {"input_tokens": script.prompt_n, "output_tokens": script.tokens},
        }
    message = {"message": {"role": "assistant", "content": text}} if "chat" in path else {"text": text}
    return {
        "id": "chatcmpl-fake",
        "object": "chat.completion",
        "created": _CREATED,
        "model": "fake",
        "choices": [{"index": 0, "finish_reason": "stop", **message}],
        "usage": script.usage(),
        "timings": script.timings(),
    }
