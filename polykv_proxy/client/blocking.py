"""``PolyKVClient``: the proxy's own routes, for threads."""

from __future__ import annotations

import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import httpx

from polykv_proxy.client import calls, procedures, transport
from polykv_proxy.client.errors import PolyKVError
from polykv_proxy.client.events import ChatEvents, EventReader
from polykv_proxy.client.patience import Patience

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from polykv_proxy.client import results
    from polykv_proxy.client.calls import Call, JsonObject
    from polykv_proxy.client.procedures import History, Procedure
    from polykv_proxy.client.results import Rates

T = TypeVar("T")


class PolyKVClient:
    """The proxy's own routes. Safe to use from several threads; close it, or use it in a ``with``.

    Every method raises the errors of ``polykv_proxy.client.errors``; the docstrings name only special ones.

    Args:
        base_url: of the proxy, with or without ``/v1``.
        api_key: pools belong to it, and only requests with the same key ride on them.
        admin_key: of the control routes, where the proxy demands one.
        timeout_s: seconds without a byte that are waited for an answer; None: for ever. Long prefixes take
            long to compute.
        patience: what is sent again after an error.
        headers: further headers of every request.
        http: an httpx client of one's own, which is not closed here; then the first four and ``headers``
            are not used.
    """

    def __init__(  # noqa: PLR0913 - who asks, where, how patiently
        self,
        base_url: str = transport.DEFAULT_URL,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        timeout_s: float | None = None,
        patience: Patience | None = None,
        headers: Mapping[str, str] | None = None,
        http: httpx.Client | None = None,
    ) -> None:
        target = transport.Target(base_url, api_key, admin_key, headers, timeout_s)
        self._owned = http is None
        self._http = httpx.Client(**target.options) if http is None else http
        self._patience = patience or Patience()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        if self._owned:
            self._http.close()

    # -- the shell ---------------------------------------------------------------------------------------

    def send(self, call: Call[T]) -> T:
        """One request of ``polykv_proxy.client.calls``, again where ``Patience`` allows it."""
        attempts = self._patience.attempts()
        while True:
            try:
                try:
                    answer = self._http.request(**transport.request_options(call))
                except httpx.HTTPError as error:
                    raise transport.failure(error) from error
                return transport.result(call, answer)
            except PolyKVError as error:
                pause = attempts.pause_after(error, idempotent=call.idempotent)
                if pause is None:
                    raise
            time.sleep(pause)

    def run(self, procedure: Procedure[T]) -> T:
        """Carry out what takes several requests; see ``polykv_proxy.client.procedures``."""
        try:
            step = next(procedure)
            while True:
                if isinstance(step, procedures.Pause):
                    time.sleep(step.seconds)
                    step = procedure.send(None)
                    continue
                try:
                    found = self.send(step)
                except PolyKVError as error:
                    step = procedure.throw(error)
                else:
                    step = procedure.send(found)
        except StopIteration as end:
            value: T = end.value
            return value

    # -- pools -------------------------------------------------------------------------------------------

    def create_pool(self, **options: Unpack[calls.PoolOptions]) -> results.Pool:
        """The pool of this content; computed unless there is one already.

        Raises:
            PoolCapacityError: no sequence id is left.
        """
        return self.send(calls.create_pool(**options))

    def fork_pool(self, pool_id: str, **options: Unpack[calls.ForkOptions]) -> results.Pool:
        """A child of a pool; the content is the child's whole prefix.

        Raises:
            PrefixMismatchError: nothing of it, or not ``branch_pos`` tokens, are the parent's.
            PoolNotFoundError: the parent is gone.
        """
        return self.send(calls.fork_pool(pool_id, **options))

    def list_pools(self) -> results.PoolListing:
        """All pools of this API key, and where all used cells are."""
        return self.send(calls.list_pools())

    def show_pool(self, pool_id: str) -> results.PoolStatus:
        """One pool and what is below it."""
        return self.send(calls.show_pool(pool_id))

    def release_pool(self, pool_id: str, *, recursive: bool = False) -> results.Released:
        """Take a pool's id away; its cells go with their last holder. Again is no error."""
        return self.send(calls.release_pool(pool_id, recursive=recursive))

    def pin_pool(self, pool_id: str) -> bool:
        """No eviction takes it; whether it is pinned now."""
        return self.send(calls.pin_pool(pool_id, pinned=True))

    def unpin_pool(self, pool_id: str) -> bool:
        """Undo ``pin_pool``; whether it is pinned now."""
        return self.send(calls.pin_pool(pool_id, pinned=False))

    def evict_pool(self, pool_id: str, *, subtree: bool = False) -> results.Evicted:
        """Give its cells back, with those of all below it if asked; ids and tokens stay."""
        return self.send(calls.evict_pool(pool_id, subtree=subtree))

    def set_admission(self, pool_id: str, policy: Mapping[str, Any]) -> JsonObject:
        """Say what holds for a pool's sessions; what is in force now."""
        return self.send(calls.set_admission(pool_id, policy))

    # -- room --------------------------------------------------------------------------------------------

    def capacity(self, pool_id: str | None = None, *, expected_tokens: int | None = None) -> results.Capacity:
        """Whether there is room for one more session, of a pool or of those that name none."""
        return self.send(calls.capacity(pool_id, expected_tokens=expected_tokens))

    def wait_for_capacity(
        self,
        pool_id: str | None = None,
        *,
        sessions: int = 1,
        expected_tokens: int | None = None,
        max_wait_s: float = 300.0,
    ) -> results.Capacity:
        """Wait until there is room for so many sessions.

        Raises:
            PoolSaturatedError: there was none in that time.
        """
        return self.run(
            procedures.wait_for_capacity(
                pool_id, sessions=sessions, expected_tokens=expected_tokens, max_wait_s=max_wait_s
            )
        )

    def reserve(
        self, pool_id: str, *, sessions: int, ttl_s: float = 60.0, idempotency_key: str | None = None
    ) -> results.Reservation:
        """Places for sessions that will come; a request takes one by ``opencoti.lease_id``, once.

        Raises:
            PoolSaturatedError: there is no room for all of them.
        """
        key = uuid.uuid4().hex if idempotency_key is None else idempotency_key
        return self.send(calls.reserve(pool_id, sessions=sessions, ttl_s=ttl_s, idempotency_key=key))

    # -- sessions ----------------------------------------------------------------------------------------

    def list_sessions(self) -> tuple[results.Session, ...]:
        """All conversations of this API key; with the admin key, of all."""
        return self.send(calls.list_sessions())

    def close_session(self, session_id: str, *, scope: str | None = None) -> results.Migrated:
        """The conversation is over; the cells that only it held are free. See ``calls`` for ``scope``."""
        return self.send(calls.close_session(session_id, scope=scope))

    def migrate_session(self, session_id: str, pool_id: str, *, scope: str | None = None) -> results.Migrated:
        """Let a conversation go on from another pool; all of it, or nothing."""
        return self.send(calls.migrate_session(session_id, pool_id, scope=scope))

    def compact_by_refork(  # noqa: PLR0913 - what a compaction is made of
        self,
        ancestor: str,
        history: History,
        *,
        session_id: str | None = None,
        summary: str | None = None,
        max_summary_tokens: int = procedures.MAX_SUMMARY_TOKENS,
        chat_members: Mapping[str, Any] | None = None,
        **keep: Unpack[calls.KeepOptions],
    ) -> results.Reforked:
        """Summarise in place, fork the ancestor with summary and tail, migrate the session.

        See ``procedures.compact_by_refork``. The branch it came from is the caller's to release, once what
        the conversation goes on with is written down.
        """
        return self.run(
            procedures.compact_by_refork(
                ancestor,
                history,
                session_id=session_id,
                summary=summary,
                max_summary_tokens=max_summary_tokens,
                chat_members=chat_members,
                **keep,
            )
        )

    # -- text, rates, the engine -------------------------------------------------------------------------

    def tokenize(self, **options: Unpack[calls.ContentOptions]) -> results.Tokens:
        """Tokens of a prompt; or of whole chat bodies, up to the end of what chats that go on share."""
        return self.send(calls.tokenize(**options))

    def count_tokens(self, body: Mapping[str, Any]) -> int:
        """Prompt tokens of a chat body, as the engine counts them; of a plain llama-server too."""
        return self.send(calls.count_tokens(body))

    def chat(self, body: Mapping[str, Any]) -> results.Chat:
        """One chat, not streamed; never sent again once it may have begun."""
        return self.send(calls.chat(body))

    def rates(self) -> results.Rates:
        """What sessions experience now."""
        return self.send(calls.rates())

    def props(self) -> JsonObject:
        """``GET /props``; the member ``opencoti`` is the proxy's."""
        return self.send(calls.props())

    @contextmanager
    def chat_stream(self, body: Mapping[str, Any]) -> Iterator[Iterator[JsonObject]]:
        """One chat as a stream of documents: ``with client.chat_stream(body) as documents``.

        It is never sent again once it may have begun, and a stream without its end marker is an error.
        The block's end closes the connection, which stops the engine's work.

        Raises:
            TruncatedStreamError: while documents are read.
        """
        call = calls.chat({**body, "stream": True})
        with self._open(call) as answer:
            yield _documents(answer)

    @contextmanager
    def tps_stream(self) -> Iterator[Iterator[Rates]]:
        """``GET /polykv/tps`` as a stream: ``with client.tps_stream() as documents``.

        The block's end closes the connection.
        """
        with self._open(calls.rates_stream()) as answer:
            yield _rates(answer)

    @contextmanager
    def _open(self, call: Call[Any]) -> Iterator[httpx.Response]:
        answer = self._opened(call)
        try:
            yield answer
        finally:
            answer.close()

    def _opened(self, call: Call[Any]) -> httpx.Response:
        """A successful answer whose body is not read yet; asked for again as in ``send``."""
        attempts = self._patience.attempts()
        while True:
            try:
                return self._begun(call)
            except PolyKVError as error:
                pause = attempts.pause_after(error, idempotent=call.idempotent)
                if pause is None:
                    raise
            time.sleep(pause)

    def _begun(self, call: Call[Any]) -> httpx.Response:
        try:
            request = self._http.build_request(**transport.request_options(call))
            answer = self._http.send(request, stream=True)
            if answer.status_code < 400:
                return answer
            try:
                answer.read()
            finally:
                answer.close()
        except httpx.HTTPError as error:
            raise transport.failure(error) from error
        raise transport.refusal(answer)


def _documents(answer: httpx.Response) -> Iterator[JsonObject]:
    events = ChatEvents()
    try:
        for piece in answer.iter_bytes():
            yield from events.feed(piece)
    except httpx.HTTPError as error:
        raise transport.failure(error) from error
    events.finish()


def _rates(answer: httpx.Response) -> Iterator[Rates]:
    reader = EventReader()
    try:
        for piece in answer.iter_bytes():
            for data in reader.feed(piece):
                yield transport.rates(data)
    except httpx.HTTPError as error:
        raise transport.failure(error) from error
