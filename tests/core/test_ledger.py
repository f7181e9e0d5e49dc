"""Claims about ``core.ledger``: nothing is counted twice, released twice, or sent without room for it."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polykv_proxy.core.costs import Cost
from polykv_proxy.core.ledger import CellLedger, Fit
from polykv_proxy.core.policies import CellPolicy


def cost(prompt, expected, bound=None, *, exact=True):
    """A request's cost; what it may produce is what it will, unless said otherwise."""
    return Cost(prompt=prompt, expected=expected, bound=expected if bound is None else bound, exact=exact)


def ledger(total=1000, **options):
    """A ledger whose margins are out of the way unless a test is about them."""
    return CellLedger(total, **{"growth": 0, **options})


def test_a_request_reserves_its_prompt_and_what_it_will_produce():
    """And gives both back, once."""
    book = ledger()
    assert book.fit(cost(300, 200), 0.0) is Fit.FITS
    book.reserve(1, cost(300, 200))
    assert (book.figures().reserved, book.figures().free, book.empty_now) == (500, 500, 700)
    assert 1 in book
    assert book.release(1)
    assert not book.release(1)
    assert (book.figures().free, book.empty_now) == (1000, 1000)


def test_reserving_twice_changes_nothing():
    """The first reservation stands."""
    book = ledger()
    book.reserve(1, cost(300, 200))
    book.reserve(1, cost(900, 100))
    assert book.figures().reserved == 500


def test_what_does_not_fit_waits_and_what_never_will_is_told_apart():
    """Only a counted prompt proves that."""
    book = ledger()
    book.reserve(1, cost(300, 300))
    assert book.fit(cost(300, 101), 0.0) is Fit.WAITS
    assert book.fit(cost(999, 500), 0.0) is Fit.WAITS
    assert book.fit(cost(1000, 1), 0.0) is Fit.NEVER
    assert book.fit(cost(5000, 1, exact=False), 0.0) is Fit.WAITS
    book.release(1)
    assert book.fit(cost(999, 500), 0.0) is Fit.FITS
    assert book.fit(cost(5000, 1, exact=False), 0.0) is Fit.FITS


def test_pinned_pools_count_for_never_and_others_only_for_now():
    """An operator may release a pool, so waiting for that is not hopeless."""
    book = ledger()
    book.residents.keep("pinned", 400, lasting=True)
    book.residents.keep("explicit", 300)
    assert book.fit(cost(600, 1), 0.0) is Fit.NEVER
    assert book.fit(cost(599, 1), 0.0) is Fit.WAITS
    book.residents.drop("explicit")
    assert book.fit(cost(599, 1), 0.0) is Fit.FITS


def test_shared_cells_count_once():
    """Ten requests on one pool cost ten suffixes, and the pool stays while they run."""
    book = ledger()
    book.residents.keep("pool", 600, value=1.0)
    assert book.figures().free == 1000
    for number in range(10):
        assert book.fit(cost(20, 20), 0.0, uses=["pool"]) is Fit.FITS
        book.reserve(number, cost(20, 20), uses=["pool"])
    assert book.figures().free == 0
    assert book.fit(cost(1, 0), 0.0) is Fit.WAITS
    for number in range(10):
        book.release(number)
    assert book.figures().free == 1000


def test_claiming_a_pool_that_could_go_counts_as_need():
    """Its cells are not there for others any more."""
    book = ledger()
    book.residents.keep("pool", 600, value=1.0)
    book.reserve(1, cost(300, 150))
    assert book.fit(cost(10, 10), 0.0) is Fit.FITS
    assert book.fit(cost(10, 10), 0.0, uses=["pool"]) is Fit.WAITS


def test_a_pool_that_is_dropped_while_it_is_used_goes_with_its_last_user():
    """As the engine does it."""
    book = ledger()
    book.residents.keep("pool", 600)
    book.reserve(1, cost(10, 10), uses=["pool", "unknown"])
    book.residents.drop("pool")
    assert book.figures().protected == 600
    book.release(1)
    assert book.figures().protected == 0
    book.residents.drop("pool")


def test_the_slot_that_a_request_gets_is_its_own():
    """What it held is taken over or given back, and counted once either way."""
    book = ledger()
    book.residents.keep(("slot", 0), 700, value=1.0)
    assert book.fit(cost(750, 50), 0.0, replaces=("slot", 0)) is Fit.FITS
    book.reserve(1, cost(750, 50), replaces=("slot", 0))
    assert book.empty_now == 250
    book.release(1, leaves=("slot", 0), cells=790, value=2.0)
    assert book.figures().reclaimable == 790
    assert book.figures().free == 1000


def test_what_others_use_is_not_replaced():
    """Its cells are theirs as long as they run."""
    book = ledger()
    book.residents.keep("pool", 300, value=1.0)
    book.reserve(1, cost(10, 10), uses=["pool"])
    book.reserve(2, cost(10, 10), replaces="pool")
    assert book.figures().protected == 300
    book.release(1)
    assert book.figures().reclaimable == 300


def test_a_slot_that_is_not_to_be_reclaimed_is_its_requests_too():
    """Held for a client that will try again."""
    book = ledger()
    book.residents.keep(("slot", 0), 700)
    assert book.fit(cost(750, 50), 0.0) is Fit.WAITS
    assert book.fit(cost(750, 50), 0.0, replaces=("slot", 0)) is Fit.FITS


def test_what_can_be_taken_back_is_named_least_valuable_first_and_once():
    """Only as much as is needed, before it is needed."""
    book = ledger(watermark=100)
    book.residents.keep("dear", 300, value=9.0)
    book.residents.keep("cheap", 300, value=1.0)
    book.residents.keep("mine", 100)
    assert book.reclaim() == []
    book.reserve(1, cost(350, 300))
    assert book.reclaim() == ["cheap"]
    assert book.reclaim() == []
    book.residents.keep("cheap", 300, value=1.0)  # it would not go
    assert book.reclaim() == ["cheap"]
    book.residents.drop("cheap")
    assert book.empty_now == 250


def test_growth_is_made_room_for_as_it_comes():
    """A reservation does not evict; cells that are about to be filled do."""
    book = ledger(growth=20)
    book.residents.keep("idle", 600, value=1.0)
    book.reserve(1, cost(100, 700))
    assert book.reclaim() == []
    book.progress(1, held=380, expected=700)
    assert book.reclaim() == ["idle"]


def test_a_request_is_costed_anew():
    """Up and down, within what it may produce, never below what it holds."""
    book = ledger()
    book.reserve(1, cost(100, 100, bound=600))
    book.progress(1, held=150, expected=300)
    assert book.figures().reserved == 400
    book.progress(1, held=150, expected=9000)
    assert book.figures().reserved == 700
    book.progress(1, held=750, expected=1)
    assert book.figures().reserved == 750
    book.progress(2, held=1, expected=1)
    assert book.figures().reserved == 750


def test_without_overcommit_the_bound_is_reserved():
    """Whatever is expected."""
    book = ledger(overcommit=False)
    book.reserve(1, cost(100, 100, bound=600))
    book.progress(1, held=110, expected=50)
    assert book.figures().reserved == 700
    assert book.margin == 0


def test_alone_a_request_may_have_all_there_is():
    """Its estimate must not keep it waiting for ever."""
    book = ledger(watermark=50, growth=30)
    assert book.fit(cost(900, 4000), 0.0) is Fit.FITS
    assert book.fit(cost(949, 4000), 0.0) is Fit.FITS
    assert book.fit(cost(950, 4000), 0.0) is Fit.NEVER


def test_the_latest_are_stopped_before_the_cache_is_full():
    """Each once, and not before all that can go is gone."""
    book = ledger(growth=50)
    book.residents.keep("idle", 200, value=1.0)
    for number in (1, 2, 3):
        book.reserve(number, cost(100, 50, bound=900))
    assert book.overdrawn() == []
    for number in (1, 2, 3):
        book.progress(number, held=250, expected=300)
    assert book.overdrawn() == []
    book.residents.drop("idle")
    for number in (1, 2, 3):
        book.progress(number, held=300, expected=350)
    assert book.overdrawn() == [3]
    assert book.overdrawn() == []
    book.release(3)
    assert book.overdrawn() == []


def test_set_aside_cells_are_nobody_elses():
    """Until they are given back; changing them does not add up."""
    book = ledger()
    book.earmark("promised", 400)
    book.earmark("promised", 300)
    assert book.figures().free == 700
    book.earmark("promised", 0)
    assert book.figures().free == 1000


def test_a_stale_sample_counts_as_full():
    """Nobody to ask is another matter."""
    book = ledger(stale_after_s=3.0)
    assert book.fit(cost(1, 1), 0.0) is Fit.WAITS
    book.on_sample(0, {}, taken_at=10.0)
    assert book.fit(cost(1, 1), 13.0) is Fit.FITS
    assert book.fit(cost(1, 1), 13.1) is Fit.WAITS
    assert book.fit(cost(1000, 1), 99.0) is Fit.NEVER
    assert not ledger().stale(1e9)


def test_samples_correct():
    """What the engine has beyond our book is used, until a sample says otherwise."""
    book = ledger()
    book.residents.keep("pool", 200)
    book.reserve(1, cost(100, 100))
    book.on_sample(500, {1: 100, 9: 50}, taken_at=1.0)
    figures = book.figures()
    assert (figures.unexplained, figures.free, figures.used) == (150, 450, 550)
    book.on_sample(500, {1: 300}, taken_at=2.0)
    assert (book.figures().unexplained, book.figures().reserved) == (0, 300)


def test_margins_can_be_changed():
    """Those who run keep what they reserved; staleness stays off where nobody is asked."""
    book = CellLedger(1000, growth=0, stale_after_s=3.0)
    book.on_sample(0, {}, taken_at=0.0)
    book.reserve(1, cost(100, 100, bound=500))
    book.adopt(CellPolicy(watermark_ratio=0.1, growth_tokens=10, overcommit=False, stale_after_s=5.0))
    assert book.margin == 100
    assert book.figures().reserved == 200
    assert not book.stale(4.0)
    book.progress(1, held=100, expected=100)
    assert book.figures().reserved == 600
    book.adopt(CellPolicy(watermark_ratio=0.0, growth_tokens=10))
    assert book.margin == 0  # what it may produce at most is reserved
    book.progress(1, held=100, expected=100)
    assert book.margin == 10
    unasked = ledger()
    unasked.adopt(CellPolicy())
    assert not unasked.stale(1e9)


def test_figures_for_one_more():
    """The margin belongs to those who run, and nothing is negative."""
    book = ledger(watermark=100, growth=10)
    assert book.figures().admissible == 900
    book.reserve(1, cost(100, 100, bound=100))
    assert book.figures().admissible == 700  # it has all that it may fill
    book.reserve(2, cost(100, 100, bound=500))
    assert book.figures().admissible == 490
    book.on_sample(5000, {}, taken_at=1.0)
    assert (book.figures().free, book.figures().admissible) == (0, 0)


@pytest.mark.parametrize("overcommit", [True, False])
def test_cells_that_nobody_explains_are_no_room(overcommit):
    """Alone a request has the rest: it does not wait for what it cannot get."""
    book = ledger(total=4096, watermark=40, growth=32, overcommit=overcommit)
    book.on_sample(1, {}, 0.0)
    assert book.fit(cost(3000, 1024, bound=1096), 0.0) is Fit.FITS
    assert book.fit(cost(500, 1024, bound=3596), 0.0) is Fit.FITS


def test_a_request_that_is_costed_anew_is_no_younger():
    """The latest to come is stopped."""
    book = ledger(growth=32)
    book.reserve("old", cost(300, 50, bound=600, exact=False))
    book.reserve("new", cost(300, 50, bound=600))
    book.recost("old", cost(290, 50, bound=600))
    book.on_sample(980, {"old": 500, "new": 480}, 0.0)
    assert book.overdrawn() == ["new"]


def test_the_brake_follows_the_speed_where_the_margin_may_not():
    """A margin is bounded by a share of the cache, what is filled until somebody looks is not."""
    book = ledger(growth=5)
    for name in ("first", "last"):
        book.reserve(name, cost(100, 50, bound=900))
    book.on_sample(900, {"first": 450, "last": 450}, 0.0)
    book.grow(5, brake=40)
    assert book.overdrawn() == []
    book.grow(5, brake=60)
    assert book.overdrawn() == ["last"]


class LedgerAgainstModel:
    """Any order of everything, beside a model that adds up from scratch.

    Args:
        dice: decides everything.
    """

    def __init__(self, dice):
        self.dice = dice
        self.done = Counter()  # what really happened
        self.book = CellLedger(1000, watermark=20, growth=5)
        self.residents = {}
        self.running = {}
        self.next = 1

    def keep(self):
        """A resident changes."""
        key, value = self.dice.randint(0, 5), self.dice.choice([None, 0.0, 1.0, 2.0])
        cells = self.dice.choice([0, self.dice.randint(1, 400)])
        self.done["changed" if key in self.residents else "kept"] += 1
        self.book.residents.keep(key, cells, value=value, lasting=value is None and key == 0)
        self.residents[key] = cells

    def drop(self):
        """One goes; while somebody uses it, its cells stay."""
        key = self.dice.randint(0, 5)
        used = any(key in uses for uses in self.running.values())
        self.done["dropped in use" if used else "dropped"] += key in self.residents
        self.book.residents.drop(key)
        if not used:
            self.residents.pop(key, None)

    def ask(self):
        """A request comes; it is written down only where it fits."""
        prompt = self.dice.choice([0, self.dice.randint(1, 200), self.dice.randint(1, 1200)])
        expected, exact = self.dice.randint(0, 200), self.dice.random() < 0.7
        wanted = cost(prompt, expected, expected + self.dice.randint(0, 500), exact=exact)
        uses = set(self.dice.sample(range(6), self.dice.randint(0, 2)))
        replaces = self.dice.choice([None, *range(9)])
        if replaces in uses or any(replaces in used for used in self.running.values()):
            replaces = None
        before = self.book.figures()
        fit = self.book.fit(wanted, 0.0, uses=uses, replaces=replaces)
        assert self.book.figures() == before
        self.done[fit.value] += 1
        if fit is Fit.FITS:
            self.done["shares"] += bool(uses & self.residents.keys())
            self.done["takes over"] += replaces in self.residents
            self.book.reserve(self.next, wanted, uses=uses, replaces=replaces)
            self.running[self.next] = {key for key in uses if key in self.residents}
            self.residents.pop(replaces, None)
            self.next += 1
            after = self.book.figures()
            assert after.reserved + after.protected + after.unexplained <= after.total
            assert after.reserved > before.reserved or not exact or prompt == 0
        elif fit is Fit.NEVER:
            assert exact
            shared = sum(self.residents.get(key, 0) for key in uses)
            assert prompt + 1 + 20 + shared > 1000 - before.protected
        elif not self.running and before.unexplained == 0:
            assert before.protected or sum(self.residents.values())

    def progress(self):
        """One goes on, or is costed anew."""
        request = self.dice.choice(list(self.running))
        if self.dice.random() < 0.3:
            self.done["costed anew"] += 1
            uses = self.running[request]
            self.book.recost(request, cost(self.dice.randint(0, 100), 20, 50), uses=uses)
            self.running[request] = {key for key in uses if key in self.book.residents}
            self.forget(uses)
            return
        self.done["went on"] += 1
        self.book.progress(request, held=self.dice.randint(0, 400), expected=self.dice.randint(0, 900))

    def release(self):
        """The first release counts, and no other."""
        request = self.dice.choice(list(self.running))
        leaves, cells = self.dice.choice([None, 6, 7, 8]), self.dice.randint(0, 300)
        self.done["left something" if leaves else "left nothing"] += 1
        assert self.book.release(request, leaves=leaves, cells=cells) is True
        assert self.book.release(request, leaves=leaves, cells=cells) is False
        self.forget(self.running.pop(request))
        if leaves is not None:
            self.residents[leaves] = cells

    def forget(self, keys):
        """What was dropped while these were used is gone if nobody uses it any more."""
        for key in keys:
            if key not in self.book.residents:
                self.residents.pop(key, None)

    def sample(self):
        """The engine says something else."""
        self.book.on_sample(self.dice.randint(0, 1000), {}, taken_at=0.0)

    def look(self):
        """Who is named runs; who is taken back is resident and unused."""
        for key in self.book.reclaim():
            self.done["taken back"] += 1
            assert not any(key in uses for uses in self.running.values())
            self.book.residents.drop(key)
            del self.residents[key]
        named = self.book.overdrawn()
        self.done["stopped"] += len(named)
        assert set(named) <= set(self.running)
        assert self.book.overdrawn() == []

    def it_adds_up(self):
        """The running sums are the sums, and nothing is below zero."""
        residents, requests = self.book.residents._known.values(), self.book._requests.values()
        figures = self.book.figures()
        assert figures.protected == sum(each.cells for each in residents if not each.reclaimable)
        assert figures.reclaimable == sum(each.cells for each in residents if each.reclaimable)
        assert figures.reserved == sum(each.reserved for each in requests)
        assert self.book._sum.due == sum(each.due for each in requests)
        assert self.book._sum.slack == sum(self.book._slack(each) for each in requests)
        assert self.book.residents.lasting == sum(each.cells for each in residents if each.lasting)
        assert sum(self.residents.values()) == sum(each.cells for each in residents)
        assert set(self.running) == set(self.book._requests)
        assert min(figures.free, figures.reserved, figures.protected, figures.reclaimable) >= 0
        assert all(each.reserved >= each.held for each in requests)
        held_by = [key for uses in self.running.values() for key in uses]
        assert all(each.holders == held_by.count(key) for key, each in self.book.residents._known.items())

    def live_on(self):
        """Forty steps."""
        always = [self.keep, self.drop, self.look, self.sample, *[self.ask] * 4]
        for _ in range(40):
            self.dice.choice([*always, *[self.progress, self.release] * 2] if self.running else always)()
            self.it_adds_up()


@settings(max_examples=150)
@given(st.integers(0))
def test_a_ledger_adds_up_as_its_model_does(seed):
    """Residents, requests and samples in any order."""
    LedgerAgainstModel(random.Random(seed)).live_on()


def test_the_model_lets_everything_happen():
    """A step that never does anything shows nothing."""
    done = Counter()
    for seed in range(100):
        model = LedgerAgainstModel(random.Random(seed))
        model.live_on()
        done += model.done
    assert set(done) == {
        "changed",
        "costed anew",
        "dropped",
        "dropped in use",
        "fits",
        "kept",
        "left nothing",
        "left something",
        "never",
        "shares",
        "stopped",
        "taken back",
        "takes over",
        "waits",
        "went on",
    }


@pytest.mark.parametrize("overcommit", [True, False])
def test_everything_released_is_everything_back(overcommit):
    """No cell is lost on the way."""
    book = CellLedger(1000, growth=5, overcommit=overcommit)
    for number in range(20):
        wanted = cost(number * 7, 30, bound=60)
        if book.fit(wanted, 0.0) is Fit.FITS:
            book.reserve(number, wanted)
            book.progress(number, held=number * 8, expected=55)
    for number in range(20):
        book.release(number)
    assert book.empty_now == book.figures().free == 1000
