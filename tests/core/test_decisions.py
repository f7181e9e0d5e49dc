"""Claims about ``core.decisions``: decisions are values."""

import dataclasses

import pytest

from polykv_proxy.core.decisions import Admit, AwaitIdle, Lease, PoolPolicy, Queue, Reject, Ticket, WakeQueued
from polykv_proxy.core.slots import Ask
from polykv_proxy.core.types import LeaseId, Scope, SlotId

LEASE = Lease(LeaseId(1), (SlotId(0),), None, continues=False, granted_at=0.0)
TICKET = Ticket(Ask(scope=Scope("")), conversation=True, since=0.0, since_ts=0.0, number=1)


@pytest.mark.parametrize(
    "value",
    [Admit(LEASE), Queue(TICKET), Reject("code", "why"), WakeQueued(TICKET), AwaitIdle(LEASE, stop=True)],
)
def test_outcomes_and_commands_never_change(value):
    """What was decided cannot be edited on its way to being carried out."""
    name = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, None)


def test_a_lease_begins_open_and_without_a_pool():
    """Only its end and its pool are written later."""
    assert (LEASE.ended, LEASE.pool) == (False, None)
    assert TICKET.lease is None


def test_policy_in_force_by_default_shares_prefixes():
    """Both automatisms are on; a pool of its own needs more tokens than a match."""
    policy = PoolPolicy()
    assert policy.auto_match
    assert policy.auto_pools
    assert policy.min_match_tokens < policy.auto_min_tokens
    assert 0 < policy.auto_share <= 1
