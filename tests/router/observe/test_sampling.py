"""The router decides what is traced: the ratio, the wishes of clients, and one decision for each request."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, Tracer, TraceState, set_span_in_context

from common.contracts.limits import CLIENT_TRACES_BURST, CLIENT_TRACES_PER_SECOND
from common.telemetry import context_from, parent_of, traceparent_of
from router.observe.sampling import RequestSampler
from tests.support.spans import CollectedSpans

ASKED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
DECLINED = ASKED[:-2] + "00"


class Clock:
    """Seconds that a test sets, and the numbers that are drawn."""

    now = 0.0
    drawn = 1.0


def tracer(ratio: float, clock: Clock) -> Tracer:
    sampler = RequestSampler(ratio, lambda: clock.now, lambda: clock.drawn)
    return CollectedSpans(sampler).tracer


def recorded(made: Tracer, traceparent: str) -> bool:
    return made.start_span("request", context_from(traceparent)).is_recording()


def test_beyond_the_ratio_a_few_wishes_are_granted() -> None:
    clock = Clock()
    made = tracer(0.0, clock)
    assert [recorded(made, ASKED) for _ in range(2 * CLIENT_TRACES_BURST)].count(True) == CLIENT_TRACES_BURST
    clock.now = 3 / CLIENT_TRACES_PER_SECOND
    assert [recorded(made, ASKED) for _ in range(10)].count(True) == 3


def test_of_the_wishes_the_ratio_is_granted() -> None:
    clock = Clock()
    made = tracer(0.5, clock)
    for _ in range(CLIENT_TRACES_BURST):
        recorded(made, ASKED)
    clock.drawn = 0.4
    assert recorded(made, ASKED)
    clock.drawn = 0.6
    assert not recorded(made, ASKED)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_who_declines_is_not_traced(ratio: float) -> None:
    assert not recorded(tracer(ratio, Clock()), DECLINED)


@pytest.mark.parametrize(("ratio", "wanted"), [(0.0, False), (1.0, True)])
def test_without_a_wish_the_ratio_decides(ratio: float, wanted: bool) -> None:
    assert recorded(tracer(ratio, Clock()), "") is wanted


def test_a_request_is_decided_once() -> None:
    """The span of the RPC is a local parent: the request's span follows it, and takes no second wish."""
    clock = Clock()
    made = tracer(0.0, clock)
    for number in range(CLIENT_TRACES_BURST + 1):
        with made.start_as_current_span("rpc", context_from(ASKED)) as rpc:
            request = made.start_span("request", parent_of(traceparent_of()))
            assert request.is_recording() is rpc.is_recording() is (number < CLIENT_TRACES_BURST)
        assert request.get_span_context().trace_id == rpc.get_span_context().trace_id


def test_another_traceparent_than_the_current_one_is_a_clients() -> None:
    made = tracer(1.0, Clock())
    with made.start_as_current_span("rpc"):
        assert trace.get_current_span(parent_of(ASKED)).get_span_context().is_remote


@pytest.mark.parametrize(("drawn", "wanted"), [(0.0, True), (1.0, False)])
def test_the_state_of_a_client_s_trace_is_kept_whatever_is_decided(drawn: float, wanted: bool) -> None:
    state = TraceState([("vendor", "1")])
    remote = SpanContext(1, 2, True, TraceFlags(TraceFlags.SAMPLED), state)
    sampler = RequestSampler(0.5, lambda: 0.0, lambda: drawn)
    above = set_span_in_context(NonRecordingSpan(remote), Context())
    while (span := CollectedSpans(sampler).tracer.start_span("request", above)).is_recording() is not wanted:
        pass  # the few wishes beyond the ratio are granted first
    assert span.get_span_context().trace_state == state
