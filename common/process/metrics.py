"""Metrics of one process, and the small HTTP endpoint that serves them, with /health and /live for probes.

Services define their metrics on the registry from `new_registry`, under names that start with `quire:`.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    exposition,
)
from prometheus_client.openmetrics import exposition as openmetrics

from common.contracts.errors import DeadlineExceeded, PermissionDenied, PortTaken, QuireError, Unavailable, Unsupported
from common.contracts.limits import (
    MAX_METRICS_CONNECTIONS,
    MAX_METRICS_CONNECTIONS_A_PEER,
    MAX_SITE_CONNECTIONS,
    MAX_SITE_CONNECTIONS_A_PEER,
)
from common.process.connections import Connections
from common.process.small_http import Answer, Reply, Request, SmallHttpServer, text
from common.untrusted.host_names import is_own_name

PORT_OFFSET: Final = 1000
# What a POST does; it returns the JSON of the answer.
Action = Callable[[], Awaitable[object]]
_FAILED: Final = HTTPStatus.INTERNAL_SERVER_ERROR
_STATUSES: Final[Mapping[type[QuireError], HTTPStatus]] = {
    Unavailable: HTTPStatus.SERVICE_UNAVAILABLE,
    DeadlineExceeded: HTTPStatus.GATEWAY_TIMEOUT,
    PermissionDenied: HTTPStatus.FORBIDDEN,
    Unsupported: HTTPStatus.NOT_IMPLEMENTED,
}


def new_registry() -> CollectorRegistry:
    """Return a registry with the figures of the process itself (memory, CPU, open files, garbage collection).

    From then on no series of the process says when it was created: each counter and histogram would have one more.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry


def exposed(registry: CollectorRegistry, accept: str) -> tuple[str, bytes]:
    """Return content type and body for a scraper that accepts these types: OpenMetrics, with exemplars, if accepted.

    Every scraper gets the same names. prometheus_client's own choice writes `quire_` for `quire:` in OpenMetrics
    unless the scraper asks for UTF-8 names, which those before Prometheus 3 do not.
    """
    if "application/openmetrics-text" in accept:
        body: bytes = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return openmetrics.CONTENT_TYPE_LATEST, body
    return exposition.CONTENT_TYPE_PLAIN_0_0_4, exposition.generate_latest(registry)


def metrics_port(configured: int | None, grpc_port: int) -> int:
    """Return the port of the endpoint: the configured one, else 1000 above gRPC's; 0 (a free one) when that is 0."""
    if configured is not None:
        return configured
    return grpc_port + PORT_OFFSET if grpc_port else 0


class MetricsServer:
    """Serves GET /metrics, /health, /work and /live; `healthy` says whether the process can serve requests.

    Probes have no certificate, so they ask here and not the gRPC port. /live answers while the event loop turns. /work
    is as /health, and not well either while work stands still at a process that serves on.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        healthy: Callable[[], bool],
        why_not: Callable[[], str] = lambda: "",
        stalled: Callable[[], str] = lambda: "",
    ) -> None:
        """`why_not` returns a reason for what is not healthy, `stalled` one for work that stands still."""
        self._registry, self._healthy, self._why_not, self._stalled = registry, healthy, why_not, stalled
        self._pages: dict[str, Callable[[], object]] = {}
        self._actions: dict[str, Action] = {}
        self._open_actions = True
        self._site: tuple[str, Answer] | None = None
        self.connections = Connections(MAX_METRICS_CONNECTIONS, MAX_METRICS_CONNECTIONS_A_PEER)
        self._server = SmallHttpServer(self._answer, self.connections)
        self.port = 0

    def add(self, pages: Mapping[str, Callable[[], object]]) -> None:
        """Serve further paths: each answers with what its function returns, as JSON."""
        self._pages.update(pages)

    def add_actions(self, actions: Mapping[str, Action], from_elsewhere: bool) -> None:
        """Serve POST of further paths: each answers with what its function returns, as JSON.

        This port knows no callers. So pages of browsers are refused, and other machines unless `from_elsewhere`.
        """
        self._actions.update(actions)
        self._open_actions = from_elsewhere

    def add_site(self, prefix: str, answer: Answer) -> None:
        """Let `answer` reply to GET and HEAD of `prefix` and of all paths below it; "/" leads there.

        It has connections of its own bound, so that its readers cannot take those of probes.
        """
        self._site = prefix, answer
        self._server.bound(f"{prefix}/", Connections(MAX_SITE_CONNECTIONS, MAX_SITE_CONNECTIONS_A_PEER, f"{prefix}/"))

    async def start(self, host: str, port: int, flag: str = "--metrics-port") -> int:
        """Listen and return the port, which the option `flag` names. Raises PortTaken."""
        try:
            self.port = await self._server.start(host, port)
        except OSError as error:
            raise PortTaken(flag, host, port, error.strerror) from None
        return self.port

    async def stop(self) -> None:
        await self._server.stop()

    def _answer(self, request: Request) -> Reply | Awaitable[Reply]:
        if request.host and is_loopback(request.peer) and not is_own_name(request.host):
            what = f"{request.host[:100]!r} could be anybody's name for this machine"
            return text(HTTPStatus.FORBIDDEN, f"{what}; ask by its address, its name or localhost")
        return self._act(request) if request.method == "POST" else self._show(request)

    async def _act(self, request: Request) -> Reply:
        action = self._actions.get(request.path)
        if action is None:
            words = f"POST is for {', '.join(self._actions) or 'nothing here'}"
            return text(HTTPStatus.METHOD_NOT_ALLOWED, f"{words}; expected GET or HEAD")
        if request.origin:
            return text(HTTPStatus.FORBIDDEN, "pages of a browser may not ask for this; expected no Origin header")
        if not (self._open_actions or is_loopback(request.peer)):
            words = "from another machine this needs the operator's certificate, which the gRPC admin port asks for"
            return text(HTTPStatus.FORBIDDEN, f"{words}: quire reset-cache --admin-address HOST:PORT")
        try:
            return _json(HTTPStatus.OK, await action())
        except QuireError as error:
            return _json(_status_of(error), {"error": {"message": str(error), "code": error.reason.lower()}})

    def _show(self, request: Request) -> Reply | Awaitable[Reply]:
        if request.path in self._actions:
            return text(HTTPStatus.METHOD_NOT_ALLOWED, f"{request.path} changes something; expected POST")
        if request.path == "/metrics":
            return Reply(HTTPStatus.OK, *exposed(self._registry, request.accept))
        if request.path in ("/health", "/work", "/live"):
            return self._health(request.path)
        if (page := self._pages.get(request.path)) is not None:
            return _json(HTTPStatus.OK, page())
        if self._site is not None and (shown := _shown(request, *self._site)) is not None:
            return shown
        sites = [f"{self._site[0]}/"] if self._site is not None else []
        named = ", ".join(["/metrics", "/health", "/work", *self._pages, *sites])
        return text(HTTPStatus.NOT_FOUND, f"{named} and /live are here")

    def _health(self, path: str) -> Reply:
        stalled = self._stalled() if path == "/work" else ""
        well = path == "/live" or (self._healthy() and not stalled)
        status, word = (HTTPStatus.OK, "ok") if well else (HTTPStatus.SERVICE_UNAVAILABLE, "not ready")
        why = "" if well else self._why_not() or stalled
        return _json(status, {"status": word} | ({"reason": why} if why else {}))


def _shown(request: Request, prefix: str, answer: Answer) -> Reply | Awaitable[Reply] | None:
    """Return the answer of a site, or the way to it; None for other paths."""
    if request.path in ("/", prefix):
        return text(HTTPStatus.FOUND, f"see {prefix}/")._replace(headers=(("Location", f"{prefix}/"),))
    return answer(request) if request.path.startswith(f"{prefix}/") else None


def is_loopback(peer: str) -> bool:
    """Return whether an address is one of this machine's loopback; False for what is not an address."""
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _json(status: HTTPStatus, value: object) -> Reply:
    return Reply(status, "application/json", json.dumps(value, ensure_ascii=False).encode())


def _status_of(error: QuireError) -> HTTPStatus:
    return next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), _FAILED)
