"""The attached workers: each has the pool's identity and one session."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from opentelemetry.trace import Tracer

from common.errors import NotFound
from common.lease import Attach, AttachRejected
from common.types import PoolIdentity
from kvmanager.core.ledger import Ledger
from kvmanager.core.manager import Manager, WorkerRegistration
from kvmanager.core.past_totals import PastTotals
from kvmanager.index.writer import IndexWriter
from kvmanager.sessions.attached_worker import AttachedWorker, DecisionSink
from kvmanager.sessions.reserve_spans import ReserveSpans

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SessionCounts:
    """Rising counters of sessions, and of those that ended because the worker broke the protocol."""

    opened: int = 0
    refused: int = 0
    quarantined: int = 0


@dataclass(frozen=True, slots=True)
class StreamEnds:
    """How a session ends its stream: at once, or by a request to the worker to leave."""

    end: Callable[[str], None]
    drain: Callable[[], None]


@dataclass(slots=True)
class _Live:
    worker: AttachedWorker
    stream: StreamEnds


@dataclass(slots=True)
class Attachments:
    """Attached workers by id, around the core's registrations.

    `configured` holds the parts of the identity that were configured; the first worker to attach fixes the rest, until
    the last one has left.
    """

    manager: Manager
    index: IndexWriter
    sink: DecisionSink
    tracer: Tracer
    configured: Mapping[str, object] = field(default_factory=dict)
    counts: SessionCounts = field(default_factory=SessionCounts)
    draining: bool = False
    past: PastTotals = field(default_factory=PastTotals)
    _opening: int = 0
    _live: dict[str, _Live] = field(default_factory=dict)
    _departure: asyncio.Event = field(default_factory=asyncio.Event)

    async def open(self, attach: Attach, stream: StreamEnds) -> AttachedWorker | AttachRejected:
        """Open a session, or return the refusal. Raises StaleEpoch when another manager has taken over."""
        self._opening += 1
        try:
            return await self._open(attach, stream)
        finally:
            self._opening -= 1
            self._forget_identity()

    async def _open(self, attach: Attach, stream: StreamEnds) -> AttachedWorker | AttachRejected:
        registration = self._refusal(attach.identity) or await self._attach(attach)
        if isinstance(registration, AttachRejected):
            self.counts.refused += 1
            log.warning("refused worker", extra={"worker_id": attach.worker_id, "reason": registration.reason})
            return registration
        spans = ReserveSpans(self.tracer, attach.worker_id)
        worker = AttachedWorker(self.manager, registration, self.index, self.sink, spans)
        self._live[attach.worker_id] = _Live(worker, stream)
        self.counts.opened += 1
        return worker

    async def _attach(self, attach: Attach) -> WorkerRegistration | AttachRejected:
        # The identity is fixed before any await, so that only one of two first workers decides it.
        self.manager.identity = self._expected(attach.identity)
        self.manager.adopt_epoch(await self.index.epoch_for(attach))
        self._leave_for(attach)
        return self.manager.attach(attach)

    def close(self, worker: AttachedWorker) -> None:
        """End a session on this side. Nothing happens if it was closed before."""
        worker_id = worker.attach.worker_id
        live = self._live.get(worker_id)
        if live is None or live.worker is not worker:
            return
        del self._live[worker_id]
        worker.close()
        self.past.add(worker_id, worker.registration.ledger.state.totals)
        self._forget_identity()
        self._departure.set()
        log.info("worker left", extra={"worker_id": worker_id})

    def drain(self) -> None:
        """Refuse new sessions, and ask every worker to leave and attach again later."""
        self.draining = True
        for live in tuple(self._live.values()):
            live.stream.drain()

    async def left(self) -> None:
        """Return once no worker is attached."""
        while self._live:
            self._departure.clear()
            await self._departure.wait()

    def ledgers(self, worker_id: str = "") -> Iterator[tuple[str, Ledger]]:
        """Yield worker ids with their ledgers, sorted; of one worker if it is named. Raises NotFound if unknown."""
        if worker_id and worker_id not in self.manager.workers():
            raise NotFound(f"no worker {worker_id} is attached")
        for each in self.manager.workers():
            if worker_id in ("", each):
                yield each, self.manager.ledger(each)

    # ------------------------------------------------------------ rules

    def _expected(self, theirs: PoolIdentity) -> PoolIdentity:
        """Return the identity that a worker must have: the pool's, else its own with the configured parts."""
        return self.manager.identity or replace(theirs, **self.configured)  # type: ignore[arg-type]

    def _forget_identity(self) -> None:
        """Forget the identity when no worker is attached or attaching; the next worker may have another one."""
        if not self._live and not self._opening:
            self.manager.forget_identity()

    def _refusal(self, theirs: PoolIdentity) -> AttachRejected | None:
        if self.draining:
            return AttachRejected("the manager is shutting down; attach again later", retry=True)
        mismatches = self._expected(theirs).differences(theirs)
        if mismatches:
            return AttachRejected("; ".join(map(str, mismatches)), mismatches)
        return None

    def _leave_for(self, attach: Attach) -> None:
        """Close a session whose worker has opened a later one. A worker has one session, so the old one is broken."""
        live = self._live.get(attach.worker_id)
        if live is None:
            return
        old = live.worker.attach
        if old.incarnation == attach.incarnation and old.session < attach.session:
            self.close(live.worker)
            live.stream.end("the worker has opened another session")
