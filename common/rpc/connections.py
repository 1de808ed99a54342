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
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from grpc import aio

from common.own_thread import in_own_thread

_OPEN_FILES: Final = "/proc/self/fd"
# Watches of health, which never end by themselves.
_HEALTH: Final = "/grpc.health."
# Seconds for gRPC to hand the last statuses to the kernel, and between two looks at what the kernel has sent.
_FLUSH_S: Final = 0.05
# Of a socket that its other end, or gRPC, has closed meanwhile.
_CLOSED: Final = frozenset({errno.EBADF, errno.ENOENT, errno.ENOTCONN, errno.EINVAL, errno.ENOTSOCK})

# Sockets by the numbers of their files. The values are their inodes: a number may stand for another socket later.
_Sockets: TypeAlias = dict[int, int]


# Held while a descriptor is in use: two servers may end at once.
_few_descriptors = threading.Lock()


class Calls:
    """Counts the calls of a server that have not ended, those of health apart, and lets go of ended ones.

    `by_port` has them by the port from which their client is connected.

    A call that is in a cycle when it ends waits for the collector with all that it had: gRPC's native call, its
    message, the frames of its handler. One that was long enough there is in the oldest generation, which a service
    walks after millions of new objects (`common/process/garbage.py`). So no cycle is left.
    """

    def __init__(self) -> None:
        self._running = 0
        self._over = asyncio.Event()
        self.by_port = Counter[int]()
        self._open = asyncio.Event()
        self._open.set()

    def hold(self) -> None:
        """Let calls that come from now on wait, those of health apart."""
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def around(self, method: str, context: Any) -> AbstractAsyncContextManager[None]:
        return self._count(context, 0 if method.startswith(_HEALTH) else 1)

    @asynccontextmanager
    async def _count(self, context: Any, calls: int) -> AsyncIterator[None]:
        # gRPC runs a handler in a task that ends once the call's status is written, or the call is given up. A
        # callback of the context would be called then too, but the context keeps it, and it keeps the context.
        task, port = asyncio.current_task(), _port_of(context.peer())
        assert task is not None
        self._running += calls
        self.by_port[port] += calls
        task.add_done_callback(lambda _: self._ended(calls, port))
        if calls:
            await self._open.wait()
        try:
            yield
        except aio.AbortError as error:
            # The call's state keeps this error, and the error's frames keep the state.
            task.add_done_callback(partial(_forget_frames, error))
            raise

    def _ended(self, calls: int, port: int) -> None:
        self._running -= calls
        self.by_port[port] -= calls
        if not self.by_port[port]:
            del self.by_port[port]
        if not self._running:
            self._over.set()

    async def over(self, seconds: float) -> None:
        """Return when every call has ended, or after so many seconds."""
        if self._running:
            self._over.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._over.wait()


def _forget_frames(error: BaseException, _: object) -> None:
    error.__traceback__ = error.__context__ = error.__cause__ = None


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

    There may be thousands of open files, so a thread looks at them: the loop still refuses late calls. It looks at all
    of them twice, and then at the connections alone: once no listener is left, none can come.
    """
    try:
        listeners, ended = await in_own_thread("listeners", _find, ports, True)
        ended += _visit(listeners, _replace)
        connections, missed = await in_own_thread("connections", _find, ports, False)
        await _delivered(connections, seconds)
        return ended + missed + await in_own_thread("connections", _visit, connections, _end)
    except OSError:  # no thread can be started
        return Ended(failed=1)


async def leave(ports: Collection[int], calls: Mapping[int, int], seconds: float) -> bool:
    """Close the listeners of this process on these local ports, and for so many seconds each connection without a call.

    Other processes on the ports get the clients' next connections. `calls` has the running calls by their clients'
    ports. Return whether no client is connected then.
    """
    ends = time.monotonic() + seconds
    try:
        listeners, _ = await in_own_thread("listeners", _find, ports, True)
        _visit(listeners, _replace)
        while True:
            connections, _ = await in_own_thread("connections", _find, ports, False)
            _leave_idle(connections, calls)
            if not connections or time.monotonic() >= ends:
                return not connections
            await asyncio.sleep(_FLUSH_S)
    except OSError:  # no thread can be started
        return False


def _leave_idle(connections: _Sockets, calls: Mapping[int, int]) -> None:
    """End what this process sends on connections without calls."""

    def look(_: int, connection: socket.socket) -> None:
        if not calls.get(connection.getpeername()[1]) and not _bytes(connection, termios.FIONREAD):
            connection.shutdown(socket.SHUT_WR)

    _visit(connections, look)


async def _delivered(connections: _Sockets, seconds: float) -> None:
    """Return when the other ends have acknowledged what each connection had to send, or after so many seconds.

    A connection counts until it was found with nothing to send once: refusals of later calls follow at any time.
    """
    ends, waiting = time.monotonic() + seconds, connections
    while waiting:
        await asyncio.sleep(_FLUSH_S)
        waiting = await in_own_thread("connections", _unsent, waiting)
        if time.monotonic() >= ends:
            return


def _unsent(connections: _Sockets) -> _Sockets:
    """Return the connections whose other end has yet to acknowledge bytes."""
    found: _Sockets = {}

    def look(number: int, connection: socket.socket) -> None:
        if _bytes(connection, termios.TIOCOUTQ):
            found[number] = connections[number]

    _visit(connections, look)
    return found


def _bytes(connection: socket.socket, queue: int) -> int:
    """Return the number of bytes in a queue of the kernel."""
    return int.from_bytes(fcntl.ioctl(connection, queue, bytes(4)), sys.byteorder)


def _port_of(peer: str) -> int:
    """Return the port in gRPC's name of a peer, as in "ipv4:127.0.0.1:1234"; 0 where it has none."""
    port = peer.rpartition(":")[2]
    return int(port) if port.isascii() and port.isdigit() else 0


def _end(_: int, connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


def _find(ports: Collection[int], listening: bool) -> tuple[_Sockets, Ended]:
    """Return the listeners, or the connections, of these local ports, and how many files could not be looked at."""
    found: _Sockets = {}

    def look(number: int, copy: socket.socket) -> bool:
        if copy.getsockname()[1] in ports and _listens(copy) == listening:
            found[number] = _inode(copy)
        return False

    try:
        return found, _look(_open_files(), look)
    except OSError:
        return found, Ended(failed=1)


def _visit(sockets: _Sockets, act: Callable[[int, socket.socket], None]) -> Ended:
    """Act on each of these sockets that is still open: on its number and a copy of it."""

    def look(number: int, copy: socket.socket) -> bool:
        if _inode(copy) != sockets[number]:
            return False
        act(number, copy)
        return True

    return _look(sockets, look)


def _look(numbers: Iterable[int], look: Callable[[int, socket.socket], bool]) -> Ended:
    """Look at the TCP sockets among these open files: at the number and a copy of each. Count where that is True."""
    done = failed = 0
    for number in numbers:
        with _few_descriptors:
            try:
                copy = _socket_of(number)
                if copy is not None:
                    with copy:
                        done += look(number, copy)
            except OSError as error:
                failed += error.errno not in _CLOSED
    return Ended(done, failed)


def _replace(number: int, listener: socket.socket) -> None:
    """Put a socket that listens nowhere in the place of a listener, which is thereby closed.

    gRPC writes a line to standard error when it finds its listener shut down; so it finds an idle one.
    """
    with socket.socket(listener.family, socket.SOCK_STREAM) as idle:
        if os.fstat(number).st_ino == _inode(listener):
            os.dup2(idle.fileno(), number, inheritable=False)


def _open_files() -> list[int]:
    """Return the numbers of the open files; none elsewhere than on Linux. Raises OSError without a free descriptor."""
    try:
        with _few_descriptors:
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


def _inode(of: socket.socket) -> int:
    return os.fstat(of.fileno()).st_ino
