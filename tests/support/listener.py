"""A TCP server of a test that leaves no connection open, at whichever moment the last one comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Self

from tests.support.turns import take_turn


@dataclass
class Listener:
    """Serves each connection in a task of its own: asyncio logs an error where one that it started is cancelled."""

    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
    host: str = "127.0.0.1"
    port: int = 0
    connections: int = 0
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _server: asyncio.Server | None = None
    _over: bool = False

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self._over:  # it was accepted before, and its turn came after
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self.serve(reader, writer))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: writer.transport.abort())  # also of a task that is cancelled before it starts

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Listen no longer, and end what is open. Idempotent."""
        self._over = True
        server, self._server = self._server, None
        if server is not None:
            for each in server.sockets:
                asyncio.get_running_loop().remove_reader(each.fileno())
            # asyncio leaves a connection open for ever if its server closes between the accept and this turn.
            await take_turn()
            server.close()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
