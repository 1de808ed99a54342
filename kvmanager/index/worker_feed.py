"""The changes of one attached worker that the index lacks: single ones, or the whole membership."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain, islice

from common.contracts.index_format import DiscoveredWorker
from common.contracts.types import BlockHash
from kvmanager.contracts.index_events import Cleared, IndexEvent, IndexSnapshot, Stored
from kvmanager.contracts.ports import IndexCall, WorkerEntry


# The net effect of many membership events on the prefix index, in an order that keeps the index prefix-closed.
# A pending change is ADDED when the index did not have the hash before, and KEPT when it may (a removal must be
# sent then). Else it is REMOVED. An addition that is removed again before it was sent leaves nothing.
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


class WorkerFeed:
    """Takes membership events in, gives changes out. Bounded: beyond `limit` hashes it falls back to publishing all.

    `slot` and `generation` are what the entries in the index are made of; a new generation voids all earlier ones.
    `session` is the worker's count of attaches. `elsewhere` is set while another group publishes this worker.
    """

    def __init__(
        self,
        worker: DiscoveredWorker,
        snapshot: Callable[[], IndexSnapshot],
        draw_generation: Callable[[], int],
        limit: int,
        session: int = 0,
    ) -> None:
        self.worker, self.session = worker, session
        self.slot: int | None = None
        self.generation = 0
        self.changes = NetChanges()
        self.republish = True
        self.closed = False
        self.elsewhere = False
        self._snapshot, self._draw, self._limit = snapshot, draw_generation, limit
        self._number = self._taken = 0

    @property
    def behind(self) -> int:
        """Hashes whose change is not in the index yet; the whole membership counts as one."""
        return len(self.changes) + self._taken + int(self.republish)

    def push(self, events: Iterable[IndexEvent]) -> None:
        """Take events in their order; a gap in their numbers, a clear or an overflow leads to publishing all."""
        if self.republish:
            return
        store, remove, number = self.changes.store, self.changes.remove, self._number
        for event in events:
            if event.number <= number:
                continue
            if event.number != number + 1 or isinstance(event, Cleared):
                self.publish_all()
                return
            number += 1
            if isinstance(event, Stored):
                store(event.hash, event.depth)
            else:
                remove(event.hash, event.depth)
        self._number = number
        if len(self.changes) > self._limit:
            self.publish_all()

    def publish_all(self) -> None:
        """Forget the changes: the whole membership is to be published under a new generation."""
        self.republish = True
        self.changes = NetChanges()

    def lose_slot(self) -> None:
        """Forget the slot, which another group has taken for this worker or another one, or which a wipe has freed."""
        self.slot = None
        self.publish_all()

    def new_entry(self) -> WorkerEntry:
        """Draw a generation and return how the worker is to be registered; then call `begin`."""
        worker = self.worker
        return WorkerEntry(worker.worker_id, worker.incarnation, worker.address, self._draw(), self.session)

    def begin(self, slot: int | None, generation: int) -> None:
        """Make every member a pending change of a new generation, which is registered in the index by now."""
        self.slot, self.generation, self.elsewhere = slot, generation, False
        snapshot = self._snapshot()
        self._number = snapshot.number
        self.republish, self.changes = False, NetChanges()
        self.changes.refresh(snapshot.entries)

    def refresh(self) -> None:
        """Make every member a pending change, so that its entry lives on. Events still in flight are applied too."""
        self.changes.refresh(self._snapshot().entries)

    def take(self) -> NetChanges:
        """Return the pending changes and start again; `put_back` those that could not be sent."""
        changes, self.changes = self.changes, NetChanges()
        self._taken = len(changes)
        return changes

    def put_back(self, unsent: NetChanges) -> None:
        """Put changes back that were not sent, or that the index may lack, under those that came since."""
        self._taken = 0
        if len(unsent) and not self.republish:
            self.changes = unsent.merged_under(self.changes)
