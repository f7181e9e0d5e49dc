"""Claims about ``stillness``: nothing begins in a slot too early."""

import asyncio

from polykv_proxy.core.decisions import Lease
from polykv_proxy.core.types import LeaseId, SlotId
from polykv_proxy.stillness import Stillness


class Room:
    """Cells that are empty when it is said so."""

    def __init__(self):
        self.full = set()
        self.begun = []

    def awaits_room(self, lease):
        """Whether it has to wait."""
        return lease.lease_id in self.full

    def begins(self, lease):
        """It began."""
        self.begun.append(lease.lease_id)


async def test_one_at_a_time_needs_a_slot_to_be_still(rig):
    """Whoever comes second waits, and a request waits for both; other slots are not concerned."""
    one, two = rig.take_all()
    first = rig.runtime.stillness.of(one.slots[0])
    await first.__aenter__()
    order = []

    async def second():
        async with rig.runtime.stillness.of(one.slots[0]):
            order.append("second")

    async def begin():
        await rig.runtime.stillness.may_begin(one)
        order.append("request")

    tasks = [asyncio.get_running_loop().create_task(work) for work in (second(), begin())]
    await rig.runtime.stillness.may_begin(two)
    await asyncio.sleep(0.01)
    assert not order
    await first.__aexit__(None, None, None)
    await asyncio.gather(*tasks)
    assert sorted(order) == ["request", "second"]


def lease(number, *slots):
    """A request's hold on slots."""
    return Lease(LeaseId(number), tuple(map(SlotId, slots)), None, continues=False, granted_at=0.0)


async def test_what_is_filled_has_to_be_empty_first():
    """Each time something was taken back it is looked at again; others are not kept."""
    room = Room()
    room.full.add(1)
    stillness = Stillness(room)
    one = asyncio.get_running_loop().create_task(stillness.may_begin(lease(1, 0)))
    await asyncio.sleep(0)
    assert await stillness.may_begin(lease(2, 1))
    stillness.emptied()
    await asyncio.sleep(0.01)
    assert room.begun == [2]
    room.full.clear()
    stillness.emptied()
    assert await one
    assert room.begun == [2, 1]


async def test_who_waits_too_long_does_not_begin():
    """For a slot to be used again, or for room; one that is over waits for none."""
    room = Room()
    room.full.add(1)
    stillness = Stillness(room)
    async with stillness.of(SlotId(0)):
        assert SlotId(0) in stillness
        assert await stillness.may_begin(lease(2, 1, 0), 0.01) is None
    assert SlotId(0) not in stillness
    waits = lease(1, 0)
    assert await stillness.may_begin(waits, 0.01) is None
    assert room.begun == []
    waits.ended = True
    assert await stillness.may_begin(waits, 0.01)
