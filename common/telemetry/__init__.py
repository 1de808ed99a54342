"""Tracing with OpenTelemetry. The engine and the kernels import nothing of this: they return times, not spans."""

from common.telemetry.context import context_from, is_sampled, parent_of, span_context_of, traceparent_of, tracestate_of

__all__ = ["context_from", "is_sampled", "parent_of", "span_context_of", "traceparent_of", "tracestate_of"]
