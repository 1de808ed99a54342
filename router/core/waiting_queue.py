"""The order in which requests get a worker: higher priority first, then by arrival."""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class Ticket:
    """A place in the order. A request that lost its worker rejoins with its old ticket, before later arrivals."""

    __slots__ = ("entry", "key")

    def __init__(self, priority: int, arrival: int) -> None:
        self.key = (-priority, arrival)
        # The number of the join that counts; None while the ticket is not in the queue.
        self.entry: int | None = None


class WaitingQueue(Generic[ItemT]):
    """A priority queue from which any ticket may leave at any time, and which it may join again."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int, Ticket, ItemT]] = []
        self._arrivals, self._entries = itertools.count(), itertools.count()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def ticket(self, priority: int) -> Ticket:
        """Return a new ticket, which is not in the queue yet."""
        return Ticket(priority, next(self._arrivals))

    def join(self, ticket: Ticket, item: ItemT) -> None:
        """Queue an item at the place of its ticket; a ticket in the queue keeps its item."""
        if ticket.entry is None:
            ticket.entry = next(self._entries)
            self._length += 1
            heapq.heappush(self._heap, (ticket.key, ticket.entry, ticket, item))

    def leave(self, ticket: Ticket) -> None:
        """Remove a ticket; nothing happens when it is not in the queue."""
        if ticket.entry is not None:
            ticket.entry = None
            self._length -= 1

    def head(self) -> tuple[Ticket, ItemT] | None:
        """Return the first ticket and its item, without removing them."""
        while self._heap:
            _, entry, ticket, item = self._heap[0]
            if ticket.entry == entry:
                return ticket, item
            heapq.heappop(self._heap)
        return None
