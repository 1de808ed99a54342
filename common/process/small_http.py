"""A small HTTP server for scrapers, probes and operators: one request a connection, with the public HTTP port's bounds.

It needs nothing but asyncio: the KV manager and the worker have no web framework.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from common.contracts import limits
from common.process.connections import Connections
from common.process.ports import listener

_REQUEST: Final = re.compile(r"([A-Z]+) (\S+) HTTP/1\.[01]")
_HEADER: Final = re.compile(r"[!-9;-~]+:[^\0]*")
_LENGTH: Final = re.compile(r"[0-9]{1,9}")


class Reply(NamedTuple):
    """Status, content type and body; further headers are written as they are."""

    status: HTTPStatus
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class Request(NamedTuple):
    """What a client asks for; the path has no query. `origin` is the page that a browser sends it from, if any.

    `host` is the name by which the client calls this server, with the port if it named one. `fetch_site` is how a
    browser relates the page that asks to this server (Sec-Fetch-Site); other clients send nothing.
    """

    method: str
    path: str
    accept: str
    origin: str = ""
    peer: str = ""
    body_bytes: int = 0
    query: str = ""
    host: str = ""
    fetch_site: str = ""


Answer = Callable[[Request], Reply | Awaitable[Reply]]


def text(status: HTTPStatus, words: str) -> Reply:
    return Reply(status, "text/plain", f"{words}\n".encode())


_MOST_HEADERS: Final = f"{limits.MAX_HTTP_HEADERS} headers, of {limits.MAX_HTTP_HEAD_BYTES} bytes with the request line"
_TOO_LARGE: Final = text(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"expected at most {_MOST_HEADERS}")
_NO_HTTP: Final = text(HTTPStatus.BAD_REQUEST, "this is not an HTTP/1.1 request")
_LATE: Final = text(HTTPStatus.REQUEST_TIMEOUT, f"the headers did not come within {limits.HTTP_HEAD_SECONDS:g} s")
_WRONG_METHOD: Final = text(HTTPStatus.METHOD_NOT_ALLOWED, "expected GET, HEAD or POST")
_NO_LENGTH: Final = text(HTTPStatus.LENGTH_REQUIRED, "expected a body with a Content-Length, or none")
_LONG_BODY: Final = text(
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"expected a body of at most {limits.SMALL_HTTP_BODY_BYTES} bytes"
)


class SmallHttpServer:
    """Calls `answer` with each request; `connections` counts those that are open."""

    def __init__(self, answer: Answer, connections: Connections) -> None:
        self._answer, self._connections = answer, connections
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._parts: dict[str, Connections] = {}

    def bound(self, prefix: str, connections: Connections) -> None:
        """Count connections that ask for paths with a prefix on their own too, and end those whose readers leave."""
        self._parts[prefix] = connections

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port (a free one for 0). Raises OSError when it is taken."""
        to = {"sock": listener(host, port)} if host == "::" else {"host": host, "port": port}
        self._server = await asyncio.start_server(self._serve, limit=limits.MAX_HTTP_HEAD_BYTES, **to)
        taken: int = self._server.sockets[0].getsockname()[1]
        return taken

    async def stop(self) -> None:
        """Stop listening, and cut the connections that are open: a slow one must not hold the process."""
        if self._server is not None:
            self._server.close()
            for writer in self._open:
                writer.transport.abort()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str((writer.get_extra_info("peername") or ("unknown",))[0])
        full = self._connections.enter(peer)
        self._open.add(writer)
        try:
            if full:
                await _close_with(writer, text(HTTPStatus.SERVICE_UNAVAILABLE, full))
            else:
                await self._exchange(reader, writer, peer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass  # a client that is gone, or does not read, gets no more
        finally:
            writer.transport.abort()
            self._open.discard(writer)
            if not full:
                self._connections.leave(peer)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> None:
        request = await _received(reader)
        if isinstance(request, Request):
            part = next((each for prefix, each in self._parts.items() if request.path.startswith(prefix)), None)
            request = request._replace(peer=peer)
            await (self._reply(request, writer) if part is None else self._reply_in(part, request, reader, writer))
            return
        if writer.is_closing():
            return
        writer.write(_encoded(request))
        writer.write_eof()
        async with asyncio.timeout(limits.HTTP_LINGER_SECONDS):
            while await reader.read(limits.MAX_HTTP_HEAD_BYTES):
                pass  # a refusal would be lost if something were left unread

    async def _reply(self, request: Request, writer: asyncio.StreamWriter) -> None:
        answer = self._answer(request)
        reply = await answer if inspect.isawaitable(answer) else answer
        await _close_with(writer, reply, with_body=request.method != "HEAD")

    async def _reply_in(
        self, part: Connections, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Reply to a request for a bounded part, until the reader closes its side of the connection."""
        if full := part.enter(request.peer):
            await _close_with(writer, text(HTTPStatus.SERVICE_UNAVAILABLE, full))
            return
        try:
            await _unless_gone(self._reply(request, writer), reader)
        finally:
            part.leave(request.peer)


async def _unless_gone(work: Coroutine[Any, Any, None], reader: asyncio.StreamReader) -> None:
    """Do work; cancel it when the other side sends no more. Raises what the work raises."""
    working, rest = asyncio.create_task(work), asyncio.create_task(_drained(reader))
    try:
        await asyncio.wait((working, rest), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        rest.cancel()
        await asyncio.gather(working, rest, return_exceptions=True)


async def _drained(reader: asyncio.StreamReader) -> None:
    while await reader.read(limits.MAX_HTTP_HEAD_BYTES):
        pass  # nothing is expected after a request


async def _received(reader: asyncio.StreamReader) -> Request | Reply:
    """Read a request, and pass over its body; return the refusal of one that breaks a bound.

    Raises IncompleteReadError at an early end.
    """
    try:
        async with asyncio.timeout(limits.HTTP_HEAD_SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
            request = _parsed(head.decode("latin-1").split("\r\n")[:-2])
            if isinstance(request, Request):
                await reader.readexactly(request.body_bytes)
            return request
    except asyncio.LimitOverrunError:
        return _TOO_LARGE
    except TimeoutError:
        return _LATE


def _parsed(lines: list[str]) -> Request | Reply:
    asked, headers = _REQUEST.fullmatch(lines[0]), lines[1:]
    if asked is None or not all(map(_HEADER.fullmatch, headers)):
        return _NO_HTTP
    if len(headers) > limits.MAX_HTTP_HEADERS:
        return _TOO_LARGE
    method, target = asked.groups()
    if method not in ("GET", "HEAD", "POST"):
        return _WRONG_METHOD
    length = _value("content-length", headers) or "0"
    if _value("transfer-encoding", headers) or not _LENGTH.fullmatch(length):
        return _NO_LENGTH
    if int(length) > limits.SMALL_HTTP_BODY_BYTES:
        return _LONG_BODY
    path, _, query = target.partition("?")
    accept, origin, host, site = (_value(name, headers) for name in ("accept", "origin", "host", "sec-fetch-site"))
    return Request(method, path, accept, origin, body_bytes=int(length), query=query, host=host, fetch_site=site)


def _value(name: str, headers: Iterable[str]) -> str:
    """Return the value of the first header of a name, which is given in lower case; empty without one."""
    split = (header.partition(":") for header in headers)
    return next((value.strip() for found, _, value in split if found.lower() == name), "")


async def _close_with(writer: asyncio.StreamWriter, reply: Reply, with_body: bool = True) -> None:
    """Send an answer and close. Raises TimeoutError when the client leaves it unread."""
    writer.write(_encoded(reply, with_body))
    writer.close()
    async with asyncio.timeout(limits.HTTP_STALL_SECONDS):
        await writer.wait_closed()


def _encoded(reply: Reply, with_body: bool = True) -> bytes:
    further = "".join(f"{name}: {value}\r\n" for name, value in reply.headers)
    head = (
        f"HTTP/1.1 {reply.status.value} {reply.status.phrase}\r\nContent-Type: {reply.content_type}\r\n"
        f"Content-Length: {len(reply.body)}\r\n{further}Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (reply.body if with_body else b"")
