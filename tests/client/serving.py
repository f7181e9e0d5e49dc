"""A server that says what it is told to, and counts its connections."""

from __future__ import annotations

import asyncio
import contextlib
import json


class Scripted:
    """Answers in order; each is a status, headers and a body, or a callable that gets the writer.

    Attributes:
        requests: what came: method and target, headers, body.
        open: connections that are open now.
        accepted: connections so far.
    """

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests = []
        self.open = 0
        self.accepted = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await self._server.wait_closed()

    async def all_closed(self):
        """Wait until nobody is connected."""
        async with asyncio.timeout(20.0):
            while self.open:
                await asyncio.sleep(0.005)

    async def _serve(self, reader, writer):
        self.open += 1
        self.accepted += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._answer(reader, writer):
                    pass
        finally:
            self.open -= 1
            writer.close()

    async def _answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line, *fields = head.split("\r\n")[:-2]
        headers = {name.lower(): value for name, _, value in (field.partition(": ") for field in fields)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.requests.append((line.rpartition(" ")[0], headers, body))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            return await answer(reader, writer)
        status, more, document = answer
        raw = document if isinstance(document, bytes) else json.dumps(document).encode()
        sent = "".join(f"{name}: {value}\r\n" for name, value in more.items())
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(raw)}\r\n{sent}\r\n".encode() + raw)
        await writer.drain()
        return True


async def hang_up(reader, writer):
    """Close without a word."""
    return False


def stream(*events, end=b"data: [DONE]\n\n", hold=None):
    """An event stream; ``hold`` waits on an event that never comes before it ends."""

    async def answer(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for each in events:
            writer.write(b"data: " + json.dumps(each).encode() + b"\n\n")
        await writer.drain()
        if hold is not None:
            hold.set()
            await reader.read()  # until the client leaves
        writer.write(end)
        await writer.drain()
        return False

    return answer
