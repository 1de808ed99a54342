"""Changes of the prefix cache's membership for the index outside: numbered densely, with snapshots to repair gaps."""

from __future__ import annotations

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
