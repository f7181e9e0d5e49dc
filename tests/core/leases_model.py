"""Books of who has which slots, to hold leases to."""

from collections import Counter
from dataclasses import replace

from core.planes import (
    SCOPE,
    TOKENS,
    ready,
    sample,
    slot_sample,
)
from polykv_proxy.core.cells import Need
from polykv_proxy.core.costs import Asked
from polykv_proxy.core.decisions import (
    Admit,
    AttachPlan,
    AwaitIdle,
    Never,
    Queue,
    Reclaim,
    Reject,
    WakeQueued,
)
from polykv_proxy.core.plane import ControlPlane
from polykv_proxy.core.planner import Wanted
from polykv_proxy.core.policies import CellPolicy
from polykv_proxy.core.slots import Ask, Content
from polykv_proxy.core.types import (
    PoolUid,
    Scope,
    SlotId,
)

ROOMY = CellPolicy(watermark_ratio=0.0, growth_tokens=1, stale_after_s=1e9)


def longer(chain, *messages):
    """A chain with more links; each stands for all before it."""
    for message in messages:
        chain = (*chain, hash((chain, message)))
    return chain


class LeasesAgainstModel:
    """Leases of a plane, and books of what it answered: they have to agree.

    The model knows what each slot was left with, so that it can tell who has to go on where.

    Args:
        dice: decides everything.
    """

    MAX_WAITING = 3
    CELLS = 200

    def __init__(self, dice):
        self.dice = dice
        self.done = Counter()  # what really happened
        self.slots = dice.randint(1, 4)
        self.plane = ControlPlane(max_waiting=self.MAX_WAITING)
        self.plane.cells.adopt(ROOMY)
        self.epoch = 0
        self.now = 0.0
        self.serving = False
        self.reading = None  # the sample that counts
        self.running = []  # leases whose owner is at work
        self.leaving = []  # leases whose owner left before the engine was idle
        self.borrowed = []
        self.waiting = []  # tickets
        self.retries = []  # those of them that waited for a certain slot: back there, they come first
        self.woken = []  # tickets with a lease that its owner has not seen yet
        self.going = []  # what the plane wants to have taken back
        self.of_epoch = {}  # lease ids, and the epoch in which each was given
        self.asks = {}  # lease ids, and what each was asked for
        self.displaced = {}  # lease ids, and what their first slots held before
        self.left = {}  # slots, and the conversation that each was left with
        self.pools = {}  # the pool that each lease runs on
        self.talks = []  # conversations: scope, name and chain
        if dice.random() < 0.8:
            self.ready()

    # -- what the plane says -----------------------------------------------------------------------------

    def obey(self, commands):
        """Do what it says; those who are woken were the first in line, but for those who wait for a slot."""
        for command in commands:
            match command:
                case WakeQueued(ticket):
                    assert self.serving
                    ahead = self.waiting[: self.waiting.index(ticket)]
                    self.waiting.remove(ticket)
                    if ticket.never is not None:
                        assert ticket.lease is None
                        continue
                    in_its_way = [each for each in ahead if not self.plane.board.awaits(each.ask)]
                    assert not in_its_way or ticket in self.retries
                    self.granted(ticket.lease, ticket.ask)
                    self.woken.append(ticket)
                case AwaitIdle(lease, _):
                    self.leaving.append(lease)
                case Reclaim(key):
                    self.going.append(key)

    def granted(self, lease, ask):
        """A lease is new, on slots that nobody has; who goes on in a slot finds there what he left."""
        assert lease.lease_id not in self.of_epoch
        held = [slot for other in self.live() for slot in other.slots]
        assert not set(lease.slots) & set(held)
        self.of_epoch[lease.lease_id] = self.epoch
        self.asks[lease.lease_id] = ask
        was = self.left.get(lease.slots[0])
        if lease.continues:
            self.done["continues"] += 1
            assert (was[0], was[1]) == (ask.scope, ask.name)
            assert was[2][:2] == ask.chain[:2]
        elif ask.slots == 1 and not ask.exclusive:
            assert not self.resident(ask, lease.slots[0])
            assert not any(self.goes_on(ask, self.asks[each.lease_id]) for each in self.leaving_now())
        self.displaced[lease.lease_id] = was
        for slot in lease.slots:
            self.left.pop(slot, None)

    def resident(self, ask, *slots):
        """Whether an idle slot, or one of these, was left with what the request goes on with."""
        idle = [slot.slot for slot in self.plane.board if slot.idle] + list(slots)
        held = [self.left[slot] for slot in idle if slot in self.left]
        return any(self.goes_on(ask, Ask(scope=each[0], name=each[1], chain=each[2])) for each in held)

    @staticmethod
    def goes_on(ask, earlier):
        """Whether a request is another turn of an earlier one, or the same again."""
        links = len(earlier.chain)
        same = (ask.scope, ask.name) == (earlier.scope, earlier.name)
        return same and links > 1 and ask.chain[:links] == earlier.chain

    def leaving_now(self):
        """Leases whose owners left and may come again, and whose requests the engine is stopping."""
        return [
            lease
            for lease in self.leaving
            if self.of_epoch[lease.lease_id] == self.epoch
            and not (lease.session is not None and lease.session.closed)
        ]

    def live(self):
        """Leases that hold slots of the present engine."""
        leases = [
            *self.running,
            *self.leaving,
            *self.borrowed,
            *(ticket.lease for ticket in self.woken),
        ]
        return [lease for lease in leases if self.of_epoch[lease.lease_id] == self.epoch]

    def some(self, several):
        """One of several."""
        return self.dice.choice(several)

    # -- rules -------------------------------------------------------------------------------------------

    def wish(self):
        """What somebody asks for: the next turn of a conversation, the same again, or something new."""
        kind = self.dice.random()
        if self.talks and kind < 0.8:
            scope, name, chain = self.some(self.talks[-4:])
            chain = longer(chain, self.dice.randint(1, 9)) if kind < 0.5 else chain
        else:
            scope, name = Scope(self.some("st")), self.some([None, "a", "auto-1"])
            chain = longer((), *(self.dice.randint(1, 2) for _ in range(self.dice.randint(0, 4))))
        if len(chain) > 1:
            self.talks.append((scope, name, chain))
        need = None
        if self.dice.random() < 0.5:
            asked = Asked(kind="k", body_bytes=0, max_tokens=self.dice.randint(1, 40))
            need = Need(asked=asked, prompt=self.dice.choice([5, 5, 20, 60, 60, 100, 200]))
        return Ask(
            scope=scope,
            name=name,
            chain=chain,
            slots=self.dice.choice([1] * 9 + [2, 4]),
            exclusive=self.dice.random() < 0.05,
            need=need,
        )

    def come(self):
        """Some requests come at once; it is in a crowd that things go wrong."""
        self.now += self.dice.choice([0.0, 0.0, 1.0, 400.0])
        for _ in range(self.dice.choice([1, 1, 1, 4])):
            ask, conversation = self.wish(), True
            if self.dice.random() < 0.2:
                ask, conversation = replace(ask, name=None, chain=()), False
            match self.plane.leases.on_request(ask, self.now, now_ts=0.0, conversation=conversation):
                case Admit(lease):
                    self.done["admitted"] += 1
                    assert self.serving
                    assert all(self.plane.board.awaits(ticket.ask) for ticket in self.waiting)
                    assert (lease.session is not None) == conversation
                    self.granted(lease, ask)
                    self.running.append(lease)
                case Queue(ticket):
                    self.done["retry waits" if self.plane.board.awaits(ask) else "waits"] += 1
                    self.waiting.append(ticket)
                case Reject(code, _):
                    self.done["rejected"] += 1
                    assert code == "queue_full"
                    assert len(self.waiting) == self.MAX_WAITING
                case Never():
                    self.done["never"] += 1
                    assert ask.need.prompt + 1 > self.CELLS

    def take_lease(self):
        """Somebody who was woken goes to work."""
        if self.woken:
            self.done["taken"] += 1
            self.running.append(self.woken.pop(self.dice.randrange(len(self.woken))).lease)

    def attach(self):
        """Somebody's request goes out on a pool."""
        leases = [lease for lease in self.running if lease.pool is None and not lease.ended]
        if not leases or not self.serving:
            return
        self.done["attached"] += 1
        lease = self.some(leases)
        made, compute = self.plane.pools.enter(TOKENS, SCOPE, Wanted(), now_ts=0.0)
        if compute:
            self.plane.pools.on_ready(made, PoolUid(self.epoch + 1))
        self.plane.leases.on_dispatch(lease, AttachPlan(made, 4, 4))
        self.pools[lease.lease_id] = made

    def begin(self):
        """Somebody's request is sent."""
        if self.running:
            self.plane.cells.begins(self.some(self.running))

    def give_up(self):
        """Somebody who waits, or was just woken, leaves."""
        if not (self.waiting or self.woken):
            return
        ticket = self.some([*self.waiting, *self.woken])
        (self.waiting if ticket in self.waiting else self.woken).remove(ticket)
        if ticket.lease is not None:
            self.over(ticket.lease, Content.OLD)
        commands = self.plane.leases.on_gave_up(ticket, self.now)
        self.done["gave up, lets in" if commands else "gave up"] += 1
        self.obey(commands)

    def over(self, lease, content):
        """What a lease leaves in its slots."""
        if self.of_epoch[lease.lease_id] != self.epoch:
            return
        first, ask = lease.slots[0], self.asks[lease.lease_id]
        was = self.displaced[lease.lease_id]
        closed = lease.session is not None and lease.session.closed
        if content is Content.NEW and ask.chain and not closed:
            self.left[first] = (ask.scope, ask.name, ask.chain, lease.session)
        if content is Content.OLD and was is not None and was[3].slot in (None, first) and not was[3].closed:
            self.left[first] = was  # else it is somewhere else by now

    def finish(self):
        """A request is over, perhaps reported twice."""
        if not self.running:
            return
        lease = self.some(self.running)
        clean, content = self.dice.random() < 0.6, self.some([*Content, Content.NEW, Content.NEW])
        self.running.remove(lease)
        self.pools.pop(lease.lease_id, None)
        if clean:
            self.over(lease, content)
        commands = self.plane.leases.on_finished(lease, self.now, clean=clean, content=content)
        if self.of_epoch[lease.lease_id] == self.epoch:
            self.done[f"over {'clean' if clean else 'left'} {content.value}"] += 1
            assert clean or commands[0] == AwaitIdle(lease, stop=True)
        else:
            assert commands == []
        self.obey(commands)
        if self.dice.random() < 0.3:
            assert self.plane.leases.on_finished(lease, self.now, clean=True, content=content) == []

    def idle(self):
        """The engine is done with an abandoned request."""
        if not self.leaving:
            return
        lease, content = self.some(self.leaving), self.some([*Content, Content.NEW, Content.NEW])
        self.leaving.remove(lease)
        self.over(lease, content)
        commands = self.plane.leases.on_slots_idle(lease, self.now, content)
        self.done["idle, lets in" if commands else "idle"] += 1
        self.obey(commands)

    def borrow(self):
        """Somebody keeps a slot to himself that is idle, and gives it back as it was."""
        if self.borrowed and self.dice.random() < 0.6:
            lease = self.borrowed.pop()
            commands = self.plane.leases.returned(lease, self.now)
            self.done["returned"] += 1
            self.obey(commands)
            return
        slot = SlotId(self.dice.randrange(self.slots))
        lease = self.serving and self.plane.leases.borrow(slot, self.now)
        if lease:
            self.done["borrowed"] += 1
            self.of_epoch[lease.lease_id] = self.epoch
            self.borrowed.append(lease)

    def learn(self):
        """A request that could not be pinned runs in another slot, whose own request has not been sent."""
        taken = {slot for lease in (*self.leaving, *self.borrowed) for slot in lease.slots}
        free = [slot for slot in range(self.slots) if slot not in taken]
        leases = [lease for lease in self.running if not lease.ended and lease.lease_id in self.alone()]
        if not leases or not free or not self.serving:
            return
        lease, slot = self.some(leases), SlotId(self.some(free))
        others = [each for each in self.live() if slot in each.slots and each is not lease]
        if any(each.lease_id not in self.alone() for each in others):
            return
        self.done["changed places" if others else "elsewhere"] += slot != lease.slots[0]
        source = lease.slots[0]
        was = self.displaced[lease.lease_id]
        commands = self.plane.leases.on_slot_learnt(lease, slot, self.now)
        assert lease.slots == (slot,)
        if slot != source:
            self.left.pop(slot, None)
            self.displaced[lease.lease_id] = None
            for other in others:
                assert other.slots == (source,)
                self.displaced[other.lease_id] = None
            if not others and was is not None and was[3].slot in (None, source):
                self.left[source] = was
        self.obey(commands)

    def alone(self):
        """Leases of the present engine that have one slot each."""
        return {lease.lease_id for lease in self.live() if len(lease.slots) == 1}

    def end_session(self):
        """A client says that its conversation is over."""
        idle = [session for session in self.plane.sessions if not session.running]
        if idle:
            self.done["ended"] += 1
            session = self.some(idle)
            slot, commands = self.plane.end_session(session.session_id, session.scope, self.now)
            self.left.pop(slot, None)
            self.obey(commands)

    def take_back(self):
        """What has to go for those who run is gone, or would not go."""
        if not self.going:
            return
        key, gone = self.going.pop(0), False
        kind, name = key
        lease = self.plane.leases.borrow(name, self.now) if kind == "slot" else None
        if lease is not None or (kind == "slot" and self.plane.leases.is_reclaimable(name)):
            self.done["taken back"] += 1
            gone = True
            self.plane.leases.on_emptied(name)
            self.left.pop(name, None)
            for each in self.live():
                if each.slots[0] == name:
                    self.displaced[each.lease_id] = None
        if lease is not None:
            self.obey(self.plane.leases.returned(lease, self.now))
        self.obey(self.plane.on_reclaimed(key, self.now, gone=gone))

    def down(self):
        """The engine is gone."""
        self.serving = False
        self.plane.on_engine_down()

    def ready(self):
        """An engine answers, the same or another one."""
        if self.dice.random() < 0.5 and self.plane.facts is not None:
            self.done["restarted"] += 1
            self.epoch += 1
            self.slots = self.dice.randint(1, 4)
            self.reading = None
            self.pools.clear()
            self.left.clear()
            self.going.clear()
        self.serving = True
        self.obey(ready(self.plane, f"e{self.epoch}", slots=self.slots, cells=self.CELLS))
        self.sample(age=0)

    def sample(self, age=None):
        """A reading comes in, perhaps of an engine that is gone; released pools are forgotten by it.

        Now and then it shows that the engine emptied a slot.
        """
        age = self.dice.choice([0, 0, 0, 1]) if age is None else age
        counts = age == 0 and self.plane.facts is not None
        slots, lost = [], []
        for slot in self.plane.board if counts else ():
            tokens = self.dice.choice([0, 5, 20, 40, 80])
            if slot.idle and slot.slot in self.left and not tokens:
                lost.append(slot.session)
                self.left.pop(slot.slot)
            slots.append(replace(slot_sample(slot.slot, tokens=tokens), tag=slot.lease or slot.left_by or 0))
        used = sum(slot.tokens for slot in slots)
        reading = replace(sample(f"e{self.epoch - age}", used=used, slots=tuple(slots)), taken_at=self.now)
        self.obey(self.plane.on_sample(reading, self.now))
        self.done["lost"] += len(lost)
        assert all(session.slot is None and session.taken for session in lost if not session.running)
        if counts:
            self.reading = reading
            self.done["read"] += 1
            assert self.plane.tree.nodes() == [made for made in self.plane.tree if made.resident]

    def release(self):
        """A pool that nobody uses is released, and the engine has given its number back."""
        idle = [made for made in self.plane.tree if made.resident and not made.attached]
        if idle:
            self.done["released"] += 1
            self.plane.tree.release(idle[0])
            self.plane.tree.retire(idle[0].number)

    def wind_up(self):
        """When everything ended, nobody waits and all slots are idle."""
        if not self.serving:
            self.ready()
        for _ in range(2 * self.MAX_WAITING + 2):  # each round serves one who waits, at least
            while self.going:
                self.take_back()
            while self.borrowed:
                self.obey(self.plane.leases.returned(self.borrowed.pop(), self.now))
            while self.woken:
                self.take_lease()
            while self.running:
                lease = self.running.pop()
                self.pools.pop(lease.lease_id, None)
                self.over(lease, Content.NOTHING)
                self.obey(self.plane.leases.on_finished(lease, self.now, clean=True, content=Content.NOTHING))
            while self.leaving:
                lease = self.leaving.pop()
                self.over(lease, Content.NOTHING)
                self.obey(self.plane.leases.on_slots_idle(lease, self.now, Content.NOTHING))
            self.sample(age=0)
        assert not self.waiting
        assert not self.woken
        assert self.plane.board.idle_count == self.slots
        assert not any(session.running for session in self.plane.sessions)

    # -- what always holds -------------------------------------------------------------------------------

    def slots_have_one_lease_each(self):
        """Taken slots are those of live leases, each once; the dead engine's leases have ended."""
        held = {slot.slot: slot.lease for slot in self.plane.board if not slot.idle}
        assert held == {number: lease.lease_id for lease in self.live() for number in lease.slots}
        assert self.plane.board.idle_count == len(self.plane.board.slots) - len(held)
        assert all(lease.ended for lease in self.running if self.of_epoch[lease.lease_id] != self.epoch)

    def a_session_is_in_one_slot(self):
        """Board and sessions agree, and ids are unique in a scope; idle slots hold what was left."""
        held = [(slot.session, slot.slot) for slot in self.plane.board if slot.session is not None]
        assert all(session.slot == number for session, number in held)
        for session in self.plane.sessions:
            if session.slot is not None:
                assert self.plane.board.slots[session.slot].session is session
        ids = [session.key for session in self.plane.sessions]
        assert len(ids) == len(set(ids))
        for slot in self.plane.board:
            if slot.idle:
                left = self.left.get(slot.slot)
                assert slot.chain == (() if left is None else left[2])

    def a_session_runs_while_its_request_does(self):
        """From the lease to its end, and every running one is remembered."""
        leases = [lease for lease in self.live() if not lease.ended and lease.session is not None]
        assert {id(lease.session) for lease in leases} == {
            id(session) for session in self.plane.sessions if session.running
        }

    def the_queue_is_fair(self):
        """Those who wait, and nobody else; the first who waits for no certain slot cannot be let in."""
        known = list(self.plane.leases._waiting.values())
        assert {id(ticket) for ticket in known} == {id(ticket) for ticket in self.waiting}
        assert self.plane.serving == self.serving
        self.retries += [ticket for ticket in known if self.plane.board.awaits(ticket.ask)]
        anywhere = [ticket for ticket in known if not self.plane.board.awaits(ticket.ask)]
        if self.serving and anywhere:
            ask = anywhere[0].ask
            placement = self.plane.board.place(ask)
            assert placement is None or not self.plane.cells.fits(ask, placement, self.now)

    def the_picture_is_the_engine_s(self):
        """The last reading of this engine, or none."""
        assert self.plane.sample is self.reading
        assert (self.plane.ownership is None) == (self.reading is None)

    def a_pool_in_use_is_counted(self):
        """As many requests as run on it, so that nobody evicts it meanwhile."""
        for made in self.plane.tree:
            assert made.attached >= sum(pool is made for pool in self.pools.values())
        if not self.running:
            assert not any(made.attached for made in self.plane.tree if made.resident)

    def live_on(self):
        """Sixty steps, and everything ends."""
        steps = [self.come, self.finish] * 6 + [self.idle, self.take_lease] * 3
        steps += [self.attach, self.begin, self.give_up, self.borrow, self.learn, self.sample] * 2
        steps += [self.take_back] * 3 + [self.release, self.end_session]
        for _ in range(60):
            self.some(steps if self.serving else [self.ready, self.come, self.finish, self.give_up])()
            if self.dice.random() < 0.02:
                self.some([self.down, self.ready])()
            self.check()
        self.wind_up()
        self.check()

    def check(self):
        """All of it."""
        self.slots_have_one_lease_each()
        self.a_session_is_in_one_slot()
        self.a_session_runs_while_its_request_does()
        self.the_queue_is_fair()
        self.the_picture_is_the_engine_s()
        self.a_pool_in_use_is_counted()
