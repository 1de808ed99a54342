"""Spans of steps: each in a trace of its own, because many requests share a step. Links join it to their sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import Link, Tracer

from common.contracts.types import SequenceId
from gpuworker.engine.ports import StepRecord
from gpuworker.server.spans import SequenceSpans

_PARTS: Final = ("planning", "guessing", "waiting", "running", "finishing")


class StepSpans:
    """Makes a span of each record; `tracer` samples all: the engine records no other steps."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def add(self, record: StepRecord, spans_of: Callable[[SequenceId], SequenceSpans | None]) -> None:
        """Write the span of a step; it and its traced sequences, as far as they are known here, link to each other."""
        found = [spans for each in record.traced if (spans := spans_of(each)) is not None]
        attributes: dict[str, int | float] = {
            "quire.step": record.step,
            "quire.decodes": record.decodes,
            "quire.prefill_tokens": record.prefill_tokens,
            "quire.drafted_tokens": record.drafts,
            "quire.traced_sequences": len(record.traced),
            "quire.predicted_seconds": record.predicted,
        }
        attributes |= {f"quire.{part}_seconds": getattr(record, part) for part in _PARTS}
        if record.copying:
            attributes["quire.copying_seconds"] = record.copying
        span = self._tracer.start_span(
            "step",
            Context(),
            attributes=attributes,
            links=[Link(each.context, {"quire.request_id": each.request_id}) for each in found],
            start_time=record.begin_ns,
        )
        for each in found:
            each.stepped(span.get_span_context(), record.step)
        span.end(record.end_ns)
