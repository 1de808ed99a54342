"""The spans of one traced sequence at the worker: reserve, prefill chunks, decode; made on the I/O loop.

`sequence` is the server's half of a call, with the router's `stream` as the client's. `reserve` is the client's half of
a call of the KV manager.

The engine's thread never uses a tracer: it hands over wall-clock times, and this module starts and ends spans with
those.
"""

from __future__ import annotations

from typing import Final

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, SpanKind, Tracer

from common.contracts.errors import QuireError
from common.contracts.lease import Admit
from common.contracts.transfers import Fetched
from common.contracts.types import FinishReason
from common.rpc.status import code_of
from common.telemetry import traceparent_of
from common.telemetry.conventions import fail_server_span, fail_span
from gpuworker.engine.ports import Chunk
from gpuworker.scheduling.outcomes import Loaded, SequenceFinished

_FAILED: Final = {
    FinishReason.CANCELLED: (grpc.StatusCode.CANCELLED, "cancelled"),
    FinishReason.DEADLINE: (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline exceeded"),
    FinishReason.ERROR: (grpc.StatusCode.INTERNAL, "error"),
}


class SequenceSpans:
    """Follows one sequence from its submission to its end."""

    def __init__(self, tracer: Tracer, parent: Context, attributes: dict[str, str | int]) -> None:
        self._tracer, self.request_id = tracer, str(attributes.get("quire.request_id", ""))
        self._root = tracer.start_span("sequence", context=parent, kind=SpanKind.SERVER, attributes=attributes)
        self._context = trace.set_span_in_context(self._root)
        self._reserve: Span | None = tracer.start_span("reserve", self._context, SpanKind.CLIENT)
        self._decode_begin, self._decode_end, self._decode_steps, self._drafted = 0, 0, 0, 0

    @property
    def context(self) -> SpanContext:
        """What a link to the sequence names."""
        return self._root.get_span_context()

    def stepped(self, context: SpanContext, step: int) -> None:
        """Link to the span of a step that the sequence was in."""
        self._root.add_link(context, {"quire.step": step})

    @property
    def reserve_traceparent(self) -> str:
        """The parent of the KV manager's span."""
        return traceparent_of(trace.set_span_in_context(self._reserve)) if self._reserve is not None else ""

    def admitted(self, admit: Admit) -> None:
        """End the span of the wait for blocks."""
        if self._reserve is None:
            fetched = {} if admit.fetched is None else _of_fetch(admit.fetched)
            self._root.add_event("admitted again", {"quire.cached_tokens": admit.cached_tokens, **fetched})
            return
        self._reserve.set_attributes(
            {
                "quire.cached_tokens": admit.cached_tokens,
                "quire.miss_reason": str(admit.miss_reason),
                "quire.blocks": len(admit.block_table),
                "quire.shared_blocks": admit.n_shared,
                "quire.decision_id": admit.decision_id,
            }
        )
        if admit.fetched is not None:
            self._reserve.set_attributes(_of_fetch(admit.fetched))
        self._reserve.end()
        self._reserve = None

    def loaded(self, loaded: Loaded) -> None:
        """Note blocks that were copied from host memory, in place of being computed."""
        attributes = {"quire.loaded_blocks": loaded.blocks, "quire.load_seconds": loaded.seconds}
        self._root.add_event("loaded from host memory", attributes)

    def preempted(self) -> None:
        self._root.add_event("preempted")

    def orphaned(self) -> None:
        self._root.add_event("orphaned")

    def resumed(self) -> None:
        self._root.add_event("resumed")

    def chunk(self, chunk: Chunk) -> None:
        """Take in a prefill chunk, which is a span, or decode steps, of which there is one span in all."""
        if chunk.decode:
            self._decode_begin = self._decode_begin or chunk.begin_ns
            self._decode_end = chunk.end_ns
            self._decode_steps += chunk.steps
            self._drafted += chunk.drafts
            return
        attributes = {"quire.start": chunk.start, "quire.scheduled_tokens": chunk.length}
        span = self._tracer.start_span(
            "prefill chunk", context=self._context, start_time=chunk.begin_ns, attributes=attributes
        )
        span.end(chunk.end_ns)

    def finished(self, end: SequenceFinished) -> None:
        """End every open span, with the right status for a sequence that was cancelled, expired or failed."""
        if end.reason in _FAILED:
            code, words = _FAILED[end.reason]
            self._fail(code, end.message or words)
        if self._reserve is not None:
            self._reserve.end()
        if self._decode_begin:
            attributes = {"quire.steps": self._decode_steps, "quire.output_tokens": end.usage.output_tokens}
            if self._drafted:
                attributes |= {
                    "quire.drafted_tokens": self._drafted,
                    "quire.accepted_draft_tokens": end.usage.accepted_draft_tokens,
                    "quire.model_drafted_tokens": end.usage.model_drafted_tokens,
                    "quire.accepted_model_draft_tokens": end.usage.accepted_model_draft_tokens,
                }
            span = self._tracer.start_span(
                "decode", context=self._context, start_time=self._decode_begin, attributes=attributes
            )
            span.end(self._decode_end)
        for name in ("host_cached_tokens", "disk_cached_tokens", "peer_cached_tokens"):
            if tokens := getattr(end.usage, name):
                self._root.set_attribute(f"quire.{name}", tokens)
        self._root.set_attribute("quire.finish_reason", str(end.reason))
        self._root.end()

    def refused(self, error: Exception) -> None:
        """End every span of a sequence that the engine never got."""
        code = code_of(error) if isinstance(error, QuireError) else grpc.StatusCode.INTERNAL
        self._fail(code, str(error))
        if self._reserve is not None:
            self._reserve.end()
        self._root.end()

    def _fail(self, code: grpc.StatusCode, message: str) -> None:
        """Give an error to the sequence, and to the wait for blocks if it is what did not end well."""
        fail_server_span(self._root, code, message)
        if self._reserve is not None:
            fail_span(self._reserve, code, message)


def _of_fetch(fetched: Fetched) -> dict[str, str | int | float]:
    """Return what a sequence waited for, as attributes of the wait."""
    return {
        "quire.fetched_blocks": fetched.blocks,
        "quire.fetch_asked_blocks": fetched.asked,
        "quire.fetch_seconds": fetched.seconds,
        "quire.fetch_source": fetched.source,
    }
