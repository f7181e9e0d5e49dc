"""Claims about ``api.cache``: what is saved, for whom, and deleting it."""

import pytest
import pytest_asyncio
from fake_durable import FakeDurable

from api.rig import CHAT, Rig, chat
from polykv_proxy.api.identity import scope_of_keys


@pytest_asyncio.fixture
async def rig(tmp_path):
    """One slot, and an admin key."""
    durable = {"min_tokens": 8, "min_free_bytes": 0, "idle_save_s": 0.0, "pools_every_s": 0.0}
    async with Rig(saving=FakeDurable(tmp_path, slots=1), admin="boss", durable=durable) as started:
        yield started


async def talk(rig, name, *contents, key="mine", **more):
    """A turn, saved."""
    body = chat(name, *contents, session_id=name, **more)
    assert (await rig.ask(CHAT, body, X_Api_Key=key)).status == 200
    await rig.durable.round()


async def get(rig, path="", **headers):
    """As the administrator."""
    return await rig.ask(f"/polykv/cache{path}", **({"Authorization": "Bearer boss"} | headers))


async def test_everything_that_is_saved_is_listed(rig):
    """Sessions and pools, with what they take."""
    await talk(rig, "run/a", "first")
    await rig.ask(
        "/polykv/pools", {"prompt": "p" * 90, "pin": True, "label": "l"}, Authorization="Bearer boss"
    )
    await rig.durable.round()
    listing = (await get(rig)).json
    by_kind = {entry["kind"]: entry for entry in listing["entries"]}
    assert by_kind["session"]["key"] == "run/a"
    assert by_kind["session"]["n_tokens"] > 100
    assert by_kind["session"]["bytes"] > by_kind["session"]["n_tokens"]
    assert (by_kind["pool"]["pinned"], by_kind["pool"]["label"]) == (True, "l")
    assert listing["engines"][0]["state"] == "on"
    assert listing["engines"][0]["entries"] == 2


async def test_others_see_nothing_and_delete_nothing(rig):
    """Keys that are the admin's see all."""
    await talk(rig, "run/a", "first")
    assert (await rig.ask("/polykv/cache")).status == 401
    assert len((await get(rig, "/run")).json["entries"]) == 1


async def test_a_scope_tells_two_keys_states_of_one_name_apart(rig):
    """To see and to delete; tombstones, too."""
    for key in ("one", "two"):
        await talk(rig, "a", key * 30, key=key)
    one, two = (scope_of_keys(key, None, shared=False) for key in ("one", "two"))
    listed = (await get(rig, "/a")).json["entries"]
    assert sorted((each["key"], each["scope"]) for each in listed) == sorted([("a", one), ("a", two)])
    assert [each["scope"] for each in (await get(rig, f"/a?scope={one}")).json["entries"]] == [one]
    assert (await get(rig, f"/a?scope={one}", method="DELETE")).json["deleted"] == 1
    left = (await get(rig, "/a")).json
    assert [each["scope"] for each in left["entries"]] == [two]
    assert [(each["scope"], each["reason"]) for each in left["tombstones"]] == [(one, "deleted")]


async def test_a_key_takes_all_below_it(rig):
    """Deleting, too; a tombstone stays."""
    for name in ("run/a", "run/b", "runner"):
        await talk(rig, name, "first")
    assert len((await get(rig, "/run")).json["entries"]) == 2
    deleted = await get(rig, "/run", method="DELETE")
    assert deleted.json == {"key": "run", "deleted": 2}
    gone = await get(rig, "/run/a")
    assert (gone.status, gone.error["code"]) == (404, "cache_not_found")
    assert [each["reason"] for each in gone.error["tombstones"]] == ["deleted"]
    assert (await get(rig, "/run", method="DELETE")).status == 404
    listing = (await get(rig)).json
    assert [entry["key"] for entry in listing["entries"]] == ["runner"]
    assert {each["key"] for each in listing["tombstones"]} == {"run/a", "run/b"}


async def test_a_listing_comes_in_pages(rig):
    """Of a key, too; each entry once, tombstones on the first."""
    for name in ("run/a", "run/b", "x", "gone"):
        await talk(rig, name, "first")
    await get(rig, "/gone", method="DELETE")
    for path, keys in (("", ["run/a", "run/b", "x"]), ("/run", ["run/a", "run/b"])):
        seen, after, pages = [], None, []
        while after is not None or not pages:
            query = "" if after is None else f"&after={after}"
            pages.append((await get(rig, f"{path}?limit=1{query}")).json)
            seen += [entry["key"] for entry in pages[-1]["entries"]]
            after = pages[-1]["next"]
        assert seen == keys
        assert len(pages) == len(keys)
        assert [len(page["tombstones"]) for page in pages] == [path == "", *[0] * (len(keys) - 1)]
    assert (await get(rig, "/run?after=0-99")).json["entries"] == []


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=201", "limit"),
        ("limit=x", "limit"),
        ("after=", "after"),
        ("after=1", "after"),
    ],
)
async def test_a_page_that_cannot_be(rig, query, param):
    """Refused by name."""
    answer = await get(rig, f"?{query}")
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_two_entries_of_a_key_name_what_moved(rig):
    """Here a tool."""
    await talk(rig, "a", "first", tools=[{"name": "one"}])
    await talk(rig, "b", "first")
    await talk(rig, "a", "first", tools=[{"name": "two"}])
    entries = (await get(rig, "/a")).json["entries"]
    assert [entry["config_changed"] for entry in entries] == [["tools"], ["tools"]]
    assert len({entry["config_hash"] for entry in entries}) == 2


async def test_props_say_whether_and_why_not(rig):
    """Beside everything else."""
    assert (await rig.ask("/props")).json["opencoti"]["durable_kv"]["state"] == "on"
    rig.durable.shelf.reason = "for a test"
    assert (await rig.ask("/props")).json["opencoti"]["durable_kv"]["reason"] == "for a test"


async def test_a_key_is_deleted_on_all_engines_or_on_none(tmp_path):
    """In use on the second, it stays on the first."""
    durable = {"min_tokens": 8, "min_free_bytes": 0, "idle_save_s": 0.0}
    engines = tuple(FakeDurable(tmp_path / name, slots=1) for name in "xy")
    async with Rig(saving=engines, models=("x", "y"), durable=durable) as rig:
        for model in "xy":
            await rig.ask(CHAT, chat("first", session_id=f"run/{model}", model=model))
        for engine in rig.fleet:
            await engine.durable.round()
        (entry,) = rig.fleet[1].durable.shelf.catalogue
        async with rig.fleet[1].durable.shelf.holding(entry):
            refused = await rig.ask("/polykv/cache/run", method="DELETE")
        assert (refused.status, refused.error["code"]) == (409, "cache_in_use")
        assert [len(engine.durable.shelf.catalogue) for engine in rig.fleet] == [1, 1]
        assert (await rig.ask("/polykv/cache/run", method="DELETE")).json["deleted"] == 2


async def test_a_deletion_that_the_disk_refuses_is_an_error(rig):
    """Nobody is told that it is gone."""
    await talk(rig, "a", "first")
    folder = rig.durable.shelf.store.folder
    (sidecar,) = folder.glob("*.json")
    sidecar.unlink()
    sidecar.mkdir()
    (sidecar / "x").mkdir()
    refused = await get(rig, "/a", method="DELETE")
    assert (refused.status, refused.error["code"]) == (503, "slot_file")
