"""Claims about ``core.catalogue``: one entry an identity, tokens decide, the least valuable goes."""

import string
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.catalogue import (
    MAX_TOMBSTONES,
    Catalogue,
    Kind,
    PoolRecord,
    Reason,
    Retention,
    SavedState,
    above,
    is_under,
)
from polykv_proxy.core.types import PoolId, Scope, as_tokens, common_prefix

CONFIG = {"system": "s", "tools": "t", "template": "p", "kwargs": "k"}


def state(tokens, key="me", **more):
    """A saved conversation."""
    values = {
        "kind": Kind.SESSION,
        "key": key,
        "scope": Scope(""),
        "model_id": "m",
        "config": CONFIG,
        "tokens": as_tokens(tokens),
        "file": f"{key}.bin",
        "file_bytes": 100,
        "file_digest": "d",
        "created_ts": 10.0,
    }
    return SavedState(**(values | more))


def pool(tokens, key="p", *, pinned=False, **more):
    """A saved pool."""
    record = PoolRecord(pool_id=PoolId(key), origin="explicit", pinned=pinned)
    return state(tokens, key, kind=Kind.POOL, pool=record, config={}, **more)


def test_what_is_saved_again_takes_its_place():
    """With what it was used; nothing is gone."""
    catalogue = Catalogue()
    first = catalogue.add(state(range(100)), used_ts=1.0, uses=3)
    second = catalogue.add(state(range(200), file_bytes=250), used_ts=2.0)
    assert not catalogue.has(first)
    assert catalogue.has(second)
    assert second.uses == 3
    assert len(catalogue) == 1
    assert catalogue.total_bytes == 250
    assert catalogue.tombstones(None) == []
    assert catalogue.get(second.state.identity) is second


@pytest.mark.parametrize(
    "change",
    [
        {"key": "you"},
        {"scope": Scope("x")},
        {"model_id": "n"},
        {"kind": Kind.POOL},
        *({"config": CONFIG | {part: "other"}} for part in CONFIG),
    ],
)
def test_each_part_of_the_identity_makes_it_another(change):
    """They live side by side."""
    catalogue = Catalogue()
    catalogue.add(state(range(100)), used_ts=1.0)
    catalogue.add(replace(state(range(100)), **change), used_ts=1.0)
    assert len(catalogue) == 2


def test_the_longest_prefix_wins_whatever_its_key_or_configuration():
    """A changed tool shares what is really equal."""
    catalogue = Catalogue()
    catalogue.add(state(range(100)), used_ts=1.0)
    other = catalogue.add(state([*range(150), 9, 9], "b", config=CONFIG | {"tools": "x"}), used_ts=1.0)
    assert catalogue.best(as_tokens([*range(150), 7]), Scope(""), "m") == (other, 150)


@pytest.mark.parametrize(("scope", "model"), [("x", "m"), ("", "n")])
def test_another_scope_and_another_model_never_match(scope, model):
    """Whatever the tokens are."""
    catalogue = Catalogue()
    catalogue.add(state(range(100)), used_ts=1.0)
    assert catalogue.best(as_tokens(range(100)), Scope(scope), model) is None
    assert catalogue.holds_sessions(Scope(""), "m")
    assert not catalogue.holds_sessions(Scope(scope), model)


def test_pools_are_no_sessions():
    """A request does not find them here; they come back as pools, shorter ones first."""
    catalogue = Catalogue()
    long, short = catalogue.add(pool(range(90), "a"), used_ts=1), catalogue.add(pool(range(50)), used_ts=1)
    assert catalogue.best(as_tokens(range(90)), Scope(""), "m") is None
    assert not catalogue.holds_sessions(Scope(""), "m")
    assert catalogue.pools("m") == [short, long]
    assert catalogue.pools("n") == []


@pytest.mark.parametrize("reason", [Reason.INEFFECTIVE, Reason.IDENTITY_CHANGED, Reason.DELETED])
def test_an_entry_that_is_wrong_or_unwanted_is_found_no_more_even_while_it_is_in_use(reason):
    """Its file stays until who uses it is done, but nobody else begins to."""
    catalogue = Catalogue()
    entry = catalogue.add(state(range(100)), used_ts=1.0)
    entry.holds = 1
    assert catalogue.remove(entry, reason, 5.0)
    assert catalogue.best(as_tokens(range(100)), Scope(""), "m") is None
    assert [each.file for each in catalogue.tombstones(None)] == ["me.bin"]


def test_an_entry_in_use_stays():
    """It is not swept, whether its file is read or somebody works with what it is of."""
    catalogue = Catalogue()
    entry = catalogue.add(state(range(100)), used_ts=1.0)
    limits = Retention(max_bytes=0, max_idle_s=0.0)
    entry.holds = 1
    assert not catalogue.remove(entry, Reason.SWEPT, 5.0)
    assert catalogue.overdue(limits, 1e9, 0) == []
    entry.holds = 0
    assert catalogue.overdue(limits, 1e9, 0, {entry}) == []
    assert catalogue.overdue(limits, 1e9, 0) == [entry]
    assert catalogue.remove(entry, Reason.SWEPT, 5.0)
    assert not catalogue.remove(entry, Reason.SWEPT, 5.0)


def test_each_configuration_of_a_key_has_its_own_reason():
    """One does not overwrite another's; what comes back is not gone, and the others are."""
    catalogue = Catalogue()
    one, two = ({"system": name, "tools": "t"} for name in "xy")
    entries = [catalogue.add(state(range(100), config=each), used_ts=1.0) for each in (one, two)]
    for entry, reason in zip(entries, (Reason.SWEPT, Reason.INEFFECTIVE), strict=True):
        assert catalogue.remove(entry, reason, 5.0)
    assert [each.reason for each in catalogue.tombstones(None)] == [Reason.INEFFECTIVE, Reason.SWEPT]
    catalogue.add(state(range(100), config=one), used_ts=1.0)
    assert [each.reason for each in catalogue.tombstones(None)] == [Reason.INEFFECTIVE]


def test_why_an_entry_is_gone_is_remembered_until_it_is_back():
    """The latest first, and as seen from a scope."""
    catalogue = Catalogue()
    for key, scope, reason in (("a", "", Reason.SWEPT), ("b", "x", Reason.INEFFECTIVE)):
        catalogue.remove(catalogue.add(state(range(70), key, scope=Scope(scope)), used_ts=1), reason, 5.0)
    gone = catalogue.tombstones(None)
    assert [(each.key, each.reason, each.tokens, each.gone_ts) for each in gone] == [
        ("b", Reason.INEFFECTIVE, 70, 5.0),
        ("a", Reason.SWEPT, 70, 5.0),
    ]
    assert [each.key for each in catalogue.tombstones(Scope("x"))] == ["b"]
    catalogue.add(state(range(80), "a"), used_ts=6.0)
    assert [each.key for each in catalogue.tombstones(None)] == ["b"]


def test_tombstones_are_bounded():
    """The oldest is forgotten."""
    catalogue = Catalogue()
    for number in range(MAX_TOMBSTONES + 3):
        catalogue.remove(catalogue.add(state([1], f"k{number}"), used_ts=1), Reason.SWEPT, 5.0)
    gone = catalogue.tombstones(None)
    assert len(gone) == MAX_TOMBSTONES
    assert gone[-1].key == "k3"


def test_tombstones_of_an_earlier_run_are_entered():
    """In their order; what has been saved since then is there."""
    catalogue, again = Catalogue(), Catalogue()
    for key in ("a", "a/b", "c"):
        catalogue.remove(catalogue.add(state([1], key), used_ts=1), Reason.SWEPT, 5.0)
    again.bury(*reversed(catalogue.tombstones(None)))
    assert again.tombstones(None) == catalogue.tombstones(None)
    assert [each.key for each in again.tombstones(None, "a")] == ["a/b", "a"]
    before = again.burials
    again.add(state([1], "a"), used_ts=6.0)
    assert [each.key for each in again.tombstones(None, "a")] == ["a/b"]
    assert again.burials > before


@given(st.text("ab/#", max_size=12), st.text("ab/#", max_size=12))
def test_the_keys_above_one_are_those_that_it_is_under(key, other):
    """The index and the rule agree."""
    assert (other in above(key)) == is_under(key, other)


def test_a_page_goes_on_where_the_last_one_ended():
    """Whatever came or went meanwhile; who asks sees his own."""
    catalogue = Catalogue()
    entries = [catalogue.add(state([number], f"k/{number}"), used_ts=1.0) for number in range(5)]
    other = catalogue.add(state([1], "x", scope=Scope("other")), used_ts=1.0)
    page, last = catalogue.page(None, limit=2)
    assert page == entries[:2]
    catalogue.remove(entries[1], Reason.SWEPT, 2.0)
    catalogue.remove(entries[2], Reason.SWEPT, 2.0)
    page, last = catalogue.page(None, after=last, limit=2)
    assert page == entries[3:]
    again = catalogue.add(state([0], "k/0"), used_ts=1.0)
    assert catalogue.page(None, after=last, limit=2) == ([other, again], None)
    assert catalogue.page(Scope("other"), limit=2) == ([other], None)
    assert catalogue.page(None, key="k", limit=2) == ([*entries[3:]], entries[4].number)
    assert catalogue.page(None, key="none", limit=2) == ([], None)


def test_keys_nest():
    """By their slashes, not by how they begin."""
    catalogue = Catalogue()
    for key in ("run", "run/a", "run/a/b", "runner"):
        catalogue.add(state([1, 2], key), used_ts=1.0)
    assert sorted(each.state.key for each in catalogue.under("run", None)) == ["run", "run/a", "run/a/b"]
    assert [each.state.key for each in catalogue.under("run/a/b", Scope(""))] == ["run/a/b"]
    assert catalogue.under("run", Scope("x")) == []


def test_two_entries_of_a_key_say_which_part_moved():
    """Against the latest other one."""
    catalogue = Catalogue()
    first = catalogue.add(state([1], created_ts=1.0), used_ts=1.0)
    second = catalogue.add(state([1], created_ts=2.0, config=CONFIG | {"tools": "x"}), used_ts=1.0)
    third = catalogue.add(
        state([1], created_ts=3.0, config=CONFIG | {"tools": "x", "system": "y"}), used_ts=1.0
    )
    assert catalogue.moved(third) == ("system",)
    assert catalogue.moved(second) == ("system",)
    assert catalogue.moved(first) == ("system", "tools")
    assert catalogue.moved(catalogue.add(state([1], "alone"), used_ts=1.0)) == ()


def test_what_was_idle_for_too_long_goes_first():
    """Pinned or not."""
    catalogue = Catalogue()
    old = catalogue.add(pool(range(10), pinned=True), used_ts=0.0)
    catalogue.add(state(range(10)), used_ts=90.0)
    assert catalogue.overdue(Retention(max_idle_s=50.0), 100.0, None) == [old]


def test_the_least_valuable_goes_until_all_fits():
    """Work spared, for the bytes and the idle time; what is pinned is not counted on."""
    catalogue = Catalogue()
    catalogue.add(pool(range(10), pinned=True), used_ts=0.0)
    idle = catalogue.add(state(range(1000), "idle"), used_ts=0.0)
    used = catalogue.add(state(range(1000), "used"), used_ts=99.0)
    often = catalogue.add(state(range(1000), "often"), used_ts=99.0, uses=5)
    fat = catalogue.add(state(range(1000), "fat", file_bytes=100_000), used_ts=99.0)
    limits = Retention(max_bytes=250)
    assert catalogue.overdue(limits, 100.0, None) == [fat, idle, used]
    assert catalogue.overdue(Retention(), 100.0, None) == []
    assert catalogue.overdue(Retention(min_free_bytes=50), 100.0, 20) == [fat]
    assert often.value(100.0) > used.value(100.0) > idle.value(100.0)


words = st.lists(st.integers(0, 2), max_size=140)


@given(
    st.lists(
        st.tuples(words, st.sampled_from(string.ascii_lowercase[:4]), st.sampled_from("xy"), st.booleans()),
        max_size=12,
    ),
    words,
    st.sampled_from("xy"),
)
def test_the_best_entry_is_the_one_that_brute_force_finds(steps, prompt, scope):
    """After any order of saves and removals; below a block's length nothing has to be found."""
    catalogue, truth = Catalogue(), {}
    for tokens, key, of, goes in steps:
        entry = catalogue.add(state(tokens, key, scope=Scope(of)), used_ts=1.0)
        truth[key, of] = entry
        if goes:
            catalogue.remove(entry, Reason.DELETED, 1.0)
            del truth[key, of]
    tokens = as_tokens(prompt)
    found = catalogue.best(tokens, Scope(scope), "m")
    best = max((common_prefix(e.tokens, tokens) for e in truth.values() if e.scope == scope), default=0)
    if found is not None:
        assert found[0] in truth.values()
        assert found[0].scope == scope
        assert common_prefix(found[0].tokens, tokens) == found[1] <= best
    if best >= 64:
        assert found is not None
        assert found[1] == best
    assert catalogue.total_bytes == sum(each.state.file_bytes for each in truth.values())
    assert set(catalogue) == set(truth.values())


def test_what_moved_is_found_among_those_of_the_key_alone():
    """A listing asks it of every entry: looking at all of them each time would be quadratic."""
    looked = []

    class Counting(Catalogue):
        def __iter__(self):
            looked.append(1)
            return super().__iter__()

    catalogue = Counting()
    one = catalogue.add(state([1, 2], config={"system": "a"}), used_ts=1.0)
    two = catalogue.add(state([1, 3], config={"system": "b"}), used_ts=1.0)
    assert catalogue.moved(one) == catalogue.moved(two) == ("system",)
    assert catalogue.remove(one, Reason.SWEPT, 2.0)
    assert catalogue.moved(two) == ()
    assert looked == []
