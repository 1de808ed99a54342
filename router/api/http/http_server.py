"""Serves an ASGI application with uvicorn inside the event loop that is running, without touching signals."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import uvicorn
from fastapi import FastAPI

from common.contracts import limits
from common.contracts.errors import PortTaken
from common.process.connections import Connections
from common.process.ports import listener
from common.rpc.tls import PublicCertificate, RenewedContext
from router.api.http.http_protocol import BoundedHttpProtocol, HttpConfig
from router.contracts.ports import UNWATCHED

# Accepts the connections of a TLS port, which count from their first moment.
# The servers of event loops show a connection only after its handshake: clients that never finish one would hold as
# many files as they like.


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


_BACKLOG = 2048
_DATE_SECONDS = 1.0  # between two changes of the date in answers


class _Server(uvicorn.Server):
    """uvicorn's server, with an event for when it listens, and without signal handlers."""

    def __init__(self, config: HttpConfig) -> None:
        super().__init__(config)
        self._http = config
        self.listening, self.leaving, self._ending = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def end(self) -> None:
        """Take no new connection, and let `serve` return once those that are open have ended."""
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        """Keep the date of answers until `end`. uvicorn's own loop looks ten times a second whether it should end."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(_DATE_SECONDS):
                    await self._ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn visits all connections before it waits for anything.
        asyncio.get_running_loop().call_soon(self.leaving.set)
        await super().shutdown(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if (context := self._http.tls) is None:
            await super().startup(sockets)
        else:
            await super().startup([])
            listeners = [
                TlsListener(each, context, self._http.connections, self._new_protocol) for each in sockets or ()
            ]
            self.servers = listeners  # type: ignore[assignment]  # uvicorn closes them and waits for that
            for each in listeners:
                each.task.add_done_callback(self._listens_no_more)
        self.listening.set()

    def _new_protocol(self) -> BoundedHttpProtocol:
        return BoundedHttpProtocol(self._http, server_state=self.server_state, app_state=self.lifespan.state)

    def _listens_no_more(self, _: asyncio.Task[None]) -> None:
        self.end()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """A running server. `port` is the one it listens on."""

    def __init__(self, server: _Server, task: asyncio.Task[None], port: int) -> None:
        """`task` serves until `stop`; when it ends before, nothing listens any more."""
        self._server, self.task = server, task
        self.port = port
        self.leaving = server.leaving
        """Set once `stop` has ended each connection without a request; those with one end after it."""

    async def stop(self) -> None:
        """Take no new connection, let running requests finish within the grace period, then cancel them.

        The listeners are closed before the first await.
        """
        for each in self._server.servers:
            each.close()
        self._server.end()
        await self.task


def bounded_connections(most: int, most_a_peer: int) -> Connections:
    """Return the count of a server's connections. They have at most half of the files that the process may open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Connections(most if files == resource.RLIM_INFINITY else min(most, files // 2), most_a_peer)


async def serve_http(
    app: FastAPI,
    host: str,
    port: int,
    grace_s: float = 5.0,
    reuse_port: bool = False,
    tls: PublicCertificate | None = None,
    connections: Connections | None = None,
) -> HttpServer:
    """Listen and serve; port 0 takes a free one. `app.state.refusals` sees what is no request. Raises PortTaken."""
    try:
        listens = listener(host, port, _BACKLOG, reuse_port)
    except OSError as error:
        raise PortTaken("--port", host, port, error.strerror) from None
    _notice_lost_hosts(listens)
    grace = max(1, round(grace_s))  # uvicorn takes whole seconds
    config = HttpConfig(
        app,
        connections=bounded_connections(1024, 1024) if connections is None else connections,
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        # Without keys the address is the tenant, and any process of this host could name another one.
        proxy_headers=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=grace,
        tls=None if tls is None else RenewedContext(tls).context,
        refusals=getattr(app.state, "refusals", UNWATCHED),
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listens]), name="http")
    listening = asyncio.create_task(server.listening.wait())
    await asyncio.wait({task, listening}, return_when=asyncio.FIRST_COMPLETED)
    listening.cancel()
    if task.done():
        task.result()
    return HttpServer(server, task, listens.getsockname()[1])


def _notice_lost_hosts(listener: socket.socket) -> None:
    """End connections whose other end has acknowledged nothing for as long as a slow reader may take.

    Accepted sockets have the options of their listener. Without them the kernel tries for some 15 minutes, or for ever
    where nothing is to be sent. A reader that stands still for so long has no better right to its blocks.
    """
    if sys.platform == "linux":
        silent_s = round(limits.HTTP_STALL_SECONDS)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, silent_s // 2)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, silent_s // 6)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * silent_s)
