"""Serves an ASGI application with uvicorn inside the event loop that is running, without touching signals."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import secrets
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import httptools
import uvicorn
from fastapi import FastAPI
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from common.contracts import limits
from common.contracts.clock import until_tick
from common.contracts.errors import PortTaken
from common.process.connections import Connections
from common.process.ports import listener
from common.rpc.tls import PublicCertificate, RenewedContext
from router.contracts.ports import UNWATCHED, RefusalWatch
from router.contracts.refusals import DROPPED_REASON_HEADER, SATURATED, Refusal, fault_of_status


# One HTTP connection with bounds, which uvicorn and httptools do not have.
# Bounds hold for the bytes and number of headers, the time to receive a request, and requests sent ahead. Others
# hold for the time that an answer waits for its reader, and for connections, all and by peer. What breaks a bound,
# or is not HTTP, gets a proper answer and not a line in the log.
class HttpConfig(uvicorn.Config):
    """uvicorn's settings, and what all connections of the server share."""

    def __init__(
        self,
        app: Any,
        connections: Connections,
        tls: ssl.SSLContext | None = None,
        refusals: RefusalWatch = UNWATCHED,
        **kwargs: Any,
    ) -> None:
        super().__init__(app, http=BoundedHttpProtocol, timeout_keep_alive=limits.HTTP_IDLE_SECONDS, **kwargs)
        self.connections, self.tls, self.refusals = connections, tls, refusals


class _TooLargeError(Exception):
    """Ends the parser from one of its callbacks."""


_MOST_HEADERS: Final = f"{limits.MAX_HTTP_HEADERS} headers, of {limits.MAX_HTTP_HEAD_BYTES} bytes with the request line"
_HEAD_TOO_LARGE: Final = (431, f"the headers are too large; expected at most {_MOST_HEADERS}")
_AHEAD: Final = (429, f"more than {limits.MAX_HTTP_PIPELINED} requests were sent ahead; wait for the answers")
_NO_HTTP: Final = (400, "this is not an HTTP/1.1 request")
_NO_HEAD: Final = (408, f"the headers did not come within {limits.HTTP_HEAD_SECONDS:g} s")
_UPLOADS: Final = b"/v1/files"


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol over httptools, with the bounds of `common/contracts/limits.py`."""

    def __init__(self, config: HttpConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._connections, self._refusals = config.connections, config.refusals
        # The address that is counted; empty while it is not. Where a handshake comes first it is counted before.
        self.peer = ""
        # Bytes that came since the parser last reported the end of headers, or a part of a body.
        self._unreported = 0
        # Of the request that is being received.
        self._head_bytes = self._head_lines = 0
        self._head_ended = False
        # Why the parser was stopped.
        self._refusal = _NO_HTTP
        # Whether the connection was refused: it is still read, and what comes is dropped.
        self._refused = False
        self._receiving: asyncio.TimerHandle | None = None
        # The request that is being answered; `cycle` is the one that came last, which may wait behind it.
        self._served: RequestResponseCycle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self.peer:
            peer = self.client[0] if self.client else "unknown"
            if full := self._connections.enter(peer):
                self._refused = True
                transport.write(self._answer(503, full))
                transport.close()
                return
            self.peer = peer
        self._receive_within(limits.HTTP_HEAD_SECONDS, _NO_HEAD)

    def connection_lost(self, exc: Exception | None) -> None:
        self.leave()
        self._received()
        if self._stalled is not None:
            self._stalled.cancel()
        self._unset_keepalive_if_required()
        self._end_request()
        super().connection_lost(exc)

    def leave(self) -> None:
        """Count no longer. Idempotent."""
        if self.peer:
            self._connections.leave(self.peer)
            self.peer = ""

    # ------------------------------------------------------------ a request comes

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        self._unreported += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # no other protocol is spoken here; the request is answered as HTTP
        except httptools.HttpParserError:
            self._refuse(*self._refusal)
            return
        if self._unreported > limits.MAX_HTTP_HEAD_BYTES:
            self._refuse(*_HEAD_TOO_LARGE)
        elif self._receiving is None and not self._serving:
            self._receive_within(limits.HTTP_HEAD_SECONDS, _NO_HEAD)

    def on_message_begin(self) -> None:
        self._head_bytes = self._head_lines = 0
        self._head_ended = False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        self._head_lines += 1
        if self._head_bytes > limits.MAX_HTTP_HEAD_BYTES or self._head_lines > limits.MAX_HTTP_HEADERS:
            self._stop_parser(_HEAD_TOO_LARGE)
        if not self._head_ended:  # a trailer, which a proxy may let pass, is not a header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unreported = 0
        self._head_ended = True
        if self._head_bytes + len(self.url) > limits.MAX_HTTP_HEAD_BYTES:
            self._stop_parser(_HEAD_TOO_LARGE)
        if len(self.pipeline) >= limits.MAX_HTTP_PIPELINED:
            self._stop_parser(_AHEAD)
        is_upload = self.url.partition(b"?")[0].endswith(_UPLOADS)
        seconds = limits.HTTP_UPLOAD_SECONDS if is_upload else limits.HTTP_BODY_SECONDS
        self._receive_within(seconds, (408, f"the body did not come within {seconds:g} s"))
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unreported = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unreported = 0
        self._received()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    def _stop_parser(self, refusal: tuple[int, str]) -> None:
        self._refusal = refusal
        raise _TooLargeError

    def _receive_within(self, seconds: float, late: tuple[int, str]) -> None:
        self._received()
        self._receiving = self.loop.call_later(seconds, self._refuse, *late)

    def _received(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    # ------------------------------------------------------------ a refusal

    @property
    def _serving(self) -> bool:
        """Whether a request is being answered."""
        return self._served is not None and not self._served.response_complete

    @property
    def _answer_has_begun(self) -> bool:
        """Whether the request that is being served, or whose body still comes, has an answer already."""
        served = self._served
        return served is not None and served.response_started and (served.more_body or not served.response_complete)

    def _end_request(self) -> None:
        if self._served is not None and not self._served.response_complete:
            self._served.disconnected = True
            self._served.message_event.set()

    def _refuse(self, status: int, message: str) -> None:
        """Answer, if no other answer has begun; end the requests of the connection, and close it a moment later."""
        self._refused = True
        self._received()
        if self.transport.is_closing():
            return
        if not self._answer_has_begun:
            self.transport.write(self._answer(status, message))
        self._end_request()
        self.pipeline.clear()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._receiving = self.loop.call_later(limits.HTTP_LINGER_SECONDS, self.transport.abort)

    def _answer(self, status: int, message: str) -> bytes:
        # The request has got no ids, and its own are not read: this one names the answer alone.
        request_id = secrets.token_hex(16)
        refusal = Refusal("http", "connection", str(status), fault_of_status(status), request_id, words=(message,))
        self._refusals.note_refusal(refusal, self._refusals.now_ns())
        return _answer(status, message, request_id)

    # ------------------------------------------------------------ a slow reader

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(limits.HTTP_STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._stalled = self.loop.call_later(limits.HTTP_STALL_SECONDS, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; one whose peer has not read the last answer is cut."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()


def _answer(status: int, message: str, request_id: str) -> bytes:
    """Return a whole response with an error body of the OpenAI-compatible API; it closes the connection."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}}).encode()
    head = "content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n%s\r\n"
    more = "retry-after: 1\r\n" if status in (429, 503) else ""
    if status == 503:
        more += f"{DROPPED_REASON_HEADER}: {SATURATED}\r\n"
    more += f"x-request-id: {request_id}\r\nx-quire-request-id: {request_id}\r\nx-trace-id: {secrets.token_hex(16)}\r\n"
    return STATUS_LINE[status] + (head % (len(body), more)).encode() + body


# Until the process may have files for new connections again.
_RETRY_S: Final = 0.5


# Accepts the connections of a TLS port, which count from their first moment.
# The servers of event loops show a connection only after its handshake: clients that never finish one would hold as
# many files as they like.
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
                async with asyncio.timeout(until_tick(time.monotonic(), _DATE_SECONDS)):
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
    """Listen and serve; port 0 takes a free one. `app.state.refusals` sees what is not a request. Raises PortTaken."""
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
