"""The worker's end of the lease protocol: a LeaseChannel over gRPC that always works towards a session.

The client lives on the worker's I/O loop. The engine's thread calls `poll`, `attach`, `send` and `reconnect`; none of
them blocks. Events cross in a deque, commands by `call_soon_threadsafe`. A stream is never resumed. After any failure,
and a jittered delay, the client opens a new stream and asks the engine for a new Attach. Of several managers, it takes
the one that leads, and while that is unknown the next one each time.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from grpc import aio

from common.backoff import Backoff
from common.contracts.errors import ProtocolViolation, StaleEpoch
from common.contracts.lease import (
    Attach,
    Attached,
    AttachRejected,
    Confirmed,
    Connected,
    Detached,
    Granted,
    Inventory,
    LeaseEvent,
    Report,
    highest_plausible_epoch,
)
from common.contracts.limits import MAX_LEASE_OUTBOX
from common.group.leader_watch import LeaderWatch
from common.group.names import Resolve, resolved
from common.process.supervised import Supervisor
from common.rpc import stream_writes
from common.rpc.pulses import SilenceWatch, send_pulses
from common.rpc.server import Dial, open_channel
from common.rpc.silence import pulse_seconds
from common.wire.inventory_codec import inventory_chunks
from common.wire.lease_codec import (
    attach_ok_from_proto,
    attach_to_proto,
    batch_from_proto,
    rejected_from_proto,
    report_to_proto,
)
from gpuworker.scheduling.manager_silence import ManagerSilence
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc

LeaseCall: TypeAlias = "aio.StreamStreamCall[kvmanager_pb2.SessionRequest, kvmanager_pb2.SessionResponse]"

ANSWER_TIMEOUT_S: Final = 30.0
_UNANSWERED: Final = 256


# One stream of a worker to a KV manager: what is queued for it, how long grants take, and why it is to end.
@dataclass(slots=True)
class Connection:
    """One stream. `session` is the session offered on it, None before; `ended` says why the stream is to end.

    What it hears is noted at `manager`, which outlives it.
    """

    number: int
    call: LeaseCall
    ended: asyncio.Future[str]
    manager: ManagerSilence
    outbox: asyncio.Queue[kvmanager_pb2.SessionRequest] = field(default_factory=asyncio.Queue)
    session: int | None = None
    epoch_seen: int = 0
    answered: bool = False
    sent: int = 0
    received: int = 0
    # The messages that a Confirmed waits for, by number.
    unconfirmed: deque[int] = field(default_factory=deque)
    # When the latest messages were queued, by number; old messages without an answer are dropped.
    queued: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_UNANSWERED))
    _silence: SilenceWatch | None = None
    _watching: asyncio.Task[None] | None = None

    def put(self, message: kvmanager_pb2.SessionRequest) -> None:
        """Queue a message of the session, whose grants are timed."""
        self._put(message)
        self.queued.append((self.sent, time.perf_counter()))

    def _put(self, message: kvmanager_pb2.SessionRequest) -> None:
        assert self.session is not None
        self.sent += 1
        message.session, message.seq, message.ack = self.session, self.sent, self.received
        self.outbox.put_nowait(message)
        if self.outbox.qsize() > MAX_LEASE_OUTBOX:
            self.end(f"it left {MAX_LEASE_OUTBOX} messages unread")

    def round_trip(self, ack: int) -> float | None:
        """Return the seconds since message `ack` was queued, None when it was answered before."""
        queued = None
        while self.queued and self.queued[0][0] <= ack:
            queued = self.queued.popleft()
        return time.perf_counter() - queued[1] if queued is not None and queued[0] == ack else None

    def end(self, why: str) -> None:
        """Ask for the end of the stream, from this side."""
        if not self.ended.done():
            self.ended.set_result(why)

    def await_answer(self) -> None:
        """End the stream unless the Attach is answered in time."""
        asyncio.get_running_loop().call_later(ANSWER_TIMEOUT_S, self._end_unanswered)

    def _end_unanswered(self) -> None:
        if not self.answered:
            self.end(f"no answer to an Attach within {ANSWER_TIMEOUT_S:g} s")

    async def write(self) -> None:
        """Write what is queued; the only writer of the stream: two writes at once end an RPC."""
        while await stream_writes.write(self.call, await self.outbox.get()):
            pass  # once the stream has ended, the reader reports the cause

    def heard(self) -> None:
        """Note that something came."""
        self.manager.heard(time.monotonic())
        if self._silence is not None:
            self._silence.heard()

    def bound_silence(self, seconds: float) -> None:
        """Send pulses from now on, and end the stream when nothing comes for so many seconds; 0: do neither."""
        if pulse_seconds(seconds) is not None:
            self._silence = SilenceWatch(seconds)
            self._silence.begin()
            self._watching = asyncio.create_task(self._watch(self._silence))
            self._watching.add_done_callback(lambda ended: self.task_ended(ended, "its silence could not be watched"))

    async def _watch(self, silence: SilenceWatch) -> None:
        pulses = asyncio.create_task(send_pulses(silence.limit, self._pulse))
        try:
            await silence.over()
            self.end(f"nothing came from it for {silence.limit:g} s")
        finally:
            pulses.cancel()

    def confirm(self) -> bool:
        """Send what the manager answers behind all messages before it; return whether this manager does."""
        if self._silence is None:
            return False
        self._put(kvmanager_pb2.SessionRequest(pulse=kvmanager_pb2.Pulse()))
        self.unconfirmed.append(self.sent)
        return True

    def count_confirmed(self, ack: int) -> int:
        """Return how many more messages of those that a Confirmed waits for the manager has applied."""
        before = len(self.unconfirmed)
        while self.unconfirmed and self.unconfirmed[0] <= ack:
            self.unconfirmed.popleft()
        return before - len(self.unconfirmed)

    def _pulse(self) -> None:
        self.manager.ran(time.monotonic())
        self._put(kvmanager_pb2.SessionRequest(pulse=kvmanager_pb2.Pulse()))

    def task_ended(self, task: asyncio.Task[None], what: str) -> None:
        """End the stream when one of its tasks ended by a defect: reports would only gather."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.end(f"{what} ({error!r})")

    def close(self) -> None:
        """Note that the stream has ended."""
        self.ended.cancel()
        if self._watching is not None:
            self._watching.cancel()


log = logging.getLogger(__name__)

OPEN_TIMEOUT_S: Final = 5.0
BACKOFF: Final = Backoff(first=0.05, longest=2.0, jitter=0.5)  # seconds between attempts
_MANY: Final = 100  # failures after which the pause is the longest


class _Refused(Exception):
    """The manager answered AttachRejected."""

    def __init__(self, rejected: AttachRejected) -> None:
        super().__init__("; ".join(map(str, rejected.mismatches)) or rejected.reason)
        self.rejected = rejected


class LeaseClient:
    """Keeps a session with one KV manager. The I/O loop calls `start` and `close`, the engine's thread all others.

    `names` are HOST:PORT of all managers of the worker's group, one of which leads; a host may have several addresses.
    The I/O loop calls `on_event` whenever `poll` has something new, and `on_refused` when the manager refuses this
    worker for good (another identity); the client then retries rarely. `supervisor` begins the client again should a
    defect end it.
    """

    def __init__(
        self,
        names: Sequence[str],
        on_event: Callable[[], None] = lambda: None,
        on_refused: Callable[[AttachRejected], None] = lambda rejected: None,
        rng: random.Random | None = None,
        dial: Dial = open_channel,
        supervisor: Supervisor | None = None,
        resolve: Resolve = resolved,
    ) -> None:
        self._on_event, self._on_refused = on_event, on_refused
        self._watch = LeaderWatch(names, dial, self._leader_changed, resolve)
        self._address, self._attempts = self._watch.addresses[0], 0
        self._opening: asyncio.Timeout | None = None
        self._leader_news = asyncio.Event()
        self._dial = dial
        self._supervisor = supervisor or Supervisor()
        self.before: Callable[[], Awaitable[None]] | None = None
        """Awaited before each stream."""
        self.on_round_trip: Callable[[float], None] = lambda seconds: None
        """Takes the seconds from a report to its grants."""
        self._silence = ManagerSilence(time.monotonic())
        self._rng = rng or random.Random()
        self._events: deque[tuple[int, LeaseEvent]] = deque()
        self._connection: Connection | None = None
        self._connections = 0
        self._polled = 0  # the connection whose Connected the engine saw last
        self._failures = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to connect. Call `close` at the end."""
        self._loop = asyncio.get_running_loop()
        self._watch.start(self._supervisor)
        self._task = self._supervisor.run_task("lease client", self._run)

    async def close(self) -> None:
        """End the session and stop; the engine gets Detached."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._watch.close()

    # ------------------------------------------------------------ engine's thread

    def poll(self) -> list[LeaseEvent]:
        """Return the events since the last call, in order; a Connected voids everything before it."""
        arrived: list[LeaseEvent] = []
        while self._events:
            number, event = self._events.popleft()
            if isinstance(event, Connected):
                self._polled = number
                arrived.clear()
            arrived.append(event)
        return arrived

    def attach(self, attach: Attach, inventory: Inventory) -> None:
        """Answer the Connected that `poll` returned last."""
        self._on_loop(self._offer, self._polled, attach, inventory)

    def send_report(self, session: int, report: Report) -> None:
        """Queue a report of the session; dropped silently when that session is gone."""
        self._on_loop(self._report, session, report)

    def confirm(self, session: int) -> None:
        """Ask for Confirmed behind the reports so far; Detached comes instead when that session is lost."""
        self._on_loop(self._confirm, session)

    def reconnect(self) -> None:
        """Drop the connection that `poll` returned last, and open another."""
        self._on_loop(self._drop, self._polled)

    def away_seconds(self, begin: float, end: float) -> float:
        """Return the seconds between two times without a manager that answered."""
        return self._silence.seconds(begin, end)

    def _on_loop(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None, "start the client first"
        with suppress(RuntimeError):  # the loop was closed: the process ends, and nothing waits for the message
            self._loop.call_soon_threadsafe(self._command, function, *arguments)

    def _command(self, function: Callable[..., None], *arguments: object) -> None:
        """Carry out a command of the engine. After an error the session ends: the manager may lack what was said."""
        try:
            function(*arguments)
        except Exception:
            log.exception("a command of the engine failed")
            if self._connection is not None:
                self._connection.end("a message to it could not be made; this worker's log has the details")

    # ------------------------------------------------------------ I/O loop: commands

    def _offer(self, number: int, attach: Attach, inventory: Inventory) -> None:
        connection = self._connection
        if connection is None or connection.number != number:
            self._post(Detached(attach.session))  # its connection is gone; the next connection requests a new Attach
            return
        if connection.session is not None:  # a stream carries one session
            self._post(Detached(attach.session))
            connection.end("the engine attached twice")
            return
        connection.session, connection.epoch_seen = attach.session, attach.epoch_seen
        connection.put(kvmanager_pb2.SessionRequest(attach=attach_to_proto(attach)))
        for chunk in inventory_chunks(inventory):
            connection.put(kvmanager_pb2.SessionRequest(inventory=chunk))
        connection.await_answer()

    def _report(self, session: int, report: Report) -> None:
        connection = self._connection
        if connection is not None and connection.session == session:
            connection.put(kvmanager_pb2.SessionRequest(report=report_to_proto(report)))

    def _confirm(self, session: int) -> None:
        connection = self._connection
        if connection is not None and connection.session == session and not connection.confirm():
            self._post(Confirmed(session))

    def _drop(self, number: int) -> None:
        if self._connection is not None and self._connection.number == number:
            self._connection.end("the engine asked for another")

    def _post(self, event: LeaseEvent) -> None:
        self._events.append((self._connections, event))
        self._on_event()

    # ------------------------------------------------------------ I/O loop: the connection

    async def _run(self) -> None:
        await self._watch.first_addresses()
        while True:
            longest = False
            self._address = self._next_address()
            try:
                await self._connect()
            except _Refused as refused:
                longest = not refused.rejected.retry
                level = logging.ERROR if longest else logging.WARNING
                log.log(level, "KV manager %s refuses this worker: %s", self._address, refused)
                if longest:
                    self._on_refused(refused.rejected)
            except (aio.AioRpcError, ProtocolViolation, StaleEpoch, TimeoutError) as error:
                log.warning("no session with KV manager %s: %s", self._address, _in_words(error))
            except Exception:  # a worker that no longer attaches is of no use, and nothing else would say so
                log.exception("the session with KV manager %s ended by an error", self._address)
            await self._pause(self._next_delay(longest))

    def _next_address(self) -> str:
        """Return the manager that leads; while that is unknown, each one in turn."""
        addresses = self._watch.addresses
        turn = addresses[self._attempts % len(addresses)]
        self._attempts += 1
        return self._watch.leader or turn

    def _leader_changed(self) -> None:
        """Leave a manager when another one leads: one that hangs would keep this worker.

        A session with the leader stays, also where the leader is known by another of its addresses.
        """
        self._leader_news.set()
        leader = self._watch.leader
        if leader is None or leader == self._address:
            return
        if self._connection is not None and not self._watch.same_process(leader, self._address):
            self._connection.end(f"KV manager {leader} leads now")
        if self._opening is not None and not self._opening.expired():  # a change just before may have ended it
            self._opening.reschedule(asyncio.get_running_loop().time())

    async def _pause(self, seconds: float) -> None:
        """Wait before the next attempt, but only until another manager is known to lead."""
        self._leader_news.clear()
        if self._watch.leader not in (None, self._address):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._leader_news.wait()

    def _next_delay(self, longest: bool) -> float:
        """Return the seconds until the next attempt: doubled each time up to a bound, less up to a half at random."""
        self._failures = _MANY if longest else self._failures + 1
        return BACKOFF.pause(self._failures, self._rng.random())

    async def _connect(self) -> None:
        """Open one stream and serve it until it ends, for whatever reason."""
        if self.before is not None:
            await self.before()
        async with self._dial(self._address) as channel:
            call: LeaseCall = kvmanager_pb2_grpc.KvManagerServiceStub(channel).Session()
            try:
                await self._open(call)
                self._connections += 1
                ended = asyncio.get_running_loop().create_future()
                await self._serve(Connection(self._connections, call, ended, self._silence))
            finally:
                call.cancel()

    async def _open(self, call: LeaseCall) -> None:
        """Wait for the manager's headers. Raises TimeoutError, at once when another manager is known to lead."""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S) as self._opening:
                await call.initial_metadata()
        finally:
            self._opening = None

    async def _serve(self, connection: Connection) -> None:
        """Serve a stream until either side ends it. Raises the error that ended the stream, if any."""
        self._connection = connection
        self._post(Connected())
        reader, writer = asyncio.create_task(self._read(connection)), asyncio.create_task(connection.write())
        writer.add_done_callback(lambda ended: connection.task_ended(ended, "messages to it could not be written"))
        try:
            await asyncio.wait((reader, connection.ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._connection = None
            connection.close()
            reader.cancel()
            writer.cancel()
            if connection.answered:
                self._silence.lost(time.monotonic())
            if connection.session is not None:
                self._post(Detached(connection.session))
            read, _ = await asyncio.gather(reader, writer, return_exceptions=True)
        if isinstance(read, Exception):
            raise read
        if not connection.ended.cancelled():
            log.warning("left KV manager %s: %s", self._address, connection.ended.result())

    async def _read(self, connection: Connection) -> None:
        async for response in connection.call:
            connection.heard()
            if response.session == connection.session and not self._take(connection, response):
                return

    def _take(self, connection: Connection, response: kvmanager_pb2.SessionResponse) -> bool:
        """Take one message of the session; return whether the stream goes on."""
        connection.received += 1
        if response.seq != connection.received:
            raise ProtocolViolation(f"message {response.seq} of the manager came where {connection.received} was due")
        session, kind = response.session, response.WhichOneof("message")
        if kind == "attach_rejected":
            raise _Refused(rejected_from_proto(response.attach_rejected))
        if kind == "attach_ok":
            self._take_answer(connection, response.attach_ok)
        elif kind == "batch" and connection.answered:
            self._post(Granted(session, batch_from_proto(response.batch)))
            seconds = connection.round_trip(response.ack)
            if seconds is not None:
                self.on_round_trip(seconds)
        elif kind == "pulse" and connection.answered:
            pass
        elif kind == "drain":
            log.info("KV manager %s is going away", self._address)
            return False
        else:
            raise ProtocolViolation(f"the manager sent {kind} where nothing of the kind was due")
        for _ in range(connection.count_confirmed(response.ack)):
            self._post(Confirmed(session))
        return True

    def _take_answer(self, connection: Connection, message: kvmanager_pb2.AttachOk) -> None:
        ok = attach_ok_from_proto(message)
        if ok.epoch < connection.epoch_seen:
            raise StaleEpoch(f"a manager of epoch {ok.epoch} answered; {connection.epoch_seen} was seen before")
        if ok.epoch > highest_plausible_epoch(connection.epoch_seen):
            raise ProtocolViolation(f"the manager names epoch {ok.epoch}; no manager of this pool can have that one")
        connection.answered = True
        self._silence.attached(time.monotonic(), pulse_seconds(message.silence_seconds))
        connection.bound_silence(message.silence_seconds)
        self._failures = 0
        assert connection.session is not None
        self._post(Attached(connection.session, ok))


def _in_words(error: Exception) -> str:
    if isinstance(error, aio.AioRpcError):
        return f"{error.code().name} {error.details()}"
    return str(error) or type(error).__name__
