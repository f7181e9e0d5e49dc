"""Claims about ``engine.wire``: recorded replies of llama-server, tag b11434, as core values."""

import msgspec
import pytest
from recorded import reply

from polykv_proxy.core.stock import SlotLook
from polykv_proxy.core.types import SlotId
from polykv_proxy.engine import wire


def test_props_of_a_stock_engine_give_an_upper_bound():
    """One window a slot; no pools, no epoch."""
    facts, identity = wire.read_props(reply("props"))
    assert (facts.slots, facts.max_pools, facts.ctx_tokens, facts.cells) == (2, 0, 2048, 4096)
    assert (facts.epoch, facts.bytes_per_cell, identity) == ("", 0, {})
    assert wire.read_props(b"{}")[0].cells == 0


def test_props_tell_whether_anything_but_text_is_taken():
    """Of whatever kind; an engine that does not say takes text."""
    assert not wire.read_media(reply("props"))
    assert not wire.read_media(b"{}")
    for kind in ("vision", "video", "audio"):
        body = b'{"media_marker":"<m>","modalities":{"vision":false,"%s":true}}' % kind.encode()
        assert wire.read_media(body)
        assert wire.read_media_marker(body) == "<m>"
    assert wire.read_media_marker(reply("props")) == ""


def test_pieces_that_are_no_text_say_nothing():
    """A byte of a longer letter is a list of numbers."""
    body = b'{"tokens":[{"id":1,"piece":"<s>"},{"id":9,"piece":[226,153]}]}'
    assert wire.read_pieces(body) == [(1, "<s>"), (9, "")]


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


@pytest.mark.parametrize("name", ["shown_chat", "shown_responses", "shown_messages"])
def test_prompts_are_text_up_to_where_they_are_tokens(name):
    """The same form from every route; without media there are none."""
    shown = wire.read_prompt(reply(name))
    assert shown.text.startswith("<|im_start|>system")
    assert not shown.tokens


def test_a_prompt_without_text_is_all_tokens():
    """It is too short, or the engine's patch is older; one without a patch is refused."""
    shown = wire.read_prompt(reply("count_chat"))
    assert (shown.text, len(shown.tokens)) == (None, 22)
    with pytest.raises(msgspec.ValidationError):
        wire.read_prompt(b'{"input_tokens":22}')


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


def test_adapters_are_told_with_their_strength():
    """Other members do not matter."""
    assert wire.read_adapters(b'[{"id":0,"path":"a","scale":1.0,"task_name":""}]') == [wire.Adapter("a", 1.0)]
