"""Pools of conversations: had again whenever they are gone, given up when nothing names them any more.

A pool is named by its content, so asking for it makes it, or finds it. What was seen to exist is remembered
here, so that the usual call asks nothing. The memory is a guess: the proxy says when it was wrong
(``pool_unknown``), and then it is forgotten.

Pools save work. Where they cannot be had, because the proxy is full or there is none, or because it wants a
key for its control routes, conversations go on without. A client key that is wrong is an error.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from hashlib import sha256
from typing import TYPE_CHECKING

from polykv_proxy.client import calls
from polykv_proxy.client.errors import (
    AuthenticationError,
    ConflictError,
    DisabledError,
    NotFoundError,
    PolyKVError,
    PoolNotFoundError,
)
from polykv_proxy.client.procedures import History, fork_or_create
from polykv_proxy.langgraph.messages import to_openai

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from langchain_core.messages import BaseMessage

    from polykv_proxy.client.procedures import Procedure
    from polykv_proxy.client.results import Pool
    from polykv_proxy.langgraph.channels import PoolRef, Prefix
    from polykv_proxy.langgraph.chat_model import ChatPolyKV

log = logging.getLogger(__name__)

REMEMBERED = 1024

KEYLESS = "admin_key_required"
NO_ADMIN_KEY = (
    "the proxy demands its admin key for pools, so conversations go on without: long prefixes are still "
    "shared where the proxy finds that they agree (pools.auto_min_tokens), but headroom is unknown, and a "
    "compaction writes its summary without a fork. Give the model admin_key=, or POLYKV_ADMIN_API_KEY"
)


class Pools:
    """The pools of one model's conversations.

    Args:
        model: whose requests ride on them; its address, key and template settings count.
        keep: how long they stay; see ``polykv_proxy.client.calls.KeepOptions``.
    """

    def __init__(self, model: ChatPolyKV, keep: calls.KeepOptions | None = None) -> None:
        self.model = model
        self._keep: calls.KeepOptions = keep or {}
        self._seen: OrderedDict[str, PoolRef] = OrderedDict()
        self._off = False

    def have(self, prefix: Prefix, messages: Sequence[BaseMessage] = ()) -> PoolRef | None:
        """The pool of this prefix and these messages after it; None where there is none to be had.

        Args:
            prefix: system and tools, which are the stable ancestor.
            messages: what a compaction left; none before the first.
        """
        seen = self._recall(prefix, messages)
        return (
            seen if seen is not None or self._off else self.model.client.run(self._having(prefix, messages))
        )

    async def ahave(self, prefix: Prefix, messages: Sequence[BaseMessage] = ()) -> PoolRef | None:
        """``have`` for asyncio."""
        seen = self._recall(prefix, messages)
        if seen is not None or self._off:
            return seen
        return await self.model.async_client.run(self._having(prefix, messages))

    def release(self, pool_ids: Iterable[str]) -> list[str]:
        """Give pools up; returns those that could not be, to be tried again."""
        return self.model.client.run(self.releasing(pool_ids))

    async def arelease(self, pool_ids: Iterable[str]) -> list[str]:
        """``release`` for asyncio."""
        return await self.model.async_client.run(self.releasing(pool_ids))

    def releasing(self, pool_ids: Iterable[str]) -> Procedure[list[str]]:
        """``release`` as a part of other procedures."""
        left = []
        for pool_id in pool_ids:
            self.forget(pool_id)
            try:
                yield calls.release_pool(pool_id)
            except NotFoundError:
                pass
            except ConflictError:  # somebody forked it; it goes when that does
                left.append(pool_id)
            except PolyKVError as error:
                log.info("pool_not_released", extra={"pool_id": pool_id, "reason": error.code})
                left.append(pool_id)
        return left

    def forget(self, pool_id: str) -> None:
        """The proxy says that this one is gone."""
        for content in [content for content, ref in self._seen.items() if ref["id"] == pool_id]:
            del self._seen[content]

    def history(self, prefix: Prefix, messages: Sequence[BaseMessage] = ()) -> History:
        """A conversation as the client's procedures take it."""
        return History(
            system=[] if prefix["system"] is None else [prefix["system"]],
            past=to_openai(messages),
            tools=prefix["tools"],
            chat_template_kwargs=self.model.chat_template_kwargs,
        )

    def remember(self, prefix: Prefix, messages: Sequence[BaseMessage], pool: Pool, root: str) -> PoolRef:
        """A pool that was seen to exist."""
        content = self._digest(prefix, messages)
        ref: PoolRef = {"id": pool.pool_id, "root": root, "n_tokens": pool.prefix_len, "content": content}
        self._seen[content] = ref
        self._seen.move_to_end(content)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return ref

    # -- inside ------------------------------------------------------------------------------------------

    def _recall(self, prefix: Prefix, messages: Sequence[BaseMessage]) -> PoolRef | None:
        return self._seen.get(self._digest(prefix, messages))

    def _digest(self, prefix: Prefix, messages: Sequence[BaseMessage]) -> str:
        content = [prefix["system"], prefix["tools"], self.model.chat_template_kwargs, to_openai(messages)]
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _having(self, prefix: Prefix, messages: Sequence[BaseMessage]) -> Procedure[PoolRef | None]:
        try:
            return (yield from self._making(prefix, messages))
        except AuthenticationError as error:
            if error.code != KEYLESS:
                raise
            self._off = True
            log.warning(NO_ADMIN_KEY)
            return None
        except PolyKVError as error:
            gone = isinstance(error, NotFoundError) and not isinstance(error, PoolNotFoundError)
            self._off = gone or isinstance(error, DisabledError)
            log.info("pool_not_had", extra={"reason": error.code or error.status, "for_good": self._off})
            return None

    def _making(self, prefix: Prefix, messages: Sequence[BaseMessage]) -> Procedure[PoolRef]:
        history = self.history(prefix, messages)
        root: Pool = yield calls.create_pool(**history.content(()), **self._keep)
        ref = self.remember(prefix, (), root, root.pool_id)
        if messages:
            pool = yield from fork_or_create(root.pool_id, history, history.past, **self._keep)
            ref = self.remember(prefix, messages, pool, root.pool_id)
        return ref
