"""The page over HTTP: static files from memory, and data as JSON. Nothing here changes anything.

The port knows no callers, so what a browser could be made to fetch is bounded: no page of another origin may ask, a
name that could lead elsewhere tomorrow is refused, and what the page shows cannot become code in it (CSP).
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final

from common.clock import Clock
from common.errors import InvalidRequest, NotFound, QuireError, Unavailable
from common.process.metrics import is_loopback
from common.process.small_http import Reply, Request, text
from router.page.query import Query

PREFIX: Final = "/page"
DATA: Final = f"{PREFIX}/data/"
_STATIC: Final = Path(__file__).parent / "static"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_POLICY: Final = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
HEADERS: Final = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-cache"),
)
_STATUSES: Final[tuple[tuple[type[QuireError], HTTPStatus], ...]] = (
    (InvalidRequest, HTTPStatus.BAD_REQUEST),
    (NotFound, HTTPStatus.NOT_FOUND),
    (Unavailable, HTTPStatus.SERVICE_UNAVAILABLE),
)
# Several tabs and several people share an answer for so long.
_FRESH_S: Final = 1.0
_MOST_KEPT: Final = 64
_AT_ONCE: Final = 4


@dataclass(frozen=True, slots=True)
class Source:
    """What answers one path, and the parameters that it takes."""

    answer: Callable[[Query], Awaitable[object]]
    parameters: frozenset[str] = field(default=frozenset())


class Site:
    """`sources` by the last part of their path. Other machines may ask for data only if `from_elsewhere`."""

    def __init__(self, sources: Mapping[str, Source], clock: Clock, from_elsewhere: bool) -> None:
        self._sources, self._clock, self._from_elsewhere = sources, clock, from_elsewhere
        self._files = _read(_STATIC)
        self._own_names = {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}
        self._answers: dict[tuple[str, str], tuple[float, asyncio.Task[Reply]]] = {}
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def answer(self, request: Request) -> Reply:
        """Answer a GET or HEAD of a path below PREFIX."""
        refusal = self._refusal(request)
        if refusal:
            return _with_headers(text(HTTPStatus.FORBIDDEN, refusal))
        if request.path.startswith(DATA):
            return _with_headers(await self._shared(request.path.removeprefix(DATA), request.query))
        found = self._files.get(request.path.removeprefix(f"{PREFIX}/") or "index.html")
        if found is None:
            return _with_headers(text(HTTPStatus.NOT_FOUND, f"{PREFIX}/ has no such file; expected {PREFIX}/"))
        return _with_headers(Reply(HTTPStatus.OK, *found))

    def _refusal(self, request: Request) -> str:
        """Return why a caller gets nothing, or ""."""
        if request.origin and request.origin.partition("://")[2] != request.host:
            return "pages of other origins may not read this"
        if not self._is_own_name(request.host):
            return f"open the page by the machine's address or name: {request.host[:100]!r} could be anybody's"
        if not (self._from_elsewhere or is_loopback(request.peer)):
            what = "the admin plane asks callers for certificates, which browsers have not; open the page"
            return f"{what} on the machine of the router, or through ssh -L or kubectl port-forward"
        return ""

    def _is_own_name(self, host: str) -> bool:
        """Return whether no foreign DNS server could have said this name: else any page could ask by its own name."""
        name = host.lower()
        name = name[: name.find("]") + 1] if name.startswith("[") else name.partition(":")[0]
        has_domain = "." in name or name.startswith("[")
        if name in self._own_names or not has_domain:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name.endswith((".svc", ".internal", ".local", ".localhost", ".svc.cluster.local"))
        return True

    async def _shared(self, name: str, query: str) -> Reply:
        """Answer with what an equal question got within the last second, or is about to get."""
        now, key = self._clock.monotonic(), (name, query)
        kept = self._answers.get(key)
        if kept is None or (kept[1].done() and now - kept[0] >= _FRESH_S):
            self._forget(now)
            if len(self._answers) >= _MOST_KEPT:
                words = f"too many questions at once: {_MOST_KEPT} wait; ask again in a second"
                return _error(HTTPStatus.TOO_MANY_REQUESTS, words, "overloaded")
            kept = now, asyncio.create_task(self._data(name, query))
            self._answers[key] = kept
        return await asyncio.shield(kept[1])

    def _forget(self, now: float) -> None:
        old = [key for key, (at, task) in self._answers.items() if task.done() and now - at >= _FRESH_S]
        for key in old:
            del self._answers[key]

    async def _data(self, name: str, query: str) -> Reply:
        source = self._sources.get(name)
        if source is None:
            named = ", ".join(sorted(self._sources))
            return _error(HTTPStatus.NOT_FOUND, f"{DATA} has {named}", NotFound.reason.lower())
        try:
            parameters = Query(query)
            parameters.allow(source.parameters)
            async with self._turns:
                return _json(HTTPStatus.OK, await source.answer(parameters))
        except QuireError as error:
            status = next((each for kind, each in _STATUSES if isinstance(error, kind)), None)
            return _error(status or HTTPStatus.INTERNAL_SERVER_ERROR, str(error), error.reason.lower())


def _read(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Return type and content of each file that may be served."""
    files = (path for path in folder.rglob("*") if path.suffix in _TYPES)
    return {path.relative_to(folder).as_posix(): (_TYPES[path.suffix], path.read_bytes()) for path in files}


def _with_headers(reply: Reply) -> Reply:
    return reply._replace(headers=HEADERS)


def _json(status: HTTPStatus, value: object) -> Reply:
    body = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Reply(status, "application/json", body.encode(errors="replace"))


def _error(status: HTTPStatus, message: str, code: str) -> Reply:
    return _json(status, {"error": {"message": message, "code": code}})
