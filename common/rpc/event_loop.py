"""The event loop of every service: uvloop, with gRPC's wake-ups read in bulk.

gRPC's own thread writes one byte to a socket pair for each finished operation. Its reader takes one byte a turn of the
loop, though it handles everything that has finished. Under load stale bytes gather, and the loop turns in vain for
each. Once the socket is full (at some 280 bytes) gRPC's thread blocks in its write. That holds up every completion of
the process, new calls included. So all bytes but one are read before gRPC's reader is called.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from common.rpc.grpc_internals import is_completion_reader

ResultT = TypeVar("ResultT")


class Loop(uvloop.Loop):
    """uvloop's loop, which recognises gRPC's reader; a reader of another shape (a later gRPC) is left as it is."""

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: object) -> None:
        if isinstance(fd, socket.socket) and is_completion_reader(callback):
            callback = functools.partial(_take_all_but_one, fd, callback)
        super().add_reader(fd, callback, *args)


def _take_all_but_one(wakes: socket.socket, reader: Callable[[], object]) -> None:
    stale = len(wakes.recv(4096, socket.MSG_PEEK)) - 1
    if stale > 0:
        wakes.recv(stale)
    reader()


def run(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a service's main coroutine, as asyncio.run does."""
    return uvloop.run(main, loop_factory=Loop)
