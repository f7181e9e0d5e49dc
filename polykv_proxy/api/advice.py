"""Tells operators what keeps their clients from sharing: ``GET /polykv/advice``.

Openings of new conversations are compared, each one once; what was found is logged when it is new, and shown
until the proxy stops. Requests that go on in their slot, or open like one before them, cost nothing.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

import msgspec
import structlog
from aiohttp import web

from polykv_proxy.api import members
from polykv_proxy.api.reply import json_reply
from polykv_proxy.core.advice import AdviceBook, Opening
from polykv_proxy.core.volatile import VolatileKind, as_engine_masks
from polykv_proxy.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable

    from polykv_proxy.api import shapes_kept
    from polykv_proxy.api.asked import Asked
    from polykv_proxy.api.families import Family
    from polykv_proxy.core.advice import Finding
    from polykv_proxy.core.decisions import PoolPolicy
    from polykv_proxy.core.types import Scope

log = structlog.get_logger(__name__)

REMEDIES = {
    VolatileKind.BILLING_HEADER: "set pools.mask_billing_header, or CLAUDE_CODE_ATTRIBUTION_HEADER=0 in the "
    "client's environment",
    VolatileKind.CLOCK: "put the time behind what all prompts share, say into the last message",
    VolatileKind.TOOLS_REORDERED: "sort the tools by name before they are sent",
}
"""What to do about it."""


class _Opening(msgspec.Struct):
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


class _Message(msgspec.Struct):
    role: str = ""


class Advice:
    """What was noticed in the requests of all clients.

    Args:
        policy: whether billing headers are masked.
    """

    def __init__(self, policy: PoolPolicy) -> None:
        self.masks = policy.mask_billing_header
        """Whether billing headers are to be made constant."""
        self._book = AdviceBook()

    def notice(self, asked: Asked, family: Family, scope: Scope) -> None:
        """A conversation opens: look for what keeps it from sharing with those before it.

        Args:
            asked: its request.
            family: the API it came in on.
            scope: whose it is.
        """
        now = monotonic()
        if not (asked.structured and asked.chain) or not self._book.wants(scope, asked.chain[0], now):
            return
        opening = opening_of(asked.body, family)
        found = self._book.look(scope, asked.chain[0], opening, now=now, now_ts=Runtime.now_ts())
        if found is not None and found[1]:
            finding = found[0]
            log.warning(
                "volatile_prefix",
                kind=finding.kind.value,
                section=finding.section,
                api=finding.api,
                old=finding.old,
                new=finding.new,
                lost_bytes=finding.lost_bytes,
                remedy=REMEDIES[finding.kind],
            )

    def on_masked(self, scope: Scope) -> None:
        """A request's billing header was made constant."""
        if self._book.on_masked(scope):
            log.info("billing_header_masked", reason="pools.mask_billing_header; logged once per API key")

    def routes(self, sees: Callable[[web.Request], Scope | None]) -> list[web.RouteDef]:
        """The HTTP face.

        Args:
            sees: scope whose findings a request may see; None: all.
        """

        async def show(request: web.Request) -> web.Response:
            return json_reply(self._document(sees(request)))

        return [web.get("/polykv/advice", show)]

    def _document(self, scope: Scope | None) -> shapes_kept.Advice:
        return {
            "volatile": [_view(finding) for finding in reversed(self._book.findings(scope))],
            "billing_header": {
                "masked": self.masks,
                "requests_masked": self._book.masked_in(scope),
            },
        }


def _view(finding: Finding) -> shapes_kept.Finding:
    return {
        "kind": finding.kind.value,
        "section": finding.section,
        "api": finding.api,
        "old": finding.old,
        "new": finding.new,
        "shared_bytes": finding.shared_bytes,
        "lost_bytes": finding.lost_bytes,
        "times": finding.times,
        "first_seen_ts": finding.first_seen_ts,
        "last_seen_ts": finding.last_seen_ts,
        "remedy": REMEDIES[finding.kind],
    }


def opening_of(body: bytes, family: Family) -> Opening:
    """The parts of a body that conversations have in common, as they stand there."""
    try:
        parsed = msgspec.json.decode(body, type=_Opening)
        scene = [as_engine_masks(bytes(parsed.system)), bytes(parsed.instructions)]
        for messages in (parsed.messages, parsed.input):
            if bytes(memoryview(messages)[:1]) == b"[":
                for one in members.items(bytes(messages)):
                    if msgspec.json.decode(one, type=_Message).role not in ("system", "developer"):
                        break
                    scene.append(one)
        system = b"\n".join(part for part in scene if part)
        return Opening(family.dialect.value, system, bytes(parsed.tools))
    except (msgspec.DecodeError, RecursionError):
        return Opening(family.dialect.value, b"", b"")
