"""Who leads a group, to the exact moment; then a state machine of processes that hang, die and lose Redis."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvmanager.core import epochs
from kvmanager.core.leadership import Attempt, Change, Leadership, Lease, granted

TTL, POLL = 3.0, 0.25
OTHER = Lease(7, "other", "h:1", "ns", 2)


def new(owner: str = "own") -> Leadership:
    return Leadership(owner, TTL, POLL)


def leader(term: int = 5, at: float = 0.0) -> Leadership:
    core = new()
    assert core.held(at, term) is Change.GAINED
    return core


# ------------------------------------------------------------ the lease in Redis


@pytest.mark.parametrize(
    ("lease", "counter", "attempt", "term"),
    [
        (None, None, Attempt(0, 0), 501),  # new: the term jumps
        (None, 4, Attempt(0, 0), 5),
        (None, 4, Attempt(0, 9), 10),  # above what the caller has seen
        (None, 4, Attempt(4, 4), 4),  # removed, and nobody has taken it since
        (None, 5, Attempt(4, 4), 6),  # removed, and somebody has
        (None, None, Attempt(4, 4), 505),  # wiped
        (OTHER, 7, Attempt(0, 7), None),
        (OTHER, 7, Attempt(0, 7, seize=(6, 2)), None),  # another one has taken it meanwhile
        (OTHER, 7, Attempt(0, 7, seize=(7, 1)), None),  # it was renewed meanwhile
        (OTHER, 7, Attempt(0, 7, seize=(7, 2)), 8),
        (OTHER, 3, Attempt(0, 0, seize=(7, 2)), 8),  # a counter that was overwritten
        (Lease(7, "own", "h:2"), 7, Attempt(0, 0), 7),  # the answer to the attempt before was lost
    ],
)
def test_redis_gives_terms_that_only_rise(
    lease: Lease | None, counter: int | None, attempt: Attempt, term: int | None
) -> None:
    assert granted(lease, counter, "own", attempt, 500) == term


# ------------------------------------------------------------ one manager


def test_a_new_manager_tries_at_once_and_does_not_lead() -> None:
    core = new()
    assert (core.leads(0.0), core.next_attempt(0.0), core.attempt(0.0)) == (False, 0.0, Attempt(0, 0))


def test_a_leader_renews_after_a_third_and_ends_before_redis_does() -> None:
    core = leader(at=10.0)
    assert core.next_attempt(10.5) == pytest.approx(0.5)
    assert core.leads(12.6)
    assert not core.leads(12.8)
    assert core.held(11.0, 5) is Change.NONE
    assert core.leads(13.6)


def test_the_life_of_a_lease_counts_from_the_moment_before_the_attempt() -> None:
    core = leader(at=0.0)
    core.held(1.0, 5)  # whenever the answer came
    assert core.leads(3.6)
    assert not core.leads(3.8)


def test_a_standby_tries_again_after_a_poll_and_leads_never_meanwhile() -> None:
    core = new()
    assert core.refused(1.0, OTHER) is Change.NONE
    assert core.next_attempt(1.0) == POLL
    assert core.attempt(1.0) == Attempt(0, 7)
    assert not core.leads(1.0)


def test_a_lease_is_seized_only_in_the_term_whose_owner_has_ended() -> None:
    core = new()
    core.refused(0.0, OTHER)
    core.gone(6)
    assert core.attempt(0.1).seize is None
    core.gone(7)
    assert core.attempt(0.1).seize == OTHER.mark
    assert core.next_attempt(0.1) == 0.0
    last = replace(OTHER, renewal=3)  # the owner renewed once more before it ended
    core.refused(0.2, last)
    assert core.next_attempt(0.2) == 0.0
    assert core.attempt(0.2).seize == last.mark
    core.refused(0.3, Lease(8, "third", "h:3"))
    assert core.attempt(0.3) == Attempt(0, 8)


def test_a_lease_is_seized_early_once_in_each_life_of_a_lease() -> None:
    core = new()
    core.refused(0.0, OTHER)
    core.gone(7)
    assert core.held(1.0, 8) is Change.GAINED
    core.refused(1.5, Lease(9, "other", "h:1"))
    core.gone(9)
    core.refused(1.6, Lease(9, "other", "h:1", renewal=1))
    assert core.next_attempt(1.6) == POLL
    assert core.attempt(3.9).seize is None
    assert core.attempt(4.0).seize == (9, 1)


def test_a_standby_takes_a_lease_that_was_not_renewed_for_a_whole_life_on_its_own_clock() -> None:
    core = new()
    core.refused(10.0, OTHER)
    core.refused(12.9, OTHER)
    assert core.next_attempt(12.9) == pytest.approx(0.1)
    assert core.attempt(12.9).seize is None
    assert core.attempt(13.0).seize == OTHER.mark
    renewed = replace(OTHER, renewal=3)
    core.refused(13.0, renewed)
    assert core.attempt(15.9).seize is None
    assert core.attempt(16.0).seize == renewed.mark


def test_a_standby_watches_a_whole_life_again_after_a_failure_of_redis() -> None:
    core = new()
    core.refused(0.0, OTHER)
    core.unreachable(2.9)
    assert core.attempt(60.0).seize is None
    core.refused(60.0, OTHER)
    assert core.attempt(62.9).seize is None
    assert core.attempt(63.0).seize == OTHER.mark


def test_a_leader_that_another_one_replaced_stands_by() -> None:
    core = leader(5)
    assert core.refused(9.0, OTHER) is Change.LOST
    assert (core.term, core.leads(9.0), core.leader) == (0, False, OTHER)


def test_a_leader_with_another_term_has_lost_the_first() -> None:
    core = leader(5)
    assert core.held(1.0, 6) is Change.NEW_TERM


def test_a_leader_goes_on_while_redis_is_unreachable() -> None:
    core = leader(at=0.0)
    for failed_at in (1.5, 3.0, 4.5, 60.0 - 54.0):
        assert core.unreachable(failed_at) is Change.NONE
        assert core.leads(failed_at + 2.6)
    assert not core.leads(6.0 + 2.8)


def test_a_leader_that_stood_still_is_not_revived_by_a_failure() -> None:
    core = leader(at=0.0)
    assert core.unreachable(2.8) is Change.LOST
    assert not core.leads(2.8)


def test_a_leader_that_stood_still_goes_on_when_redis_confirms_it() -> None:
    core = leader(at=0.0)
    assert not core.leads(10.0)
    assert core.attempt(10.0) == Attempt(5, 5)
    assert core.held(10.0, 5) is Change.NONE
    assert core.leads(12.6)


def test_a_standby_never_leads_by_a_failure() -> None:
    core = new()
    core.refused(0.0, OTHER)
    assert core.unreachable(1.0) is Change.NONE
    assert not core.leads(1.0)


def test_a_leader_tries_soon_after_a_failure_and_a_standby_late() -> None:
    core = leader(at=0.0)
    core.unreachable(1.0)
    assert core.next_attempt(1.0) == POLL
    core = new()
    core.unreachable(1.0)
    assert core.next_attempt(1.0) == TTL


def test_who_resigned_leads_no_more() -> None:
    core = leader(at=0.0)
    assert core.resigned(1.0) is Change.LOST
    assert not core.leads(1.0)


# ------------------------------------------------------------ several managers


@dataclass
class Redis:
    """The lease, and the index of one namespace with its fence, as the scripts keep them."""

    up: bool = True
    lease: Lease | None = None
    counter: int | None = None
    epoch: int | None = None
    term: int = 0
    jumps: int = 0
    renewals: int = 0

    def hold(self, owner: str, attempt: Attempt) -> int | Lease:
        self.jumps += 1000
        self.renewals += 1
        term = granted(self.lease, self.counter, owner, attempt, self.jumps)
        if term is None:
            assert self.lease is not None
            return self.lease
        self.counter = term if self.counter is None else max(self.counter, term)
        self.lease = Lease(term, owner, owner, renewal=self.renewals)
        return term

    def acquire(self, least: int, held: int, term: int) -> int | None:
        """Take an epoch; None for a manager that was replaced."""
        if epochs.is_replaced(held, self.epoch) or self.term > term:
            return None
        self.jumps += 1000
        self.epoch = epochs.acquired(least, self.epoch, self.epoch, self.jumps)
        self.term = term
        return self.epoch


@dataclass
class Process:
    """A manager's process: `pending` is the attempt that Redis has carried out and the process has not seen yet.

    `exempt`: it may lead beside another one, because Redis was wiped or it lost Redis, and it has no answer since then.
    """

    core: Leadership
    alive: bool = True
    hung: bool = False
    epoch: int = 0
    fence: int = 0
    exempt: bool = False
    pending: tuple[float, int | Lease | None, int] | None = None
    wrote: list[int] = field(default_factory=list)


class Group(RuleBasedStateMachine):
    """Three managers, one Redis, one worker. A manager that hangs sees no time pass, and wakes up anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.redis, self.starts = 0.0, Redis(), 0
        self.processes: list[Process] = []
        self.terms: dict[int, str] = {}
        self.last_epoch = self.highest_term = 0
        self.worker: tuple[Process, int] | None = None
        self.epoch_seen = 0
        self.wipes = 0

    @initialize()
    def start(self) -> None:
        self.processes = [self._born() for _ in range(3)]

    def _born(self) -> Process:
        self.starts += 1
        return Process(new(f"m{self.starts}"))

    def _running(self, index: int) -> Process | None:
        process = self.processes[index]
        return process if process.alive and not process.hung else None

    # ------------------------------------------------------------ attempts

    @rule(index=st.integers(0, 2))
    def send(self, index: int) -> None:
        """Redis carries an attempt out, or is unreachable; the process sees the outcome later."""
        process = self._running(index)
        if process is None or process.pending is not None:
            return
        found = self.redis.hold(process.core.owner, process.core.attempt(self.now)) if self.redis.up else None
        process.pending = (self.now, found, self.wipes)
        if isinstance(found, int):
            assert self.terms.setdefault(found, process.core.owner) == process.core.owner, "two owners of one term"
            assert found >= self.highest_term or self.wipes, "a term fell"
            self.highest_term = max(self.highest_term, found)

    @rule(index=st.integers(0, 2))
    def see(self, index: int) -> None:
        process = self._running(index)
        if process is None or process.pending is None:
            return
        (sent_at, found, wipes), process.pending = process.pending, None
        process.exempt = found is None or wipes != self.wipes
        if found is None:
            change = process.core.unreachable(self.now)
        elif isinstance(found, Lease):
            change = process.core.refused(self.now, found)
        else:
            change = process.core.held(sent_at, found)
        if change is not Change.NONE:
            process.epoch = process.fence = 0
        if change in (Change.GAINED, Change.NEW_TERM):
            self._take_epoch(process)  # at once, so that the last leader can write no more

    def _take_epoch(self, process: Process) -> bool:
        if not self.redis.up:
            return False
        seen = self.epoch_seen if self.worker is not None else 0
        taken = self.redis.acquire(1 + max(process.epoch, seen), process.fence, process.core.term)
        if taken is None:
            return False
        process.epoch = process.fence = taken
        return True

    # ------------------------------------------------------------ what leaders do

    @rule(index=st.integers(0, 2))
    def attach(self, index: int) -> None:
        process = self._running(index)
        if process is None or not process.core.leads(self.now):
            return
        if process.epoch < self.epoch_seen or not process.epoch:
            if self.redis.up:
                if not self._take_epoch(process):
                    return
            else:
                process.epoch = 1 + max(process.epoch, self.epoch_seen)
        self.worker, self.epoch_seen = (process, process.epoch), process.epoch

    @rule(index=st.integers(0, 2))
    def write_index(self, index: int) -> None:
        """The write is sent without a look at the lease: the fence alone decides."""
        process = self._running(index)
        if process is None or not process.fence or not self.redis.up:
            return
        if self.redis.epoch == process.fence:
            assert process.core.term == self.redis.term, "a manager wrote the index that had lost its term"
            assert process.fence >= self.last_epoch or self.wipes
            self.last_epoch = max(self.last_epoch, process.fence)

    # ------------------------------------------------------------ faults

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 2.0, 4.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(index=st.integers(0, 2))
    def hang(self, index: int) -> None:
        self.processes[index].hung = True

    @rule(index=st.integers(0, 2))
    def wake(self, index: int) -> None:
        self.processes[index].hung = False

    @rule(index=st.integers(0, 2))
    def kill(self, index: int) -> None:
        dead = self.processes[index]
        dead.alive = False
        for other in self.processes:  # what a watch of the owner finds
            if other.core.leader is not None and other.core.leader.owner == dead.core.owner:
                other.core.gone(other.core.leader.term)

    @rule(index=st.integers(0, 2))
    def restart(self, index: int) -> None:
        if not self.processes[index].alive:
            self.processes[index] = self._born()

    @rule(seconds=st.sampled_from([1.0, 2.0, 4.0]), indices=st.sets(st.integers(0, 2), min_size=1))
    def rounds(self, seconds: float, indices: set[int]) -> None:
        """Some processes make an attempt each, time passes, and they make another one."""
        for _ in range(2):
            for index in sorted(indices):
                self.send(index)
                self.see(index)
            self.now += seconds

    @rule(up=st.booleans())
    def reach_redis(self, up: bool) -> None:
        self.redis.up = up

    @precondition(lambda self: self.redis.up)
    @rule()
    def wipe(self) -> None:
        self.redis = Redis(jumps=self.redis.jumps, renewals=self.redis.renewals)
        self.wipes += 1
        for each in self.processes:
            each.exempt = True

    # ------------------------------------------------------------ what always holds

    @invariant()
    def one_process_a_term(self) -> None:
        terms = [each.core.term for each in self.processes if each.alive and each.core.term]
        assert len(terms) == len(set(terms))

    @invariant()
    def one_leader(self) -> None:
        """Of the managers that have Redis's answer since it was last wiped or unreachable, one leads by its clock."""
        leading = [each.core.term for each in self.processes if each.alive and each.core.leads(self.now)]
        exempt = [each.core.term for each in self.processes if each.alive and each.exempt]
        assert len(set(leading) - set(exempt)) <= 1, "two leaders"

    def teardown(self) -> None:
        """When faults stop, exactly one manager leads, and its grants and index writes are accepted."""
        self.redis.up = True
        for index in range(3):
            self.wake(index)
            self.restart(index)
        for _ in range(9):
            self.now += TTL / 3
            for index in range(3):
                self.send(index)
                self.see(index)
        leading = [each for each in self.processes if each.core.leads(self.now)]
        assert len(leading) == 1
        index = self.processes.index(leading[0])
        self.attach(index)
        assert self.worker is not None
        assert self.worker[0] is leading[0]
        for other in range(3):
            self.write_index(other)
        assert self.redis.epoch == leading[0].fence
        super().teardown()


TestGroup = Group.TestCase
TestGroup.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
