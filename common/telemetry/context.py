"""Trace context as it travels inside messages: the W3C `traceparent`, because one stream carries many requests.

Format: `00-<trace id, 32 hex digits>-<parent span id, 16>-<flags, 2>`; the last bit of the flags means "sampled".
"""

from __future__ import annotations

import re
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN_CONTEXT, NonRecordingSpan, SpanContext, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common.contracts.limits import MAX_TRACESTATE_CHARS

_PROPAGATOR = TraceContextTextMapPropagator()
# The version of today; OpenTelemetry reads all others, at ten times the cost.
_VERSION_0: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


def traceparent_of(context: Context | None = None) -> str:
    """Return the traceparent of the span in `context` (default: the current one); "" where there is none.

    A span that is not sampled has one too, with the flag off, so that later services start no trace of their own.
    """
    span = trace.get_current_span(context).get_span_context()
    return _text(span) if span.is_valid else ""


def tracestate_of(context: Context) -> str:
    """Return the tracestate of the span in a context, "" where it has none."""
    return trace.get_current_span(context).get_span_context().trace_state.to_header()


def _text(span: SpanContext) -> str:
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"


def context_from(traceparent: str, tracestate: str = "") -> Context:
    """Return the context in which a span becomes the child of `traceparent`; an empty one if that is not a traceparent.

    The span and those below it have the `tracestate`, of which what is malformed or too long is left out.
    """
    found = _VERSION_0.fullmatch(traceparent)
    if found is None or tracestate:
        state = {"tracestate": tracestate} if 0 < len(tracestate) <= MAX_TRACESTATE_CHARS else {}
        return _PROPAGATOR.extract({"traceparent": traceparent, **state} if traceparent else {}, Context())
    trace_id, span_id, flags = (int(each, 16) for each in found.groups())
    span = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return trace.set_span_in_context(NonRecordingSpan(span), Context()) if span.is_valid else Context()


def parent_of(traceparent: str, tracestate: str = "") -> Context:
    """Return the context for a child of `traceparent`: with the current span itself where that is the one named.

    A span of this process is then no remote parent, so that its decision to sample is not taken again.
    """
    current = trace.get_current_span()
    own = current.get_span_context()
    return trace.set_span_in_context(current) if traceparent == _text(own) else context_from(traceparent, tracestate)


def span_context_of(traceparent: str) -> SpanContext:
    """Return the target of a link: ids and flags in `traceparent`; the invalid span context when it has none."""
    return trace.get_current_span(context_from(traceparent)).get_span_context() if traceparent else INVALID_SPAN_CONTEXT


def is_sampled(traceparent: str) -> bool:
    """Return whether `traceparent` has the flag "sampled". It costs far less than a parse, so every step may ask."""
    # The last of 55 characters is a hexadecimal digit of the flags; the odd ones have the bit.
    return len(traceparent) == 55 and traceparent[-1] in "13579bdf"
