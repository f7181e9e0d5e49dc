"""Claims about ``durable.sessions``: saved when a slot is lost, and only what a whole answer left."""

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest
from api.rig import CHAT, chat, until

from polykv_proxy.core.cells import need_of_pool
from polykv_proxy.core.slots import Ask, Content
from polykv_proxy.core.types import Scope, SlotId
from polykv_proxy.durable.sessions import RETRY_S


async def turn(rig, name, *contents, **more):
    """A turn of a conversation, and what it displaced is on disk; returns what of its prompt was reused."""
    answer = await rig.ask(CHAT, chat(name, *contents, session_id=name, **more))
    assert answer.status == 200, answer.body
    await rig.durable.shelf.all_over()
    return answer.json["timings"]["cache_n"]


def keys(rig):
    """What is saved."""
    return sorted(entry.state.key for entry in rig.durable.shelf.catalogue)


def prompt_of(rig, name, *contents):
    """Tokens of such a prompt."""
    return len(rig.engine.tokens_of(rig.engine.renders(chat(name, *contents))))


async def test_who_loses_his_slot_is_saved_and_comes_back(proxies):
    """Before the other's request is sent; his next turn computes what is new."""
    rig = await proxies()
    await turn(rig, "a", "first")
    assert keys(rig) == []
    await turn(rig, "b", "first")
    assert keys(rig) == ["a"]
    past = prompt_of(rig, "a", "first")
    answer = (await rig.ask(CHAT, chat("a", "first", "second", session_id="a"))).json
    assert answer["timings"]["cache_n"] == answer["opencoti"]["restored_tokens"] == past
    assert rig.durable.shelf.metrics.restores["effective"] == 1
    assert rig.durable.shelf.metrics.restored_tokens == past


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x" * 200}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 9}),
        ("/v1/responses", {"input": "x" * 200}),
        ("/v1/completions", {"prompt": "x" * 200}),
        ("/completion", {"prompt": "x" * 200}),
    ],
)
async def test_whole_answers_of_every_api_are_worth_keeping(proxies, path, body, stream):
    """Streamed or not."""
    rig = await proxies()
    answer = await rig.ask(path, body | {"session_id": "me", "stream": stream})
    assert answer.status == 200
    await rig.durable.round()
    assert keys(rig) == ["me"]


async def test_who_goes_on_in_his_slot_is_left_alone(proxies):
    """Nothing is written on a turn, nothing is read."""
    rig = await proxies(idle_save_s=1000.0)
    canarys = list(rig.engine.moves)
    for content in ("one", "two", "three"):
        await turn(rig, "a", content)
        await rig.durable.round()
    assert rig.engine.moves == canarys


async def test_the_idle_are_saved_once(proxies):
    """After the time that is set, and again only when they went on."""
    rig = await proxies(idle_save_s=1000.0)
    await turn(rig, "a", "first")
    await rig.durable.sessions.keep_idle(1000.0)
    assert keys(rig) == []
    await rig.durable.sessions.keep_idle(0.0)
    (entry,) = rig.durable.shelf.catalogue
    await rig.durable.sessions.keep_idle(0.0)
    assert list(rig.durable.shelf.catalogue) == [entry]
    await turn(rig, "a", "first", "second")
    await rig.durable.sessions.keep_idle(0.0)
    (longer,) = rig.durable.shelf.catalogue
    assert len(longer.tokens) > len(entry.tokens)
    assert rig.idle == 1


LONG = "y" * 700
"""Of a conversation of which a short turn is less than a twentieth."""


@pytest.mark.parametrize("how", ["idle", "displaced", "emptied"])
async def test_what_is_nearly_all_on_disk_is_not_written_again(proxies, how):
    """The next turn computes the rest; who drains or asks for it has it whole."""
    rig = await proxies(idle_save_s=1000.0)
    await turn(rig, "a", LONG)
    await rig.durable.sessions.keep_idle(0.0)
    (entry,) = rig.durable.shelf.catalogue
    assert await turn(rig, "a", LONG, "next") > 0
    before = len(rig.engine.moved("save"))
    if how == "idle":
        for _ in range(3):
            await rig.durable.sessions.keep_idle(0.0)
        assert len(rig.engine.moved("save")) == before
        await rig.durable.drain()
        assert len(rig.engine.moved("save")) == before + 1
        (whole,) = rig.durable.shelf.catalogue
        assert len(whole.tokens) > len(entry.tokens)
        return
    if how == "emptied":
        assert await rig.runtime.empty_oldest()
    else:
        await turn(rig, "b", "first")
    assert len(rig.engine.moved("save")) == before
    assert rig.durable.shelf.metrics.saves["failed"] == 0
    assert await turn(rig, "a", LONG, "next", "last") == prompt_of(rig, "a", LONG)
    assert entry in list(rig.durable.shelf.catalogue)
    await rig.durable.sessions.keep_idle(0.0)  # still only a bit more than was restored
    assert entry in list(rig.durable.shelf.catalogue)
    closed = (await rig.ask("/polykv/sessions/a/close?keep=1", {})).json
    assert closed["kept"] is True
    (mine,) = rig.durable.shelf.catalogue.under("a", None)
    assert len(mine.tokens) > len(entry.tokens)


@pytest.mark.parametrize("what", ["edited", "cut", "unknown", "left", "configured", "deleted"])
async def test_what_is_not_known_to_be_on_disk_is_written(proxies, what):
    """The history was edited, its reuse is unknown, a turn failed between, another configuration."""
    rig = await proxies(idle_save_s=1000.0)
    await turn(rig, "a", LONG)
    await rig.durable.sessions.keep_idle(0.0)
    (entry,) = rig.durable.shelf.catalogue
    more = {}
    said = [LONG, "next"]
    if what == "edited":
        said = [LONG[:200] + "z" + LONG[:500], "next"]
    elif what == "unknown":
        on_answer = rig.durable.on_answer
        rig.runtime.saver.on_answer = lambda lease, _: on_answer(lease, None)
    elif what == "left":
        rig.engine.script.fault = "die_mid_stream"
        await rig.ask(CHAT, chat("a", LONG[:200] + "z", session_id="a", stream=True))
        rig.engine.script.fault = None
        await rig.quiet()
    elif what == "configured":
        more = {"chat_template_kwargs": {"thinking": False}}
    elif what == "deleted":
        assert (await rig.ask("/polykv/cache/a", method="DELETE")).status == 200
    elif what == "cut":
        said = [LONG[:400]]
    await turn(rig, "a", *said, **more)
    before = len(rig.engine.moved("save"))
    await rig.durable.sessions.keep_idle(0.0)
    kept = what == "cut"  # all of it is there, and more
    assert len(rig.engine.moved("save")) == before + (not kept)
    assert (entry in list(rig.durable.shelf.catalogue)) == (what in ("cut", "configured"))


async def test_a_drain_saves_everybody(proxies):
    """For the next proxy, which has other ids for those without a name."""
    rig = await proxies(slots=2, idle_save_s=1000.0)
    await turn(rig, "a", "first")
    await rig.ask(CHAT, chat("nobody"))
    await rig.durable.drain()
    assert len(keys(rig)) == 2
    again = await proxies(slots=2, idle_save_s=1000.0)
    assert await turn(again, "a", "first", "second") == prompt_of(again, "a", "first")
    answer = (await again.ask(CHAT, chat("nobody", "more"))).json
    assert answer["timings"]["cache_n"] == prompt_of(again, "nobody")
    before = keys(again)
    await again.durable.drain()
    assert keys(again) == before  # rule 4: they went on from what was there


OVERFLOWS = {
    "none": {"code": 500, "message": "Compute error.", "type": "server_error"},
    "cells": {"code": 500, "message": "Context size has been exceeded.", "type": "server_error"},
    "window": {
        "code": 400,
        "message": "request (3000 tokens) exceeds the available context size (1024 tokens)",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": 3000,
        "n_ctx": 1024,
    },
}


@pytest.mark.parametrize("says", OVERFLOWS)
@pytest.mark.parametrize("fault", ["error", "die_mid_stream", "error_mid_stream"])
async def test_what_failed_changes_nothing(proxies, fault, says):
    """The state of the last whole answer stays, also when the slot is lost; what overflowed failed."""
    rig = await proxies()
    rig.engine.script.error_body = {"error": OVERFLOWS[says]}
    rig.engine.script.status = OVERFLOWS[says]["code"]
    await turn(rig, "a", "first")
    await rig.durable.round()
    (entry,) = rig.durable.shelf.catalogue
    rig.engine.script.fault = fault
    await rig.ask(CHAT, chat("a", "first", "second", session_id="a", stream=True))
    rig.engine.script.fault = None
    await rig.quiet()
    await rig.durable.round()
    await turn(rig, "b", "first")
    assert entry in list(rig.durable.shelf.catalogue)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_was_cut_at_max_tokens_is_a_whole_one(proxies, stream):
    """It was delivered; the conversation goes on from it."""
    rig = await proxies()
    rig.engine.script.extra = {"choices": [{"index": 0, "finish_reason": "length", "delta": {}}]}
    await rig.ask(CHAT, chat("a", "y" * 300, session_id="a", stream=stream, max_tokens=1))
    await rig.durable.round()
    assert keys(rig) == ["a"]


async def test_who_left_is_not_saved(proxies):
    """Before the answer was whole."""
    rig = await proxies()
    rig.engine.gate.clear()
    asking = rig.start(CHAT, chat("a", session_id="a"))
    await until(lambda: rig.engine.running == 1)
    asking.cancel()
    await rig.quiet()
    rig.engine.gate.set()
    await rig.durable.round()
    assert keys(rig) == []


@pytest.mark.parametrize(
    "more", [{"opencoti": {"cache": False}}, {"n": 2}, {"lora": [{"id": 0, "scale": 1.0}]}]
)
async def test_what_is_not_the_conversation_is_not_saved(proxies, more):
    """A request that wants no cache, several answers, adapters of its own."""
    rig = await proxies(slots=2)
    await turn(rig, "a", "first", **more)
    await rig.durable.round()
    assert keys(rig) == []


async def test_little_of_ones_own_is_not_worth_a_file(proxies):
    """It is computed as soon as read."""
    rig = await proxies(min_tokens=2000)
    await turn(rig, "a", "first")
    await turn(rig, "b", "first")
    assert keys(rig) == []


async def test_a_file_that_would_be_nearly_all_its_pools_is_not_written(proxies):
    """Unless it is asked for; nobody looks at it again and again."""
    rig = await proxies(idle_save_s=1000.0)
    pool = await rig.pool({"prompt": "p" * 700, "pin": True})
    body = {"prompt": "p" * 700 + "own" * 10, "pool_id": pool["pool_id"], "session_id": "a"}
    assert (await rig.ask("/v1/completions", body)).status == 200
    before, looks = len(rig.engine.moved("save")), []
    client = rig.runtime.client  # the sampler has it, too, and looks when it likes
    rig.runtime.client = SimpleNamespace(counters=lambda: looks.append(1) or client.counters())
    for _ in range(3):
        await rig.durable.sessions.keep_idle(0.0)
    rig.runtime.client = client
    assert len(rig.engine.moved("save")) == before
    assert len(looks) == 1
    closed = (await rig.ask("/polykv/sessions/a/close?keep=1", {})).json
    assert closed["kept"] is True


async def test_who_is_emptied_for_his_cells_is_saved_first(proxies):
    """Whoever takes the slot's cells, by a pool or by the ledger."""
    rig = await proxies(slots=2)
    await turn(rig, "a", "first")
    assert await rig.runtime.empty_oldest()
    await rig.durable.shelf.all_over()
    assert keys(rig) == ["a"]
    await turn(rig, "b", "first")
    slot = rig.runtime.plane.sessions.get("b", Scope("")).slot
    assert await rig.runtime._empty(SlotId(slot))
    await rig.durable.shelf.all_over()
    assert keys(rig) == ["a", "b"]


async def test_a_pool_that_is_computed_saves_what_it_displaces(proxies):
    """Its slot is somebody's."""
    rig = await proxies()
    await turn(rig, "a", "first")
    await rig.pool({"prompt": "x" * 200})
    await rig.durable.shelf.all_over()
    assert keys(rig) == ["a"]


async def test_a_session_that_is_closed_stays_only_if_it_is_to(proxies):
    """``keep`` saves; without it the disk forgets it, too."""
    rig = await proxies(idle_save_s=1000.0)
    await turn(rig, "a", "first")
    closed = (await rig.ask("/polykv/sessions/a/close?keep=1", {})).json
    assert closed["kept"] is True
    assert keys(rig) == ["a"]
    assert await turn(rig, "a", "first", "second") == prompt_of(rig, "a", "first")
    closed = (await rig.ask("/polykv/sessions/a/close", {})).json
    assert closed["kept"] is False
    assert keys(rig) == []


async def test_who_runs_keeps_his_state_from_being_deleted(proxies):
    """409, and afterwards it goes."""
    rig = await proxies()
    await turn(rig, "a", "first")
    await rig.durable.round()
    rig.engine.gate.clear()
    asking = rig.start(CHAT, chat("a", "first", "second", session_id="a"))
    await until(lambda: rig.engine.running == 1)
    refused = await rig.ask("/polykv/cache/a", method="DELETE")
    assert (refused.status, refused.error["code"]) == (409, "cache_in_use")
    rig.engine.gate.set()
    await asking
    assert (await rig.ask("/polykv/cache/a", method="DELETE")).json["deleted"] == 1


async def test_what_is_saved_across_a_restart_is_nobody_elses(proxies):
    """The slots of the new engine have the old ones' numbers, and other keys' conversations."""
    rig = await proxies(slots=2, idle_save_s=1000.0)
    for name in "ac":
        await rig.ask(CHAT, chat(name, "y" * 300, session_id=name), Authorization="Bearer one")
    reached, go_on = threading.Event(), threading.Event()

    def step(name):
        if name == "sync_file" and not reached.is_set():
            reached.set()
            go_on.wait(10)

    rig.durable.shelf.store._on_step = step
    keeping = asyncio.create_task(rig.durable.sessions.keep_idle(0.0))
    await asyncio.to_thread(reached.wait)
    rig.down()
    rig.engine.restart()
    await rig.up()
    for name in "uv":
        body = chat(name, "s" * 300, session_id=name)
        assert (await rig.ask(CHAT, body, Authorization="Bearer two")).status == 200
    go_on.set()
    await keeping
    saved = list(rig.durable.shelf.catalogue)
    assert saved
    for entry in saved:
        assert entry.state.key in "ac"
        assert ord("s") not in entry.tokens[-250:]


async def test_a_slot_that_is_another_once_it_is_saved_is_not_kept(proxies):
    """The engine was restarted and used before anybody noticed."""
    rig = await proxies(idle_save_s=1000.0)
    await turn(rig, "a", "y" * 300)
    save, tag = rig.runtime.client.save_slot, rig.engine.sequences[0].tag

    async def late(slot, name):
        rig.engine.sequences[0].tag = tag + 100
        return await save(slot, name)

    rig.runtime.client.save_slot = late
    await rig.durable.sessions.keep_idle(0.0)
    assert keys(rig) == []
    rig.runtime.client.save_slot = save
    await rig.durable.sessions.keep_idle(0.0)
    assert keys(rig) == []
    assert len(rig.engine.moved("save")) == 2  # the canary's, and one


async def test_a_slot_is_saved_once_also_if_two_are_to_displace_it(proxies):
    """A pool that is to be computed there, and who takes back its cells: nothing is written over it."""
    rig = await proxies()
    await turn(rig, "a", "y" * 300)
    before = len(rig.engine.moved("save"))
    need = need_of_pool(100, None, 0)
    lease = rig.runtime.line.request(Ask(scope=Scope(""), need=need), conversation=False).lease
    await asyncio.gather(
        rig.runtime.saver.before_request(lease, None, 0), rig.runtime._take_back(("slot", SlotId(0)))
    )
    assert len(rig.engine.moved("save")) == before + 1
    await rig.durable.shelf.all_over()
    (entry,) = rig.durable.shelf.catalogue
    assert len(entry.tokens) > 300
    rig.runtime.finish(lease, clean=True, content=Content.NOTHING)


async def test_what_was_emptied_while_it_was_saved_does_not_count(proxies):
    """The file is whole, and of nothing."""
    rig = await proxies(idle_save_s=1000.0)
    await turn(rig, "a", "first")
    await rig.durable.sessions.keep_idle(0.0)
    await turn(rig, "a", "first", "second")
    (entry,) = rig.durable.shelf.catalogue
    save = rig.runtime.client.save_slot

    async def emptied(slot, name):
        held = rig.engine.sequences[0]
        held.tokens = held.tokens[:2]
        return await save(slot, name)

    rig.runtime.client.save_slot = emptied
    await rig.durable.sessions.keep_idle(0.0)
    assert list(rig.durable.shelf.catalogue) == [entry]


async def test_what_cannot_be_saved_is_not_written_out_again_and_again(proxies):
    """Not before some time went by, the conversation went on, or the proxy stops."""
    rig = await proxies(idle_save_s=1000.0)
    await turn(rig, "a", "y" * 300)
    rig.engine.full = True
    before = len(rig.engine.moved("save"))
    for _ in range(4):
        await rig.durable.sessions.keep_idle(0.0)
    assert len(rig.engine.moved("save")) == before + 1
    await rig.durable.drain()
    assert len(rig.engine.moved("save")) == before + 2
    rig.runtime.plane.sessions.get("a", Scope("")).refused_at -= RETRY_S
    await rig.durable.sessions.keep_idle(0.0)
    assert len(rig.engine.moved("save")) == before + 3
    await turn(rig, "a", "y" * 300, "more")
    await rig.durable.sessions.keep_idle(0.0)
    assert len(rig.engine.moved("save")) == before + 4
    rig.engine.full = False
    await turn(rig, "a", "y" * 300, "more", "again")
    await rig.durable.sessions.keep_idle(0.0)
    assert keys(rig) == ["a"]


async def test_media_are_not_written_at_all(proxies):
    """Neither when they are idle, nor displaced, nor closed, nor at the end; nothing is wrong with that."""

    def sees(engine):
        engine.props["modalities"] = {"vision": True}

    rig = await proxies(slots=2, idle_save_s=1000.0, prepare=sees)
    picture = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    for name in ("a", "b"):
        await turn(rig, name, "y" * 300)
        await rig.durable.sessions.keep_idle(0.0)
    assert keys(rig) == ["a", "b"]
    before = len(rig.engine.moved("save"))
    for name in ("a", "b"):
        await turn(rig, name, "y" * 300, picture)
    await rig.durable.sessions.keep_idle(0.0)
    await turn(rig, "c", "y" * 300)
    assert len(rig.engine.moved("save")) == before
    await rig.ask("/polykv/sessions/c/close", {})
    await rig.ask("/polykv/sessions/b/close", {"keep": True})
    await rig.durable.drain()
    saved = rig.engine.moved("save")[before:]
    assert len(saved) == ("c" in keys(rig))
    assert rig.durable.shelf.last_error is None


async def test_who_is_closed_while_he_is_saved_is_forgotten(proxies):
    """Nothing of him appears afterwards."""
    rig = await proxies(idle_save_s=1000.0)
    await turn(rig, "a", "y" * 300)
    held = rig.engine.slow["/slots/0"] = asyncio.Event()
    keeping = asyncio.create_task(rig.durable.sessions.keep_idle(0.0))
    await until(lambda: len(rig.durable.shelf.saves))
    closing = rig.start("/polykv/sessions/a/close", {})
    await asyncio.sleep(0.02)
    held.set()
    await keeping
    assert (await closing).json["kept"] is False
    assert keys(rig) == []
    await rig.durable.sessions.keep_idle(0.0)
    assert keys(rig) == []


@pytest.mark.parametrize("act", ["migrate", "close", "keep", "erase"])
async def test_a_save_of_ours_is_waited_for_by_who_is_told_to_use_its_slot(proxies, act):
    """It is over in a moment, and nobody outside knows of it: what is asked for is done, not refused."""
    rig = await proxies(idle_save_s=1000.0)
    pool = await rig.pool()
    await turn(rig, "a", LONG)
    held = rig.engine.slow["/slots/0"] = asyncio.Event()
    keeping = asyncio.create_task(rig.durable.sessions.keep_idle(0.0))
    await until(lambda: rig.runtime.plane.board.slots[0].borrowed)
    path, body = {
        "migrate": ("/polykv/sessions/a/migrate", {"pool_id": pool["pool_id"]}),
        "close": ("/polykv/sessions/a/close", {}),
        "keep": ("/polykv/sessions/a/close?keep=1", {}),
        "erase": ("/slots/0?action=erase", {}),
    }[act]
    asked = rig.start(path, body)
    await asyncio.sleep(0.05)
    assert not asked.done()
    held.set()
    await keeping
    answer = await asked
    assert answer.status == 200, answer.body
    assert rig.runtime.plane.board.slots[0].session is None
    assert rig.engine.used == pool["prefix_len"]
    assert keys(rig) == ([] if act == "close" else ["a"])
    if act == "migrate":
        moved = await rig.ask(CHAT, chat("hi", session_id="a"))
        assert moved.headers["x-pool-id"] == pool["pool_id"]


async def test_who_is_closed_to_stay_while_he_is_looked_at_stays_whole(proxies, monkeypatch):
    """A save of idle slots leaves out a short turn; the one that was asked for does not."""
    rig = await proxies(idle_save_s=1000.0)
    await turn(rig, "a", LONG)
    await rig.durable.sessions.keep_idle(0.0)
    (entry,) = rig.durable.shelf.catalogue
    await turn(rig, "a", LONG, "next")
    client, go_on = rig.runtime.client, asyncio.Event()
    counters = client.counters

    async def slowly():
        await go_on.wait()
        return await counters()

    monkeypatch.setattr(client, "counters", slowly)
    keeping = asyncio.create_task(rig.durable.sessions.keep_idle(0.0))
    await until(lambda: rig.runtime.plane.board.slots[0].borrowed)
    closing = rig.start("/polykv/sessions/a/close?keep=1", {})
    await asyncio.sleep(0.05)
    go_on.set()
    await keeping
    assert (await closing).json["kept"] is True
    (whole,) = rig.durable.shelf.catalogue
    assert len(whole.tokens) > len(entry.tokens)


async def test_a_save_that_does_not_end_is_not_waited_for_for_ever(proxies, monkeypatch):
    """Then it is said that the slot is busy, and nothing has changed."""
    rig = await proxies(idle_save_s=1000.0)
    pool = await rig.pool()
    await turn(rig, "a", LONG)
    monkeypatch.setattr("polykv_proxy.runtime.BORROWED_WAIT_S", 0.05)
    held = rig.engine.slow["/slots/0"] = asyncio.Event()
    keeping = asyncio.create_task(rig.durable.sessions.keep_idle(0.0))
    await until(lambda: rig.runtime.plane.board.slots[0].borrowed)
    answer = await rig.ask("/polykv/sessions/a/migrate", {"pool_id": pool["pool_id"]})
    assert (answer.status, answer.error["code"]) == (409, "slot_busy")
    assert rig.runtime.plane.sessions.get("a", Scope("")).moves_to is None
    held.set()
    await keeping


async def test_what_was_deleted_is_not_saved_again(proxies):
    """Not what the session left before, of which there was more than on disk."""
    rig = await proxies(idle_save_s=1000.0)
    await turn(rig, "a", "first")
    await rig.durable.sessions.keep_idle(0.0)
    await turn(rig, "a", "first", "second")
    assert (await rig.ask("/polykv/cache/a", method="DELETE")).json["deleted"] == 1
    await rig.durable.sessions.keep_idle(0.0)
    assert keys(rig) == []
    await turn(rig, "a", "first", "second", "third")
    await rig.durable.sessions.keep_idle(0.0)
    assert keys(rig) == ["a"]


async def test_deleting_a_name_deletes_all_its_conversations(proxies):
    """Several run under one."""
    rig = await proxies(slots=3, idle_save_s=1000.0)
    await turn(rig, "foo", "y" * 300)
    await rig.ask(CHAT, chat("another", "z" * 300, session_id="foo"))
    await rig.ask(CHAT, chat("other", "z" * 300, session_id="food"))
    await rig.durable.sessions.keep_idle(0.0)
    before = keys(rig)
    assert "food" in before
    assert len(before) == 3
    assert (await rig.ask("/polykv/cache/foo", method="DELETE")).json["deleted"] == 2
    assert keys(rig) == ["food"]


async def test_a_pool_that_is_there_keeps_its_state(proxies):
    """It would be saved again: who wants to be rid of it releases it."""
    rig = await proxies()
    pool = await rig.pool()
    await rig.durable.round()
    assert keys(rig) == [pool["pool_id"]]
    refused = await rig.ask(f"/polykv/cache/{pool['pool_id']}", method="DELETE")
    assert (refused.status, refused.error["code"]) == (409, "cache_in_use")


def hanging(rig, name, until_s=20):
    """Its disk hangs in that step until what this returns is set."""
    go_on = threading.Event()
    rig.durable.shelf.store._on_step = lambda step: step == name and go_on.wait(until_s)
    return go_on


async def test_a_disk_that_hangs_takes_no_slot_and_no_request_waits_for_it(proxies):
    """Neither who displaces a conversation, nor who would have been saved, nor the end of the proxy."""
    rig = await proxies(slots=2, idle_save_s=1000.0, drain_s=5.0)
    await turn(rig, "a", "y" * 300)
    await turn(rig, "b", "z" * 300)
    go_on, disk = hanging(rig, "sync_file"), rig.durable.shelf.disk
    disk._patience_s = 0.3
    idle = asyncio.create_task(rig.durable.sessions.keep_idle(0.0))
    await until(lambda: len(rig.durable.shelf.saves) == 1 and rig.idle == 2)
    for name in "cdef":
        answer = await rig.ask(CHAT, chat(name, "w" * 300, session_id=name))
        assert answer.status == 200
    await idle
    await until(lambda: not rig.durable.shelf.on)
    assert "did not answer" in rig.durable.status()["reason"]
    answer = await rig.ask(CHAT, chat("a", "y" * 300, "more", session_id="a"))
    assert answer.status == 200
    assert (await rig.ask("/polykv/cache")).json["engines"][0]["state"] == "off"
    assert (await rig.ask("/polykv/sessions/a/close", {})).status == 200
    await rig.durable.round()
    await rig.durable.drain()
    await rig.quiet()
    disk._patience_s = 20.0
    go_on.set()
    await until(lambda: rig.durable.shelf.on)
    await rig.durable.shelf.all_over()
    assert "a" not in keys(rig)
    await turn(rig, "g", "v" * 300)
    assert len(rig.durable.shelf.saves) == 0
    await rig.durable.sessions.keep_idle(0.0)  # whatever was saved before it hung, this is
    assert "g" in keys(rig)
    assert all([await rig.durable.shelf.check(entry) for entry in rig.durable.shelf.catalogue])


async def test_who_goes_on_before_what_he_left_is_on_disk_is_not_believed_to_have_it_there(proxies):
    """His edited history is in the slot by then: what the file holds of that is not known."""
    rig = await proxies(idle_save_s=1000.0)
    await turn(rig, "a", LONG)
    go_on = hanging(rig, "sync_file")
    idle = asyncio.create_task(rig.durable.sessions.keep_idle(0.0))
    await until(lambda: len(rig.durable.shelf.saves) == 1 and rig.idle == 1)
    session = rig.runtime.plane.sessions.get("a", Scope(""))
    assert session.coming == session.delivered
    answer = await rig.ask(CHAT, chat("a", "z" * 700, session_id="a"))
    assert answer.status == 200
    go_on.set()
    await idle
    assert session.kept is None
    assert session.coming is None
    await rig.durable.sessions.keep_idle(0.0)
    assert max(len(entry.tokens) for entry in rig.durable.shelf.catalogue) > 700
    assert len(rig.engine.moved("save")) == 3  # the canary's, and both


async def test_what_is_on_its_way_is_not_written_again(proxies):
    """By who takes the slot before it counts."""
    rig = await proxies(idle_save_s=1000.0)
    await turn(rig, "a", "y" * 300)
    before = len(rig.engine.moved("save"))
    go_on = hanging(rig, "sync_file")
    idle = asyncio.create_task(rig.durable.sessions.keep_idle(0.0))
    await until(lambda: len(rig.durable.shelf.saves) == 1 and rig.idle == 1)
    assert (await rig.ask(CHAT, chat("b", "z" * 300, session_id="b"))).status == 200
    assert len(rig.engine.moved("save")) == before + 1
    go_on.set()
    await idle
    assert keys(rig) == ["a"]


async def test_what_is_deleted_while_somebody_looks_whether_to_save_it_stays_away(proxies):
    """The engine was asked what the slot holds, and meanwhile the state on disk went."""
    rig = await proxies(idle_save_s=1000.0)
    await turn(rig, "a", "first")
    await rig.durable.sessions.keep_idle(0.0)
    await turn(rig, "a", "first", "second " * 30)
    client, asked, go_on = rig.runtime.client, asyncio.Event(), asyncio.Event()
    counters = client.counters

    async def slow():
        sample = await counters()
        asked.set()
        await go_on.wait()
        return sample

    client.counters = slow
    keeping = asyncio.create_task(rig.durable.sessions.keep_idle(0.0))
    await until(lambda: asked.is_set() and rig.idle == 0)
    client.counters = counters
    assert (await rig.ask("/polykv/cache/a", method="DELETE")).json["deleted"] == 1
    go_on.set()
    await keeping
    await rig.durable.shelf.all_over()
    assert keys(rig) == []
    assert [path.name for path in rig.engine.folder.glob("kv-*")] == []


async def test_what_is_deleted_with_others_is_not_saved_while_they_go(proxies):
    """All go in one step: a save that begins before the last file went is of what was said since."""
    rig = await proxies(idle_save_s=1000.0, slots=2)
    for name in ("a", "a/b"):
        await turn(rig, name, "first")
    await rig.durable.sessions.keep_idle(0.0)
    await turn(rig, "a/b", "first", "second " * 30)
    store, reached, go_on = rig.durable.shelf.store, threading.Event(), threading.Event()
    delete = store.delete

    def slow(state, **more):
        reached.set()
        go_on.wait(20)
        delete(state, **more)

    store.delete = slow
    deleting = rig.start("/polykv/cache/a", method="DELETE")
    await until(reached.is_set)
    await rig.durable.sessions.keep_idle(0.0)
    go_on.set()
    assert (await deleting).json["deleted"] == 2
    await rig.durable.shelf.all_over()
    assert keys(rig) == []
    assert [path.name for path in rig.engine.folder.glob("kv-*")] == []


async def test_what_is_closed_while_somebody_reads_it_goes(proxies):
    """Nobody finds it any more, and its file goes with the last who reads it."""
    rig = await proxies(idle_save_s=1000.0)
    await turn(rig, "a", "first")
    await rig.durable.sessions.keep_idle(0.0)
    (entry,) = rig.durable.shelf.catalogue
    file = rig.engine.folder / entry.state.file
    async with rig.durable.shelf.holding(entry):
        assert (await rig.ask("/polykv/sessions/a/close", {})).status == 200
        assert keys(rig) == []
        assert file.exists()
    assert list(rig.engine.folder.glob("kv-*")) == []


async def test_adapters_of_ones_own_are_seen_however_they_are_spelt(proxies):
    """An escaped key is the same key to the engine."""
    rig = await proxies()
    body = json.dumps(chat("a", "first", session_id="a") | {"lora": [{"id": 0, "scale": 0.5}]})
    body = body.replace('"lora"', '"l\\u006fra"').encode()
    assert (await rig.ask(CHAT, body, Content_Type="application/json")).status == 200
    await rig.durable.round()
    assert keys(rig) == []
