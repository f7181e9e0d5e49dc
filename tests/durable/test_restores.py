"""Claims about ``durable.restores``: what was saved comes back when it pays, and is proven."""

import asyncio
from dataclasses import replace

import pytest
from api.rig import CHAT, chat, until

from durable.test_sessions import keys, prompt_of, turn
from polykv_proxy.api.identity import scope_of_keys
from polykv_proxy.core.catalogue import Kind, Reason, Retention
from polykv_proxy.core.types import Scope
from polykv_proxy.durable.saves import Label
from polykv_proxy.engine.wire import SlotFile
from polykv_proxy.errors import BadRequestError, UnavailableError


async def test_a_request_with_adapters_of_its_own_gets_nothing(proxies):
    """The engine would not reuse it, and the state would be taken for one that does not help."""
    rig = await proxies()
    await turn(rig, "a", "first")
    await turn(rig, "b", "first")
    before = rig.engine.moved("restore")
    await turn(rig, "a", "first", "second", lora=[{"id": 0, "scale": 1.0}])
    assert rig.engine.moved("restore") == before
    assert "a" in keys(rig)


async def test_a_restore_that_does_not_help_is_seen_and_goes(proxies):
    """The engine said that it restored; the answer says otherwise."""
    rig = await proxies()
    await turn(rig, "a", "first")
    await turn(rig, "b", "first")
    rig.engine.window = 5
    assert await turn(rig, "a", "first", "second") == 5
    metrics = rig.durable.shelf.metrics
    assert (metrics.restores["ineffective"], metrics.restores["effective"]) == (1, 0)
    assert "a" not in keys(rig)
    assert Reason.INEFFECTIVE in [each.reason for each in rig.durable.shelf.catalogue.tombstones(None)]


async def test_a_restore_that_fails_is_a_plain_request(proxies):
    """The slot is empty then, and nobody is told that it holds something."""
    rig = await proxies()
    await turn(rig, "a", "first")
    await turn(rig, "b", "first")
    rig.engine.broken["/slots/0"] = (400, b'{"error": {"code": 400, "message": "Unable to restore slot"}}')
    await turn(rig, "a", "first", "second")
    del rig.engine.broken["/slots/0"]
    assert rig.durable.shelf.metrics.restores["failed"] == 1
    assert rig.durable.shelf.status()["last_error"]


async def test_a_pool_that_holds_as_much_is_used_instead(proxies):
    """Nothing is read from disk for a few tokens."""
    rig = await proxies()
    await turn(rig, "a", "first")
    await turn(rig, "b", "first")
    await rig.pool({"messages": chat("a", "first")["messages"]})
    before = rig.engine.moved("restore")
    await turn(rig, "a", "first", "x")
    assert rig.engine.moved("restore") == before


async def test_a_slot_that_holds_as_much_is_used_instead(proxies):
    """What another conversation left there begins alike; nothing is read for the rest."""
    rig = await proxies(min_tokens=64)
    await turn(rig, "a", "first")
    await turn(rig, "b", "first")
    await rig.durable.round()
    before = rig.engine.moved("restore")
    assert await turn(rig, "a", "first", "second") > 150
    assert rig.engine.moved("restore") == before
    assert {"a", "b"} <= set(keys(rig))


async def test_a_state_that_does_not_fit_is_left_on_disk(proxies):
    """For a moment all of it needs cells."""
    rig = await proxies(slots=2)
    await turn(rig, "a", "first")
    await turn(rig, "b", "first")
    await turn(rig, "c", "first")
    before = rig.engine.moved("restore")
    rig.engine.cells = rig.engine.used + 20
    await turn(rig, "a", "first", "second")
    assert rig.engine.moved("restore") == before
    assert "a" in keys(rig)


async def test_another_keys_conversation_is_never_found(proxies):
    """Scopes are apart on disk, too."""
    rig = await proxies()
    await rig.ask(CHAT, chat("a", "first"), Authorization="Bearer one")
    await turn(rig, "b", "first")
    before = rig.engine.moved("restore")
    await rig.ask(CHAT, chat("a", "first", "second"), Authorization="Bearer two")
    assert rig.engine.moved("restore") == before


@pytest.mark.parametrize("end", ["sweep", "save", "delete"])
async def test_a_state_that_is_to_be_restored_stays_readable(proxies, end):
    """From the moment it was chosen: between that and the engine's reading it others have their turn."""
    rig = await proxies(slots=2)
    await turn(rig, "a", "y" * 300)
    await rig.durable.round()
    (entry,) = rig.durable.shelf.catalogue
    await turn(rig, "b", "z" * 300)
    await turn(rig, "c", "w" * 300)
    shelf, check = rig.durable.shelf, rig.durable.shelf.check

    async def meanwhile(chosen):
        assert chosen is entry
        right = await check(chosen)
        if end == "save":
            label = Label(kind=Kind.SESSION, key="a", scope=entry.scope, config=entry.state.config)
            longer = [*entry.tokens, *range(9)]

            async def write(name):
                return SlotFile(len(longer), rig.engine._write(name, longer))

            assert await shelf.saves.save(label, len(longer), write) is not None
        elif end == "delete":
            assert (await rig.ask("/polykv/cache/a", method="DELETE")).status == 409
        else:
            shelf.limits = Retention(max_bytes=0, min_free_bytes=0)
            await shelf.sweeps.sweep(1e9, due=True)
        return right

    shelf.check = meanwhile
    answer = (await rig.ask(CHAT, chat("a", "y" * 300, "more", session_id="a"))).json
    assert answer["opencoti"]["restored_tokens"] == prompt_of(rig, "a", "y" * 300)
    restores = shelf.metrics.restores
    assert (restores["ineffective"], restores["failed"], restores["refused"]) == (0, 0, 0)
    assert (shelf.store.folder / entry.state.file).exists() == shelf.catalogue.has(entry)


async def test_a_restore_takes_nothing_that_others_count_on(proxies):
    """Cells that are empty now may be promised to who runs."""
    rig = await proxies(slots=2)
    for name, content in (("x", "x" * 500), ("z", "z" * 500), ("b", "first"), ("c", "first")):
        await turn(rig, name, content)
    before = rig.engine.moved("restore")
    ledger = rig.runtime.plane.cells.ledger
    figures = ledger.figures
    ledger.figures = lambda: replace(figures(), free=0)
    ledger.reserved = lambda _: 400
    await rig.ask(CHAT, chat("x", "x" * 100, session_id="d", max_tokens=1))
    assert rig.engine.moved("restore") == before
    ledger.figures = figures
    await rig.ask(CHAT, chat("z", "z" * 100, session_id="e", max_tokens=1))
    assert len(rig.engine.moved("restore")) == len(before) + 1


async def test_no_wish_for_tokens_where_nothing_is_saved(proxies):
    """Requests are not tokenized for nothing."""
    rig = await proxies()
    assert not rig.durable.may_help(Scope(""), adapters=False)
    await turn(rig, "a", "first")
    await rig.durable.round()
    assert rig.durable.may_help(Scope(""), adapters=False)
    assert not rig.durable.may_help(Scope(""), adapters=True)
    assert not rig.durable.may_help(Scope("other"), adapters=False)


async def test_the_first_state_of_all_is_waited_for(proxies):
    """It is on its way while its session comes back: nothing counts yet, and looking for it helps."""
    rig = await proxies()
    async with rig.durable.shelf.changing:  # the disk is slow
        for name in ("a", "b"):
            assert (await rig.ask(CHAT, chat(name, "first", session_id=name))).status == 200
        assert not keys(rig)
        assert rig.durable.may_help(Scope(""), adapters=False)
        assert not rig.durable.may_help(Scope("other"), adapters=False)
        back = asyncio.create_task(turn(rig, "a", "first", "second"))
        await until(lambda: len(rig.durable.shelf.saves) == 2)  # b was there
    assert await back >= prompt_of(rig, "a", "first") - 1


async def test_who_does_not_go_on_from_what_is_being_saved_does_not_wait_for_it(proxies):
    """A save takes as long as the disk does."""
    rig = await proxies(slots=2, idle_save_s=1000.0)
    await turn(rig, "a", "y" * 300)
    await turn(rig, "c", "first")
    await rig.durable.sessions.keep_idle(0.0)
    await turn(rig, "a", "y" * 300, "more" * 9)
    held = rig.engine.slow["/slots/0"] = asyncio.Event()
    keeping = asyncio.create_task(rig.durable.sessions.keep_idle(0.0))
    await until(lambda: len(rig.durable.shelf.saves))
    before = len(rig.engine.moved("restore"))
    await turn(rig, "b", "first")
    assert not keeping.done()
    restores = rig.durable.restores
    assert restores._on_the_way(rig.runtime.plane.sessions.get("a", Scope("")))
    assert not restores._on_the_way(rig.runtime.plane.sessions.get("b", Scope("")))
    held.set()
    await keeping
    assert not restores._on_the_way(rig.runtime.plane.sessions.get("a", Scope("")))
    assert len(rig.engine.moved("restore")) == before


@pytest.mark.parametrize("why", ["verdict", "part", "cells", "silence", "loading"])
async def test_what_the_engine_will_not_take_is_not_tried_for_ever(proxies, why):
    """Unless it lacked cells, did not answer, or is another engine that loads."""
    rig = await proxies(slots=2)
    for name in "abc":
        await turn(rig, name, name * 300)
    client, restore = rig.runtime.client, rig.runtime.client.restore_slot
    tries = []

    async def refuses(slot, name):
        tries.append(name)
        if why == "part":
            moved = await restore(slot, name)
            return SlotFile(moved.n_tokens - 1, moved.n_bytes)
        if why == "cells":
            rig.engine.cells = rig.engine.used + 200
        if why == "silence":
            raise UnavailableError("the engine did not answer", code="engine_timeout")
        if why == "loading":  # another engine, which nobody noticed yet
            client._check(503, b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}')
        raise BadRequestError("Unable to restore slot", code="engine_refused")

    client.restore_slot = refuses
    (entry,) = [each for each in rig.durable.shelf.catalogue if each.state.key == "a"]
    assert (await rig.ask(CHAT, chat("a", "a" * 300, "more", session_id="a"))).status == 200
    client.restore_slot = restore
    assert len(tries) == 1
    assert rig.durable.shelf.catalogue.has(entry) == (why in ("cells", "silence", "loading"))
    assert rig.durable.shelf.metrics.restores["failed"] == 1
    if why in ("verdict", "part"):
        gone = rig.durable.shelf.catalogue.tombstones(None)
        assert [(each.key, each.reason) for each in gone] == [("a", Reason.INEFFECTIVE)]


async def test_two_that_go_on_from_one_state_do_not_overwrite_each_other(proxies):
    """The first takes its key; the other has one of its own."""
    rig = await proxies(slots=2, idle_save_s=1000.0)
    await rig.ask(CHAT, chat("a", "first"))
    await rig.durable.drain()
    (before,) = keys(rig)
    again = await proxies(slots=2, idle_save_s=1000.0)
    again.engine.gate.clear()
    asking = [again.start(CHAT, chat("a", "first", f"then {then}")) for then in "xy"]
    await until(lambda: again.engine.running == 2)
    again.engine.gate.set()
    for one in asking:
        assert (await one).json["timings"]["cache_n"] >= prompt_of(again, "a", "first")
    await again.durable.drain()
    assert len(keys(again)) == 2
    assert before in keys(again)


@pytest.mark.parametrize("end", ["drain", "close"])
async def test_who_only_begins_like_a_state_leaves_it_alone(proxies, end):
    """He has what they have in common; it is neither replaced by his nor deleted with his."""
    rig = await proxies(idle_save_s=1000.0)
    await turn(rig, "alice", "x" * 500)
    await rig.durable.drain()
    (entry,) = rig.durable.shelf.catalogue
    again = await proxies(idle_save_s=1000.0)
    answer = (await again.ask(CHAT, chat("bob", session_id="bob"))).json
    assert answer["opencoti"]["restored_tokens"] > 100
    if end == "drain":
        await again.durable.drain()
        assert keys(again) == ["alice", "bob"]
    else:
        assert (await again.ask("/polykv/sessions/bob/close", {})).status == 200
        assert keys(again) == ["alice"]
    hers = next(each for each in again.durable.shelf.catalogue if each.state.key == "alice")
    assert hers.tokens == entry.tokens
    assert await again.durable.shelf.check(hers)


async def test_another_conversation_of_a_name_saves_beside_what_is_there(proxies):
    """After a restart the first that calls itself so need not be the one that was saved."""
    rig = await proxies(slots=2, idle_save_s=1000.0)
    await turn(rig, "foo", "y" * 600)
    await rig.durable.drain()
    (entry,) = rig.durable.shelf.catalogue
    again = await proxies(slots=2, idle_save_s=1000.0)
    await turn(again, "foo", "q" * 100)
    await again.durable.drain()
    assert keys(again) == ["foo", "foo#2"]
    assert entry.tokens in [each.tokens for each in again.durable.shelf.catalogue]
    await turn(again, "foo", "q" * 100, "more")
    await again.durable.drain()
    assert keys(again) == ["foo", "foo#2"]  # it goes on under that key
    assert [await again.durable.shelf.check(each) for each in again.durable.shelf.catalogue] == [True, True]


async def test_what_was_saved_under_a_number_is_found_by_the_name_alone(proxies):
    """As it was while another key had the name: the first that calls itself so now goes on with it."""
    for content in ("y" * 600, "q" * 100):
        rig = await proxies(slots=2, idle_save_s=1000.0)
        await turn(rig, "foo", content)
        await rig.durable.drain()
    assert keys(rig) == ["foo", "foo#2"]
    again = await proxies(slots=2, idle_save_s=1000.0)
    (first,) = (each for each in again.durable.shelf.catalogue if each.state.key == "foo")
    assert await again.durable.shelf.remove(first, Reason.DELETED)
    answer = (await again.ask(CHAT, chat("foo", "q" * 100, "more", session_id="foo"))).json["opencoti"]
    assert answer["session_id"] == "foo"
    assert answer["restored_tokens"] == prompt_of(again, "foo", "q" * 100)
    await again.durable.drain()
    assert keys(again) == ["foo#2"]


async def test_two_keys_save_under_one_name(proxies):
    """And each goes on from its own, also after a restart."""
    rig = await proxies(slots=2, idle_save_s=1000.0)
    for key in ("one", "two"):
        await rig.ask(CHAT, chat("foo", key * 40, session_id="foo"), X_Api_Key=key)
    await rig.durable.drain()
    assert keys(rig) == ["foo", "foo"]
    again = await proxies(slots=2, idle_save_s=1000.0)
    for key in ("two", "one"):
        body = chat("foo", key * 40, "more", session_id="foo")
        answer = (await again.ask(CHAT, body, X_Api_Key=key)).json["opencoti"]
        assert (answer["session_id"], answer["restored_tokens"]) == ("foo", prompt_of(again, "foo", key * 40))
    await again.durable.drain()
    assert keys(again) == ["foo", "foo"]
    assert (await again.ask("/polykv/sessions/foo/close", {}, X_Api_Key="one")).status == 200
    (left,) = again.durable.shelf.catalogue
    assert left.scope == scope_of_keys("two", None, shared=False)
