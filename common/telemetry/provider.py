"""Sets tracing up for one process, and takes it down without hanging when no collector receives the spans.

Spans go to the first of: OTEL_EXPORTER_OTLP_ENDPOINT, an exporter object (the router's own ring), `--trace-endpoint`
(the router, for the other services), nowhere. Nothing global is set: each part that makes spans gets its tracer.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import Tracer

from common.limits import MAX_ATTRIBUTE_CHARS
from common.rpc.roles import Role
from common.rpc.tls import Identity, expecting
from common.settings.options import ServiceSettings

log = logging.getLogger(__name__)

_ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_EXPORT_TIMEOUT_S: Final = 2.0
_SCHEDULE_DELAY_MS: Final = 500
_QUEUE_SPANS: Final = 8_192
_BATCH_SPANS: Final = 512


@dataclass(frozen=True, slots=True)
class Telemetry:
    """The tracer of one process; `aclose` delivers the remaining spans, for about two seconds at most."""

    tracer: Tracer
    provider: TracerProvider
    processor: SpanProcessor | None = None

    def emit(self, spans: Sequence[ReadableSpan]) -> None:
        """Deliver spans that have ended and that no tracer made, as those of the tracer."""
        if self.processor is not None:
            for span in spans:
                self.processor.on_end(span)

    async def aclose(self) -> None:
        """Deliver the remaining spans and stop; the event loop goes on meanwhile."""
        await asyncio.to_thread(self.provider.shutdown)


def setup(
    service: str,
    settings: ServiceSettings,
    exporter: SpanExporter | None = None,
    environ: Mapping[str, str] | None = None,
    instance: str = "",
    sampler: Sampler | None = None,
    ids: IdGenerator | None = None,
) -> Telemetry:
    """Return the tracing of a process. `exporter` receives spans in this process, as each ends; it must be quick.

    `instance` distinguishes processes of one service (a worker's id). `ids` makes random ids by default. Sampling is
    decided at the head, by `sampler`. The default follows the traceparent, and samples `settings.trace_sample_ratio` of
    the requests without one.
    """
    resource = Resource.create(
        {"service.name": f"quire-{service}", "service.instance.id": instance or str(os.getpid())}
    )
    sampler = sampler or ParentBased(TraceIdRatioBased(settings.trace_sample_ratio))
    limits = SpanLimits(max_attribute_length=MAX_ATTRIBUTE_CHARS)
    provider = TracerProvider(sampler, resource, shutdown_on_exit=False, id_generator=ids, span_limits=limits)
    processor = _processor(settings, exporter, os.environ if environ is None else environ)
    if processor is not None:
        provider.add_span_processor(processor)
    return Telemetry(provider.get_tracer("quire"), provider, processor)


def _processor(
    settings: ServiceSettings, exporter: SpanExporter | None, environ: Mapping[str, str]
) -> SpanProcessor | None:
    endpoint = next((environ[name] for name in _ENDPOINT_VARIABLES if environ.get(name)), None)
    identity = None
    if endpoint is None and exporter is not None:
        return SimpleSpanProcessor(exporter)
    if endpoint is None and settings.trace_endpoint is not None:
        identity = Identity.of(settings)
        endpoint = f"{'http' if identity is None else 'https'}://{settings.trace_endpoint}"
    if endpoint is None:
        return None
    # The exporter and its queue log the same failure for each batch; Delivery logs it once.
    logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
    logging.getLogger("opentelemetry.sdk._shared_internal").setLevel(logging.CRITICAL)
    exporter = _exporter(endpoint) if identity is None else _RenewedExporter(endpoint, identity)
    return _DeliveringProcessor(Delivery(exporter, endpoint))


def _exporter(endpoint: str, identity: Identity | None = None) -> SpanExporter:
    """Return what sends spans; with an identity, to a router."""
    if identity is None:
        return OTLPSpanExporter(endpoint, insecure=not endpoint.startswith("https"), timeout=_EXPORT_TIMEOUT_S)
    return OTLPSpanExporter(
        endpoint,
        credentials=identity.channel_credentials(),
        timeout=_EXPORT_TIMEOUT_S,
        channel_options=(expecting(Role.ROUTER),),
    )


class _RenewedExporter(SpanExporter):
    """Sends spans to a router with mTLS, over a new channel after each change of the certificate."""

    def __init__(self, endpoint: str, identity: Identity) -> None:
        self._endpoint, self._identity = endpoint, identity
        self._version, self._exporter = identity.files.current().version, _exporter(endpoint, identity)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
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

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
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


class _DeliveringProcessor(BatchSpanProcessor):
    """Batches off the event loop; at the end it tries each batch that waits, until one fails."""

    def __init__(self, delivery: Delivery) -> None:
        super().__init__(delivery, _QUEUE_SPANS, _SCHEDULE_DELAY_MS, _BATCH_SPANS)
        self._delivery = delivery

    def shutdown(self) -> None:
        self._delivery.closing = True
        super().shutdown()  # type: ignore[no-untyped-call]
