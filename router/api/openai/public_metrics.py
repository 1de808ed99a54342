"""/metrics of the HTTP port, for whoever reaches it: made once a second at most, however often it is asked for."""

from __future__ import annotations

from typing import Final

from fastapi import Request, Response
from prometheus_client import CollectorRegistry

from common.contracts.clock import Clock
from common.process.metrics import exposed

_FRESH_S: Final = 1.0


class PublicMetrics:
    def __init__(self, registry: CollectorRegistry, clock: Clock) -> None:
        self._registry, self._clock = registry, clock
        # By format: when it was made, its content type and body.
        self._made: dict[bool, tuple[float, str, bytes]] = {}

    async def answer(self, request: Request) -> Response:
        """Return the figures in the format that the scraper accepts."""
        accept, now = request.headers.get("accept", ""), self._clock.monotonic()
        is_open = "application/openmetrics-text" in accept
        at, kind, body = self._made.get(is_open, (-_FRESH_S, "", b""))
        if not body or now - at >= _FRESH_S:
            kind, body = exposed(self._registry, accept)
            self._made[is_open] = now, kind, body
        return Response(body, headers={"content-type": kind})
