"""Compaction at work: the decisions of ``compaction``, carried out with a model and its pools.

One ``Compactor`` serves all three ways in: the middleware for ``create_agent``, ``CompactionNode`` for a
graph of one's own, ``pre_model_hook`` for ``create_react_agent``.

The order of things (CTX-6): summary in place, fork of the stable ancestor, migration of the session; then one
state update that names the new messages, the new pool, and the old one as to be released. It is released when
this is asked the next time, which is at least one committed step later: a node that is repeated, or a process
that dies in between, still finds everything that its state names. A checkpoint from before, replayed later,
names a pool that is gone; it is had again by its content. (With ``durability="exit"`` nothing is committed
before a run ends. A run that dies then goes back to a pool that may be gone, and has it again the same way.)
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage, RemoveMessage, SystemMessage
from langgraph.config import get_stream_writer
from langgraph.graph.message import REMOVE_ALL_MESSAGES

from polykv_proxy.client import calls
from polykv_proxy.client.errors import ContextOverflowError, PolyKVError
from polykv_proxy.client.procedures import SUMMARISE, compact_by_refork
from polykv_proxy.langgraph import compaction
from polykv_proxy.langgraph.compaction import Compacted, Count, Summarise, Trimmed
from polykv_proxy.langgraph.errors import model_errors
from polykv_proxy.langgraph.messages import to_openai
from polykv_proxy.langgraph.pools import Pools

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from langchain_core.messages import BaseMessage

    from polykv_proxy.client.procedures import Procedure
    from polykv_proxy.langgraph.channels import PoolRef, Prefix
    from polykv_proxy.langgraph.chat_model import ChatPolyKV

log = logging.getLogger(__name__)

EVENT = "polykv.compaction"
"""``type`` of the custom stream event; one for each compaction."""

_NUMBER = re.compile(r"#[0-9]+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What is known of a conversation between two turns."""

    messages: Sequence[BaseMessage]
    """Without the system message."""
    prefix: Prefix
    """As it stood in the last request."""
    pool: PoolRef | None = None
    retired: Sequence[str] = ()
    """Pools that an earlier compaction left."""


class Compactor:
    """Compacts conversations of a model, and makes those fit that cannot be compacted.

    Args:
        model: answers them, and writes the summaries.
        pools: of the model; None: new ones.
        window: tokens of a conversation; None: as the model's profile says, or else the server.
        instruction: asks for a summary.
        max_summary_tokens: at most.
    """

    def __init__(
        self,
        model: ChatPolyKV,
        pools: Pools | None = None,
        *,
        window: int | None = None,
        instruction: str = SUMMARISE,
        max_summary_tokens: int = 512,
    ) -> None:
        self.model = model
        self.pools = Pools(model) if pools is None else pools
        self._window = window
        self._instruction = instruction
        self._max_summary_tokens = max_summary_tokens

    # -- asked between two turns -------------------------------------------------------------------------

    def tend(self, conversation: Conversation) -> dict[str, Any]:
        """Release what an earlier compaction left, and compact if it is time.

        Returns:
            A state update: ``polykv_retire``, and after a compaction ``messages`` and ``polykv_pool``.
        """
        with model_errors():
            return self.model.client.run(self._tending(conversation))

    async def atend(self, conversation: Conversation) -> dict[str, Any]:
        """``tend`` for asyncio."""
        with model_errors():
            return await self.model.async_client.run(self._tending(conversation))

    # -- asked for what is about to be sent --------------------------------------------------------------

    def fit(
        self, messages: Sequence[BaseMessage], prefix: Prefix, *, refused: ContextOverflowError | None = None
    ) -> Sequence[BaseMessage]:
        """Outgoing messages that fit; the same ones where there is nothing to do.

        Args:
            messages: without the system message.
            prefix: what precedes them.
            refused: what the engine said when they were sent; None: they were not.
        """
        with model_errors():
            return self.model.client.run(self._fitting(messages, prefix, refused))

    async def afit(
        self, messages: Sequence[BaseMessage], prefix: Prefix, *, refused: ContextOverflowError | None = None
    ) -> Sequence[BaseMessage]:
        """``fit`` for asyncio."""
        with model_errors():
            return await self.model.async_client.run(self._fitting(messages, prefix, refused))

    # -- inside ------------------------------------------------------------------------------------------

    def _tending(self, conversation: Conversation) -> Procedure[dict[str, Any]]:
        update: dict[str, Any] = {}
        if conversation.retired:
            left = yield from self.pools.releasing(conversation.retired)
            update["polykv_retire"] = left
        window = yield from self._knowing_window()
        messages, prefix = conversation.messages, conversation.prefix
        if window is None or not compaction.may_compact(window) or not compaction.is_due(messages, window):
            return update
        steps = compaction.compact(messages, self._instruction)
        try:
            outcome = yield from self._carrying_out(steps, prefix, session_name(messages))
        except PolyKVError as error:  # the conversation goes on as it is; the next turn tries again
            log.info("compaction_failed", extra={"reason": error.code or error.status})
            return update
        if not isinstance(outcome, Compacted):
            log.info("compaction_refused", extra={"reason": outcome.reason, "messages": len(messages)})
            return update
        pool = yield from self._moving(conversation, outcome)
        update["messages"] = [RemoveMessage(id=REMOVE_ALL_MESSAGES), *outcome.messages]
        if conversation.pool is not None:
            update["polykv_pool"] = pool
            old, root = conversation.pool["id"], conversation.pool["root"]
            if old != root and (pool is None or pool["id"] != old):  # the ancestor is never retired
                update["polykv_retire"] = [*update.get("polykv_retire", []), old]
        _announce(outcome, pool)
        return update

    def _moving(self, conversation: Conversation, outcome: Compacted) -> Procedure[PoolRef | None]:
        """A fresh branch for what a compaction left, and the session on it; None where there are no pools."""
        if conversation.pool is None:
            return None
        root = conversation.pool["root"]
        kept = outcome.messages[compaction.SUMMARY_MESSAGES :]
        history = replace(self.pools.history(conversation.prefix), tail=to_openai(kept))
        try:
            done = yield from compact_by_refork(
                root,
                history,
                session_id=session_id(conversation.messages),
                summary=outcome.messages[1].text,
            )
        except PolyKVError as error:  # the branch saves work; the smaller messages are worth having anyway
            log.info("fork_failed", extra={"reason": error.code})
            return None
        return self.pools.remember(conversation.prefix, outcome.messages, done.pool, root)

    def _fitting(
        self, messages: Sequence[BaseMessage], prefix: Prefix, refused: ContextOverflowError | None
    ) -> Procedure[Sequence[BaseMessage]]:
        window = yield from self._knowing_window()
        if refused is not None and refused.ctx_size is not None:
            window = refused.ctx_size
        if window is None or (refused is None and not compaction.is_due(messages, window)):
            return messages
        try:
            trimmed: Trimmed = yield from self._carrying_out(compaction.trim(messages, window), prefix, None)
        except PolyKVError as error:  # nobody counts; the engine has the last word
            log.info("ladder_failed", extra={"reason": error.code or error.status})
            return messages
        for rung in trimmed.rungs:
            log.info("ladder", extra={"rung": rung.name, "messages": rung.messages, "of": len(messages)})
        return trimmed.messages

    def _carrying_out(
        self, steps: compaction.Steps[Any], prefix: Prefix, session: str | None
    ) -> Procedure[Any]:
        """Turn what a decision asks for into requests."""
        try:
            step = next(steps)
            while True:
                try:
                    found = yield self._call(step, prefix, session)
                except ContextOverflowError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(found if isinstance(step, Count) else found.text)
        except StopIteration as end:
            return end.value

    def _call(self, step: Summarise | Count, prefix: Prefix, session: str | None) -> calls.Call[Any]:
        system = [] if prefix["system"] is None else [SystemMessage(prefix["system"]["content"])]
        messages = [*system, *step.messages]
        given: dict[str, Any] = {"tools": prefix["tools"]} if prefix["tools"] else {}
        if isinstance(step, Summarise):
            given |= {"max_tokens": self._max_summary_tokens, "session_id": session}
            if prefix["tools"]:  # they stay in the prompt, and none is called
                given["tool_choice"] = "none"
            body, _ = self.model.request(messages, None, given)
            return calls.chat(body)
        body, _ = self.model.request(messages, None, {**given, "session_id": None})
        return calls.count_tokens({name: body[name] for name in _PROMPT if name in body})

    def _knowing_window(self) -> Procedure[int | None]:
        if self._window is None and self.model.profile:
            self._window = self.model.profile.get("max_input_tokens")
        if self._window is None:
            with suppress(PolyKVError):
                props = yield calls.props()
                self._window = (props.get("default_generation_settings") or {}).get("n_ctx")
        return self._window


_PROMPT = ("model", "messages", "tools", "chat_template_kwargs")
"""Members of a chat body that make its prompt."""


def session_id(messages: Sequence[BaseMessage]) -> str | None:
    """The proxy's id of the conversation that these messages had, if it had a name."""
    for message in reversed(messages):
        if isinstance(message, AIMessage) and "session_id" in message.response_metadata:
            told: Mapping[str, Any] = message.response_metadata
            return told["session_id"] if told.get("session_name") else None
    return None


def session_name(messages: Sequence[BaseMessage]) -> str | None:
    """The name under which these messages were sent."""
    found = session_id(messages)
    return None if found is None else _NUMBER.sub("", found)


def _announce(outcome: Compacted, pool: PoolRef | None) -> None:
    """One visible event for each compaction, in the log and in the graph's custom stream."""
    event = {
        "type": EVENT,
        "replaced_messages": outcome.replaced,
        "tokens_before": outcome.tokens_before,
        "tokens_after": outcome.tokens_after,
        "pool_id": None if pool is None else pool["id"],
    }
    log.info("compacted", extra={name: value for name, value in event.items() if name != "type"})
    with suppress(RuntimeError):  # outside a graph there is no stream
        get_stream_writer()(event)
