"""The page over HTTP: static files from memory, the runbook, and data as JSON. Nothing here changes anything.

The port knows no callers. So no page of another origin may ask. A name of a host that could lead elsewhere tomorrow
is refused. The policy for contents (CSP) keeps text from becoming code.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Final

from common.contracts.clock import Clock
from common.process.metrics import is_loopback
from common.process.small_http import Reply, Request, text
from common.untrusted.host_names import is_own_name
from router.api.page.answers import Answers, Later, Source
from router.api.page.runbook import runbook_page

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


class Site:
    """`sources` by the last part of their path. Other machines may ask for data only if `from_elsewhere`."""

    def __init__(
        self, sources: Mapping[str, Source], clock: Clock, from_elsewhere: bool, later: Later | None = None
    ) -> None:
        """`later` calls a function after some seconds; by default the event loop does."""
        self._from_elsewhere, self._answers = from_elsewhere, Answers(sources, clock, later)
        self._files = _read(_STATIC) | {"runbook": (_TYPES[".html"], runbook_page().encode())}

    @property
    def kept(self) -> int:
        """How many answers are kept for those who ask the same."""
        return self._answers.kept

    async def answer(self, request: Request) -> Reply:
        """Answer a GET or HEAD of a path below PREFIX."""
        refusal = self._refusal(request)
        if refusal:
            return _with_headers(text(HTTPStatus.FORBIDDEN, refusal))
        if request.path.startswith(DATA):
            return _with_headers(await self._answers.to(request.path.removeprefix(DATA), request.query, request.peer))
        found = self._files.get(request.path.removeprefix(f"{PREFIX}/") or "index.html")
        if found is None:
            return _with_headers(text(HTTPStatus.NOT_FOUND, f"{PREFIX}/ has no such file; expected {PREFIX}/"))
        return _with_headers(Reply(HTTPStatus.OK, *found))

    def _refusal(self, request: Request) -> str:
        """Return why a caller gets nothing, or ""."""
        if request.origin and request.origin.partition("://")[2] != request.host:
            return "pages of other origins may not read this"
        if request.path.startswith(DATA) and request.fetch_site not in ("", "same-origin"):
            return f"this is for the page itself: open {PREFIX}/"
        if not is_own_name(request.host):
            return f"open the page by the machine's address or name: {request.host[:100]!r} could be anybody's"
        if not (self._from_elsewhere or is_loopback(request.peer)):
            what = "the admin plane asks callers for certificates, which browsers have not; open the page"
            return f"{what} on the machine of the router, or through ssh -L or kubectl port-forward"
        return ""


def _read(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Return type and content of each file that may be served."""
    files = (path for path in folder.rglob("*") if path.suffix in _TYPES)
    return {path.relative_to(folder).as_posix(): (_TYPES[path.suffix], path.read_bytes()) for path in files}


def _with_headers(reply: Reply) -> Reply:
    return reply._replace(headers=HEADERS)
