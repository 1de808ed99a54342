"""One attached worker: its messages change the ledger; index, decisions and spans follow after the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from time import time_ns
from typing import Final, NamedTuple, Protocol

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import Attach, AttachOk, GrantBatch, Inventory, Report
from common.contracts.types import Decision
from kvmanager.contracts.index_events import IndexEvent
from kvmanager.index.worker_feed import WorkerFeed
from kvmanager.index.writer import IndexWriter
from kvmanager.ledger.registry import WorkerRegistration, WorkerRegistry
from kvmanager.sessions.kv_events import KvEventHub
from kvmanager.sessions.reserve_spans import ReserveSpans

ADMISSIONS_A_BATCH: Final = 32
"""The worker begins with these while the others are decided, and other workers are served in between."""


class DecisionSink(Protocol):
    def record(self, decision: Decision) -> None:
        """Keep a record; must not block."""
        ...


class Effects(NamedTuple):
    """What a message of the worker caused, and the message itself."""

    message: Report | Inventory
    batch: GrantBatch | None
    events: tuple[IndexEvent, ...]
    decisions: tuple[Decision, ...]
    came_ns: int  # the wall clock before any of it


class AttachedWorker:
    """Serves one session. Each message is answered at once; its other effects are settled later."""

    def __init__(
        self,
        manager: WorkerRegistry,
        registration: WorkerRegistration,
        index: IndexWriter,
        sink: DecisionSink,
        spans: ReserveSpans,
        events: KvEventHub,
    ) -> None:
        self._manager, self.registration, self._index = manager, registration, index
        self._sink, self._spans, self._events = sink, spans, events
        self._feed: WorkerFeed | None = None
        self._reset_settled = asyncio.Event()

    @property
    def attach(self) -> Attach:
        return self.registration.attach

    @property
    def is_current(self) -> bool:
        return self._manager.is_current(self.registration)

    def rebuild_in_steps(self, inventory: Inventory) -> Iterator[None]:
        """Rebuild from the inventory, in steps between which others are served. Raises ProtocolViolation."""
        if self.registration.ready:
            raise ProtocolViolation("a session has one inventory")
        return self._manager.rebuild_in_steps(self.registration, inventory)

    def complete(self, inventory: Inventory) -> tuple[AttachOk, Effects]:
        """Return the answer to an inventory whose rebuild is done, and the first batch."""
        came_ns = time_ns()
        ok = self._manager.finish_rebuild(self.registration)
        return ok, self._scheduled(inventory, came_ns)

    def apply_report(self, report: Report) -> Effects:
        """Apply a report and schedule; `has_more` says whether that was all. Raises ProtocolViolation."""
        if not self.registration.ready:
            raise ProtocolViolation("a report came before the inventory was complete")
        ledger, came_ns = self.registration.ledger, time_ns()
        ledger.apply_report(report)
        if report.reset and not ledger.reset_pending:
            self._reset_settled.set()
        return self._scheduled(report, came_ns, ADMISSIONS_A_BATCH)

    @property
    def has_more(self) -> bool:
        """Whether `continue_schedule` is to be called."""
        return self.registration.ledger.has_more

    def continue_schedule(self) -> Effects:
        """Return what the next batch for a report causes."""
        return self._scheduled(Report(), time_ns(), ADMISSIONS_A_BATCH)

    def order_reset(self) -> Effects:
        """Return what a reset of the ledger's cache caused, with the batch that orders it."""
        self._reset_settled.clear()
        return self._scheduled(Report(), time_ns())

    def order_ahead(self) -> Effects:
        """Return the batch that orders what is to come although nobody waits for it, if it is its turn."""
        return self._scheduled(Report(), time_ns(), ADMISSIONS_A_BATCH)

    def break_stall(self, why: str) -> Effects | None:
        """Return the batch that orders a preemption because the ledger stands still; None where none helps."""
        ledger, came_ns = self.registration.ledger, time_ns()
        batch = ledger.break_stall(why)
        if batch is None:
            return None
        return Effects(Report(), batch, ledger.drain_index_events(), ledger.drain_decisions(), came_ns)

    async def reset_settled(self) -> None:
        """Return once the worker has confirmed the reset, or its session is over."""
        await self._reset_settled.wait()

    def _scheduled(self, message: Report | Inventory, came_ns: int, most: int | None = None) -> Effects:
        ledger = self.registration.ledger
        batch = ledger.schedule(most)
        return Effects(message, batch, ledger.drain_index_events(), ledger.drain_decisions(), came_ns)

    def settle_effects(self, effects: Effects) -> None:
        """Pass on the other effects of a message. Call it after the answer has left."""
        for decision in effects.decisions:
            self._sink.record(decision)
        if isinstance(effects.message, Inventory):
            self._spans.opened(effects.message, effects.batch, effects.decisions, effects.came_ns)
            if self.is_current:
                self._feed = self._index.open_feed(self.attach, self.registration.ledger.index_snapshot)
                self._events.attached(self.attach, self.registration.ledger.index_snapshot)
        else:
            self._spans.reported(effects.message, effects.batch, effects.decisions, effects.came_ns)
        if self.is_current and effects.events:
            self._events.changed(self.attach.worker_id, effects.events)
        if self._feed is not None and effects.events:
            self._index.push(self._feed, effects.events)

    def close(self) -> None:
        """Forget the ledger. The worker's next inventory has everything that the worker holds."""
        self._manager.detach(self.registration)
        self._events.left(self.attach)
        self._reset_settled.set()
        self._spans.close()
        if self._feed is not None:
            self._index.close_feed(self._feed)
            self._feed = None
