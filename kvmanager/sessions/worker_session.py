"""One worker's live session: its ledger, and what is fed from it once the worker has its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from common.errors import ProtocolViolation
from common.lease import Attach, AttachOk, GrantBatch, Inventory, Report
from common.types import Decision
from kvmanager.core.index_events import IndexEvent
from kvmanager.core.manager import Manager, Session
from kvmanager.index.worker_feed import WorkerFeed
from kvmanager.index.writer import IndexWriter
from kvmanager.sessions.reserve_spans import ReserveSpans


class DecisionSink(Protocol):
    """Where decision records go."""

    def record(self, decision: Decision) -> None:
        """Keep a record; must not block."""
        ...


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What a message of the worker caused besides the answer to it."""

    heard: Report | Inventory
    batch: GrantBatch | None
    events: tuple[IndexEvent, ...]
    decisions: tuple[Decision, ...]


class WorkerSession:
    """Serves one session: each message is answered at once, and what else follows from it is settled later."""

    def __init__(
        self,
        manager: Manager,
        session: Session,
        index: IndexWriter,
        sink: DecisionSink,
        spans: ReserveSpans,
    ) -> None:
        self._manager, self.session, self._index = manager, session, index
        self._sink, self._spans = sink, spans
        self._feed: WorkerFeed | None = None

    @property
    def attach(self) -> Attach:
        return self.session.attach

    @property
    def current(self) -> bool:
        """Whether messages of this session still count."""
        return self._manager.current(self.session)

    def complete(self, inventory: Inventory) -> tuple[AttachOk, Aftermath]:
        """Rebuild from the inventory and return the answer, and the first batch. Raises ProtocolViolation."""
        if self.session.ready:
            raise ProtocolViolation("a session has one inventory")
        ok = self._manager.complete(self.session, inventory)
        return ok, self._scheduled(inventory)

    def report(self, report: Report) -> Aftermath:
        """Apply a report and schedule. Raises ProtocolViolation."""
        if not self.session.ready:
            raise ProtocolViolation("a report came before the inventory was complete")
        self.session.ledger.apply(report)
        return self._scheduled(report)

    def _scheduled(self, heard: Report | Inventory) -> Aftermath:
        ledger = self.session.ledger
        batch = ledger.schedule()
        return Aftermath(heard, batch, ledger.drain_index_events(), ledger.drain_decisions())

    def settle(self, aftermath: Aftermath) -> None:
        """Hand on what followed; called after the answer has left."""
        for decision in aftermath.decisions:
            self._sink.record(decision)
        if isinstance(aftermath.heard, Inventory):
            self._spans.opened(aftermath.heard, aftermath.batch, aftermath.decisions)
            if self.current:
                self._feed = self._index.open_feed(self.attach, self.session.ledger.index_snapshot)
        else:
            self._spans.reported(aftermath.heard, aftermath.batch, aftermath.decisions)
        if self._feed is not None and aftermath.events:
            self._index.push(self._feed, aftermath.events)

    def close(self) -> None:
        """Forget the ledger; whatever the worker holds, it will tell in its next inventory."""
        self._manager.detach(self.session)
        self._spans.close()
        if self._feed is not None:
            self._index.close_feed(self._feed)
            self._feed = None
