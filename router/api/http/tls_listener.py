"""Accepts the connections of a TLS port, which count from their first moment.

The servers of event loops show a connection only after its handshake: clients that never finish one would hold as
many files as they like.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Final

from common.contracts import limits
from common.process.connections import Connections
from router.api.http.http_protocol import BoundedHttpProtocol

# Until the process may have files for new connections again.
_RETRY_S: Final = 0.5


class TlsListener:
    """A listening socket, with the two methods that uvicorn calls on a server."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        connections: Connections,
        new_protocol: Callable[[], BoundedHttpProtocol],
    ) -> None:
        listener.setblocking(False)
        self._listener, self._context = listener, context
        self._connections, self._new_protocol = connections, new_protocol
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self.task = asyncio.create_task(self._accept(), name="TLS listener")

    def close(self) -> None:
        """Take no new connection, and drop those whose handshake has not ended."""
        for task in (self.task, *self._handshakes):
            task.cancel()
        self._listener.close()

    async def wait_closed(self) -> None:
        await asyncio.gather(self.task, *self._handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            try:
                connection, address = await self._loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(_RETRY_S)
                continue
            peer = str(address[0])
            if self._connections.enter(peer):
                connection.close()  # nothing can be said before a handshake
                continue
            task = asyncio.create_task(self._shake_hands(connection, peer))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, connection: socket.socket, peer: str) -> None:
        """Make a connection of TLS; the protocol leaves the count when it is lost."""
        protocol = self._new_protocol()
        protocol.peer = peer
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._context, ssl_handshake_timeout=limits.HTTP_HEAD_SECONDS
            )
        except OSError:
            protocol.leave()
        except BaseException:  # broad: a cancelled handshake leaves too
            connection.close()
            protocol.leave()
            raise
