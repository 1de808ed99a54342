"""Ends the connections of a server that will serve no more, so that late calls fail as UNAVAILABLE.

A gRPC server that stops tells its clients with GOAWAY. A call that is on its way then is answered CANCELLED, which
clients take for their own doing and do not send again. A call on a connection that is closed ends as UNAVAILABLE.
gRPC has no way to close a connection of a server, so the sockets are found among the open files of the process.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Final

_OPEN_FILES: Final = "/proc/self/fd"
# Calls that nobody waits for.
_HEALTH: Final = "/grpc.health."
# Seconds for the last statuses to leave after their handlers have returned.
_FLUSH_S: Final = 0.05


class Calls:
    """Counts the calls inside the handlers of a server, those of health apart."""

    def __init__(self) -> None:
        self._inside = 0
        self._over = asyncio.Event()

    def around(self, method: str, _: Any) -> AbstractAsyncContextManager[None]:
        return self._count(0 if method.startswith(_HEALTH) else 1)

    @asynccontextmanager
    async def _count(self, calls: int) -> AsyncIterator[None]:
        self._inside += calls
        try:
            yield
        finally:
            self._inside -= calls
            if not self._inside:
                self._over.set()

    async def over(self, seconds: float) -> None:
        """Return when no call is inside and the last statuses have left, or after so many seconds."""
        if self._inside:
            self._over.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), seconds)
        await asyncio.sleep(_FLUSH_S)


def shut_down(ports: Collection[int]) -> int:
    """Shut down what this process has open on these local ports, listeners first; return how many sockets.

    Elsewhere than on Linux nothing is found, and clients see what gRPC tells them.
    """
    found, numbers = dict[int, socket.socket](), dict[int, int]()
    for number in _open_files():
        # A copy may have the number of the folder, which was open while it was read.
        if number not in found and (copy := _socket_of(number)) is not None:
            found[copy.fileno()], numbers[copy.fileno()] = copy, number
    mine = [each for each in found.values() if _local_port(each) in ports]
    for each in sorted(mine, key=_listens, reverse=True):
        if _listens(each):
            _replace(numbers[each.fileno()], each)
        else:
            with suppress(OSError):  # the client has closed it
                each.shutdown(socket.SHUT_RDWR)
    for each in found.values():
        each.close()
    return len(mine)


def _replace(number: int, listener: socket.socket) -> None:
    """Put a socket that listens nowhere in the place of a listener, which is thereby closed.

    gRPC writes a line to standard error when it finds its listener shut down; so it finds an idle one.
    """
    with socket.socket(listener.family, socket.SOCK_STREAM) as idle:
        os.dup2(idle.fileno(), number, inheritable=False)


def _open_files() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_OPEN_FILES)]
    except OSError:
        return []


def _socket_of(number: int) -> socket.socket | None:
    """Return a second handle of an open file; None unless it is a TCP socket."""
    try:
        copy = os.dup(number)
    except OSError:
        return None
    try:
        found = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    if found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6):
        return found
    found.close()
    return None


def _local_port(of: socket.socket) -> int:
    try:
        return int(of.getsockname()[1])
    except OSError:
        return 0


def _listens(of: socket.socket) -> bool:
    return bool(of.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
