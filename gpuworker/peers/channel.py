"""A socket between two workers, used by one thread: exact reads and whole writes, each with a bound on its time."""

from __future__ import annotations

import select
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

# A socket takes what is free in its buffer; small answers leave at once.
_NO_DELAY: Final = (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


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
            raise self.late()
        return left

    def late(self) -> ChannelTimedOut:
        return ChannelTimedOut(f"nothing, or too little, passed in {self._pace.seconds:g} s")


class Channel:
    """A connected socket, with or without TLS. All but `break_off` is for one thread."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
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
        while at < size:
            left = clock.left()
            try:
                self._socket.settimeout(left)
                passed = self._socket.recv_into(target[at:])
            except TimeoutError:
                raise clock.late() from None
            except OSError as error:
                raise ChannelBroken(words_of(error)) from None
            if not passed:
                broken = ChannelBroken if at else ChannelEnded
                raise broken("the other end closed the connection")
            at += passed
            clock.count(passed)

    def send(self, content: bytes | memoryview, pace: Pace) -> None:
        """Write all of the content. Raises ChannelBroken."""
        clock, rest = _Clock(pace), memoryview(content)
        while rest:
            left = clock.left()
            try:
                self._socket.settimeout(left)
                passed = self._socket.send(rest)
            except TimeoutError:
                raise clock.late() from None
            except OSError as error:
                raise ChannelBroken(words_of(error)) from None
            rest = rest[passed:]
            clock.count(passed)

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
