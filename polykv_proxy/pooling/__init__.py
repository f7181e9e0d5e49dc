"""Pools at work: computes, snapshots, evicts and releases them in the engine.

What a pool is and where it stands in the tree is the core's; here the engine is made to agree.

``materialize`` computes pools, ``snapshot`` makes them of what slots hold, ``share`` does so unasked,
``room`` takes back what is not wanted any more, ``sessions`` ends and moves conversations, and ``tend`` looks
after all of it. ``Pooling`` is all of them for those who serve requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polykv_proxy.pooling.materialize import Materializer
from polykv_proxy.pooling.room import Room
from polykv_proxy.pooling.sessions import Sessions
from polykv_proxy.pooling.share import Sharing
from polykv_proxy.pooling.snapshot import Snapshots
from polykv_proxy.pooling.tend import Tender

if TYPE_CHECKING:
    from polykv_proxy.runtime import Runtime

__all__ = ["Pooling"]


class Pooling:
    """All that is done to the pools of one engine; each method is described where it is at home.

    Args:
        runtime: the engine's control plane at work.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.room = room = Room(runtime)
        self.materializer = Materializer(runtime, room)
        self.create = self.materializer.create
        self.ensure_resident = self.materializer.ensure_resident
        self.revive = self.materializer.revive
        snapshots = Snapshots(runtime, room)
        self.snapshot_session = snapshots.of_session
        self.snapshot_slot = snapshots.of_slot
        self.sharing = Sharing(runtime, room, snapshots)
        self.share_from = self.sharing.from_slot
        self.sessions = Sessions(runtime, room, self.materializer)
        self.tender = Tender(runtime, room)
        self.release = room.release
        self.evict = room.evict
