"""The rules by which one manager of a group leads, and by which another one takes over.

The managers of a group share a lease in Redis. The lease names its owner, has a term, and a number that each renewal
changes. It has no life in Redis, which evicts keys that have one when it is full. A standby takes the lease when the
number has not changed for `ttl` on the standby's own clock. Terms only rise: each manager that takes the lease gets a
higher one. Redis follows `granted` in one atomic step (`kvmanager/index/hold.lua`); a test compares both over a real
server.

A leader counts from the moment before each renewal was sent, and a standby from the moment after it saw that renewal.
So the lease ends for the leader first. While Redis is unreachable, no other manager can take the lease, so the leader
goes on. A leader whose process stood still past the end of its lease leads no more until Redis has confirmed it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from kvmanager.contracts.epochs import believed

# Shares of the life of a lease: between two renewals, and how much earlier the leader counts it as ended.
_RENEW_SHARE: Final = 1 / 3
_MARGIN_SHARE: Final = 1 / 10


# Term and renewal: a lease that has the same mark was not renewed meanwhile.
Mark = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease as Redis has it. `address` is HOST:PORT of the owner, `namespace` the index that it writes ("": none).

    `owner` is new at each start of a process (`group/processes.py`). `renewal` is another number after each renewal.
    """

    term: int
    owner: str
    address: str
    namespace: str = ""
    renewal: int = 0

    @property
    def mark(self) -> Mark:
        return self.term, self.renewal


@dataclass(frozen=True, slots=True)
class Attempt:
    """A call that takes or renews the lease.

    `term` is the caller's own (0: it does not lead), `least` the highest one that it has seen. `seize` is the mark of
    a lease that may be taken from its owner: it was not renewed for too long, or its owner has ended for certain.
    """

    term: int
    least: int
    seize: Mark | None = None


class GroupLease(Protocol):
    """The lease of a group, for one owner. Every method but `close` raises IndexUnavailable."""

    group: str

    async def hold(self, attempt: Attempt, address: str, namespace: str) -> int | Lease:
        """Take or renew the lease; return the own term, or the lease of another owner."""
        ...

    async def resign(self) -> None:
        """Give the lease up, if this owner holds it."""
        ...

    async def close(self) -> None: ...


def granted(lease: Lease | None, counter: int | None, owner: str, attempt: Attempt, clock: int) -> int | None:
    """Return the term that an owner gets from Redis; None while another one holds the lease.

    A leader renews even a lease that was removed, as long as nobody has taken one since. Where there is no counter
    (Redis is new, or was wiped), terms go on at `clock`, in seconds since 1970. Takeovers are rarer than one a second,
    so no manager holds a term as high: not even one that the caller has never met.
    """
    if lease is not None and lease.owner == owner:
        return lease.term
    if lease is not None and lease.mark != attempt.seize:
        return None
    counter = believed(counter, attempt.least)
    if lease is None and attempt.term and counter == attempt.term:
        return attempt.term
    held = lease.term if lease is not None else 0
    term = 1 + max(attempt.least, counter or 0, held)
    return max(term, clock) if counter is None else term


class Change(Enum):
    """What the end of an attempt changed for this manager. NEW_TERM: it lost its term and has another one."""

    NONE = "none"
    GAINED = "gained"
    LOST = "lost"
    NEW_TERM = "new term"


class Leadership:
    """One manager's view. Times are seconds of its monotonic clock; `ttl` is the life of a lease without renewal.

    `poll` is the pause between two attempts of a standby.
    """

    def __init__(self, owner: str, ttl: float, poll: float) -> None:
        self.owner, self._ttl, self._poll = owner, ttl, poll
        self.term = 0
        """The term in which this manager leads; 0 for a standby."""
        self.leader: Lease | None = None
        """The lease of another manager, as last seen."""
        self._highest = self._gone = 0
        self._ends = self._due = self._seized = float("-inf")
        self._since = float("inf")  # when the leader's last renewal was first seen; inf: none was since a failure

    # ------------------------------------------------------------ questions

    def leads(self, now: float) -> bool:
        """Return whether this manager may grant blocks now."""
        return self.term > 0 and now < self._ends

    def next_attempt(self, now: float) -> float:
        """Return the seconds until the next attempt is due."""
        return max(0.0, self._due - now)

    def attempt(self, now: float) -> Attempt:
        """Return the attempt to make."""
        leader = self.leader
        if leader is None or not (now - self._since >= self._ttl or self._early(leader, now)):
            return Attempt(self.term, self._highest)
        return Attempt(self.term, self._highest, leader.mark)

    def _early(self, leader: Lease, now: float) -> bool:
        """Return whether the lease may be taken at once. Once in each `ttl`: a network can feign the owner's end."""
        return leader.term == self._gone and now - self._seized >= self._ttl

    # ------------------------------------------------------------ events

    def hurry(self) -> None:
        """Make the next attempt due: something has changed."""
        self._due = float("-inf")

    def gone(self, term: int) -> None:
        """Note that the process that took the lease of this term has ended for certain."""
        self._gone = term
        self.hurry()

    def held(self, sent_at: float, term: int) -> Change:
        """Note that Redis gave this manager the lease, in answer to an attempt that was sent at `sent_at`."""
        if self.leader is not None and self._early(self.leader, sent_at):
            self._seized = sent_at
        before, self.term, self.leader = self.term, term, None
        self._highest = max(self._highest, term)
        self._ends = sent_at + (1 - _MARGIN_SHARE) * self._ttl
        self._due = sent_at + _RENEW_SHARE * self._ttl
        if before == term:
            return Change.NONE
        return Change.NEW_TERM if before else Change.GAINED

    def refused(self, now: float, lease: Lease) -> Change:
        """Note that another manager holds the lease. `now` is after the answer."""
        renewed = self.leader is None or self.leader.mark != lease.mark
        if renewed or self._since == float("inf"):
            self._since = now
        self.leader = lease
        self._highest = max(self._highest, lease.term)
        change = self._stand_by(now)
        self._due = now if renewed and self._early(lease, now) else min(self._due, max(now, self._since + self._ttl))
        return change

    def unreachable(self, now: float) -> Change:
        """Note that an attempt has failed: Redis cannot be reached, or refuses every command.

        A leader goes on if it has led up to now. It stands by if its process stood still past the end of its lease.
        A leader tries again soon and a standby late, so that the leader is mostly the first when Redis is back. A
        standby then watches the lease for a whole `ttl` again: the leader could not renew it either. So a standby
        takes the lease of a lost leader one renewal and one `ttl` after Redis is back, or before that.
        """
        pause = _RENEW_SHARE * self._ttl
        if not self.leads(now):
            change = self._stand_by(now)
            self._due, self._since = now + pause, float("inf")
            return change
        self._ends = max(self._ends, now + (1 - _MARGIN_SHARE) * self._ttl)
        self._due = now + min(self._poll, pause / 4)
        return Change.NONE

    def resigned(self, now: float) -> Change:
        """Note that this manager gives the lease up. It takes none again before the next attempt of another one."""
        return self._stand_by(now + self._ttl)

    def _stand_by(self, now: float) -> Change:
        before, self.term = self.term, 0
        self._ends, self._due = float("-inf"), now + self._poll
        return Change.LOST if before else Change.NONE
