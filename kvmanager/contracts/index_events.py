"""Changes of the prefix cache's membership for the index: numbered densely, with snapshots to repair gaps."""

from __future__ import annotations

from dataclasses import dataclass

from common.contracts.types import BlockHash


# `Stored` and `Removed` are not frozen: to make a frozen one takes twice as long, and each seal makes one.
@dataclass(slots=True)
class Stored:
    """The first copy of a hash was registered. `depth` is 0 for the first block of a prompt."""

    number: int
    hash: BlockHash
    depth: int


@dataclass(slots=True)
class Removed:
    """The last copy of a hash was evicted, or another content with the same hash was seen."""

    number: int
    hash: BlockHash
    depth: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """All cached content was forgotten."""

    number: int


IndexEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class IndexSnapshot:
    """The whole membership, parents first, after the event with this number (0: before the first)."""

    number: int
    entries: tuple[tuple[BlockHash, int], ...]
