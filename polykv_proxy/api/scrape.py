"""``GET /metrics``: the engines' own series, and ours behind them."""

from __future__ import annotations

import asyncio
import hmac
from typing import TYPE_CHECKING

import structlog

from polykv_proxy.api.guard import UnauthorizedError
from polykv_proxy.api.status import fetch, guarded
from polykv_proxy.errors import PolyKVError
from polykv_proxy.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polykv_proxy.api.guard import Guard
    from polykv_proxy.edge.exchange import Exchange
    from polykv_proxy.edge.head import Headers, RequestHead, ResponseHead
    from polykv_proxy.fleet import Engine, Fleet
    from polykv_proxy.metrics import Exposition

log = structlog.get_logger(__name__)


class Scrape:
    """The handler.

    1. An engine gives its series: those, then ours, under the fields of its answer; of several engines each
       series has a label, and the fields are ours. Whoever has the admin key is let in with the engine's own.
    2. It has none, does not serve, or fails to answer: ours. Its key, which it cannot check now, is checked
       here.
    3. It refuses, for want of its key say: its refusal; what is not for everybody there is not here.
    4. Labels of pools are their keys' own: where there is an admin key, whoever does not have it sees the
       classes of their origins alone.

    Args:
        fleet: the engines.
        guard: knows the admin key, which opens this too.
        exposition: our series.
    """

    def __init__(self, fleet: Fleet, guard: Guard, exposition: Exposition) -> None:
        self._fleet = fleet
        self._guard = guard
        self._exposition = exposition

    async def handle(self, exchange: Exchange) -> None:
        """Answer one scrape."""
        answers = await asyncio.gather(*(self._ask(engine, exchange) for engine in self._fleet))
        texts: dict[str, bytes] = {}
        fields: Headers = []
        for engine, answer in zip(self._fleet, answers, strict=True):
            if answer is None or answer[0].status >= 500:
                self._require_key(exchange.head, engine.key)
                continue
            head, body = answer
            if head.status == 200:
                texts[engine.name] = body
                fields = [field for field in head.end_to_end() if field[0].lower() != b"content-type"]
            elif head.status != 404:
                await exchange.respond(head.status, head.end_to_end(), body)
                return
        theirs = merged(texts) if len(self._fleet) > 1 else b"".join(texts.values())
        if theirs and not theirs.endswith(b"\n"):
            theirs += b"\n"
        text = theirs + self._exposition.render(named=self._guard.is_operator(guarded(exchange.head)))
        if len(self._fleet) > 1:
            fields = []
        await exchange.respond(200, [(b"Content-Type", CONTENT_TYPE.encode()), *fields], text)

    async def _ask(self, engine: Engine, exchange: Exchange) -> tuple[ResponseHead, bytes] | None:
        """One engine's own answer; None without one."""
        if not engine.plane.serving:
            return None
        key = engine.key if self._guard.is_admin(guarded(exchange.head)) else None
        try:
            return await fetch(engine.upstream, exchange, key=key)
        except PolyKVError as error:
            log.debug("engine_metrics_unavailable", engine=engine.name, reason=error.message)
            return None

    def _require_key(self, head: RequestHead, key: str | None) -> None:
        """Check an engine's key in its place.

        Raises:
            UnauthorizedError: it is missing or wrong.
        """
        if key is None or self._guard.is_admin(guarded(head)):
            return
        scheme, _, token = (head.get(b"authorization") or b"").partition(b" ")
        given = token.strip() if scheme.lower() == b"bearer" else head.get(b"x-api-key") or b""
        if not hmac.compare_digest(given, key.encode()):
            raise UnauthorizedError("send the engine's key as a bearer token", code="engine_key_required")


def merged(texts: Mapping[str, bytes]) -> bytes:
    """Expositions of several engines as one: each metric once, its samples with a label ``engine``.

    Args:
        texts: by the engines' names.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for engine, text in texts.items():
        label = 'engine="{}"'.format(engine.replace("\\", r"\\").replace('"', r"\""))
        name = ""
        for line in text.decode("utf-8", "replace").split("\n"):  # the format's only line end
            if line.startswith(("# HELP ", "# TYPE ")):
                name = line.split(" ", 3)[2]
                known = heads.setdefault(name, [])
                if not any(one.startswith(line[:7]) for one in known):
                    known.append(line)
            elif line and not line.startswith("#"):
                samples.setdefault(name, []).append(_labelled(line, label))
    names = dict.fromkeys((*heads, *samples))
    lines = [line for name in names for line in (*heads.get(name, ()), *samples.get(name, ()))]
    return "".join(f"{line}\n" for line in lines).encode()


def _labelled(line: str, label: str) -> str:
    """A sample line with one label more, in front."""
    brace, space = line.find("{"), line.find(" ")
    if 0 <= brace < space or space < 0:
        rest = line[brace + 1 :]
        return f"{line[: brace + 1]}{label}{'' if rest.startswith('}') else ','}{rest}"
    return f"{line[:space]}{{{label}}}{line[space:]}"
