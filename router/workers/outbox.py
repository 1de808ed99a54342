"""Messages on their way to one worker, and their bytes. A submission that was not sent yet can be withdrawn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from time import monotonic

from common.contracts.clock import until_tick
from common.contracts.errors import FieldViolation, InvalidRequest, Overloaded, QuotaViolation
from common.contracts.hashing import little_endian_int32
from common.contracts.limits import MAX_OUTBOX_BYTES, MAX_SUBMIT_BYTES
from common.rpc.silence import pulse_seconds
from quire.gpuworker.v1 import gpuworker_pb2 as pb

# Seconds in which acknowledgements gather: they need no promptness, and a message of their own each would be dear.
_ACK_S = 0.25
# Seconds after which a request may be sent again to a worker that does not read.
_RETRY_S = 1.0
_PULSE = pb.StreamRequest(pulse=pb.Pulse())


class Outbox:
    """Messages in the order in which they were put. A worker that does not read makes it full, not large.

    For a worker that bears so many seconds of silence, a pulse comes first, and again after some time without any
    message. 0: that worker does not bound silence, and none comes.
    """

    def __init__(self, silence: float = 0.0) -> None:
        self._silence, self._pulse_seconds = silence, pulse_seconds(silence)
        self._taken_at, self._longest = monotonic(), 0.0
        # By position in the order.
        self._messages: OrderedDict[int, tuple[pb.StreamRequest, int]] = OrderedDict()
        # Position of each submission, by handle.
        self._submissions: dict[int, int] = {}
        self._last = 0
        self._filled = asyncio.Event()
        self._acknowledged: list[int] = []
        self._closed = False
        self.bytes = 0
        if self._pulse_seconds is not None:
            self.put(_PULSE)

    def __len__(self) -> int:
        return len(self._messages)

    def submit(self, message: pb.StreamRequest) -> None:
        """Put a submission.

        Raises InvalidRequest when it is too large for the stream, which would break for everybody; and Overloaded when
        too many bytes wait.
        """
        size = message.ByteSize()
        if size > MAX_SUBMIT_BYTES:
            what = f"makes a submission of {size} bytes with all other fields; expected at most {MAX_SUBMIT_BYTES}"
            raise InvalidRequest(FieldViolation("prompt", f"{what}; shorten the request"))
        if self._messages and self.bytes + size > MAX_OUTBOX_BYTES:
            what = f"{self.bytes} bytes wait for the worker, which does not read; at most {MAX_OUTBOX_BYTES}"
            raise Overloaded(QuotaViolation("router.outbox", what), _RETRY_S)
        self._submissions[message.submit.handle] = self._put(message, size)

    def cancel(self, message: pb.StreamRequest) -> bool:
        """Withdraw a submission, or put its cancel when it was sent already; return whether it was sent."""
        position = self._submissions.pop(message.cancel.handle, None)
        if position is None:
            self.put(message)
            return True
        self.bytes -= self._messages.pop(position)[1]
        return False

    def put(self, message: pb.StreamRequest) -> None:
        """Put a small message."""
        self._put(message, message.ByteSize())

    def acknowledge(self, handle: int) -> None:
        """Let the worker forget a sequence that has ended, soon."""
        if not self._acknowledged:
            asyncio.get_running_loop().call_later(_ACK_S, self._put_acknowledged)
        self._acknowledged.append(handle)

    def _put_acknowledged(self) -> None:
        handles, self._acknowledged = self._acknowledged, []
        if not handles:
            return
        self.put(pb.StreamRequest(ack=pb.Ack(handles=little_endian_int32(handles))))

    def close(self) -> None:
        """Take no further message: after those that wait comes the end."""
        self._put_acknowledged()
        self._closed = True
        self._filled.set()

    @property
    def stood_still(self) -> bool:
        """Whether nothing was taken for longer than the worker bears. Pulses were due: this router stood still."""
        return self._pulse_seconds is not None and max(self._longest, monotonic() - self._taken_at) > self._silence

    async def take(self) -> pb.StreamRequest | None:
        """Return the next message, once there is one; None at the end."""
        message, now = await self._next(), monotonic()
        self._longest, self._taken_at = max(self._longest, now - self._taken_at), now
        return message

    async def _next(self) -> pb.StreamRequest | None:
        while not self._messages:
            if self._closed:
                return None
            self._filled.clear()
            try:
                async with asyncio.timeout(self._pause()):
                    await self._filled.wait()
            except TimeoutError:
                return _PULSE
        _, (message, size) = self._messages.popitem(last=False)
        self.bytes -= size
        if message.HasField("submit"):
            self._submissions.pop(message.submit.handle, None)
        return message

    def _pause(self) -> float | None:
        """Return the seconds to the next pulse."""
        return None if self._pulse_seconds is None else until_tick(monotonic(), self._pulse_seconds)

    def _put(self, message: pb.StreamRequest, size: int) -> int:
        self._last += 1
        self._messages[self._last] = message, size
        self.bytes += size
        self._filled.set()
        return self._last
