"""The net effect of many membership events on the prefix index, in an order that keeps the index prefix-closed.

A pending change is ADDED when the index did not have the hash before, and KEPT when it may (a removal must be sent
then). Else it is REMOVED. An addition that is removed again before it was sent leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain, islice

from common.contracts.types import BlockHash
from kvmanager.contracts.ports import IndexCall


class _Kind(Enum):
    ADDED = auto()
    KEPT = auto()
    REMOVED = auto()


@dataclass(slots=True)
class NetChanges:
    """Changes not yet in the index, one a hash."""

    _pending: dict[BlockHash, tuple[_Kind, int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._pending)

    def store(self, block_hash: BlockHash, depth: int) -> None:
        before = self._pending.get(block_hash)
        self._pending[block_hash] = (_Kind.ADDED if before is None else _Kind.KEPT, depth)

    def remove(self, block_hash: BlockHash, depth: int) -> None:
        before = self._pending.pop(block_hash, None)
        if before is None or before[0] is not _Kind.ADDED:
            self._pending[block_hash] = (_Kind.REMOVED, depth)

    def refresh(self, entries: Iterable[tuple[BlockHash, int]]) -> None:
        """Note all members (hash, depth), to be written again."""
        for block_hash, depth in entries:
            self._pending[block_hash] = (_Kind.KEPT, depth)

    def calls(self, limit: int) -> Iterator[IndexCall]:
        """Yield calls of at most `limit` hashes: removes deepest first, then adds shallowest first.

        The hashes of a depth are sorted when their turn comes: an attach may have a million changes.
        """
        removes: dict[int, list[BlockHash]] = {}
        adds: dict[int, list[BlockHash]] = {}
        for block_hash, (kind, depth) in self._pending.items():
            (removes if kind is _Kind.REMOVED else adds).setdefault(depth, []).append(block_hash)
        order = chain(
            ((True, block_hash) for depth in sorted(removes, reverse=True) for block_hash in sorted(removes[depth])),
            ((False, block_hash) for depth in sorted(adds) for block_hash in sorted(adds[depth])),
        )
        while part := list(islice(order, limit)):
            yield IndexCall(
                tuple(block_hash for is_remove, block_hash in part if is_remove),
                tuple(block_hash for is_remove, block_hash in part if not is_remove),
            )

    def sent(self, call: IndexCall) -> None:
        """Drop the changes that a call has written."""
        for block_hash in (*call.removes, *call.adds):
            del self._pending[block_hash]

    def merged_under(self, newer: NetChanges) -> NetChanges:
        """Return these changes, which the index may or may not have, followed by newer ones."""
        merged = dict(self._pending)
        for block_hash, (kind, depth) in merged.items():
            if kind is _Kind.ADDED:
                merged[block_hash] = (_Kind.KEPT, depth)
        for block_hash, (kind, depth) in newer._pending.items():
            merged[block_hash] = (_Kind.KEPT if kind is _Kind.ADDED and block_hash in merged else kind, depth)
        return NetChanges(merged)
