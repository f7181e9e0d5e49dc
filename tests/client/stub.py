"""A proxy that only pretends: pools are names, tokens are words, answers are what a test says."""

from __future__ import annotations

import json
from hashlib import sha256

from aiohttp import web


class StubProxy:
    """An async context manager.

    Attributes:
        answers: of chats, in order; a text, a message, or a status with an error. The last one repeats.
        chats: bodies of the chats that came.
        pools: ids that exist now, and how many tokens they have.
        log: what happened to pools and sessions, in order.
        headroom: sessions for which there is room; None: any number.
        window: tokens of a conversation.
        plain: pretend to be a llama-server without a proxy.
        admin_key: that the control routes demand; None: none.
        taken: called with each chat's body before it is answered.
    """

    def __init__(self, *answers, window=8192, plain=False, admin_key=None):
        self.answers = list(answers) or ["yes"]
        self.chats = []
        self.pools = {}
        self.log = []
        self.headroom = None
        self.window = window
        self.plain = plain
        self.admin_key = admin_key
        self.taken = lambda _body: None

    async def __aenter__(self):
        app = web.Application(client_max_size=1 << 24, middlewares=[self._guard])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/chat/completions/input_tokens", self._count)
        app.router.add_get("/props", self._props)
        if not self.plain:
            app.router.add_post("/polykv/pools", self._create)
            app.router.add_post("/polykv/pools/{pool}/fork", self._create)
            app.router.add_delete("/polykv/pools/{pool}", self._release)
            app.router.add_get("/polykv/pools/{pool}/capacity", self._capacity)
            app.router.add_get("/polykv/capacity", self._capacity)
            app.router.add_post("/polykv/sessions/{session}/{action}", self._session)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request, handler):
        given = request.headers.get("X-PolyKV-Admin-Key")
        if request.path.startswith("/polykv") and self.admin_key not in (None, given):
            error = {"code": "admin_key_required", "message": "send the admin key"}
            return web.json_response({"error": error}, status=401)
        return await handler(request)

    def happened(self, verb):
        """What happened in one way: names of pools or sessions."""
        return [name for each, name in self.log if each == verb]

    @staticmethod
    def words(body):
        """Tokens of a body: its messages' words, ten for each tool, one for each message."""
        texts = [message.get("content") or "" for message in body["messages"]]
        return sum(len(text.split()) + 1 for text in texts) + 10 * len(body.get("tools") or ())

    async def _chat(self, request):
        body = await request.json()
        self.chats.append(body)
        self.taken(body)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            answer = answer(body)
        prompt = self.words(body)
        if isinstance(answer, tuple):
            status, error, *headers = answer
            return web.json_response({"error": error}, status=status, headers=dict(*headers))
        if prompt >= self.window:
            error = {"code": 400, "type": "exceed_context_size_error", "message": "too long"}
            return web.json_response(
                {"error": error | {"n_prompt_tokens": prompt, "n_ctx": self.window}}, status=400
            )
        message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
        generated = len((message.get("content") or "").split())
        asked = body.get("opencoti") or {}
        pool = asked.get("pool_id")
        cached = self.pools.get(pool, 0)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        block = {"session_id": asked.get("session_id"), "pool_id": pool, "session_tps": 9.5}
        if pool is not None and pool not in self.pools:
            block["pool_unknown"] = True
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        document = {"id": "c", "model": "stub", "usage": usage} | ({} if self.plain else {"opencoti": block})
        if not body.get("stream"):
            choices = [{"index": 0, "message": message, "finish_reason": reason}]
            return web.json_response(document | {"choices": choices})
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        deltas = [{"content": word + " "} for word in (message.get("content") or "").split(" ")]
        events = [{"choices": [{"delta": delta}]} for delta in deltas]
        events += [{"choices": [{"delta": {}, "finish_reason": reason}]}, document | {"choices": []}]
        for event in events:
            await stream.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await stream.write(b"data: [DONE]\n\n")
        return stream

    async def _count(self, request):
        return web.json_response({"input_tokens": self.words(await request.json())})

    async def _props(self, _request):
        return web.json_response({"default_generation_settings": {"n_ctx": self.window}})

    async def _create(self, request):
        body = await request.json()
        parent = request.match_info.get("pool")
        if parent is not None and parent not in self.pools:
            return self._gone(parent)
        content = json.dumps([body["messages"], body.get("tools")])
        pool = sha256(content.encode()).hexdigest()[:8]
        created = pool not in self.pools
        self.pools[pool] = self.words(body)
        self.log.append(("created" if created else "found", pool))
        answer = {"pool_id": pool, "prefix_len": self.pools[pool], "created": created, "parent": parent}
        return web.json_response(answer)

    async def _release(self, request):
        pool = request.match_info["pool"]
        self.log.append(("released", pool))
        if self.pools.pop(pool, None) is None:
            return self._gone(pool)
        return web.json_response({"pool_id": pool, "released": [pool]})

    async def _capacity(self, request):
        pool = request.match_info.get("pool")
        if pool is not None and pool not in self.pools:
            return self._gone(pool)
        room = self.headroom is None or self.headroom > 0
        answer = {"can_admit": room, "headroom_sessions": self.headroom, "retry_after_s": 0 if room else 1}
        return web.json_response(answer | {"mean_active_tps": 5.0, "compaction_pressure": 0.25})

    async def _session(self, request):
        session, action = request.match_info["session"], request.match_info["action"]
        self.log.append((action, session))
        return web.json_response({"session_id": session, "cells_freed": 7})

    @staticmethod
    def _gone(pool):
        error = {"code": "pool_not_found", "message": f"pool {pool} does not exist"}
        return web.json_response({"error": error}, status=404)
