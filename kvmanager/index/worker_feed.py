"""The changes of one attached worker that the index lacks: single ones, or the whole membership."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from common.contracts.index_format import DiscoveredWorker
from kvmanager.contracts.index_events import Cleared, IndexEvent, IndexSnapshot, Stored
from kvmanager.contracts.ports import WorkerEntry
from kvmanager.index.net_changes import NetChanges


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
