"""The claim of ``core.ledger`` as a whole: an engine driven by it never reaches the wall of its cache.

A small engine, step by step: each running request computes some prompt tokens or one token in a step; idle
slots and pools hold cells until they are taken back, which takes a while, as stopping a request does. Should
a step need a cell more than there are, every running request dies, as with a real engine. The lengths of
answers are what an adversary would choose: short until everybody expects that, then as long as allowed.
"""

import random
from dataclasses import dataclass

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from polykv_proxy.core.costs import Cost
from polykv_proxy.core.ledger import CellLedger, Fit
from polykv_proxy.core.lengths import LengthBook

CELLS = 2000
SLOTS = 6
LOOK = 5
"""Steps between two samples."""
DELAY = 4
"""Steps until a pool or slot is empty, or a request has stopped, after the word was given."""
CHUNK = 64
"""Prompt tokens of a request in a step."""


@dataclass(eq=False)
class Request:
    """One request, and what becomes of it."""

    prompt: int
    length: int
    bound: int
    exact: bool = True
    pool: bool = False
    computed: int = 0
    made: int = 0
    slot: int = -1
    starts: int = 0
    stops: int | None = None
    ended: str | None = None

    @property
    def held(self):
        """Its cells."""
        return self.computed + self.made


class Machine:
    """The engine, and the proxy in front of it: a queue in order of arrival, and the ledger."""

    def __init__(self, requests, *, overcommit, pool_cells=300, pinned=0):
        self.ledger = CellLedger(CELLS, watermark=20, growth=LOOK + 2 * DELAY + 1, overcommit=overcommit)
        self.lengths = LengthBook(assumed_tokens=64)
        self.queue = list(requests)
        self.running = []
        self.residents = {"pool": pool_cells, "pinned": pinned}
        self.ledger.residents.keep("pool", pool_cells, value=0.5)
        self.ledger.residents.keep("pinned", pinned, lasting=True)
        self.going = {}
        self.slots = set(range(SLOTS))
        self.step = 0
        self.deaths = 0
        self.most = 0

    def cost(self, request):
        """As the proxy knows it: what nobody counted is taken to be twice as long."""
        prompt = request.prompt if request.exact else 2 * request.prompt + 50
        expected = self.lengths.expected("class", request.bound)
        return Cost(prompt=prompt, expected=expected, bound=request.bound, exact=request.exact)

    def admit(self):
        """Those at the head of the queue that fit, each in a slot of its own."""
        while self.queue and self.slots:
            request = self.queue[0]
            idle = [slot for slot in self.slots if ("slot", slot) not in self.going]
            if not idle:
                return
            slot = min(idle, key=lambda each: self.residents.get(("slot", each), 0))
            key = ("slot", slot)
            uses = ["pool"] if request.pool and "pool" in self.residents and "pool" not in self.going else []
            fit = self.ledger.fit(self.cost(request), 0.0, uses=uses, replaces=key)
            if fit is Fit.NEVER:
                request.ended = "never"
            elif fit is Fit.WAITS:
                return  # nobody overtakes
            else:
                self.ledger.reserve(request, self.cost(request), uses=uses, replaces=key)
                self.residents.pop(key, None)
                request.slot = slot
                self.slots.discard(slot)
                self.running.append(request)
                # it is sent when what has to go for it is gone
                request.starts = self.step + (DELAY if self.reclaim() or self.going else 0)
            self.queue.pop(0)

    def reclaim(self):
        """Give the word to what has to go."""
        named = self.ledger.reclaim()
        self.going.update(dict.fromkeys(named, self.step + DELAY))
        return named

    def look(self):
        """A sample."""
        for request in self.running:
            expected = self.lengths.expected("class", request.bound, request.made)
            self.ledger.progress(request, held=request.held, expected=expected)
        used = sum(self.residents.values()) + sum(each.held for each in self.running)
        self.ledger.on_sample(used, {each: each.held for each in self.running}, float(self.step))
        self.reclaim()
        for request in self.ledger.overdrawn():
            request.stops = self.step + DELAY

    def end(self, request, how):
        """It is over; a slot keeps what it had, and the cells of one that was stopped are empty."""
        request.ended = how
        self.running.remove(request)
        self.slots.add(request.slot)
        key = ("slot", request.slot)
        if how == "done":
            self.lengths.on_answer("class", request.made)
            self.residents[key] = request.held
            self.ledger.release(request, leaves=key, cells=request.held, value=float(self.step))
        else:
            self.ledger.release(request)
        self.reclaim()

    def compute(self):
        """One step of the engine, and what had been told to go or to stop is gone."""
        for key, at in list(self.going.items()):
            if at <= self.step:
                del self.going[key]
                self.residents.pop(key, None)
                self.ledger.residents.drop(key)
        for request in list(self.running):
            if request.stops is not None and request.stops <= self.step:
                self.end(request, "stopped")
            elif request.starts > self.step:
                continue
            elif request.computed < request.prompt:
                request.computed = min(request.prompt, request.computed + CHUNK)
            else:
                request.made += 1

    def run(self):
        """To the end of all."""
        while self.queue or self.running:
            self.step += 1
            self.compute()
            used = sum(self.residents.values()) + sum(each.held for each in self.running)
            self.most = max(self.most, used)
            if used > CELLS:
                for request in list(self.running):
                    self.deaths += 1
                    self.end(request, "died")
            for request in list(self.running):
                if request.made >= request.length:
                    self.end(request, "done")
            if self.step % LOOK == 0:
                self.look()
            self.admit()
            assert self.step < 40_000, "nobody gets on"
        return self


def adversarial(seed, count=120, *, bound=700):
    """Short answers until they are expected, then as long as they may be, and everything in between."""
    draw = random.Random(seed)
    requests = []
    for number in range(count):
        phase = number * 4 // count
        may = draw.randint(20, bound)
        length = {0: min(may, 12), 1: may, 2: draw.choice((1, may)), 3: draw.randint(1, may)}[phase]
        prompt = draw.choice((draw.randint(1, 60), draw.randint(1, 900)))
        requests.append(Request(prompt, length, may, exact=draw.random() < 0.8, pool=draw.random() < 0.5))
    return requests


@pytest.mark.parametrize("seed", range(12))
def test_no_request_dies_of_a_full_cache(seed):
    """However long answers turn out to be; the price is that the latest may be stopped before."""
    machine = Machine(adversarial(seed), overcommit=True).run()
    assert machine.deaths == 0
    assert machine.most > 0.85 * CELLS, "the cache was never in danger, so this proves nothing"


@pytest.mark.parametrize("seed", range(12))
def test_without_overcommit_none_is_stopped_either(seed):
    """Each has reserved all it may produce."""
    requests = adversarial(seed)
    machine = Machine(requests, overcommit=False).run()
    assert machine.deaths == 0
    assert {request.ended for request in requests} == {"done"}


def test_overcommit_pays_where_answers_are_shorter_than_they_may_be():
    """Fewer steps for the same work, and nobody has to be stopped."""

    def usual():
        draw = random.Random(5)
        return [Request(draw.randint(20, 200), max(1, int(draw.gauss(60, 20))), 700) for _ in range(120)]

    requests = usual()
    fast = Machine(requests, overcommit=True).run()
    safe = Machine(usual(), overcommit=False).run()
    assert {request.ended for request in requests} == {"done"}
    assert fast.step < 0.75 * safe.step


@pytest.mark.parametrize("overcommit", [True, False])
def test_an_answer_that_outgrows_the_whole_cache_is_stopped_before(overcommit):
    """Alone it may have all there is, and no more."""
    requests = [Request(1500, 900, 900), Request(100, 50, 50)]
    machine = Machine(requests, overcommit=overcommit).run()
    assert machine.deaths == 0
    assert [request.ended for request in requests] == ["stopped", "done"]
    assert machine.most > CELLS - 30


@pytest.mark.parametrize("prompt", range(1840, 1900, 6))
def test_a_request_that_just_fits_alone_is_not_held_back_by_its_own_margin(prompt):
    """Whatever is expected of it, and however little lies between that and all there is."""
    requests = [Request(prompt, 114, 784, pool=True)]
    Machine(requests, overcommit=True, pool_cells=0, pinned=38).run()
    assert requests[0].ended in ("done", "stopped")


def test_without_the_ledger_this_engine_dies():
    """The same requests, each let in where a slot is free: the claims above are about something."""

    class Blind(CellLedger):
        def fit(self, cost, now, **more):
            return Fit.FITS

        def overdrawn(self):
            return []

    machine = Machine(adversarial(0), overcommit=True)
    blind = Blind(CELLS)
    blind.residents.keep("pool", 300, value=0.5)
    machine.ledger = blind
    assert machine.run().deaths > 0


@settings(max_examples=50, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    st.lists(
        st.builds(
            Request,
            prompt=st.integers(0, 2200),
            length=st.integers(1, 900),
            bound=st.integers(1, 900),
            exact=st.booleans(),
            pool=st.booleans(),
        ),
        max_size=25,
    ),
    st.booleans(),
    st.integers(0, 600),
)
def test_whatever_is_asked_is_answered_and_nobody_dies(requests, overcommit, pinned):
    """Prompts that fill the cache alone, answers longer than it, pinned pools: all end somehow."""
    for request in requests:
        request.length = min(request.length, request.bound)
        if not request.exact:
            request.prompt = min(request.prompt, CELLS - pinned - 400)
    machine = Machine(requests, overcommit=overcommit, pinned=pinned).run()
    assert machine.deaths == 0
    for request in requests:
        assert request.ended in ("done", "stopped", "never")
        fits = request.prompt + 1 <= CELLS - 20 - pinned
        assert request.ended != "never" or (request.exact and (request.pool or not fits))
        assert request.ended == "never" or fits
        if not overcommit and request.prompt + request.bound + 320 + pinned <= CELLS and request.exact:
            assert request.ended == "done"
