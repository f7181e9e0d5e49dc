"""Claims about ``engine.backend``: the level without pools, and what a patched engine is told.

How pools work on a patched engine is in the tests of ``pooling``, how slots are given back in ``runtime``'s.
"""

import pytest

from polykv_proxy.core.decisions import AttachPlan, Lease
from polykv_proxy.core.tree import PoolTree
from polykv_proxy.core.types import LeaseId, PoolNumber, PoolOrigin, Scope, SlotId, as_tokens
from polykv_proxy.engine.backend import LAUNCH_GRACE_S, Patched, Relaying
from polykv_proxy.engine.wire import StockSlot
from polykv_proxy.errors import DisabledError, UnavailableError


class Client:
    """An engine whose slots are as told; None: it does not tell."""

    def __init__(self, *busy):
        self.busy = busy

    async def slots(self):
        """``GET /slots``."""
        if self.busy == (None,):
            raise UnavailableError("off")
        return [StockSlot(number, working) for number, working in enumerate(self.busy)]


def lease():
    """Slot 1, as request 5."""
    return Lease(LeaseId(5), (SlotId(1),), None, continues=False, granted_at=0.0)


def plan(tokens):
    """An attach to so many tokens of a pool."""
    tree = PoolTree(2)
    pool = tree.add("p", as_tokens([1, 2, 3]), scope=Scope(""), origin=PoolOrigin.EXPLICIT, now_ts=0.0)
    return AttachPlan(pool, tokens, 3)


async def echo(address):
    """A request that says where it was sent."""
    return address


@pytest.mark.parametrize(
    ("plan", "attach"), [(None, ()), (plan(0), ()), (plan(2), ((b"X-PolyKV-Attach", b"0:2"),))]
)
async def test_a_patched_engine_is_told_in_headers(plan, attach):
    """Slot, tag, and the pool if anything of it is to be used; the body stays."""
    address = await Patched(None).dispatch(lease(), plan, None, echo, pinnable=True)
    assert address.headers == ((b"X-PolyKV-Slot", b"1"), (b"X-PolyKV-Tag", b"5"), *attach)
    assert address.id_slot is None


async def test_an_engine_without_pools_is_told_nothing():
    """It chooses for itself, and there is nothing to give back or to know."""
    relaying = Relaying(Client())
    address = await relaying.dispatch(lease(), None, None, echo, pinnable=True)
    assert (address.headers, address.id_slot) == ((), None)
    assert await relaying.prompt_tokens("/v1/chat/completions/input_tokens", b"{}") is None
    assert await relaying.prompt("/v1/chat/completions/input_tokens", b"{}", text_from=0) is None
    assert await relaying.shared(SlotId(0)) is None
    assert await relaying.release(PoolNumber(0)) == 0
    relaying.forget([SlotId(0)])
    assert relaying.listing() == {}
    for attempt in (relaying.materialize, relaying.snapshot):
        with pytest.raises(DisabledError):
            await attempt()


@pytest.mark.parametrize(
    ("busy", "others", "overdue_s", "over"),
    [
        ((True, True), 1, -1.0, False),
        ((True, False), 1, -1.0, True),
        ((True, True), 1, LAUNCH_GRACE_S + 1, True),
        ((None,), 1, 1.0, False),
        ((None,), 1, LAUNCH_GRACE_S + 1, True),
    ],
)
async def test_without_tags_the_number_of_busy_slots_tells(busy, others, overdue_s, over):
    """No more than are accounted for; and time has to do where nothing tells."""
    left = await Relaying(Client(*busy)).remains(lease(), overdue_s, others=others, stop=True)
    assert (left is not None) is over
