"""Claims about ``engine.wire``: recorded replies of a patched llama-server, tag b11434, as core values."""

import json
from pathlib import Path

import msgspec
import pytest

from polykv_proxy.core.stock import SlotLook
from polykv_proxy.core.types import OverflowSample, PoolSample, SlotId, SlotState
from polykv_proxy.engine import wire
from polykv_proxy.errors import UnavailableError

RECORDED = Path(__file__).parents[1] / "data" / "b11434"


def reply(name):
    """The body of a recorded reply."""
    return json.loads((RECORDED / f"{name}.json").read_text())["body"].encode()


def test_info_gives_facts_and_what_changes_kv():
    """Units as in the names; the cache types are part of a model's identity."""
    facts, identity = wire.read_info(reply("info"))
    assert (facts.slots, facts.max_pools, facts.cells, facts.ctx_tokens) == (2, 4, 2048, 2048)
    assert (facts.bytes_per_cell, facts.build) == (23040, "b4-26665ee")
    assert facts.epoch
    assert identity == {"type_k": "f16", "type_v": "f16"}


def test_another_protocol_is_refused():
    """With both versions in the message."""
    document = json.loads(reply("info")) | {"version": 2}
    with pytest.raises(UnavailableError, match="protocol 2, this proxy 1") as caught:
        wire.read_info(json.dumps(document).encode())
    assert caught.value.code == "engine_protocol"


def test_counters_of_an_idle_engine():
    """Slots that never ran hold nothing."""
    sample = wire.read_counters(reply("counters_idle"), 12.5)
    assert (sample.taken_at, sample.cells_used, sample.cells_total, sample.deferred) == (12.5, 0, 2048, 0)
    assert not sample.busy
    assert sample.pools == ()
    assert [(slot.slot, slot.task, slot.tag) for slot in sample.slots] == [(0, -1, 0), (1, -1, 0)]


def test_counters_show_what_is_shared():
    """A pool of 40 tokens, and a slot that rides on it."""
    sample = wire.read_counters(reply("counters_attached"), 0.0)
    assert sample.pools == (PoolSample(0, 1, 40),)
    slot = sample.slots[1]
    assert (slot.tokens, slot.shared_tokens, slot.pool_uid, slot.tag) == (44, 40, 1, 6)
    assert (slot.gen_total, slot.prompt_total, slot.cached_total) == (2, 3, 40)
    assert (slot.state, slot.ctx_tokens) == (SlotState.IDLE, 2048)
    assert sample.cells_used == 44


def test_overflows_are_read_where_they_are_counted():
    """An engine that does not count them leaves it unknown: no zeros, no False."""
    sample = wire.read_counters(reply("counters_idle"), 0.0)
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
    sample = wire.read_counters(json.dumps(document).encode(), 0.0)
    assert sample.overflow == OverflowSample(waited=5, slots_cleared=4, pools_released=3, ended=2, refused=1)
    assert [slot.waits for slot in sample.slots] == [True, False]


def test_a_state_that_is_not_known_is_not_guessed():
    """The document is refused as a whole."""
    with pytest.raises(msgspec.ValidationError):
        wire.read_counters(reply("counters_idle").replace(b'"idle"', b'"dreaming"'), 0.0)


def test_props_of_a_stock_engine_give_an_upper_bound():
    """One window a slot; no pools, no epoch."""
    facts, identity = wire.read_props(reply("props"))
    assert (facts.slots, facts.max_pools, facts.ctx_tokens, facts.cells) == (2, 0, 2048, 4096)
    assert (facts.epoch, facts.bytes_per_cell, identity) == ("", 0, {})
    assert wire.read_props(b"{}")[0].cells == 0


def test_the_template_is_part_of_the_identity():
    """So is the file."""
    identity = wire.read_template_identity(reply("props"))
    assert identity["model_path"] == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "im_start" in identity["chat_template"]


def test_models_are_told_apart_by_their_numbers():
    """Missing details are missing, not an error."""
    identity = wire.read_model_identity(reply("models"))
    assert (identity["n_params"], identity["ftype"]) == ("134515008", "Q4_1")
    for body in (b'{"data":[]}', b"{}", b'{"data":[{}]}', b'{"data":[{"meta":null}]}'):
        assert set(wire.read_model_identity(body).values()) == {"None"}


@pytest.mark.parametrize(
    ("name", "count"), [("tokenize", 4), ("count_chat", 22), ("count_responses", 33), ("count_messages", 22)]
)
def test_tokens_come_from_tokenizing_and_counting(name, count):
    """The same form from every route."""
    tokens = wire.read_tokens(reply(name))
    assert (len(tokens), tokens.typecode) == (count, "i")


def test_a_count_without_ids_is_an_engine_without_the_patch():
    """It is refused, not taken for an empty prompt."""
    with pytest.raises(msgspec.ValidationError):
        wire.read_tokens(b'{"input_tokens":22}')


def test_a_pool_tells_what_it_took():
    """And its release what came back: nothing, while a slot holds its cells."""
    made = wire.read_materialized(reply("materialize"))
    assert (made.uid, made.n_tokens, made.timings.prompt_n, made.timings.cache_n) == (1, 40, 40, 0)
    assert made.timings.prompt_ms > 0
    assert wire.read_freed(reply("release")) == 0


def test_slots_of_any_engine_are_read():
    """A slot has a task after its first only."""
    assert not any(slot.is_processing for slot in wire.read_slots(reply("slots")))
    busy = reply("slots").replace(b'"is_processing":false', b'"is_processing":true', 1)
    assert sum(slot.is_processing for slot in wire.read_slots(busy)) == 1
    one, two = wire.read_slots(b'[{"id":0,"id_task":22,"n_prompt_tokens":3},{"id":1}]')
    assert (one.id_task, one.n_prompt_tokens) == (22, 3)
    assert (two.id_task, two.n_prompt_tokens) == (None, 0)


def test_slot_files_tell_their_size():
    """Saved or restored; recorded from the pinned engine."""
    saved = b'{"id_slot":0,"filename":"x","n_saved":200,"n_written":54500,"timings":{"save_ms":0.164}}'
    restored = b'{"id_slot":1,"filename":"x","n_restored":200,"n_read":54500,"timings":{"restore_ms":0.1}}'
    for answer in (saved, restored):
        moved = wire.read_slot_file(answer)
        assert (moved.n_tokens, moved.n_bytes) == (200, 54500)


def test_what_an_engine_without_the_patch_says_of_prompts():
    """Rendered, counted, computed."""
    assert wire.read_rendered(b'{"prompt":"<s>Hi"}') == "<s>Hi"
    assert wire.read_count(b'{"input_tokens":7}') == 7
    timings = wire.read_computed(b'{"timings":{"cache_n":1,"prompt_n":2,"prompt_ms":3.5}}')
    assert (timings.cache_n, timings.prompt_n) == (1, 2)
    assert wire.read_list(b'[{"id":0}]') == [{"id": 0}]


def test_the_engines_own_sentence_is_kept():
    """Where there is none, the status has to do."""
    assert wire.read_error(reply("materialize_taken"), 400) == "pool 0 is taken"
    assert wire.read_error(reply("count_refused"), 400) == "Expected 'messages' to be an array"
    for body in (b"", b"<html>", b'{"error":"text"}', b'{"error":{}}'):
        assert wire.read_error(body, 502) == "the engine answered with status 502"


def test_any_object_can_be_read():
    """But nothing else."""
    assert wire.read_object(reply("completion_attached"))["timings"]["cache_n"] == 40
    with pytest.raises(msgspec.ValidationError):
        wire.read_object(b"[]")


def test_stock_slots_are_read_leniently():
    """A slot that never ran says less; what is missing is zero work."""
    body = (
        b'[{"id":0,"n_ctx":64,"is_processing":false},'
        b'{"id":1,"is_processing":true,"id_task":7,"n_prompt_tokens":9,"n_prompt_tokens_processed":5,'
        b'"n_prompt_tokens_cache":4,"params":{},"next_token":[{"n_decoded":3,"n_remain":-1}]}]'
    )
    idle, busy = wire.read_stock_slots(body)
    assert idle == SlotLook(slot=SlotId(0), working=False)
    assert busy == SlotLook(slot=SlotId(1), working=True, task=7, generated=3, prompt=5, cached=4)


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
    untold = wire.read_counters(json.dumps(document).encode(), 1.0)
    assert (untold.clock_s, untold.slots[0].last_token_s) == (None, None)
    slot["t_gen_last_us"], document["t_us"] = 1_500_000, 2_000_000
    told = wire.read_counters(json.dumps(document).encode(), 1.0)
    assert (told.clock_s, told.slots[0].last_token_s) == (2.0, 1.5)


def test_pools_in_files():
    """Their size, and the name that the engine gives them."""
    saved = b'{"id_pool":1,"uid":3,"seq_id":5,"n_tokens":152,"parent":0,"n_parent":150,"n_written":3504600}'
    assert wire.read_pool_file(saved) == wire.SlotFile(152, 3504600)
    restored = b'{"id_pool":1,"uid":4,"seq_id":5,"n_tokens":152,"parent":0,"n_parent":150,"n_read":3504600}'
    assert wire.read_pool_restored(restored) == wire.PoolRestored(4, 152)
    assert wire.read_adapters(b'[{"id":0,"path":"a","scale":1.0,"task_name":""}]') == [wire.Adapter("a", 1.0)]
