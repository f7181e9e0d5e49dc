"""Planes without an engine, and what happens to them."""

from polykv_proxy.core.decisions import Admit, AttachPlan, PoolPolicy
from polykv_proxy.core.plane import ControlPlane
from polykv_proxy.core.planner import Wanted
from polykv_proxy.core.slots import Ask, Content
from polykv_proxy.core.types import (
    Capability,
    EngineFacts,
    EngineSample,
    PoolUid,
    Scope,
    SlotId,
    SlotSample,
    SlotState,
    as_tokens,
)

SCOPE = Scope("s")
TOKENS = as_tokens(range(10))


def facts(epoch="e1", *, slots=2, max_pools=2, cells=1000, ctx=100):
    """Facts of an engine."""
    return EngineFacts(epoch, slots, max_pools, cells, ctx, 8, "b")


def ready(plane, epoch="e1", *, model="m", capability=Capability.ZERO_COPY, reason=None, **options):
    """An engine answers."""
    return plane.on_engine_ready(facts(epoch, **options), capability, reason, model, 0.0)


def serving(*, max_waiting=10, **options):
    """A plane whose engine is ready."""
    plane = ControlPlane(max_waiting=max_waiting)
    ready(plane, **options)
    return plane


def request(plane, *chain, name=None, now=1.0, conversation=True, scope=SCOPE, place=None, **options):
    """A request."""
    ask = Ask(scope=scope, name=name, chain=chain, **options)
    return plane.leases.on_request(ask, now, now_ts=1000.0 + now, conversation=conversation, place=place)


def admitted(plane, *chain, **options):
    """The lease of a request that is let in."""
    decision = request(plane, *chain, **options)
    assert isinstance(decision, Admit)
    return decision.lease


def finish(plane, lease, *, now=2.0, content=Content.NEW, clean=True):
    """The request is over."""
    return plane.leases.on_finished(lease, now, clean=clean, content=content)


def turn(plane, *chain, **options):
    """A whole request; returns its session."""
    lease = admitted(plane, *chain, **options)
    finish(plane, lease, now=options.get("now", 1.0))
    return lease.session


def pool(plane, tokens=TOKENS, *, uid=7, scope=SCOPE, label=None, pin=False):
    """A resident pool."""
    made, compute = plane.pools.enter(tokens, scope, Wanted(label=label, pin=pin), now_ts=5.0)
    assert compute
    plane.pools.on_ready(made, PoolUid(uid))
    return made


def sample(epoch="e1", *, used=0, slots=()):
    """A reading."""
    return EngineSample(epoch, 0.0, used, 1000, 0, slots, ())


def slot_sample(number=0, *, tokens=20, shared=0, uid=0):
    """A slot as the engine reports it."""
    return SlotSample(SlotId(number), SlotState.IDLE, 1, 0, 0, 0, 0, tokens, shared, PoolUid(uid), 100)


def policed(**options):
    """A plane with a policy of few tokens."""
    sizes = {"min_match_tokens": 4, "auto_min_tokens": 6, "auto_gain_tokens": 2}
    plane = ControlPlane(max_waiting=10, policy=PoolPolicy(**sizes | options))
    ready(plane, slots=3, max_pools=4)
    assert plane.policy.min_match_tokens == 4
    return plane


def copying(**options):
    """A plane whose engine's pools are slot files."""
    return serving(capability=Capability.COPY, reason="not patched", **options)


def attached_turn(plane, made, *chain, **options):
    """A whole request that rides on a pool; returns its session."""
    lease = admitted(plane, *chain, name="a")
    plane.leases.on_dispatch(lease, AttachPlan(made, 4, 4))
    if options.get("clean", True):
        plane.pools.on_attached(AttachPlan(made, 4, 4), lease.session, 4)
    finish(plane, lease, **options)
    return lease.session
