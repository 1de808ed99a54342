"""A TCP proxy whose connections a test breaks while both ends live."""

from __future__ import annotations

import asyncio
from contextlib import suppress

_CHUNK = 1 << 16


class Severed:
    """Passes connections on to an address on this host. `sever` breaks those that are open; new ones pass."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._killed = False
        self.accepts = asyncio.Event()
        """While it is not set, a new connection waits: its caller hears nothing."""
        self.accepts.set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)

    @property
    def address(self) -> str:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    def sever(self) -> None:
        """Reset every open connection."""
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    async def kill(self) -> None:
        """Listen no longer, and break what is open."""
        self._killed = True
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._killed:  # it was accepted before, and its turn came after
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._joined(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.transport.abort())  # also of a task that is cancelled before it starts

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = {writer}
        try:
            await self.accepts.wait()
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
            ends.add(back)
            self._open |= ends
            await asyncio.gather(_pass_on(reader, back), _pass_on(there, writer))
        except OSError:
            pass
        finally:
            self._open -= ends
            for each in ends:
                each.transport.abort()
                with suppress(OSError):
                    await each.wait_closed()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    writer.close()
