"""A TCP proxy whose connections a test breaks while both ends live."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from tests.support.listener import Listener

_CHUNK = 1 << 16


class Severed:
    """Passes connections on to an address on this host. `sever` breaks those that are open; new ones pass."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: set[asyncio.StreamWriter] = set()
        self._listener = Listener(self._joined)
        self.accepts = asyncio.Event()
        """While it is not set, a new connection waits: its caller hears nothing."""
        self.accepts.set()

    async def start(self) -> None:
        await self._listener.start()

    @property
    def address(self) -> str:
        return f"{self._listener.host}:{self._listener.port}"

    def sever(self) -> None:
        """Reset every open connection."""
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    async def kill(self) -> None:
        """Listen no longer, and break what is open."""
        await self._listener.close()

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
