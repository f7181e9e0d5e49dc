"""Claims about ``engine.patched``: recorded replies of a patched llama-server, tag b11434, as core values."""

import json

import msgspec
import pytest
from recorded import reply

from polykv_proxy.core.types import OverflowSample, PoolSample, SlotState
from polykv_proxy.engine import patched, wire
from polykv_proxy.errors import UnavailableError


def test_info_gives_facts_and_what_changes_kv():
    """Units as in the names; the cache types are part of a model's identity."""
    facts, identity = patched.read_info(reply("info"))
    assert (facts.slots, facts.max_pools, facts.cells, facts.ctx_tokens) == (2, 4, 2048, 2048)
    assert (facts.bytes_per_cell, facts.build) == (23040, "b4-26665ee")
    assert facts.epoch
    assert identity == {"type_k": "f16", "type_v": "f16"}


def test_another_protocol_is_refused():
    """With both versions in the message."""
    document = json.loads(reply("info")) | {"version": 2}
    with pytest.raises(UnavailableError, match="protocol 2, this proxy 1") as caught:
        patched.read_info(json.dumps(document).encode())
    assert caught.value.code == "engine_protocol"


def test_counters_of_an_idle_engine():
    """Slots that never ran hold nothing."""
    sample = patched.read_counters(reply("counters_idle"), 12.5)
    assert (sample.taken_at, sample.cells_used, sample.cells_total, sample.deferred) == (12.5, 0, 2048, 0)
    assert not sample.busy
    assert sample.pools == ()
    assert [(slot.slot, slot.task, slot.tag) for slot in sample.slots] == [(0, -1, 0), (1, -1, 0)]


def test_counters_show_what_is_shared():
    """A pool of 40 tokens, and a slot that rides on it."""
    sample = patched.read_counters(reply("counters_attached"), 0.0)
    assert sample.pools == (PoolSample(0, 1, 40),)
    slot = sample.slots[1]
    assert (slot.tokens, slot.shared_tokens, slot.pool_uid, slot.tag) == (44, 40, 1, 6)
    assert (slot.gen_total, slot.prompt_total, slot.cached_total) == (2, 3, 40)
    assert (slot.state, slot.ctx_tokens) == (SlotState.IDLE, 2048)
    assert sample.cells_used == 44


def test_overflows_are_read_where_they_are_counted():
    """An engine that does not count them leaves it unknown: no zeros, no False."""
    sample = patched.read_counters(reply("counters_idle"), 0.0)
    assert sample.overflow is None
    assert [slot.waits for slot in sample.slots] == [None, None]
    document = json.loads(reply("counters_idle"))
    document["overflow"] = {
        "n_waited": 5,
        "n_slots_cleared": 4,
        "n_pools_released": 3,
        "n_ended": 2,
        "n_refused": 1,
    }
    for slot, waits in zip(document["slots"], (True, False), strict=True):
        slot["waits"] = waits
    sample = patched.read_counters(json.dumps(document).encode(), 0.0)
    assert sample.overflow == OverflowSample(waited=5, slots_cleared=4, pools_released=3, ended=2, refused=1)
    assert [slot.waits for slot in sample.slots] == [True, False]


def test_a_state_that_is_not_known_is_not_guessed():
    """The document is refused as a whole."""
    with pytest.raises(msgspec.ValidationError):
        patched.read_counters(reply("counters_idle").replace(b'"idle"', b'"dreaming"'), 0.0)


def test_a_pool_tells_what_it_took():
    """And its release what came back: nothing, while a slot holds its cells."""
    made = patched.read_materialized(reply("materialize"))
    assert (made.uid, made.n_tokens, made.timings.prompt_n, made.timings.cache_n) == (1, 40, 40, 0)
    assert made.timings.prompt_ms > 0
    assert patched.read_freed(reply("release")) == 0


def test_counters_carry_the_engines_clock():
    """Seconds; unknown where the engine does not tell them."""
    slot = {
        "id": 0,
        "state": "gen",
        "id_task": 1,
        "tag": 2,
        "n_gen_total": 3,
        "n_prompt_total": 4,
        "n_cached_total": 5,
        "n_tokens": 6,
        "n_pool_shared": 0,
        "n_ctx": 7,
        "pool_uid": 0,
    }
    document = {
        "epoch": "e",
        "n_deferred": 0,
        "kv": {"n_cells": 9, "n_used": 1},
        "slots": [slot],
        "pools": [],
    }
    untold = patched.read_counters(json.dumps(document).encode(), 1.0)
    assert (untold.clock_s, untold.slots[0].last_token_s) == (None, None)
    slot["t_gen_last_us"], document["t_us"] = 1_500_000, 2_000_000
    told = patched.read_counters(json.dumps(document).encode(), 1.0)
    assert (told.clock_s, told.slots[0].last_token_s) == (2.0, 1.5)


def test_pools_in_files():
    """Their size, and the name that the engine gives them."""
    saved = b'{"id_pool":1,"uid":3,"seq_id":5,"n_tokens":152,"parent":0,"n_parent":150,"n_written":3504600}'
    assert patched.read_pool_file(saved) == wire.SlotFile(152, 3504600)
    restored = b'{"id_pool":1,"uid":4,"seq_id":5,"n_tokens":152,"parent":0,"n_parent":150,"n_read":3504600}'
    assert patched.read_pool_restored(restored) == patched.PoolRestored(4, 152)
