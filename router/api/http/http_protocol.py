"""One HTTP connection with bounds, which uvicorn and httptools do not have.

Bounds hold for the bytes and number of headers, the time to receive a request, and requests sent ahead. Others hold for
the time that an answer waits for its reader, and for connections, all and by peer. What breaks a bound, and what is no
HTTP, gets a proper answer and not a line in the log.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import ssl
from typing import Any, Final

import httptools
import uvicorn
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from common.contracts import limits
from common.process.connections import Connections
from router.contracts.ports import UNWATCHED, RefusalWatch
from router.contracts.refusals import Refusal, fault_of_status


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
_NO_HTTP: Final = (400, "this is no HTTP/1.1 request")
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
        if not self._head_ended:  # a trailer, which a proxy may let pass, is no header
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
        self._refusals.saw(refusal, self._refusals.now_ns())
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
    more += f"x-request-id: {request_id}\r\nx-quire-request-id: {request_id}\r\nx-trace-id: {secrets.token_hex(16)}\r\n"
    return STATUS_LINE[status] + (head % (len(body), more)).encode() + body
