"""Who leads a group: a state machine of processes that hang, die and lose Redis."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvmanager.contracts import epochs
from kvmanager.group.leadership import Attempt, Change, Leadership, Lease, granted

TTL, POLL = 3.0, 0.25
_STEPS = 60


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

    def hold(self, owner: str, attempt: Attempt, now: float) -> int | Lease:
        self.renewals += 1
        term = granted(self.lease, self.counter, owner, attempt, int(now))
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
        if self.epoch is None:  # the jump is above all that was given so far: random numbers never meet here by chance
            self.jumps = 4 * self.jumps + 1000
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
        self.now, self.redis, self.starts = 1e9, Redis(), 0
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
        return Process(Leadership(f"m{self.starts}", TTL, POLL))

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
        found = self.redis.hold(process.core.owner, process.core.attempt(self.now), self.now) if self.redis.up else None
        process.pending = (self.now, found, self.wipes)
        if isinstance(found, int):
            assert self.terms.setdefault(found, process.core.owner) == process.core.owner, "two owners of one term"
            # Workers follow the highest term of those that say that they lead: one that hangs may say so for long.
            assert found >= self.highest_term, "a term fell: an old leader beats the new one"
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
        current = 0 < process.epoch >= self.epoch_seen
        if self.redis.up:  # an epoch that was chosen without Redis is replaced once Redis is back
            if not (current and process.fence) and not self._take_epoch(process):
                return
        elif not current:
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

    @precondition(lambda self: self.redis.up and self.wipes < 3)
    @rule()
    def wipe(self) -> None:
        """Redis comes back empty. The clock is above all terms by then: takeovers are rarer than one a second."""
        self.now += _STEPS
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


TestGroup = pytest.mark.searches(Group.TestCase)
TestGroup.settings = settings(max_examples=300, stateful_step_count=_STEPS, deadline=None)
