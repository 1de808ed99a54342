"""A port that passes connections on to another one, and leaves none open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field


@dataclass
class Relay:
    """Passes each connection on to the port that `target` gives when it comes; `host` is where it listens."""

    target: Callable[[], int]
    host: str = "127.0.0.1"
    port: int = 0
    connections: int = 0
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _over: bool = False

    def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass a connection on, in a task of its own: asyncio logs an error where one that it started is cancelled."""
        self.connections += 1
        if self._over:  # it was accepted before, and its turn came after
            writer.transport.abort()
            return
        task = asyncio.ensure_future(joined(reader, writer, self.target()))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: writer.transport.abort())  # also of a task that is cancelled before it starts

    async def ended(self) -> None:
        """End what still runs."""
        self._over = True
        while running := [*self._running]:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    """Pass everything on between a connection and a new one to a port of this machine, until one of both ends."""
    writers = [writer]
    try:
        inner, out = await asyncio.open_connection("127.0.0.1", port)
        writers.append(out)
        async with asyncio.TaskGroup() as ways:
            for way in (_carry(reader, out), _carry(inner, writer)):
                ways.create_task(way)
    except* OSError:
        pass
    finally:
        await closed(*writers)


async def closed(*writers: asyncio.StreamWriter) -> None:
    """Close connections at once, and return when they are closed."""
    for writer in writers:
        writer.transport.abort()
    for writer in writers:
        with suppress(OSError):
            await writer.wait_closed()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    raise ConnectionAbortedError  # one end is gone: so is the other


@asynccontextmanager
async def running_relay(target: Callable[[], int], host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Relay]:
    relay = Relay(target, host)
    server = await asyncio.start_server(relay.serve, host, port)
    relay.port = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        server.close()
        await relay.ended()
