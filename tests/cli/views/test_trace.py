"""The drawing of a trace: exact text of a made-up one, in a wide and a narrow console."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from cli.views.trace import duration, render_trace
from common.contracts.types import Candidate, Decision, DecisionKind
from common.telemetry.decisions import EVENT, attributes_of
from quire.decision.v1 import decision_pb2 as pb

BEGAN = 1_700_000_000_000_000_000
TRACE = "0af7651916cd43dd8448eb211c80319c"


def at(milliseconds: float) -> int:
    return BEGAN + round(milliseconds * 1e6)


def span(name: str, parent: str, service: str, start: float, end: float, **more: Any) -> pb.Span:
    """A span whose id is its name; times in milliseconds from the start."""
    return pb.Span(
        span_id=name, parent_span_id=parent, service=f"quire-{service}", name=name, start_unix_nano=at(start),
        end_unix_nano=at(end), **more,
    )  # fmt: skip


def decided(milliseconds: float, kind: DecisionKind, chosen: str, **more: Any) -> pb.SpanEvent:
    """The event that the services make of a decision, as the store keeps it."""
    attributes = attributes_of(Decision("d1", kind, at(milliseconds), chosen, **more))
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in attributes.items()}
    return pb.SpanEvent(name=EVENT, time_unix_nano=at(milliseconds), attributes=texts)


ROUTED = decided(
    1.5,
    DecisionKind.ROUTING,
    "worker-1",
    reasons=("lowest cost",),
    candidates=(
        Candidate("worker-0", 0.0712, (("queue", 0.031), ("prefill", 0.0402))),
        Candidate("worker-1", 0.0123, (("queue", 0.004), ("prefill", 0.0083)), figures=(("hit_blocks", 5.0),)),
        Candidate("worker-2", rejected="draining"),
    ),
    signal_ages=(("worker-0", 0.05), ("worker-1", 0.125)),
)
PREEMPTED = decided(
    200,
    DecisionKind.PREEMPTION,
    "req-7",
    victim="req-7",
    beneficiary="req-9",
    reasons=("lowest priority", "latest start"),
    figures=(("tokens_lost", 48.0),),
)
SPANS = [
    # Spans come in any order, and the client's own span is not here.
    span("decode", "sequence", "gpuworker", 14, 400, status="error", status_message="DEADLINE_EXCEEDED"),
    span("request", "client", "router", 0, 400, attributes={"quire.request_id": "req-7", "quire.prompt_tokens": "812"}),
    span("route", "request", "router", 1, 2, events=[ROUTED]),
    span("sequence", "request", "gpuworker", 2, 400),
    span("reserve", "sequence", "kvmanager", 2.2, 3.9, attributes={"quire.cached_tokens": "768"}),
    span(
        "preempted", "sequence", "kvmanager", 200, 260, events=[PREEMPTED], links=["f" * 32 + ":aa", f"{TRACE}:route"]
    ),
    span("stream", "request", "router", 14, 14, events=[pb.SpanEvent(name="first token", time_unix_nano=at(14))]),
]


def drawn(spans: list[pb.Span], width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render_trace(pb.GetTraceResponse(trace_id=TRACE, spans=spans)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_trace_is_a_tree_over_time_with_its_decisions() -> None:
    assert drawn(SPANS, 100) == EXPECTED


def test_a_narrow_console_keeps_the_tree_in_order() -> None:
    lines = drawn(SPANS, 72).splitlines()
    assert max(map(len, lines)) <= 72
    broken = next(place for place, line in enumerate(lines) if "preemption:" in line)
    assert lines[broken : broken + 2] == [
        "│        ◆ 200 ms  preemption: req-7 (lowest priority, latest start)",
        "│            req-7 gave way to req-9  tokens_lost 48",
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_names_are_cut_before_the_bars_are(width: int) -> None:
    spans = [*SPANS, span("quire.inference.v1.InferenceService/GenerateWithAVeryLongName", "", "router", 0, 400)]
    rows = [line for line in drawn(spans, width).splitlines() if "InferenceService" in line or "decode" in line]
    assert max(map(len, rows)) <= width
    assert all("━━" in row for row in rows) is (width > 40)
    assert ("InferenceService/GenerateWithAVeryLongName" in rows[-1]) is (width == 120)


def test_a_wide_console_has_a_decision_in_one_line() -> None:
    assert (
        "◆ 1.50 ms  routing: worker-1 (lowest cost)  oldest signal 0.125 s  [worker-0 0.0712: queue 0.031, prefill "
        "0.0402 | worker-1 0.0123: queue 0.004, prefill 0.0083; hit_blocks 5 | worker-2 out: draining]"
    ) in drawn(SPANS, 220)


def test_a_span_that_has_not_ended_says_so() -> None:
    line = drawn([span("request", "", "router", 0, 10), pb.Span(span_id="x", name="decode", start_unix_nano=at(5))], 60)
    assert "decode" in line
    assert "…" in line.splitlines()[-1]


def test_an_empty_trace_is_a_heading() -> None:
    assert drawn([], 100) == f"trace {TRACE}\n0 spans in 0.000 ms\n"


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0.000 ms"),
        (31_000, "0.031 ms"),
        (4_200_000, "4.20 ms"),
        (41_960_000, "42.0 ms"),
        (412_400_000, "412 ms"),
        (999_700_000, "1.00 s"),
        (3_140_000_000, "3.14 s"),
        (1_234_000_000_000, "1234 s"),
        (-2_000_000, "-2.00 ms"),
    ],
)
def test_durations_have_three_digits(nanoseconds: int, text: str) -> None:
    assert duration(nanoseconds) == text


EXPECTED = """\
trace 0af7651916cd43dd8448eb211c80319c  request req-7
7 spans in 400 ms over gpuworker, kvmanager, router
                               start     took
request          router            0   400 ms  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
│  prompt_tokens 812
├─ route         router      1.00 ms  1.00 ms  ╸
│     ◆ 1.50 ms  routing: worker-1 (lowest cost)  oldest signal 0.125 s
│           worker-0 0.0712: queue 0.031, prefill 0.0402
│         ▸ worker-1 0.0123: queue 0.004, prefill 0.0083; hit_blocks 5
│           worker-2 out: draining
├─ sequence      gpuworker   2.00 ms   398 ms  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
│  ├─ reserve    kvmanager   2.20 ms  1.70 ms  ━
│  │     cached_tokens 768
│  ├─ decode     gpuworker   14.0 ms   386 ms   ╺━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
│  │     ✗ DEADLINE_EXCEEDED
│  └─ preempted  kvmanager    200 ms  60.0 ms                            ━━━━━━━━
│        ◆ 200 ms  preemption: req-7 (lowest priority, latest start)  req-7 gave way to req-9
│            tokens_lost 48
│        ↪ linked to another trace: quire trace ffffffffffffffffffffffffffffffff
│        ↪ linked to route (router) in this trace
└─ stream        router      14.0 ms 0.000 ms   ╺
      · 14.0 ms  first token
"""
