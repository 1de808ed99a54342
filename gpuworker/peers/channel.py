"""A socket between two workers, used by one thread: exact reads and whole writes, each with a bound on its time."""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

# Small messages leave at once.
_NO_DELAY: Final = (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
# Of Linux: a head leaves with what follows it, and wakes the other end once.
_MORE: Final = getattr(socket, "MSG_MORE", 0)
_RECEIVE, _SEND = socket.SO_RCVTIMEO, socket.SO_SNDTIMEO


class ChannelBroken(Exception):
    """The other end cannot be talked to any more; the text says why, and has nothing of what was sent."""


class ChannelEnded(ChannelBroken):
    """The other end closed the connection between two messages."""


class ChannelTimedOut(ChannelBroken):
    """The other end was too slow."""


@dataclass(frozen=True, slots=True)
class Pace:
    """So many `bytes`, or the rest of what is read or written if that is less, must pass in `seconds`.

    One byte at a time is therefore no progress.
    """

    seconds: float
    bytes: int = 1 << 62


class _Clock:
    """How long the next read or write may take at a pace."""

    def __init__(self, pace: Pace) -> None:
        self._pace, self._passed = pace, 0
        self._until = time.monotonic() + pace.seconds

    def count(self, passed: int) -> None:
        self._passed += passed
        if self._passed >= self._pace.bytes:
            self._passed, self._until = 0, time.monotonic() + self._pace.seconds

    def left(self) -> float:
        """Return the seconds that are left. Raises ChannelTimedOut when none are."""
        left = self._until - time.monotonic()
        if left <= 0.0:
            raise ChannelTimedOut(f"nothing, or too little, passed in {self._pace.seconds:g} s")
        return left


class Channel:
    """A connected socket, with or without TLS. All but `break_off` is for one thread.

    Without TLS the socket blocks, and the kernel bounds each call (SO_RCVTIMEO, SO_SNDTIMEO): an image is then one
    call. Python's own time-outs need three calls for each part of it.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._secure = connected, isinstance(connected, ssl.SSLSocket)
        self._timeouts = {_RECEIVE: 0.0, _SEND: 0.0}
        if not self._secure:
            connected.settimeout(None)
        with suppress(OSError):  # a pair of local sockets has no such option
            connected.setsockopt(*_NO_DELAY)

    def receive(self, size: int, pace: Pace) -> bytearray:
        """Return exactly `size` bytes. Raises ChannelBroken."""
        content = bytearray(size)
        self.receive_into(memoryview(content), pace)
        return content

    def receive_into(self, target: memoryview, pace: Pace) -> None:
        """Fill the target. Raises ChannelBroken."""
        clock, at, size = _Clock(pace), 0, len(target)
        flags = 0 if self._secure else socket.MSG_WAITALL
        while at < size:
            self._bound(_RECEIVE, clock.left())
            try:
                passed = self._socket.recv_into(target[at:], 0, flags)
            except (TimeoutError, BlockingIOError):
                continue  # the clock says whether it is over
            except OSError as error:
                raise ChannelBroken(words_of(error)) from None
            if not passed:
                broken = ChannelBroken if at else ChannelEnded
                raise broken("the other end closed the connection")
            at += passed
            clock.count(passed)

    def send(self, content: bytes | memoryview, pace: Pace, more: bool = False) -> None:
        """Write all of the content; with `more` it may wait for what is sent next. Raises ChannelBroken."""
        clock, rest = _Clock(pace), memoryview(content)
        flags = _MORE if more and not self._secure else 0
        while rest:
            self._bound(_SEND, clock.left())
            try:
                passed = self._socket.send(rest, flags)
            except (TimeoutError, BlockingIOError):
                continue
            except OSError as error:
                raise ChannelBroken(words_of(error)) from None
            rest = rest[passed:]
            clock.count(passed)

    def _bound(self, direction: int, left: float) -> None:
        """Let the next call end after about so many seconds. Raises ChannelBroken."""
        if 0.9 * self._timeouts[direction] <= left <= 1.1 * self._timeouts[direction]:
            return
        try:
            if self._secure:
                self._socket.settimeout(left)
                self._timeouts = dict.fromkeys(self._timeouts, left)
            else:
                micros = max(1000, int(left * 1e6))
                self._socket.setsockopt(
                    socket.SOL_SOCKET, direction, struct.pack("ll", micros // 1_000_000, micros % 1_000_000)
                )
                self._timeouts[direction] = left
        except OSError as error:
            raise ChannelBroken(words_of(error)) from None

    def is_idle(self) -> bool:
        """Return whether the other end has neither sent anything that was not read nor closed the connection."""
        try:
            if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
                return False
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            return not poll.poll(0)
        except (OSError, ValueError):
            return False

    def break_off(self) -> None:
        """End what another thread does with the channel, which closes it then."""
        with suppress(OSError):
            # That of `ssl.SSLSocket` would let the other thread go on without TLS.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()


def words_of(error: OSError) -> str:
    """Return what a failed call of the operating system means, without text of the other end."""
    return error.strerror or type(error).__name__
