"""One look at an engine's ``/health``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp

from polykv_proxy.engine.state import EngineState

if TYPE_CHECKING:
    from polykv_proxy.engine.address import EngineAddress

PROBE_TIMEOUT_S = 5.0
"""A health answer that takes longer counts as none; llama-server answers it beside a running decode."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look at ``/health`` showed."""

    state: EngineState
    reason: str | None = None
    silent: bool = False
    """Nothing was refused, there just was no answer in time: a busy engine looks like that."""


def open_session(address: EngineAddress) -> aiohttp.ClientSession:
    """A client that connects to this engine and nowhere else; to be closed by the caller.

    Anew for each look: a connection that was kept says nothing about whether others can still get one.
    """
    connector: aiohttp.BaseConnector = (
        aiohttp.TCPConnector(force_close=True)
        if address.socket is None
        else aiohttp.UnixConnector(path=str(address.socket), force_close=True)
    )
    return aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S), trust_env=False
    )


async def probe(session: aiohttp.ClientSession, address: EngineAddress) -> Seen:
    """Look at an engine once; every failure is a value."""
    try:
        async with session.get(f"{address.base_url}/health") as answer:
            if answer.status == 200:
                return Seen(EngineState.READY)
            if answer.status == 503:
                return Seen(EngineState.LOADING)
            return Seen(EngineState.DOWN, f"/health answered {answer.status}")
    except TimeoutError:
        return Seen(EngineState.DOWN, f"no answer within {PROBE_TIMEOUT_S:g} s", silent=True)
    except (aiohttp.ClientError, OSError) as error:
        return Seen(EngineState.DOWN, f"cannot be reached: {error}")
