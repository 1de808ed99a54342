"""One stream of a worker to a KV manager: what is queued for it, how long grants take, and why it is to end."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from grpc import aio

from common.contracts.limits import MAX_LEASE_OUTBOX
from common.rpc import stream_writes
from common.rpc.pulses import SilenceWatch, send_pulses
from common.rpc.silence import pulse_seconds
from gpuworker.scheduling.manager_silence import ManagerSilence
from quire.kvmanager.v1 import kvmanager_pb2

LeaseCall: TypeAlias = "aio.StreamStreamCall[kvmanager_pb2.SessionRequest, kvmanager_pb2.SessionResponse]"

ANSWER_TIMEOUT_S: Final = 30.0
_UNANSWERED: Final = 256


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
