"""Whose piece of work is next in a thread that tenants share: fair queueing by bytes and weight, in virtual time.

A piece starts where its tenant's last one ended, and ends its bytes over the tenant's weight later. Next is the piece
that starts first. So tenants that always have work get bytes by their weights, however many pieces wait and whatever
their sizes are. A tenant that comes after a pause starts where the piece in progress ends. Of those that start at the
same time who was served last goes last. So it waits for the piece in progress, and not for another one of that tenant,
however large its own piece is; and for one piece at most of each other tenant that always has work.

This is self-clocked fair queueing (Golestani 1994), as in `fair_queue.py`, but by where pieces start and not by where
they end: a large piece is not passed by many small ones.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from router.placement.fair_queue import Flow

ItemT = TypeVar("ItemT")
# Tenants without work whose last end is remembered, when it is looked for the first time which of them still counts.
_FIRST_LOOK: Final = 256


@dataclass(slots=True)
class _Line(Generic[ItemT]):
    """The pieces of one tenant, each with its bytes, and where the first of them starts.

    `served` is the number of the tenant's last piece among all that were taken; 0 for none since it came.
    """

    start: float
    weight: float
    served: int = 0
    waiting: int = 0
    pieces: OrderedDict[ItemT, int] = field(default_factory=OrderedDict)


class ByteTurns(Generic[ItemT]):
    """Pieces of work by tenant: in the order of arrival for one, by turns for all. Pieces are hashed and distinct."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line[ItemT]] = {}
        # Where the last pieces of tenants end that have no more.
        self._ends: dict[str, float] = {}
        # Where the piece ends that was taken last, or an earlier one that ends later.
        self._now = 0.0
        self._taken, self._next_look = 0, _FIRST_LOOK

    def __len__(self) -> int:
        """Return the number of pieces."""
        return sum(len(line.pieces) for line in self._lines.values())

    @property
    def remembered(self) -> int:
        """Tenants without work of whom something is kept."""
        return len(self._ends)

    def waiting(self, tenant: str) -> int:
        """Return the bytes of a tenant's pieces."""
        line = self._lines.get(tenant)
        return 0 if line is None else line.waiting

    def put(self, flow: Flow, size: int, piece: ItemT) -> None:
        """Add a piece of so many bytes."""
        line = self._lines.get(flow.tenant)
        if line is None:
            start = max(self._now, self._ends.pop(flow.tenant, self._now))
            line = self._lines[flow.tenant] = _Line(start, flow.weight)
        line.weight = flow.weight
        line.pieces[piece] = size
        line.waiting += size

    def take(self) -> ItemT | None:
        """Return the next piece; None when there is none."""
        if not self._lines:
            return None
        tenant, line = min(self._lines.items(), key=lambda each: (each[1].start, each[1].served))
        piece, size = line.pieces.popitem(last=False)
        line.start += size / line.weight
        line.waiting -= size
        self._now, self._taken = max(self._now, line.start), self._taken + 1
        line.served = self._taken
        self._drop_if_empty(tenant, line)
        return piece

    def withdraw(self, tenant: str, piece: ItemT) -> None:
        """Take back a piece, which costs its tenant nothing then; nothing happens when it is not here."""
        line = self._lines.get(tenant)
        if line is not None and piece in line.pieces:
            line.waiting -= line.pieces.pop(piece)
            self._drop_if_empty(tenant, line)

    def rest(self) -> None:
        """Forget what was done, if no piece is here: the thread has none either."""
        if not self._lines:
            self._ends.clear()
            self._now, self._taken, self._next_look = 0.0, 0, _FIRST_LOOK

    def _drop_if_empty(self, tenant: str, line: _Line[ItemT]) -> None:
        if line.pieces:
            return
        del self._lines[tenant]
        self._ends[tenant] = line.start
        if len(self._ends) >= self._next_look:
            self._ends = {name: end for name, end in self._ends.items() if end > self._now}
            self._next_look = max(_FIRST_LOOK, 2 * len(self._ends))
