"""A tracer whose spans a test reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import DEFAULT_ON, Sampler

from common.telemetry.spans import Origin, RecordedSpan, SpanTracer
from quire.decision.v1 import decision_pb2 as pb


def called(span: RecordedSpan | pb.Span) -> str:
    """Return the name of a span; "inference" for the one that stands for an inference, whose name has the model."""
    return "inference" if "gen_ai.operation.name" in span.attributes else span.name


def tracer_to(
    ended: Callable[[RecordedSpan], object],
    service: str = "quire-test",
    sampler: Sampler = DEFAULT_ON,
    ids: IdGenerator | None = None,
) -> SpanTracer:
    """Return a tracer that hands over its spans as they end."""
    return SpanTracer(Origin(Resource({"service.name": service})), sampler, ids or RandomIdGenerator(), ended)


class CollectedSpans:
    """Spans in the order of their ends, and a tracer that makes them."""

    def __init__(self, sampler: Sampler = DEFAULT_ON, ids: IdGenerator | None = None) -> None:
        self._ended: list[RecordedSpan] = []
        self.tracer = tracer_to(self._ended.append, sampler=sampler, ids=ids)

    def ended(self) -> tuple[RecordedSpan, ...]:
        return tuple(self._ended)

    def named(self, name: str) -> RecordedSpan:
        """Return the one span that has ended and that `called` calls so."""
        (found,) = (span for span in self._ended if called(span) == name)
        return found

    def add(self, spans: Iterable[RecordedSpan]) -> None:
        self._ended.extend(spans)
