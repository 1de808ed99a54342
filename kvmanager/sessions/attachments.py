"""The attached workers: each has the pool's identity and one session."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from opentelemetry.trace import Tracer

from common.contracts.errors import NotFound
from common.contracts.lease import Attach, AttachRejected, Reserve
from common.contracts.types import BlockHash, PoolIdentity
from common.rpc.roles import Peer
from kvmanager.contracts.ports import Leading
from kvmanager.index.writer import IndexWriter
from kvmanager.ledger.ahead_table import Answer
from kvmanager.ledger.ledger import Ledger
from kvmanager.ledger.past_totals import PastTotals
from kvmanager.ledger.registry import WorkerRegistration, WorkerRegistry
from kvmanager.sessions.attached_worker import AttachedWorker, DecisionSink, Effects
from kvmanager.sessions.kv_events import KvEventHub
from kvmanager.sessions.reserve_spans import ReserveSpans

log = logging.getLogger(__name__)

# Seconds between two looks at the prefixes that are to come although nobody waits for them; there is none otherwise.
_PART_PAUSE_S: Final = 0.02


@dataclass(slots=True)
class SessionCounts:
    """Rising counters of sessions, and of those that ended because the worker broke the protocol."""

    opened: int = 0
    refused: int = 0
    quarantined: int = 0


@dataclass(frozen=True, slots=True)
class StreamEnds:
    """How a session ends its stream (at once, or when the worker leaves on request), and sends orders."""

    end: Callable[[str], None]
    drain: Callable[[], None]
    order: Callable[[Effects], None]


@dataclass(frozen=True, slots=True)
class WorkerReset:
    """What a reset of the prefix cache did at one worker."""

    worker_id: str
    dropped_blocks: int
    blocks_in_use: int
    confirmed: bool


async def _nothing() -> None:
    """Nobody has to know of an attach."""


@dataclass(slots=True)
class _Live:
    worker: AttachedWorker
    stream: StreamEnds


@dataclass(slots=True)
class Attachments:
    """Attached workers by id, around the core's registrations; `leading` says whether this manager leads.

    `configured` holds the parts of the identity that were configured; the first worker to attach fixes the rest, until
    the last one has left. `attaching` is awaited when a worker attaches and the namespace of the index is known.
    """

    manager: WorkerRegistry
    index: IndexWriter
    sink: DecisionSink
    tracer: Tracer
    leading: Leading
    configured: Mapping[str, object] = field(default_factory=dict)
    counts: SessionCounts = field(default_factory=SessionCounts)
    draining: bool = False
    past: PastTotals = field(default_factory=PastTotals)
    events: KvEventHub = field(default_factory=KvEventHub)
    attaching: Callable[[], Awaitable[None]] = _nothing
    _opening: int = 0
    _live: dict[str, _Live] = field(default_factory=dict)
    _departure: asyncio.Event = field(default_factory=asyncio.Event)
    _wished: asyncio.Event = field(default_factory=asyncio.Event)

    async def open(
        self, attach: Attach, stream: StreamEnds, peer: Peer | None = None
    ) -> AttachedWorker | AttachRejected:
        """Open a session, or return the refusal. Raises StaleEpoch when another manager has taken over.

        Raises Unavailable while another manager of the group leads.
        `peer` is what the worker's certificate allows; None without TLS.
        """
        await self.leading.confirmed()
        self._opening += 1
        try:
            return await self._open(attach, stream, peer)
        finally:
            self._opening -= 1
            self._forget_identity()

    async def _open(self, attach: Attach, stream: StreamEnds, peer: Peer | None) -> AttachedWorker | AttachRejected:
        refusal = self._foreign_id(attach, peer) or self._refusal(attach)
        registration = refusal or await self._attach(attach)
        if isinstance(registration, AttachRejected):
            self.counts.refused += 1
            log.warning("refused worker", extra={"worker_id": attach.worker_id, "reason": registration.reason})
            return registration
        spans = ReserveSpans(self.tracer, attach.worker_id)
        worker = AttachedWorker(self.manager, registration, self.index, self.sink, spans, self.events)
        self._live[attach.worker_id] = _Live(worker, stream)
        self.counts.opened += 1
        return worker

    async def _attach(self, attach: Attach) -> WorkerRegistration | AttachRejected:
        # The identity is fixed before any await, so that only one of two first workers decides it.
        self.manager.identity = self._expected(attach.identity)
        self.manager.adopt_epoch(await self.index.epoch_for(attach))
        await self.attaching()
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
        self.events.close()
        for live in tuple(self._live.values()):
            live.stream.drain()

    def stand_by(self, why: str) -> None:
        """End every session: another manager leads."""
        self.events.close(why)
        for live in tuple(self._live.values()):
            self.close(live.worker)
            live.stream.end(why)

    def break_stall(self, worker_id: str, why: str) -> None:
        """Get a ledger going that stands still: by a preemption, or by a new session, which begins the ledger anew."""
        live = self._live.get(worker_id)
        if live is None or not live.worker.registration.ready:
            return
        effects = live.worker.break_stall(why)
        if effects is not None:
            log.error("a preemption is ordered: %s", why, extra={"worker_id": worker_id})
            live.stream.order(effects)
        else:
            log.error("the worker has to attach anew: %s", why, extra={"worker_id": worker_id})
            self.close(live.worker)
            live.stream.end(why)

    async def left(self) -> None:
        """Return once no worker is attached."""
        while self._live:
            self._departure.clear()
            await self._departure.wait()

    async def reset_cache(self, number: int, seconds: float) -> tuple[WorkerReset, ...]:
        """Drop cached blocks that no sequence uses, and wait until the workers have confirmed that.

        A worker that does not confirm within `seconds` is reset again when it attaches. `number` names the reset.
        """
        self.manager.begin_reset(number)
        ordered: list[tuple[AttachedWorker, int]] = []
        for live in tuple(self._live.values()):
            if live.worker.is_current and live.worker.registration.ready:
                ordered.append((live.worker, self.manager.reset_worker(live.worker.attach.worker_id)))
                live.stream.order(live.worker.order_reset())
                await asyncio.sleep(0)  # a large pool takes a tenth of a second: reports of the others go between
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for worker, _ in ordered:
                    await worker.reset_settled()
        return tuple(_reset_of(worker, dropped) for worker, dropped in ordered)

    def order_missed_reset(self) -> None:
        """Reset the attached workers that have not carried out the last reset."""
        for live in tuple(self._live.values()):
            registration = live.worker.registration
            if live.worker.is_current and registration.ready and live.worker.attach.reset != self.manager.last_reset:
                self.manager.reset_worker(live.worker.attach.worker_id)
                live.stream.order(live.worker.order_reset())

    # ------------------------------------------------------------ copies ahead of need

    def wish_prefix(self, worker_id: str, block_hashes: Sequence[BlockHash], why: str) -> Answer:
        """Let a prefix come into a worker's host memory although nobody waits for it. Raises NotFound."""
        answer = self.manager.wish_prefix(worker_id, block_hashes, why)
        self._order_ahead(worker_id)
        return answer

    def note_prompts(self, worker: AttachedWorker, reserves: Sequence[Reserve]) -> None:
        """Note what a worker was asked for, and begin the copies that make hot prefixes known to others."""
        if reserves and self.manager.hot is not None and worker.is_current:
            for each in self.manager.note_prompts(worker.attach.worker_id, [each.block_hashes for each in reserves]):
                self._order_ahead(each)

    async def run_ahead(self) -> None:
        """Order the parts of prefixes that nobody waits for, each when it is its turn by the clock. A background task.

        Reports order them too. An idle worker sends none.
        """
        while True:
            await self._wished.wait()
            self._wished.clear()
            while wished := [worker for worker, ledger in self.ledgers() if ledger.state.ahead.wishes]:
                for worker in wished:
                    if worker in self.manager.workers() and self.manager.ledger(worker).part_due:
                        self._order_ahead(worker)
                await asyncio.sleep(_PART_PAUSE_S)

    def _order_ahead(self, worker_id: str) -> None:
        live = self._live.get(worker_id)
        if live is not None and live.worker.is_current and live.worker.registration.ready:
            live.stream.order(live.worker.order_ahead())
            self._wished.set()

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

    def _refusal(self, attach: Attach) -> AttachRejected | None:
        """Return why a worker may not attach. Nothing has changed by then, the epoch included."""
        if self.draining:
            return AttachRejected("the manager is shutting down; attach again later", retry=True)
        mismatches = self._expected(attach.identity).differences(attach.identity)
        if mismatches:
            return AttachRejected("; ".join(map(str, mismatches)), mismatches)
        return None if self._replaced_by(attach) else self.manager.find_refusal(attach)

    def _foreign_id(self, attach: Attach, peer: Peer | None) -> AttachRejected | None:
        """Refuse an id that the worker's certificate does not allow."""
        worker_id = attach.worker_id
        if peer is None or worker_id in peer.worker_ids:
            return None
        if peer.worker_ids:
            own = ", ".join(sorted(peer.worker_ids))
            return AttachRejected(f"the certificate is that of worker {own}; expected this id and not {worker_id}")
        if worker_id in self._live and not self._replaced_by(attach):
            what = f"worker {worker_id} is attached; expected another id, or a certificate that names this one"
            return AttachRejected(what, retry=True)
        return None

    def _leave_for(self, attach: Attach) -> None:
        """Close a session whose worker has opened a later one. A worker has one session, so the old one is broken."""
        live = self._replaced_by(attach)
        if live is not None:
            self.close(live.worker)
            live.stream.end("the worker has opened another session")

    def _replaced_by(self, attach: Attach) -> _Live | None:
        """Return the session that an attach replaces. The incarnation of a session is the worker's secret."""
        live = self._live.get(attach.worker_id)
        if live is None:
            return None
        old = live.worker.attach
        own = hmac.compare_digest(old.incarnation, attach.incarnation)
        return live if own and old.session < attach.session else None


def _reset_of(worker: AttachedWorker, dropped: int) -> WorkerReset:
    ledger = worker.registration.ledger
    confirmed = worker.is_current and not ledger.reset_pending
    return WorkerReset(worker.attach.worker_id, dropped, ledger.pool_counts().in_use, confirmed)
