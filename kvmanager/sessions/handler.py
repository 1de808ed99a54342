"""Handles one Session stream. Nothing is awaited between a report and its answer.

`serve` is the stream's only writer. A reader task applies the worker's messages. The other effects of a report (index,
decisions, spans) run after the answer was handed to gRPC. A rebuild from a large inventory takes seconds: other
sessions are served between its steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from common.contracts.errors import ProtocolViolation, Unavailable
from common.contracts.lease import AttachRejected
from common.contracts.limits import MAX_UNREAD_MESSAGES
from common.rpc.roles import Peer
from common.rpc.silence import SILENCE_S
from common.wire.inventory_codec import InventoryAssembler, InventoryBounds
from common.wire.lease_codec import (
    attach_from_proto,
    attach_ok_to_proto,
    batch_to_proto,
    rejected_to_proto,
    report_from_proto,
)
from kvmanager.sessions.attached_worker import AttachedWorker, Effects
from kvmanager.sessions.attachments import Attachments, StreamEnds
from quire.kvmanager.v1 import kvmanager_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What a worker may send until its inventory is complete; `silence` is the seconds between two messages."""

    inventory_messages: int = 4096
    inventory_bytes: int = 128 << 20
    silence: float = 60.0


DEFAULT_LIMITS: Final = SessionLimits()


async def _next_turn() -> None:
    await asyncio.sleep(0)


class SessionHandler:
    """Serves one stream until it ends. `observe` receives the seconds from each report to its first batch.

    `peer` is the worker by its certificate; None without TLS. `between_steps` is awaited between the steps of a
    rebuild, and between the batches for a report.
    """

    def __init__(
        self,
        attachments: Attachments,
        requests: AsyncIterator[kvmanager_pb2.SessionRequest],
        observe: Callable[[float], None],
        limits: SessionLimits = DEFAULT_LIMITS,
        peer: Peer | None = None,
        between_steps: Callable[[], Awaitable[None]] = _next_turn,
    ) -> None:
        self._between_steps = between_steps
        self._attachments, self._observe, self._peer = attachments, observe, peer
        self._limits, self._messages = limits, aiter(requests)
        self._outbox: asyncio.Queue[kvmanager_pb2.SessionResponse | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.Task[None] | None = None
        self._worker: AttachedWorker | None = None
        self._inventory: InventoryAssembler | None = None
        self._session = self._received = self._sent = 0
        self._broken, self._over = "", False
        self._failure: BaseException | None = None

    async def serve(self, write: Callable[[kvmanager_pb2.SessionResponse], Awaitable[None]]) -> None:
        """Serve until the stream ends. Raises ProtocolViolation, StaleEpoch, or Unavailable when broken off here."""
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(self._read_all)
        try:
            while (response := await self._outbox.get()) is not None:
                await write(response)
        finally:
            # Nothing is awaited here: gRPC may cancel this task once more while it cleans up.
            self._over = True
            self._reader.cancel()
            if self._worker is not None:
                self._attachments.close(self._worker)
        if self._broken:
            raise Unavailable(self._broken)
        if self._failure is not None:
            raise self._failure

    def _read_all(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled():
            self._failure = reader.exception()
        self._outbox.put_nowait(None)

    # ------------------------------------------------------------ from outside

    def _end(self, why: str) -> None:
        self._broken = why
        if self._reader is not None:
            self._reader.cancel()

    def _drain(self) -> None:
        with suppress(ProtocolViolation):  # the session has ended for another reason
            self._send(kvmanager_pb2.SessionResponse(drain=kvmanager_pb2.Drain()))

    def _order(self, effects: Effects) -> None:
        """Send what no report asked for. A worker that does not read loses its session, and attaches again."""
        assert self._worker is not None
        try:
            self._answer(self._worker, effects)
        except ProtocolViolation as error:
            self._end(str(error))

    # ------------------------------------------------------------ messages

    async def _read(self) -> None:
        try:
            while (request := await self._next()) is not None:
                if not await self._take(request):
                    return
        except ProtocolViolation as error:
            self._attachments.counts.quarantined += 1
            worker_id = self._worker.attach.worker_id if self._worker else ""
            log.error("ended a session: %s", error, extra={"worker_id": worker_id})
            raise

    async def _next(self) -> kvmanager_pb2.SessionRequest | None:
        """Return the next message, None at the end. A session that is open may be silent, one that begins may not."""
        if self._worker is not None and self._worker.registration.ready:
            return await anext(self._messages, None)
        try:
            async with asyncio.timeout(self._limits.silence):
                return await anext(self._messages, None)
        except TimeoutError:
            what = "the rest of the inventory" if self._worker is not None else "an attach"
            raise ProtocolViolation(f"no message for {self._limits.silence:g} s; expected {what}") from None

    async def _take(self, request: kvmanager_pb2.SessionRequest) -> bool:
        """Take one message; return whether the stream goes on. Raises Unavailable when this manager leads no more."""
        await self._lead()
        self._received += 1
        if request.seq != self._received:
            raise ProtocolViolation(f"the worker sent message {request.seq}; expected message {self._received}")
        kind = request.WhichOneof("message")
        if self._worker is None:
            if kind != "attach":
                raise ProtocolViolation(f"a session began with {kind}; expected an attach")
            return await self._take_attach(request)
        if request.session != self._session:
            raise ProtocolViolation(f"a message of session {request.session} came in session {self._session}")
        if not self._worker.is_current:  # an old handler may still have messages queued
            return False
        if kind == "report":
            return await self._take_report(self._worker, request.report)
        if kind == "inventory":
            return await self._take_inventory(self._worker, request.inventory)
        if kind != "pulse":
            raise ProtocolViolation(f"the worker sent {kind}; expected a report or an inventory")
        self._send(kvmanager_pb2.SessionResponse(pulse=kvmanager_pb2.Pulse()))
        return True

    async def _lead(self) -> None:
        """Return while this manager leads. Raises Unavailable when it leads no more."""
        if not self._attachments.leading.leads():
            await self._attachments.leading.confirmed()

    async def _take_attach(self, request: kvmanager_pb2.SessionRequest) -> bool:
        self._session = request.session
        attach = attach_from_proto(request.attach, request.session)
        opened = await self._attachments.open(attach, StreamEnds(self._end, self._drain, self._order), self._peer)
        if isinstance(opened, AttachRejected):
            self._send(kvmanager_pb2.SessionResponse(attach_rejected=rejected_to_proto(opened)))
            return False
        self._worker = opened
        self._inventory = InventoryAssembler(self._bounds(opened))
        if self._over:  # the stream ended meanwhile, and the cancellation was lost
            self._attachments.close(opened)
        return not self._over

    def _bounds(self, worker: AttachedWorker) -> InventoryBounds:
        limits, attach = self._limits, worker.attach
        sizes = attach.num_blocks, attach.host_frames, attach.disk_frames
        return InventoryBounds(limits.inventory_messages, limits.inventory_bytes, *sizes)

    async def _take_inventory(self, worker: AttachedWorker, chunk: kvmanager_pb2.Inventory) -> bool:
        if self._inventory is None:
            raise ProtocolViolation("a session has one inventory")
        inventory = self._inventory.add(chunk)
        if inventory is None:
            return True
        self._inventory = None  # its parts are in the ledger soon
        for _ in worker.rebuild_in_steps(inventory):
            await self._between_steps()
            if self._over or not worker.is_current:
                return False
        await self._attachments.leading.confirmed()
        if self._over or not worker.is_current:
            return False
        ok, effects = worker.complete(inventory)
        message = attach_ok_to_proto(ok)
        message.silence_seconds = SILENCE_S
        self._send(kvmanager_pb2.SessionResponse(attach_ok=message))
        figures = {
            "sequences": len(inventory.sequences),
            "cached_blocks": len(inventory.cached_blocks),
            "epoch": ok.epoch,
        }
        log.info("worker attached", extra={"worker_id": worker.attach.worker_id, **figures})
        self._answer(worker, effects)
        return True

    async def _take_report(self, worker: AttachedWorker, message: kvmanager_pb2.Report) -> bool:
        """Answer a report. Between two batches the first one leaves, and other workers are served."""
        began, report = time.perf_counter(), report_from_proto(message)
        self._answer(worker, worker.apply_report(report))
        self._observe(time.perf_counter() - began)
        while worker.has_more:
            await self._between_steps()
            await self._lead()
            if self._over or not worker.is_current:
                return False
            self._answer(worker, worker.continue_schedule())
        self._attachments.note_prompts(worker, report.reserve)
        return True

    def _answer(self, worker: AttachedWorker, effects: Effects) -> None:
        if effects.batch is not None:
            self._send(kvmanager_pb2.SessionResponse(batch=batch_to_proto(effects.batch)))
        self._loop.call_soon(worker.settle_effects, effects)

    def _send(self, message: kvmanager_pb2.SessionResponse) -> None:
        if self._outbox.qsize() >= MAX_UNREAD_MESSAGES:
            raise ProtocolViolation(f"{MAX_UNREAD_MESSAGES} messages wait for the worker, which does not read them")
        self._sent += 1
        message.session, message.seq, message.ack = self._session, self._sent, self._received
        self._outbox.put_nowait(message)
