"""A follower of the events of a ledger's prefix cache, to compare with the cache itself."""

from __future__ import annotations

from collections.abc import Iterable

from common.contracts.types import BlockHash
from kvmanager.contracts.index_events import Cleared, IndexEvent, IndexSnapshot, Removed, Stored


class IndexReplica:
    """A follower's copy of the membership: applies events, notices a gap in their numbers, loads a snapshot then."""

    __slots__ = ("depths", "number")

    def __init__(self) -> None:
        self.number = 0
        self.depths: dict[BlockHash, int] = {}

    def apply(self, events: Iterable[IndexEvent]) -> bool:
        """Apply events in order; older ones are skipped. Return False, at the first gap, when a snapshot is needed."""
        for event in events:
            if event.number <= self.number:
                continue
            if event.number != self.number + 1:
                return False
            self.number = event.number
            match event:
                case Stored():
                    self.depths[event.hash] = event.depth
                case Removed():
                    del self.depths[event.hash]
                case Cleared():
                    self.depths.clear()
        return True

    def load(self, snapshot: IndexSnapshot) -> None:
        """Replace everything by the snapshot."""
        self.number = snapshot.number
        self.depths = dict(snapshot.entries)
