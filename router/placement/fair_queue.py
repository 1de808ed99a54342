"""The order in which requests get a worker: deficit round robin over tenants, by weight, and by age in between.

    who has waited for long, every eighth time (`common/contracts/turns.py`)
    >  higher priority first  >  tenants not over their share  >  deficit round robin over tenants
    >  within a tenant by turns of its sessions  >  within a session by what is due

A tenant in the round earns `weight` sequences a turn, and a request costs its sequences. Turns are fractions: next is
the request that is paid for after the fewest. So each tenant that always waits gets sequences by its weight, exactly,
whatever its requests cost. This is deficit round robin (Shreedhar and Varghese 1995) with a quantum that goes to 0. In
terms of virtual time it is self-clocked fair queueing (Golestani 1994), where a turn is a unit of time. The head is
recomputed at each call. While a request of 64 sequences waits for slots, a request of one sequence of another tenant
goes first.

Sessions of a tenant take turns in the same way, with equal weights: next is the session with the least virtual time
after its first request. A session that begins to wait starts at the virtual time of the one served last, so it passes
nobody who has waited for a turn, and what it had before is forgotten. Requests without a session keep their own order,
and have as many turns as there are of them: each counts as a session.

A request is due at its deadline, and after PASSED_SECONDS at the latest (`due_at`). So requests without a deadline go
in the order of their arrival, and nobody of their session passes a request who arrives so long after it.

Whoever is next by age and lacks slots stays next until it has them, while its tenant is below its share. Those that
have slots end and nobody gets one before it, so it is placed when its worker is empty at the latest. The others wait
no longer than that. Turns by age go by sequences as weights do: an old request of 16 sequences has one after 112 that
were served in the order of the queue.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from common.contracts.clock import Clock
from common.contracts.turns import DEFAULT_MAX_WAIT, IN_TURN, choose_by_age, is_old

ItemT = TypeVar("ItemT")
# Decimals of turns that count: sums of fractions are equal up to these, and then the first in the round has its turn.
_DECIMALS = 9


@dataclass(frozen=True, slots=True)
class Flow:
    """A tenant in the queue; `weight` is above 0."""

    tenant: str = ""
    weight: float = 1.0


ONE_FLOW = Flow()

PASSED_SECONDS = 30.0
"""For so long after its arrival, a request may be passed by later ones that have an earlier deadline."""

PASSED_LOAD = 4 / 3
"""What a tenant holds over its share when requests of others pass its next one, which lacks slots."""


def due_at(now: float, deadline: float | None) -> float:
    """Return when a request that arrives now is due."""
    latest = now + PASSED_SECONDS
    return latest if deadline is None else min(deadline, latest)


class Ticket:
    """A place in the order. A request that lost its worker rejoins with its old ticket, before later arrivals.

    `cost` is in sequences; a request that rejoins has paid and costs nothing. `waited`: it was not served at once.
    `waited_s` are the seconds in the queue before it last left, `since` is when it would have joined if it had waited
    for them without a break. `by_age`: its age makes it the head. `session` is one of its tenant, "" for none.
    """

    __slots__ = (
        "arrival", "by_age", "cost", "due", "flow", "priority", "queued", "sequences", "session", "since", "waited",
        "waited_s",
    )  # fmt: skip

    def __init__(
        self, priority: int, arrival: int, flow: Flow, sequences: int, due: float = 0.0, session: str = ""
    ) -> None:
        self.priority, self.arrival, self.flow, self.due, self.session = priority, arrival, flow, due, session
        self.sequences = self.cost = sequences
        self.queued = self.waited = self.by_age = False
        self.since = self.waited_s = 0.0

    @property
    def place(self) -> tuple[float, int]:
        """The place among the requests of the same tenant, priority and session."""
        return self.due, self.arrival

    @property
    def age(self) -> tuple[float, int]:
        """The place among the requests of the same tenant by age, the oldest one first."""
        return self.since, self.arrival


class _Session(Generic[ItemT]):
    """The waiting requests of one session, or all those of a tenant that have none.

    `start` is the virtual time from which its first request counts. Of those whose first request ends at the same time,
    the lowest `stamp` has its turn: the session that has waited longest for one.
    """

    __slots__ = ("has_session", "items", "stamp", "start")

    def __init__(self, has_session: bool, start: float, stamp: int) -> None:
        self.has_session, self.start, self.stamp = has_session, start, stamp
        self.items: list[tuple[tuple[float, int], Ticket, ItemT]] = []

    @property
    def rank(self) -> tuple[float, int]:
        """The virtual time after its first request, and the stamp: the least one is next."""
        return self.start + self.turns(self.items[0][1].cost, len(self.items)), self.stamp

    def turns(self, cost: int, waiting: int) -> float:
        """Return the virtual time that a request takes while so many wait."""
        return cost if self.has_session else cost / waiting

    def index(self, ticket: Ticket) -> int:
        return bisect.bisect_left(self.items, ticket.place, key=lambda each: each[0])


class _Line(Generic[ItemT]):
    """The waiting requests of one tenant and one priority by session, and the turns that the tenant has saved up."""

    __slots__ = ("_now", "_ranks", "_sessions", "_stamps", "deficit", "flow")

    def __init__(self, flow: Flow) -> None:
        self.flow, self.deficit = flow, 0.0
        # Only sessions that wait: a stranger who sends a new id each time leaves nothing.
        self._sessions: dict[str, _Session[ItemT]] = {}
        # The rank and the session of each, in the order of their turns.
        self._ranks: list[tuple[tuple[float, int], str]] = []
        self._now, self._stamps = 0.0, itertools.count()

    def __bool__(self) -> bool:
        return bool(self._sessions)

    def __iter__(self) -> Iterator[tuple[Ticket, ItemT]]:
        return ((ticket, item) for mine in self._sessions.values() for _, ticket, item in mine.items)

    @property
    def first(self) -> tuple[Ticket, ItemT]:
        _, ticket, item = self._sessions[self._ranks[0][1]].items[0]
        return ticket, item

    def item_of(self, ticket: Ticket) -> ItemT:
        mine = self._sessions[ticket.session]
        return mine.items[mine.index(ticket)][2]

    def join(self, ticket: Ticket, item: ItemT) -> None:
        mine = self._sessions.get(ticket.session)
        if mine is None:
            mine = _Session[ItemT](bool(ticket.session), self._now, next(self._stamps))
            self._sessions[ticket.session] = mine
        else:
            self._unrank(ticket.session, mine)
        mine.items.insert(mine.index(ticket), (ticket.place, ticket, item))
        self._rank(ticket.session, mine)

    def leave(self, ticket: Ticket) -> ItemT:
        mine = self._sessions[ticket.session]
        self._unrank(ticket.session, mine)
        _, _, item = mine.items.pop(mine.index(ticket))
        if mine.items:
            self._rank(ticket.session, mine)
        else:
            del self._sessions[ticket.session]
        return item

    def take_turn(self, ticket: Ticket) -> None:
        """Count the turn of a request that is served, before it leaves. One by age does not move the virtual time."""
        mine = self._sessions[ticket.session]
        if ticket is self.first[0]:
            self._now = mine.rank[0]
        self._unrank(ticket.session, mine)
        mine.start += mine.turns(ticket.cost, len(mine.items))
        mine.stamp = next(self._stamps)
        self._rank(ticket.session, mine)

    def would_lead(self, ticket: Ticket) -> bool:
        """Return whether a ticket that is not here would be the first one."""
        mine = self._sessions.get(ticket.session)
        if mine is None:
            return self._now + ticket.cost < self._ranks[0][0][0]
        if mine.items[0][1].due <= ticket.due:
            return False
        end = mine.start + mine.turns(ticket.cost, len(mine.items) + 1)
        first_of_others = next((rank for rank, session in self._ranks[:2] if session != ticket.session), None)
        return first_of_others is None or (end, mine.stamp) < first_of_others

    def _rank(self, session: str, mine: _Session[ItemT]) -> None:
        bisect.insort(self._ranks, (mine.rank, session))

    def _unrank(self, session: str, mine: _Session[ItemT]) -> None:
        del self._ranks[bisect.bisect_left(self._ranks, (mine.rank, session))]

    def turns_until(self, ticket: Ticket) -> float:
        """Return after how many more turns a request is paid for."""
        return max(0.0, ticket.cost - self.deficit) / self.flow.weight

    def earn(self, turns: float, passed_by: float) -> None:
        """Take so many turns, while a request of another tenant is served that costs `passed_by` turns.

        A tenant that is passed over saves up one request at most: its own, or the one that passes it.
        """
        most = max(float(self.first[0].cost), passed_by * self.flow.weight)
        self.deficit = max(self.deficit, min(self.deficit + turns * self.flow.weight, most))

    def pay(self, ticket: Ticket) -> None:
        """Pay for a request with what was saved, and with the turns until it is served."""
        self.deficit = max(0.0, self.deficit - ticket.cost)


class Held(Protocol):
    """What tenants hold of the slots at workers."""

    def load(self, flow: Flow) -> float:
        """Return the slots of a tenant over its share of them: 1 is exactly the share."""

    def is_over(self, flow: Flow, largest: int) -> bool:
        """Return whether others go before a tenant while requests of up to so many sequences wait."""

    def is_within(self, ticket: Ticket) -> bool:
        """Return whether a tenant holds no more than its share with this request too."""


class _NothingHeld:
    def load(self, flow: Flow) -> float:
        return 0.0

    def is_over(self, flow: Flow, largest: int) -> bool:
        return False

    def is_within(self, ticket: Ticket) -> bool:
        return True


_NOTHING: Final = _NothingHeld()


class FairQueue(Generic[ItemT]):
    """A queue from which any ticket may leave at any time, and which it may join again."""

    def __init__(self, clock: Clock, max_wait: float = DEFAULT_MAX_WAIT) -> None:
        """Let who has waited for `max_wait` seconds go by age; 0: nobody."""
        self._clock, self._max_wait = clock, max_wait
        # By priority, the lines in the order of the round; the first one has its turn next.
        self._rounds: dict[int, dict[str, _Line[ItemT]]] = {}
        # By tenant, the oldest first.
        self._ages: dict[str, list[Ticket]] = {}
        # Sequences that were served in the order of the queue since the last request by age.
        self._in_turn = 0
        self._arrivals = itertools.count()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def flows(self) -> set[Flow]:
        """Return the tenants that wait."""
        return {line.flow for lines in self._rounds.values() for line in lines.values()}

    def ticket(
        self, priority: int, flow: Flow = ONE_FLOW, sequences: int = 1, due: float = 0.0, session: str = ""
    ) -> Ticket:
        """Return a new ticket, which is not in the queue yet."""
        return Ticket(priority, next(self._arrivals), flow, sequences, due, session)

    def join_queue(self, ticket: Ticket, item: ItemT) -> None:
        """Queue an item at the place of its ticket; a ticket in the queue keeps its item."""
        if ticket.queued:
            return
        ticket.queued = True
        self._length += 1
        lines = self._rounds.setdefault(ticket.priority, {})
        line = lines.get(ticket.flow.tenant)
        if line is None:
            line = lines[ticket.flow.tenant] = _Line(ticket.flow)
        line.flow = ticket.flow
        line.join(ticket, item)
        ticket.since = self._clock.monotonic() - ticket.waited_s
        bisect.insort(self._ages.setdefault(ticket.flow.tenant, []), ticket, key=lambda each: each.age)

    def leave_queue(self, ticket: Ticket) -> ItemT | None:
        """Remove a ticket without its being served, and return its item; None when it is not in the queue."""
        if not ticket.queued:
            return None
        ticket.queued = False
        self._length -= 1
        lines = self._rounds[ticket.priority]
        line = lines[ticket.flow.tenant]
        item = line.leave(ticket)
        if not line:
            del lines[ticket.flow.tenant]
            if not lines:
                del self._rounds[ticket.priority]
        self._forget_age(ticket)
        return item

    def _forget_age(self, ticket: Ticket) -> None:
        ages = self._ages[ticket.flow.tenant]
        del ages[bisect.bisect_left(ages, ticket.age, key=lambda each: each.age)]
        if not ages:
            del self._ages[ticket.flow.tenant]
        ticket.waited_s = self._clock.monotonic() - ticket.since

    def __iter__(self) -> Iterator[tuple[Ticket, ItemT]]:
        """Iterate over all tickets and their items, in no order that counts."""
        return (each for lines in self._rounds.values() for line in lines.values() for each in line)

    def head(self, held: Held = _NOTHING, by_age: bool = True) -> tuple[Ticket, ItemT]:
        """Return the next ticket and its item, without removing them.

        Of a priority, tenants that hold more than their share go after the others. The queue must not be empty. Not
        `by_age`: in the order of the queue, also where it is the turn of age.
        """
        old = self._next_by_age(held, [each[0] for each in self._ages.values()]) if by_age else None
        if old is None:
            lines = self._rounds[max(self._rounds)].values()
            ticket, item = _next_in_round(lines, held).first
        else:
            ticket, item = old, self._rounds[old.priority][old.flow.tenant].item_of(old)
        ticket.by_age = old is not None
        return ticket, item

    def passing(self, head: Ticket, held: Held = _NOTHING) -> tuple[Ticket, ItemT] | None:
        """Return who goes before a head that lacks slots, as `_passing` has it.

        Nobody passes one that goes by age: its tenant is below its share, or waits alone.
        """
        line = _passing(self._rounds[head.priority].values(), head.flow, held)
        if line is None:
            return None
        line.first[0].by_age = False
        return line.first

    def _next_by_age(self, held: Held, oldest: Sequence[Ticket]) -> Ticket | None:
        """Return who is next by age, of the oldest ticket of each tenant; None where it is not the turn of age."""
        if self._in_turn < IN_TURN:
            return None
        now = self._clock.monotonic()
        old = choose_by_age(
            oldest,
            lambda ticket: ticket.queued and is_old(now - ticket.since, self._max_wait),
            lambda ticket: held.load(ticket.flow),
        )
        return old if old is not None and self._in_turn >= IN_TURN * old.sequences else None

    def leads(self, ticket: Ticket, held: Held = _NOTHING) -> bool:
        """Return whether a ticket that is not in the queue would be its head, or pass it."""
        oldest = self._ages if ticket.flow.tenant in self._ages else self._ages | {ticket.flow.tenant: [ticket]}
        if self._next_by_age(held, [each[0] for each in oldest.values()]) is not None:
            return False
        highest = max(self._rounds, default=ticket.priority - 1)
        if ticket.priority != highest:
            return ticket.priority > highest
        lines = self._rounds[highest]
        same = lines.get(ticket.flow.tenant)
        if same is not None and not same.would_lead(ticket):
            return False
        own: _Line[Any] = _Line(ticket.flow)
        own.deficit = same.deficit if same is not None else 0.0
        own.join(ticket, None)
        # Of lines that are equal the first one has its turn. A tenant that waits keeps its place among them.
        round_: list[_Line[Any]] = [own if line is same else line for line in lines.values()]
        if same is None:
            round_.append(own)
        first = _next_in_round(round_, held)
        return first is own or _passing(round_, first.flow, held) is own

    def before(self, priority: int) -> int:
        """Return how many tickets are before a new one of this priority: those of this or a higher one, and old ones.

        One of eight is by age, as far as old tickets of lower priorities wait.
        """
        tickets = [ticket for ages in self._ages.values() for ticket in ages]
        ahead = sum(ticket.priority >= priority for ticket in tickets)
        now = self._clock.monotonic()
        old = sum(ticket.priority < priority and is_old(now - ticket.since, self._max_wait) for ticket in tickets)
        return ahead + min(old, (min(self._in_turn, IN_TURN) + ahead) // IN_TURN)

    def serve_ticket(self, ticket: Ticket) -> None:
        """Remove the head, which got its slots: its tenant pays, and each waiting tenant earns the turns until then."""
        lines = self._rounds[ticket.priority]
        line = lines[ticket.flow.tenant]
        turns, passed_by = line.turns_until(ticket), ticket.cost / line.flow.weight
        for each in lines.values():
            if each is not line:
                each.earn(turns, passed_by)
        line.pay(ticket)
        line.take_turn(ticket)
        self._in_turn = 0 if ticket.by_age else self._in_turn + ticket.sequences
        lines[ticket.flow.tenant] = lines.pop(ticket.flow.tenant)
        self.leave_queue(ticket)
        ticket.cost = 0


def _next_in_round(round_: Collection[_Line[Any]], held: Held) -> _Line[Any]:
    """Return the line of one priority that has its turn."""
    largest = max(line.first[0].sequences for line in round_)
    return min(round_, key=lambda line: (held.is_over(line.flow, largest), _turns(line)))


def _passing(round_: Collection[_Line[Any]], head: Flow, held: Held) -> _Line[Any] | None:
    """Return the line whose request goes before the head of one priority, which lacks slots; None: nobody does.

    It stays within its tenant's share, and the head's tenant holds PASSED_LOAD of its own. So those who hold slots of
    others do not make these wait until they give some back.
    """
    if held.load(head) < PASSED_LOAD:
        return None
    within = [line for line in round_ if line.flow.tenant != head.tenant and held.is_within(line.first[0])]
    return min(within, key=_turns, default=None)


def _turns(line: _Line[Any]) -> float:
    return round(line.turns_until(line.first[0]), _DECIMALS)
