"""Claims about ``core.gate``: conversations of sessions that come, wait, go on and leave."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from polykv_proxy.core import gate as gates
from polykv_proxy.core.admission import Entered, Refused
from polykv_proxy.core.gate import ENTERED, Entry, Gate, Waiter
from polykv_proxy.core.headroom import Arm, Reason
from polykv_proxy.core.ledger import CellLedger
from polykv_proxy.core.policies import Mode, OnSaturation, Policy
from polykv_proxy.core.promises import Promise, Wish
from polykv_proxy.core.sight import Look
from polykv_proxy.core.types import Scope

REJECT = Policy(target_tps_per_session=20.0, mode=Mode.ENFORCED)
QUEUE = replace(REJECT, on_saturation=OnSaturation.QUEUE)
SCOPE = Scope("")


class Scene:
    """A gate, a clock, and an engine whose sessions share 100 tokens a second."""

    def __init__(self, **options):
        self.gate = Gate(**options)
        self.now = 0.0
        self.look()

    def ask(self, session, policy=REJECT, **entry):
        """A request."""
        return self.gate.on_request(
            Entry(session=session, policy=policy, **entry), self.now, jitter=0.5, scope=SCOPE
        )

    def look(self):
        """A sample: whoever works decodes, and has had enough tokens to have settled."""
        working = self.gate.presence.working
        self.gate.on_look(
            Look(taken_at=self.now, decoding=working, mean_tps=100.0 / working if working else None)
        )

    def settle(self, *sessions, after_s=0.25):
        """Time passes, these decode, a sample comes; returns who was let in."""
        self.now += after_s
        for session in sessions:
            self.gate.on_tokens(session, 16)
        self.look()
        return [waiter.entry.session for waiter in self.gate.wake(self.now)]

    def fill(self, count, policy=REJECT):
        """So many sessions come in, one after the other."""
        for number in range(count):
            assert isinstance(self.ask(f"s{number}", policy), Entered)
            self.settle(f"s{number}")


def test_sessions_come_in_until_the_floor_would_break():
    """Five at twenty tokens a second; the sixth is refused, with the numbers."""
    scene = Scene()
    scene.fill(5)
    refused = scene.ask("s5")
    assert isinstance(refused, Refused)
    assert refused.failing.arm is Arm.TPS
    assert refused.capacity.n_active_sessions == 5
    assert refused.capacity.mean_active_tps == pytest.approx(20.0)


def test_who_is_inside_is_never_refused():
    """A further turn, a second request at once, and after a pause; not after too long a one."""
    scene = Scene()
    scene.fill(6, policy=Policy())
    assert scene.ask("s0") is ENTERED
    scene.gate.on_over("s0", scene.now)
    scene.gate.on_over("s0", scene.now)
    scene.now += 299.0
    scene.look()
    assert scene.ask("s0") is ENTERED
    scene.gate.on_over("s0", scene.now)
    scene.now += 301.0
    scene.look()
    assert isinstance(scene.ask("s0"), Refused)


def test_who_comes_to_nothing_has_no_place():
    """Its request is over and there is no such session: the next one is judged as if it had never come."""
    scene = Scene()
    scene.fill(2)
    before = scene.gate.capacity(scene.now, REJECT).projected_mean_tps_if_admitted
    scene.ask("refused")
    scene.gate.on_over("refused", scene.now, stays=False)
    assert "refused" not in scene.gate.presence
    assert scene.gate.capacity(scene.now, REJECT).projected_mean_tps_if_admitted == before


def test_closed_is_outside():
    """Its next turn is a new admission."""
    scene = Scene()
    scene.fill(5)
    scene.gate.on_over("s0", scene.now)
    assert scene.gate.on_close("s0", scene.now)
    assert not scene.gate.on_close("s0", scene.now)
    scene.look()
    assert isinstance(scene.ask("other"), Entered)
    scene.settle("other")
    assert isinstance(scene.ask("s0"), Refused)


def test_a_burst_does_not_pass_before_the_pace_shows():
    """One is in, the others wait until it decodes, and come in one by one."""
    scene = Scene()
    assert isinstance(scene.ask("a"), Entered)
    waiters = [scene.ask(name) for name in "bcd"]
    assert all(isinstance(waiter, Waiter) for waiter in waiters)
    assert waiters[0].failing.reason is Reason.SETTLING
    assert waiters[0].max_wait_s == 2.0
    assert scene.settle() == []
    assert scene.settle("a") == ["b"]
    assert scene.settle("b") == ["c"]
    assert waiters[0].entered == Entered()
    assert scene.settle(after_s=2.0) == ["d"]


def test_what_waits_for_others_to_settle_gets_a_last_look():
    """Refused if they still do, let in if they do not."""
    scene = Scene()
    scene.fill(2)
    assert isinstance(scene.ask("s2"), Entered)
    early, late = scene.ask("early"), scene.ask("late")
    refused = scene.gate.on_expired(early, scene.now, jitter=0.5)
    assert isinstance(refused, Refused)
    assert refused.failing.reason is Reason.SETTLING
    scene.gate.on_tokens("s2", 16)
    assert scene.gate.on_expired(late, scene.now, jitter=0.5) == Entered()
    assert (scene.gate.waiting, scene.gate.presence.working) == (0, 4)


def test_who_waits_to_the_end_may_still_come_in():
    """If there is room at that moment, or it was let in at the same one."""
    scene = Scene()
    scene.fill(5, QUEUE)
    first, second = scene.ask("first", QUEUE), scene.ask("second", QUEUE)
    scene.gate.on_close("s0", scene.now)
    scene.look()
    assert scene.gate.on_expired(first, scene.now, jitter=0.5) == Entered()
    scene.gate.on_close("s1", scene.now)
    assert scene.settle("first") == ["second"]
    assert scene.gate.on_expired(second, scene.now, jitter=0.5) == Entered()
    assert scene.gate.waiting == 0
    assert scene.gate.presence.working == 5


def test_queue_holds_until_somebody_leaves():
    """Each place that comes free lets one in, in order."""
    scene = Scene()
    scene.fill(5, QUEUE)
    waiters = [scene.ask(name, QUEUE) for name in "abc"]
    assert waiters[1].failing.reason is Reason.IN_LINE
    assert scene.settle() == []
    scene.gate.on_over("s0", scene.now)
    scene.gate.on_close("s0", scene.now)
    assert scene.settle() == ["a"]
    scene.gate.on_gave_up(waiters[1], scene.now)
    scene.gate.on_close("s1", scene.now)
    assert scene.settle("a") == ["c"]


def test_the_queue_is_bounded():
    """One more is refused, for that reason."""
    scene = Scene()
    short = replace(QUEUE, queue_max_depth=1)
    scene.fill(5, short)
    assert isinstance(scene.ask("a", short), Waiter)
    refused = scene.ask("b", short)
    assert refused.failing.reason is Reason.QUEUE_FULL


def test_the_queue_of_all_pools_is_bounded(monkeypatch):
    """Whatever their policies say."""
    monkeypatch.setattr(gates, "MAX_WAITING", 1)
    scene = Scene()
    scene.fill(5, QUEUE)
    assert isinstance(scene.ask("a", QUEUE, pool="p"), Waiter)
    refused = scene.ask("b", QUEUE, pool="q")
    assert isinstance(refused, Refused)
    assert refused.failing.reason is Reason.QUEUE_FULL


def test_one_pool_does_not_keep_another_waiting():
    """A line whose floor cannot be kept is passed over by one that asks for less."""
    scene = Scene()
    scene.fill(2, Policy(target_tps_per_session=5.0, mode=Mode.ENFORCED))
    greedy = replace(QUEUE, target_tps_per_session=45.0)
    modest = replace(QUEUE, target_tps_per_session=5.0)
    assert isinstance(scene.ask("greedy", greedy, pool="p"), Waiter)
    scene.ask("a", modest, pool="q")
    assert isinstance(scene.ask("b", modest, pool="q"), Waiter)
    assert scene.settle("a") == ["b"]


def test_who_leaves_right_after_it_was_let_in_takes_no_place():
    """Its request is over, and leaving twice is nothing."""
    scene = Scene()
    scene.fill(5, QUEUE)
    waiter = scene.ask("a", QUEUE)
    scene.gate.on_close("s0", scene.now)
    assert scene.settle() == ["a"]
    scene.gate.on_gave_up(waiter, scene.now)
    assert scene.gate.presence.working == 4
    other = scene.ask("b", QUEUE)
    scene.gate.on_gave_up(other, scene.now)
    scene.gate.on_gave_up(other, scene.now)
    assert (scene.gate.waiting, scene.gate.presence.working) == (0, 4 + isinstance(other, Entered))


def test_requests_of_one_session_come_in_together():
    """They are one session: the second is not a second newcomer."""
    scene = Scene()
    scene.fill(5, QUEUE)
    both = [scene.ask("a", QUEUE), scene.ask("a", QUEUE)]
    scene.gate.on_close("s0", scene.now)
    assert scene.settle() == ["a", "a"]
    assert all(waiter.entered == Entered() for waiter in both)
    assert (scene.gate.waiting, scene.gate.presence.working) == (0, 5)


def test_without_a_policy_everybody_comes_in_and_nothing_is_computed(monkeypatch):
    """No picture is taken."""
    scene = Scene()
    monkeypatch.setattr(Gate, "picture", None)
    for number in range(50):
        assert scene.ask(f"s{number}", Policy()) is ENTERED
    assert scene.gate.backpressure(scene.now, Policy()) is None


def test_advisory_tells_what_it_would_do():
    """Newcomers in their verdict, others when they ask."""
    scene = Scene()
    advisory = replace(REJECT, mode=Mode.ADVISORY)
    scene.fill(5, advisory)
    assert scene.ask("s5", advisory) == Entered(Arm.TPS)
    assert scene.gate.backpressure(scene.now, advisory) is Arm.TPS
    assert scene.gate.backpressure(scene.now, Policy(target_tps_per_session=1.0)) is None


def test_backpressure_of_a_queue():
    """While somebody waits, whoever came now would."""
    scene = Scene()
    scene.fill(5, QUEUE)
    scene.ask("a", QUEUE)
    assert scene.gate.backpressure(scene.now, QUEUE) is Arm.QUEUE


def test_stale_samples_are_no_answer():
    """An enforced policy says so, others do not care."""
    scene = Scene(stale_after_s=3.0)
    scene.now = 3.1
    refused = scene.ask("a")
    assert isinstance(refused, Refused)
    assert refused.cannot_tell
    assert isinstance(scene.ask("b", Policy()), Entered)
    scene.settle("b")
    assert isinstance(scene.ask("c"), Entered)


def test_what_sessions_take_is_learned():
    """And foreseen for those who do not say."""
    scene = Scene(ledger=CellLedger(1000, growth=0))
    wary = replace(REJECT, kv_headroom_ratio=0.5)
    assert isinstance(scene.ask("a", wary), Entered)
    scene.settle("a")
    scene.gate.on_over("a", scene.now, cells=600)
    assert scene.ask("b", wary).failing.arm is Arm.CELLS
    for _ in range(100):
        scene.gate.on_over("a", scene.now, cells=50)
    assert 50 < scene.gate.picture(scene.now).marginal_tokens < 100
    assert isinstance(scene.ask("b", wary), Entered)


def test_the_document_is_a_pure_question():
    """Asking twice gives the same, and leaves the gate as it was."""
    scene = Scene()
    scene.fill(3)
    told = scene.gate.capacity(scene.now, REJECT, expected_tokens=10)
    assert told == scene.gate.capacity(scene.now, REJECT, expected_tokens=10)
    assert told.headroom_sessions == 2
    assert scene.gate.presence.working == 3


def test_slots_and_who_waits_for_them_are_those_of_now():
    """No sample has to come first; of an engine that is down nothing is known."""
    leases = SimpleNamespace(serving=True, board=SimpleNamespace(idle_count=0), waiting=2, wanted=(70, 1))
    scene = Scene(leases=leases)
    scene.fill(5, QUEUE)
    assert isinstance(scene.ask("s5", QUEUE), Waiter)
    told = scene.gate.capacity(scene.now, QUEUE)
    assert (told.slots_free, told.queue_depth, told.sessions_waiting) == (0, 3, 1)
    leases.board.idle_count, leases.waiting = 4, 0
    told = scene.gate.capacity(scene.now, QUEUE)
    assert (told.slots_free, told.queue_depth) == (4, 1)
    leases.serving = False
    told = scene.gate.capacity(scene.now, QUEUE)
    assert (told.slots_free, told.can_admit, told.reason, told.headroom_sessions) == (
        None,
        False,
        Reason.STALE,
        0,
    )
    assert told.retry_after_s >= 1
    assert scene.gate.reserve(wish("l"), QUEUE, scene.now, jitter=0.5).failing.reason is Reason.STALE


def wish(*leases, key="k", cells_each=0):
    """Places for these sessions."""
    return Wish(leases=leases, scope=SCOPE, key=key, ttl_s=60.0, cells_each=cells_each)


def test_a_promised_place_is_kept():
    """Others are judged as if it were taken, and whoever brings it comes in."""
    scene = Scene()
    scene.fill(3)
    promise = scene.gate.reserve(wish("l1", "l2"), REJECT, scene.now, jitter=0.5)
    assert isinstance(promise, Promise)
    assert isinstance(scene.ask("other"), Refused)
    assert isinstance(scene.ask("a", lease="l1"), Entered)
    assert isinstance(scene.ask("b", lease="l2"), Entered)
    assert isinstance(scene.ask("c", lease="l2"), Refused | Waiter)
    assert scene.gate.presence.working == 5


def test_more_than_there_is_room_for_is_not_promised():
    """All or nothing; the same key asks once."""
    scene = Scene()
    scene.fill(3)
    refused = scene.gate.reserve(wish("l1", "l2", "l3"), REJECT, scene.now, jitter=0.5)
    assert isinstance(refused, Refused)
    assert refused.capacity.headroom_sessions == 2
    promise = scene.gate.reserve(wish("l1", "l2"), REJECT, scene.now, jitter=0.5)
    assert scene.gate.reserve(wish("x", "y"), REJECT, scene.now, jitter=0.5) is promise
    assert isinstance(scene.gate.reserve(wish("l3", key="other"), REJECT, scene.now, jitter=0.5), Refused)
    assert isinstance(scene.gate.reserve(wish("l3", key="o2"), Policy(), scene.now, jitter=0.5), Promise)


def test_a_promise_ends_with_its_time():
    """Its places and its cells are free again."""
    scene = Scene(ledger=CellLedger(1000, growth=0))
    ledger = scene.gate.ledger
    scene.gate.reserve(wish("l1", "l2", cells_each=300), REJECT, 0.0, jitter=0.5)
    assert ledger.figures().free == 400
    full = scene.gate.reserve(wish("l3", "l4", key="o", cells_each=300), REJECT, 0.0, jitter=0.5)
    assert full.failing.arm is Arm.CELLS
    assert scene.gate.give_back("l1", SCOPE)
    assert not scene.gate.give_back("l1", SCOPE)
    assert not scene.gate.give_back("l2", Scope("another"))
    assert ledger.figures().free == 700
    scene.now = 60.0
    scene.gate.advance(scene.now)
    assert ledger.figures().free == 1000
    assert scene.gate.picture(scene.now).promised == 0


def test_nothing_is_promised_blindly():
    """Stale samples, too many promises, headroom that a policy wants kept."""
    scene = Scene(stale_after_s=3.0, ledger=CellLedger(1000, growth=0))
    many = scene.gate.reserve(wish(*map(str, range(5000))), Policy(), 0.0, jitter=0.5)
    assert many.failing.reason is Reason.QUEUE_FULL
    scene.gate.on_over("x", 0.0, cells=300)
    wary = replace(REJECT, kv_headroom_ratio=0.5)
    assert scene.gate.reserve(wish("a", "b"), wary, 0.0, jitter=0.5).failing.arm is Arm.CELLS
    assert scene.gate.reserve(wish("a", "b"), REJECT, 9.0, jitter=0.5).failing.reason is Reason.STALE


def test_another_model_has_another_curve():
    """The same one keeps what was learned; the last sample is of the engine before."""
    scene = Scene()
    for n in (1, 2):
        for _ in range(20):
            scene.now += 0.25
            scene.gate.on_look(
                Look(taken_at=scene.now, decoding=n, mean_tps=50.0, tokens=n * 20, seconds=n * 0.25)
            )
    assert scene.gate.picture(scene.now).fit is not None
    scene.gate.on_engine_ready(None, same_model=True)
    assert scene.gate.picture(scene.now).fit is not None
    assert scene.gate.picture(scene.now).mean_tps is None
    scene.gate.on_engine_ready(CellLedger(10), same_model=False)
    assert scene.gate.picture(scene.now).fit is None
    assert scene.gate.picture(scene.now).cells.total == 10


def test_refusals_since_the_last_one_left_are_counted():
    """They are ahead of whoever is refused next."""
    scene = Scene()
    scene.fill(5)
    waits = [scene.ask(f"x{number}").retry_after_s for number in range(3)]
    assert waits == sorted(waits)
    assert waits[-1] > waits[0]
    scene.gate.on_close("s0", scene.now)
    assert scene.gate.picture(scene.now).refused == 0


class Crowd(RuleBasedStateMachine):
    """Any order of everything, with the same few sessions."""

    def __init__(self):
        super().__init__()
        self.scene = Scene()
        self.waiting = []
        self.running = dict.fromkeys("abcdefgh", 0)

    def entered(self, session):
        """It has one more request."""
        self.running[session] += 1

    @rule(
        session=st.sampled_from("abcdefgh"),
        policy=st.sampled_from([REJECT, QUEUE, Policy(), replace(QUEUE, priority=1)]),
        pool=st.sampled_from([None, "p", "q"]),
    )
    def ask(self, session, policy, pool):
        """A request; of one that is inside it is never held or refused."""
        inside = session in self.scene.gate.presence
        passage = self.scene.ask(session, policy, pool=pool)
        assert isinstance(passage, Entered) or not inside
        if isinstance(passage, Entered):
            self.entered(session)
        elif isinstance(passage, Waiter):
            self.waiting.append(passage)

    @rule(session=st.sampled_from("abcdefgh"))
    def over(self, session):
        """One of its requests ends."""
        if self.running[session]:
            self.running[session] -= 1
            self.scene.gate.on_over(session, self.scene.now)

    @rule(session=st.sampled_from("abcdefgh"))
    def close(self, session):
        """It ends altogether."""
        self.scene.gate.on_close(session, self.scene.now)
        self.running[session] = 0
        # those that were let in with it go on, and do not bring it back
        self.waiting = [
            each for each in self.waiting if each.entered is None or each.entry.session != session
        ]

    @rule(session=st.sampled_from("abcdefgh"), span=st.sampled_from([0.1, 0.3, 2.5, 50.0]))
    def look(self, session, span):
        """Time passes."""
        self.scene.now += span
        self.scene.gate.on_tokens(session, 16)
        self.scene.look()

    @rule()
    def wake(self):
        """Those who may come in."""
        for waiter in self.scene.gate.wake(self.scene.now):
            assert waiter.entered is not None
            if waiter in self.waiting:
                self.waiting.remove(waiter)
                self.entered(waiter.entry.session)

    @rule(number=st.integers(0, 7), patient=st.booleans())
    def leave(self, number, patient):
        """One that waits leaves, or has waited long enough; it may have been let in already."""
        if not self.waiting:
            return
        waiter = self.waiting[number % len(self.waiting)]
        if patient:
            verdict = self.scene.gate.on_expired(waiter, self.scene.now, jitter=0.5)
            if isinstance(verdict, Entered) and waiter.entered is None:
                self.entered(waiter.entry.session)
            elif waiter.entered is not None:
                assert verdict is waiter.entered
                return
        else:
            if waiter.entered is not None:
                return
            self.scene.gate.on_gave_up(waiter, self.scene.now)
        self.waiting.remove(waiter)

    @invariant()
    def it_adds_up(self):
        """Who waits, waits once, and no session waits that is inside."""
        gate = self.scene.gate
        still = [waiter for waiter in self.waiting if waiter.entered is None]
        assert gate.waiting == len(still) == sum(len(each) for each in gate._waiters.values())
        assert not any(waiter.entry.session in gate.presence for waiter in still)
        let_in = [waiter.entry.session for waiter in self.waiting if waiter.entered is not None]
        running = {name for name, count in self.running.items() if count}
        assert gate.presence.working == len(running | {n for n in let_in if n in gate.presence})


TestCrowd = Crowd.TestCase
TestCrowd.settings = settings(max_examples=150, stateful_step_count=30)


def test_what_becomes_of_sessions_is_counted():
    """Each once; turns of those inside, and questions, are not among them."""
    scene = Scene()
    scene.fill(5, QUEUE)
    scene.ask("s0", QUEUE)
    refused = scene.ask("no", REJECT)
    assert isinstance(refused, Refused)
    first, second, third = (scene.ask(name, QUEUE) for name in "abc")
    assert (first.entered, scene.gate.waiting) == (None, 3)
    scene.gate.on_gave_up(third, scene.now)
    scene.gate.on_expired(second, scene.now, jitter=0.5)
    for _ in range(2):
        scene.gate.on_over("s0", scene.now)
    scene.gate.on_close("s0", scene.now)
    assert scene.settle() == ["a"]
    assert scene.gate.counts == {"admitted": 5, "queued": 1, "rejected": 1, "expired": 1, "gave_up": 1}


def test_who_leaves_while_it_is_let_in_with_another_is_over_once():
    """Its session goes on with the other request."""
    scene = Scene()
    scene.fill(5, QUEUE)
    first, second = scene.ask("y", QUEUE), scene.ask("y", QUEUE)
    for number in range(3):
        scene.gate.on_over(f"s{number}", scene.now)
        scene.gate.on_close(f"s{number}", scene.now)
    scene.now += 4
    scene.look()
    assert isinstance(scene.gate.on_expired(first, scene.now, jitter=0.5), Entered)
    inside = scene.gate.presence._inside["y"]
    assert (inside.requests, second.entered) == (2, Entered())
    scene.gate.on_gave_up(second, scene.now)
    assert second not in scene.gate.wake(scene.now)
    assert inside.requests == 1


def test_a_session_that_gives_up_with_all_its_requests_is_counted_once():
    """What is counted are sessions."""
    scene = Scene()
    scene.fill(5, QUEUE)
    for waiter in [scene.ask("z", QUEUE), scene.ask("z", QUEUE)]:
        scene.gate.on_gave_up(waiter, scene.now)
    assert scene.gate.counts["gave_up"] == 1
