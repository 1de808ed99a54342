"""The order in which requests get a worker: higher priority first, then by arrival."""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class Ticket(Generic[ItemT]):
    """A right to stand in the line. It keeps its arrival number: who lost a worker comes back before later arrivals."""

    __slots__ = ("item", "key", "stand")

    def __init__(self, item: ItemT, priority: int, arrival: int) -> None:
        self.item, self.key = item, (-priority, arrival)
        # Which of its joins counts; None while the ticket is not in the line.
        self.stand: int | None = None


class WaitingLine(Generic[ItemT]):
    """A priority queue from which any ticket may leave at any time, and which it may join again."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int, Ticket[ItemT]]] = []
        self._arrivals, self._stands = itertools.count(), itertools.count()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def ticket(self, item: ItemT, priority: int) -> Ticket[ItemT]:
        """Return a new ticket that does not stand in the line yet."""
        return Ticket(item, priority, next(self._arrivals))

    def join(self, ticket: Ticket[ItemT]) -> None:
        """Stand in the line, at the place that priority and arrival give."""
        if ticket.stand is None:
            ticket.stand = next(self._stands)
            self._length += 1
            heapq.heappush(self._heap, (ticket.key, ticket.stand, ticket))

    def leave(self, ticket: Ticket[ItemT]) -> None:
        """Give up the place; nothing happens when the ticket has none."""
        if ticket.stand is not None:
            ticket.stand = None
            self._length -= 1

    def head(self) -> Ticket[ItemT] | None:
        """Return the ticket that is next, without removing it."""
        while self._heap:
            _, stand, ticket = self._heap[0]
            if ticket.stand == stand:
                return ticket
            heapq.heappop(self._heap)
        return None
