"""What a runtime and those who serve requests tell whoever saves KV; with nobody there, nothing happens.

The other way round it would not do: what saves KV needs the runtime and the pools.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polykv_proxy.core.decisions import Lease
    from polykv_proxy.core.sessions import Session
    from polykv_proxy.core.types import Capability, EngineFacts, Scope, SlotId, Tokens


class Saver(Protocol):
    """Whoever saves KV of one engine."""

    async def meet(self, facts: EngineFacts, capability: Capability, reported: Mapping[str, str]) -> str:
        """An engine is up, and nobody uses it yet; returns the model's id, of which pool ids are made."""

    def on_ready(self) -> None:
        """The plane knows the engine: what was lost can come back."""

    def on_down(self) -> None:
        """The engine is gone."""

    @property
    def is_settled(self) -> bool:
        """Whether requests should run: what they may ride on is back."""

    async def settled(self, timeout_s: float) -> bool | None:
        """Wait until requests should run: what they may ride on is back. None: not yet."""

    def may_help(self, scope: Scope, *, adapters: bool) -> bool:
        """Whether it is worth finding out the tokens of a request's prompt.

        Args:
            scope: whose it is.
            adapters: whether it chooses LoRA adapters of its own.
        """

    async def before_request(self, lease: Lease, tokens: Tokens | None, held: int) -> None:
        """A request has its slots: save what it displaces, restore what it goes on with, if that pays.

        Args:
            lease: its hold on its slots.
            tokens: its prompt; None if nothing is to be restored.
            held: leading tokens that a pool holds.
        """

    async def before_loss(self, slot: SlotId) -> None:
        """A slot that is idle, and kept from others, is about to be emptied."""

    def on_delivered(self, lease: Lease, body: bytes, *, adapters: bool) -> None:
        """An answer went out whole: what the slot holds is worth keeping.

        Args:
            lease: its hold on its slots.
            body: its request's.
            adapters: see ``may_help``.
        """

    async def on_answer(self, lease: Lease, cached_tokens: int | None) -> None:
        """What the answer says it reused proves a restore, or not."""

    async def on_close(self, session: Session, *, keep: bool) -> bool:
        """A session ends; its slot still holds it. Returns whether its state stays on disk."""

    def status(self) -> dict[str, Any]:
        """Whether KV is saved, and why not."""


class NoSaver:
    """Nothing is saved."""

    def __init__(self, reason: str = "nothing is saved") -> None:
        self._reason = reason

    async def meet(self, facts: EngineFacts, capability: Capability, reported: Mapping[str, str]) -> str:  # noqa: ARG002
        """What the engine says of its model is all that is known of it."""
        return model_digest(reported)

    def on_ready(self) -> None:
        """Nothing."""

    def on_down(self) -> None:
        """Nothing."""

    @property
    def is_settled(self) -> bool:
        """Yes."""
        return True

    async def settled(self, timeout_s: float) -> bool | None:  # noqa: ARG002
        """At once."""
        return True

    def may_help(self, scope: Scope, *, adapters: bool) -> bool:  # noqa: ARG002
        """No."""
        return False

    async def before_request(self, lease: Lease, tokens: Tokens | None, held: int) -> None:
        """Nothing."""

    async def before_loss(self, slot: SlotId) -> None:
        """Nothing."""

    def on_delivered(self, lease: Lease, body: bytes, *, adapters: bool) -> None:
        """Nothing."""

    async def on_answer(self, lease: Lease, cached_tokens: int | None) -> None:
        """Nothing."""

    async def on_close(self, session: Session, *, keep: bool) -> bool:  # noqa: ARG002
        """It does not."""
        return False

    def status(self) -> dict[str, Any]:
        """Off."""
        return {"state": "off", "reason": self._reason}


def model_digest(reported: Mapping[str, str]) -> str:
    """Id of a model of which no more is known than what its engine says."""
    return hashlib.sha256(json.dumps(dict(reported), sort_keys=True).encode()).hexdigest()
