"""Ends the connections of a server that will serve no more, so that late calls fail as UNAVAILABLE.

A gRPC server that stops tells its clients with GOAWAY. A call that is on its way then is answered CANCELLED, which
clients take for their own doing and do not send again. A call on a connection that is closed ends as UNAVAILABLE.
gRPC has no way to close a connection of a server, so the sockets are found among the open files of the process.

That needs two free descriptors and no more: one socket is looked at, at a time, through a copy that keeps its number
from standing for another socket meanwhile.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import stat
import sys
import termios
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

_OPEN_FILES: Final = "/proc/self/fd"
# Calls that nobody waits for.
_HEALTH: Final = "/grpc.health."
# Seconds for gRPC to hand the last statuses to the kernel, and between two looks at what the kernel has sent.
_FLUSH_S: Final = 0.05
# Of a socket that its other end, or gRPC, has closed meanwhile.
_CLOSED: Final = frozenset({errno.EBADF, errno.ENOENT, errno.ENOTCONN, errno.EINVAL, errno.ENOTSOCK})


class Calls:
    """Counts the calls of a server that have not ended, those of health apart."""

    def __init__(self) -> None:
        self._running = 0
        self._over = asyncio.Event()

    def around(self, method: str, context: Any) -> AbstractAsyncContextManager[None]:
        return self._count(context, 0 if method.startswith(_HEALTH) else 1)

    @asynccontextmanager
    async def _count(self, context: Any, calls: int) -> AsyncIterator[None]:
        self._running += calls
        # gRPC calls this once it has written the call's status, or has given it up.
        context.add_done_callback(lambda _: self._ended(calls))
        yield

    def _ended(self, calls: int) -> None:
        self._running -= calls
        if not self._running:
            self._over.set()

    async def over(self, seconds: float) -> None:
        """Return when every call has ended, or after so many seconds."""
        if self._running:
            self._over.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), seconds)


@dataclass(frozen=True, slots=True)
class Ended:
    """How many sockets were ended, and how many open files could not be looked at or ended."""

    sockets: int = 0
    failed: int = 0

    def __add__(self, other: Ended) -> Ended:
        return Ended(self.sockets + other.sockets, self.failed + other.failed)


async def shut_down(ports: Collection[int], seconds: float) -> Ended:
    """Close the listeners of this process on these local ports, then end what it sends on their connections.

    Between the two the kernel gets up to so many seconds to deliver what was written. A connection that is closed in
    one direction takes what its client still sends, so that no reset overtakes the last statuses.
    Elsewhere than on Linux nothing is found, and clients see what gRPC tells them.
    """
    ended = _visit(ports, True, _replace)
    await _delivered(ports, seconds)
    return ended + _visit(ports, False, lambda _, connection: connection.shutdown(socket.SHUT_WR))


async def _delivered(ports: Collection[int], seconds: float) -> None:
    """Return when the other ends have acknowledged what each connection had to send, or after so many seconds.

    A connection counts until it was found with nothing to send once: refusals of later calls follow at any time.
    """
    ends, waiting = time.monotonic() + seconds, None
    while waiting is None or waiting:
        await asyncio.sleep(_FLUSH_S)
        unsent = _unsent(ports)
        waiting = unsent if waiting is None else waiting & unsent
        if time.monotonic() >= ends:
            return


def _unsent(ports: Collection[int]) -> set[int]:
    """Return the inodes of connections whose other end has yet to acknowledge bytes."""
    found = set[int]()

    def look(_: int, connection: socket.socket) -> None:
        if int.from_bytes(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder):
            found.add(os.fstat(connection.fileno()).st_ino)

    _visit(ports, False, look)
    return found


def _visit(ports: Collection[int], listening: bool, act: Callable[[int, socket.socket], object]) -> Ended:
    """Act on each listener, or on each connection, of these local ports: on its number and a copy of it."""
    done = failed = 0
    try:
        numbers = _open_files()
    except OSError:
        return Ended(failed=1)
    for number in numbers:
        try:
            copy = _socket_of(number)
            if copy is None:
                continue
            with copy:
                if copy.getsockname()[1] in ports and _listens(copy) == listening:
                    act(number, copy)
                    done += 1
        except OSError as error:
            failed += error.errno not in _CLOSED
    return Ended(done, failed)


def _replace(number: int, listener: socket.socket) -> None:
    """Put a socket that listens nowhere in the place of a listener, which is thereby closed.

    gRPC writes a line to standard error when it finds its listener shut down; so it finds an idle one.
    """
    with socket.socket(listener.family, socket.SOCK_STREAM) as idle:
        if os.fstat(number).st_ino == os.fstat(listener.fileno()).st_ino:
            os.dup2(idle.fileno(), number, inheritable=False)


def _open_files() -> list[int]:
    """Return the numbers of the open files; none elsewhere than on Linux. Raises OSError without a free descriptor."""
    try:
        return [int(name) for name in os.listdir(_OPEN_FILES)]
    except FileNotFoundError:
        return []


def _socket_of(number: int) -> socket.socket | None:
    """Return a copy of an open file; None unless it is a TCP socket. Raises OSError where no descriptor is free."""
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        return None
    copy = os.dup(number)
    try:
        found = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    if found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6):
        return found
    found.close()
    return None


def _listens(of: socket.socket) -> bool:
    return bool(of.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
