"""Changes of the prefix cache's membership for the index outside: numbered densely, with snapshots to repair gaps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.types import BlockHash


@dataclass(frozen=True, slots=True)
class Stored:
    """The first copy of a hash came. `depth` is its place in its chain, 0 for the first block."""

    number: int
    hash: BlockHash
    depth: int


@dataclass(frozen=True, slots=True)
class Removed:
    """The last copy of a hash went."""

    number: int
    hash: BlockHash
    depth: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is cached any more."""

    number: int


IndexEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class IndexSnapshot:
    """The whole membership, parents first, after the event with this number (0: before the first)."""

    number: int
    entries: tuple[tuple[BlockHash, int], ...]


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
