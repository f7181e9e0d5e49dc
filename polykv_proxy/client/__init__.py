"""The Python client of the proxy: pools, sessions, capacity, compaction by re-fork.

::

    calls        what is asked: one frozen value for each request, built and read without I/O
    procedures   what takes several requests: generators that yield calls and pauses
    results      what is answered: frozen values that read themselves from JSON
    errors       what goes wrong, as one tree
    patience     which requests are sent again, and when
    events       event streams, from bytes to documents
    transport    the shells' common part: httpx errors, one async client for each event loop
    blocking     ``PolyKVClient``
    concurrent   ``AsyncPolyKVClient``

Everything above ``transport`` is pure and shared by both clients, and by ``polykv_proxy.langgraph``. Nothing
of the server is imported. Needs the extra ``client``.
"""

from __future__ import annotations

from polykv_proxy.client.blocking import PolyKVClient
from polykv_proxy.client.concurrent import AsyncPolyKVClient
from polykv_proxy.client.errors import (
    AuthenticationError,
    BadRequestError,
    ConflictError,
    ConnectionFailedError,
    ContextOverflowError,
    DisabledError,
    NotFoundError,
    PolyKVError,
    PoolCapacityError,
    PoolNotFoundError,
    PoolSaturatedError,
    PrefixMismatchError,
    ServerError,
    TimedOutError,
    TruncatedStreamError,
    UnavailableError,
)
from polykv_proxy.client.patience import Patience
from polykv_proxy.client.procedures import SUMMARISE
from polykv_proxy.client.results import (
    Capacity,
    Chat,
    Evicted,
    Migrated,
    Pool,
    PoolListing,
    PoolStatus,
    Rates,
    Reforked,
    Released,
    Reservation,
    Rider,
    Session,
    SessionRate,
    Tokens,
)

__all__ = [
    "SUMMARISE",
    "AsyncPolyKVClient",
    "AuthenticationError",
    "BadRequestError",
    "Capacity",
    "Chat",
    "ConflictError",
    "ConnectionFailedError",
    "ContextOverflowError",
    "DisabledError",
    "Evicted",
    "Migrated",
    "NotFoundError",
    "Patience",
    "PolyKVClient",
    "PolyKVError",
    "Pool",
    "PoolCapacityError",
    "PoolListing",
    "PoolNotFoundError",
    "PoolSaturatedError",
    "PoolStatus",
    "PrefixMismatchError",
    "Rates",
    "Reforked",
    "Released",
    "Reservation",
    "Rider",
    "ServerError",
    "Session",
    "SessionRate",
    "TimedOutError",
    "Tokens",
    "TruncatedStreamError",
    "UnavailableError",
]
