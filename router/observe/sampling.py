"""Which requests are traced: the router decides. A client may ask for a trace, or for none.

A client's flag cannot raise the share of traced requests by more than CLIENT_TRACES_PER_SECOND. For such requests the
share is drawn here, and not from the trace id: the client chose the id. Later services follow the router.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

from common.contracts.limits import CLIENT_TRACES_BURST, CLIENT_TRACES_PER_SECOND

_CHOSEN: Final = ContextVar("chosen_trace_id", default=0)


# Ids of traces: an API may choose that of the trace that a request begins, to name it in answers of every kind.
class ChosenTraceIds(RandomIdGenerator):
    """Gives a trace the id that `beginning` chose, else a random one."""

    def generate_trace_id(self) -> int:
        return _CHOSEN.get() or super().generate_trace_id()


@contextmanager
def beginning(trace_id: str) -> Iterator[None]:
    """Let a trace that begins within the block have this id, in hexadecimal; "" chooses none."""
    token = _CHOSEN.set(int(trace_id or "0", 16))
    try:
        yield
    finally:
        _CHOSEN.reset(token)


class Allowance:
    """A token bucket, full at first."""

    def __init__(self, per_second: float, burst: float, monotonic: Callable[[], float]) -> None:
        self._per_second, self._burst, self._monotonic = per_second, burst, monotonic
        self._left, self._filled = burst, monotonic()

    def take(self) -> bool:
        """Take one; return whether one was left."""
        now = self._monotonic()
        self._left = min(self._burst, self._left + self._per_second * (now - self._filled))
        self._filled = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class RequestSampler(Sampler):
    """Samples `ratio` of all requests, and a few more whose clients ask for it."""

    def __init__(
        self,
        ratio: float,
        monotonic: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._ratio, self._draw = ratio, draw
        self._asked = Allowance(CLIENT_TRACES_PER_SECOND, CLIENT_TRACES_BURST, monotonic)
        self._unasked = ParentBased(TraceIdRatioBased(ratio))

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """Return the decision for one span. A remote parent is a client's; any other one is a span of this process."""
        parent = trace.get_current_span(parent_context).get_span_context()
        if not (parent.is_valid and parent.is_remote and parent.trace_flags.sampled):
            return self._unasked.should_sample(parent_context, trace_id, name, kind, attributes, links)
        if self._draw() < self._ratio or self._asked.take():
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes, parent.trace_state)
        return SamplingResult(Decision.DROP, trace_state=parent.trace_state)

    def get_description(self) -> str:
        return f"RequestSampler({self._ratio})"
