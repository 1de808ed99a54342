"""Delivers ended spans over OTLP, in batches and off the event loop, and says once when nobody takes them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from common.contracts.gen_ai_names import SCHEMA_URL
from common.rpc.roles import Role
from common.rpc.tls import Identity, expecting
from common.telemetry.otlp_bytes import request_bytes
from common.telemetry.otlp_http import Collector, HttpExporter
from common.telemetry.spans import SCOPE, RecordedSpan
from quire.api.proxy import PROXY_OPTION

log = logging.getLogger(__name__)

EXPORT_TIMEOUT_S: Final = 2.0
# An export takes 2 ms of processor time at the sender and the router together, however few spans are in it.
_SCHEDULE_DELAY_MS: Final = 1_000
_QUEUE_SPANS: Final = 8_192
_BATCH_SPANS: Final = 512


class Unwritten:
    """Logs the first span that cannot be written as OTLP; later ones are most likely of the same place."""

    def __init__(self) -> None:
        self._logged = False

    def add(self, span: RecordedSpan, error: Exception) -> None:
        if not self._logged:
            self._logged = True
            what = "the span %.100r cannot be written as OTLP; it is left out, as later ones like it are: %r"
            log.warning(what, span.name, error)


def otlp_request(spans: Sequence[RecordedSpan], unwritten: Unwritten | None = None) -> ExportTraceServiceRequest:
    """Return spans as one request of OTLP, without those that cannot be written, which go to `unwritten`."""
    unwritten = Unwritten() if unwritten is None else unwritten
    resources: dict[bytes, list[bytes]] = {}
    for span in spans:
        try:
            encoded = span.encoded()
        except Exception as error:  # noqa: BLE001 - values have any type, and the text of one may raise anything
            unwritten.add(span, error)
        else:
            resources.setdefault(span.origin.encoded, []).append(encoded)
    return ExportTraceServiceRequest.FromString(request_bytes(resources, SCOPE, SCHEMA_URL))


def delivering_over_http(collector: Collector, by_proxy: bool) -> Deliverer:
    """Return what delivers spans to a collector over HTTP, by the proxy of the environment if that is asked for."""
    unwritten = Unwritten()
    exporter = HttpExporter(collector, lambda spans: otlp_request(spans, unwritten), EXPORT_TIMEOUT_S, by_proxy)
    return Deliverer(Delivery(exporter, collector.url))


def delivering(endpoint: str, identity: Identity | None, by_proxy: bool = False) -> Deliverer:
    """Return what delivers spans to a URL; with an identity, to a router over mTLS.

    With `by_proxy` they go by the proxy of the environment, if it names one.
    """
    # The exporter and its queue log the same failure for each batch; Delivery logs it once.
    logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
    logging.getLogger("opentelemetry.sdk._shared_internal").setLevel(logging.CRITICAL)
    exporter = _exporter(endpoint, by_proxy=by_proxy) if identity is None else _RenewedExporter(endpoint, identity)
    return Deliverer(Delivery(exporter, endpoint))


class _Exporter(OTLPSpanExporter):
    """OpenTelemetry's exporter, with its variables, retries and TLS, for the spans of Quire."""

    def __init__(self, endpoint: str, **options: Any) -> None:
        super().__init__(endpoint, **options)
        self._unwritten = Unwritten()

    def _translate_data(self, data: Sequence[Any]) -> ExportTraceServiceRequest:
        return otlp_request(data, self._unwritten)


def _exporter(endpoint: str, identity: Identity | None = None, by_proxy: bool = False) -> SpanExporter:
    """Return what sends spans; with an identity, to a router."""
    options: tuple[tuple[str, Any], ...] = ((PROXY_OPTION, int(by_proxy)),)
    if identity is None:
        insecure = not endpoint.startswith("https")
        return _Exporter(endpoint, insecure=insecure, timeout=EXPORT_TIMEOUT_S, channel_options=options)
    return _Exporter(
        endpoint,
        credentials=identity.channel_credentials(),
        timeout=EXPORT_TIMEOUT_S,
        channel_options=(*options, expecting(Role.ROUTER)),
    )


class _RenewedExporter(SpanExporter):
    """Sends spans to a router with mTLS, over a new channel after each change of the certificate."""

    def __init__(self, endpoint: str, identity: Identity) -> None:
        self._endpoint, self._identity = endpoint, identity
        self._version, self._exporter = identity.files.current().version, _exporter(endpoint, identity)

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        version = self._identity.files.current().version
        if version != self._version:
            self._exporter.shutdown()
            self._version, self._exporter = version, _exporter(self._endpoint, self._identity)
        return self._exporter.export(spans)

    def shutdown(self) -> None:
        self._exporter.shutdown()


class Delivery(SpanExporter):
    """Passes spans on, logs once when that fails or works again, and gives up early when the process closes."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter, self._endpoint = exporter, endpoint
        self._working, self.closing = True, False

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        """Deliver a batch; FAILURE loses it."""
        if self.closing and not self._working:
            return SpanExportResult.FAILURE
        result = self._exporter.export(spans)
        working = result is SpanExportResult.SUCCESS
        if working and not self._working:
            log.info("spans are delivered to %s again", self._endpoint)
        if self._working and not working and not self.closing:
            log.warning("spans cannot be delivered to %s; they are dropped until it answers", self._endpoint)
        self._working = working
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class Deliverer(BatchSpanProcessor):
    """Batches off the event loop; at the end it tries each batch that waits, until one fails."""

    def __init__(self, delivery: Delivery) -> None:
        super().__init__(delivery, _QUEUE_SPANS, _SCHEDULE_DELAY_MS, _BATCH_SPANS)
        self._delivery = delivery

    def ended(self, span: RecordedSpan) -> None:
        """Take a span; where too many wait, the oldest one goes."""
        self.on_end(span)  # type: ignore[arg-type]

    def shutdown(self) -> None:
        self._delivery.closing = True
        super().shutdown()  # type: ignore[no-untyped-call]
