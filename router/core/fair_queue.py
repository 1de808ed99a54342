"""The order in which requests get a worker: deficit round robin over tenants, by weight.

    higher priority first  >  tenants below their share  >  deficit round robin  >  within a tenant by what is due first

A tenant in the round earns `weight` sequences a turn, and a request costs its sequences. The head is recomputed at each
call. While a request of 64 sequences waits for places, a request of one sequence of another tenant goes first.

A request is due at its deadline, and after PASSED_SECONDS at the latest (`due_at`). So requests without a deadline go
in the order of their arrival, and nobody passes a request who arrives so long after it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

ItemT = TypeVar("ItemT")
# Weights are fractions: a sum of them may miss a whole number by this much.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Flow:
    """A tenant in the queue; `weight` is above 0."""

    tenant: str = ""
    weight: float = 1.0


ONE_FLOW = Flow()

PASSED_SECONDS = 30.0
"""For so long after its arrival, a request may be passed by later ones that have an earlier deadline."""


def due_at(now: float, deadline: float | None) -> float:
    """Return when a request that arrives now is due."""
    latest = now + PASSED_SECONDS
    return latest if deadline is None else min(deadline, latest)


class Ticket:
    """A place in the order. A request that lost its worker rejoins with its old ticket, before later arrivals.

    `cost` is in sequences; a request that rejoins has paid and costs nothing. `waited`: it was not served at once.
    """

    __slots__ = ("arrival", "cost", "due", "flow", "priority", "queued", "sequences", "waited")

    def __init__(self, priority: int, arrival: int, flow: Flow, sequences: int, due: float = 0.0) -> None:
        self.priority, self.arrival, self.flow, self.due = priority, arrival, flow, due
        self.sequences = self.cost = sequences
        self.queued = self.waited = False

    @property
    def place(self) -> tuple[float, int]:
        """The place among the requests of the same tenant and priority."""
        return self.due, self.arrival


class _Line(Generic[ItemT]):
    """The waiting requests of one tenant and one priority, and the turns that it has saved up."""

    __slots__ = ("deficit", "flow", "items")

    def __init__(self, flow: Flow) -> None:
        self.flow, self.deficit = flow, 0.0
        self.items: list[tuple[tuple[float, int], Ticket, ItemT]] = []

    @property
    def first(self) -> tuple[Ticket, ItemT]:
        _, ticket, item = self.items[0]
        return ticket, item

    def rounds(self) -> int:
        """Return after how many more turns the first request is paid for."""
        missing = self.first[0].cost - self.deficit
        return max(0, math.ceil(missing / self.flow.weight - _ROUNDING))

    def earn(self, rounds: int) -> None:
        """Take so many turns. A tenant that was passed over saves up one request at most."""
        most = max(self.flow.weight, float(self.first[0].cost))
        self.deficit = max(self.deficit, min(self.deficit + rounds * self.flow.weight, most))

    def index(self, ticket: Ticket) -> int:
        return bisect.bisect_left(self.items, ticket.place, key=lambda each: each[0])


class FairQueue(Generic[ItemT]):
    """A queue from which any ticket may leave at any time, and which it may join again."""

    def __init__(self) -> None:
        # By priority, the lines in the order of the round; the first one has its turn next.
        self._rounds: dict[int, dict[str, _Line[ItemT]]] = {}
        self._arrivals = itertools.count()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def flows(self) -> set[Flow]:
        """Return the tenants that wait."""
        return {line.flow for lines in self._rounds.values() for line in lines.values()}

    def ticket(self, priority: int, flow: Flow = ONE_FLOW, sequences: int = 1, due: float = 0.0) -> Ticket:
        """Return a new ticket, which is not in the queue yet."""
        return Ticket(priority, next(self._arrivals), flow, sequences, due)

    def join(self, ticket: Ticket, item: ItemT) -> None:
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
        line.items.insert(line.index(ticket), (ticket.place, ticket, item))

    def leave(self, ticket: Ticket) -> ItemT | None:
        """Remove a ticket without its being served, and return its item; None when it is not in the queue."""
        if not ticket.queued:
            return None
        ticket.queued = False
        self._length -= 1
        lines = self._rounds[ticket.priority]
        line = lines[ticket.flow.tenant]
        _, _, item = line.items.pop(line.index(ticket))
        if not line.items:
            del lines[ticket.flow.tenant]
            if not lines:
                del self._rounds[ticket.priority]
        return item

    def head(self, over_share: Callable[[Ticket], bool] = lambda ticket: False) -> tuple[Ticket, ItemT]:
        """Return the next ticket and its item, without removing them. Tickets `over_share` go after the others.

        The queue must not be empty.
        """
        lines = self._rounds[max(self._rounds)].values()
        return min(lines, key=lambda line: (over_share(line.first[0]), line.rounds())).first

    def leads(self, ticket: Ticket, over_share: Callable[[Ticket], bool] = lambda ticket: False) -> bool:
        """Return whether a ticket that is not in the queue would be its head."""
        highest = max(self._rounds, default=ticket.priority - 1)
        if ticket.priority != highest:
            return ticket.priority > highest
        lines = self._rounds[highest]
        same = lines.get(ticket.flow.tenant)
        if same is not None and same.first[0].due <= ticket.due:
            return False
        own: _Line[Any] = _Line(ticket.flow)
        own.deficit = same.deficit if same is not None else 0.0
        own.items.append((ticket.place, ticket, None))
        # Of lines that are equal the first one has its turn. A tenant that waits keeps its place among them.
        round_: list[_Line[Any]] = [own if line is same else line for line in lines.values()]
        if same is None:
            round_.append(own)
        return min(round_, key=lambda line: (over_share(line.first[0]), line.rounds())) is own

    def before(self, priority: int) -> int:
        """Return how many tickets of this or a higher priority wait."""
        rounds = (lines for each, lines in self._rounds.items() if each >= priority)
        return sum(len(line.items) for lines in rounds for line in lines.values())

    def serve(self, ticket: Ticket) -> None:
        """Remove the head, which got its place: its tenant pays, and each waiting tenant earns the turns until then."""
        lines = self._rounds[ticket.priority]
        line = lines[ticket.flow.tenant]
        rounds = line.rounds()
        for each in lines.values():
            each.earn(rounds)
        line.deficit -= ticket.cost
        lines[ticket.flow.tenant] = lines.pop(ticket.flow.tenant)
        self.leave(ticket)
        ticket.cost = 0
