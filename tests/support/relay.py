"""A port that passes connections on to another one, and leaves none open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from tests.support.listener import Listener


class Relay(Listener):
    """Passes each connection on to the port that `target` gives when it comes."""

    def __init__(self, target: Callable[[], int], host: str, port: int) -> None:
        super().__init__(self._joined, host, port)
        self.target = target

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await joined(reader, writer, self.target())


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
    async with Relay(target, host, port) as relay:
        yield relay
