"""Sets tracing up for one process, and takes it down without hanging when no collector receives the spans.

Spans go to a function of this process (the router's own ring), else to `--trace-endpoint` (the router, for the other
services), and besides to OTEL_EXPORTER_OTLP_ENDPOINT. A receiver that does not answer takes no span from the other one.
Nothing global is set: each part that makes spans gets its tracer.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased

from common.rpc.tls import Identity
from common.settings.options import ServiceSettings
from common.telemetry.delivery import Deliverer, delivering, delivering_over_http
from common.telemetry.otlp_http import GRPC, collector_of
from common.telemetry.spans import Origin, RecordedSpan, SpanTracer, UnsampledTracer
from common.version import quire_version
from quire.api.proxy import is_this_machine

_DISABLED_VARIABLE: Final = "OTEL_SDK_DISABLED"
Sink = Callable[[RecordedSpan], object]


@dataclass(frozen=True, slots=True)
class Telemetry:
    """The tracer of one process; `aclose` delivers the remaining spans, for about two seconds at most."""

    tracer: SpanTracer
    sink: Sink
    deliverers: tuple[Deliverer, ...] = ()

    def emit(self, spans: Iterable[RecordedSpan]) -> None:
        """Deliver spans that have ended and that no tracer made, as those of the tracer."""
        for span in spans:
            self.sink(span)

    def flush(self) -> None:
        """Deliver the spans that wait; it blocks."""
        for each in self.deliverers:
            each.force_flush()

    async def aclose(self) -> None:
        """Deliver the remaining spans and stop; the event loop goes on meanwhile."""
        await asyncio.gather(*(asyncio.to_thread(each.shutdown) for each in self.deliverers))


def setup(
    service: str,
    settings: ServiceSettings,
    own: Sink | None = None,
    environ: Mapping[str, str] | None = None,
    instance: str = "",
    sampler: Sampler | None = None,
    ids: IdGenerator | None = None,
) -> Telemetry:
    """Return the tracing of a process. `own` receives spans in this process, as each ends; it must be quick.

    `instance` distinguishes processes of one service (a worker's id). `ids` makes random ids by default. Sampling is
    decided at the head, by `sampler`. The default follows the traceparent, and samples `settings.trace_sample_ratio` of
    the requests without one. OTEL_SDK_DISABLED=true samples nothing, and delivers nothing.
    Raises InvalidConfig for a variable of the exporter that cannot be followed.
    """
    # Processes of two containers may have one number, and those of one host have its name.
    origin = origin_of(service, instance or f"{socket.gethostname()}:{os.getpid()}")
    environ = os.environ if environ is None else environ
    if environ.get(_DISABLED_VARIABLE, "").strip().lower() == "true":
        return Telemetry(UnsampledTracer(origin, ids or RandomIdGenerator()), _nowhere)
    sampler = sampler or ParentBased(TraceIdRatioBased(settings.trace_sample_ratio))
    deliverers = tuple(_deliverers(settings, own is not None, environ))
    sink = _to_all([*([own] if own is not None else []), *(each.ended for each in deliverers)])
    return Telemetry(SpanTracer(origin, sampler, ids or RandomIdGenerator(), sink), sink, deliverers)


def origin_of(service: str, instance: str) -> Origin:
    """Return the origin of the spans of a process. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come before ours."""
    own = {"service.name": f"quire-{service}", "service.instance.id": instance, "service.version": quire_version()}
    return Origin(Resource.create(own).merge(OTELResourceDetector().detect()))


def _nowhere(_: RecordedSpan) -> None:
    """Take a span that nobody wants."""


def _to_all(sinks: Sequence[Sink]) -> Sink:
    """Return what hands a span to each; most processes have one."""
    if len(sinks) < 2:
        return sinks[0] if sinks else _nowhere

    def hand_over(span: RecordedSpan) -> None:
        for sink in sinks:
            sink(span)

    return hand_over


def _deliverers(settings: ServiceSettings, has_own: bool, environ: Mapping[str, str]) -> Iterator[Deliverer]:
    if settings.trace_endpoint is not None and not has_own:
        identity = Identity.of(settings)
        yield delivering(f"{'http' if identity is None else 'https'}://{settings.trace_endpoint}", identity)
    if (collector := collector_of(environ)) is not None:
        url = collector.url
        by_proxy = not is_this_machine(urlsplit(url).netloc or url)
        if collector.protocol != GRPC:
            yield delivering_over_http(collector, by_proxy)
        else:
            yield delivering(url, None, by_proxy)
