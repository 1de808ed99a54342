"""Metrics of one process, and the tiny HTTP endpoint that serves them: /metrics for Prometheus, /health for probes.

Services define their metrics on the registry from `new_registry`, under names that start with `quire:`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, exposition
from prometheus_client.openmetrics import exposition as openmetrics

from common.errors import FieldViolation, InvalidConfig

PORT_OFFSET: Final = 1000
_REQUEST_TIMEOUT_S: Final = 5.0
_MAX_HEADER_BYTES: Final = 16 << 10

Reply = tuple[HTTPStatus, str, bytes]


def new_registry() -> CollectorRegistry:
    """Return a registry with the figures of the process itself (memory, CPU, open files, garbage collection)."""
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
    """Serves GET /metrics and GET /health; `healthy` says whether the process can serve requests."""

    def __init__(self, registry: CollectorRegistry, healthy: Callable[[], bool]) -> None:
        self._registry, self._healthy = registry, healthy
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port. Raises InvalidConfig when the port is taken."""
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=_MAX_HEADER_BYTES)
        except OSError as error:
            what = f"cannot listen on {host}:{port} ({error.strerror}); expected a free port (0 takes one)"
            raise InvalidConfig(FieldViolation("--metrics-port", what)) from None
        self.port = self._server.sockets[0].getsockname()[1]
        return self.port

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                writer.write(_encode(self._reply(head), with_body=not head[0].startswith("HEAD ")))
                await writer.drain()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a client that is slow, gone or sends too much gets no answer
        finally:
            writer.close()

    def _reply(self, head: list[str]) -> Reply:
        method, _, rest = head[0].partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b""
        if path == "/metrics":
            accept = next((line[7:] for line in head if line.lower().startswith("accept:")), "")
            return HTTPStatus.OK, *exposed(self._registry, accept)
        if path == "/health":
            status, word = (HTTPStatus.OK, "ok") if self._healthy() else (HTTPStatus.SERVICE_UNAVAILABLE, "not ready")
            return status, "application/json", json.dumps({"status": word}).encode()
        return HTTPStatus.NOT_FOUND, "text/plain", b"/metrics and /health are here\n"


def _encode(reply: Reply, with_body: bool) -> bytes:
    status, content_type, body = reply
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (body if with_body else b"")
