"""The spans of `quire why --hit-rate`, what is missing of them, and the screen at 80 columns."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cli.commands.why import parser, span_of
from cli.views.change import ChangeView
from cli.why.change import changes, sorted_ends
from cli.why.pages import Records
from common.contracts.errors import InvalidConfig
from common.contracts.types import Decision, DecisionKind
from common.wire.decision_codec import decision_to_proto
from quire.decision.v1 import decision_pb2 as pb
from router.observe.diagnosis.change import Change
from router.observe.diagnosis.outcome import Outcome, figures_of, texts_of

S = 1_000_000_000
NOW = 1_000 * S


def ended(at_s: int, outcome: Outcome, tenant: str = "") -> pb.DecisionRecord:
    return decision_to_proto(
        Decision(f"d{at_s}", DecisionKind.OUTCOME, at_s * S, "stop", f"r{at_s}", (), texts_of(outcome),
                 figures=figures_of(outcome), tenant=tenant)
    )  # fmt: skip


def outcome(hit: int, miss: str, blocks: float = 0.0, worker: str = "worker-0") -> Outcome:
    return Outcome(
        ended="stop", miss=miss, worker=worker, has_first_token=True, prompt_tokens=1000, cached_tokens=hit,
        admissions=1, before=(("blocks", blocks), ("prefill", 0.1)),
    )  # fmt: skip


def found_over(*records: pb.DecisionRecord, since_s: int = 0, silent: int = 0) -> tuple[Change, ...]:
    ends = sorted_ends(Records(records, since_s * S, silent), Records(), 100.0, NOW)
    return changes(ends, hit_rate=True, latency=True)


def shown(change: Change, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(ChangeView(change, 300.0, "/page/runbook"))
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    return lines


def test_records_are_counted_in_the_span_in_which_they_were_made() -> None:
    records = [
        ended(850, outcome(500, "evicted")),
        ended(899, outcome(500, "evicted")),
        ended(900, outcome(0, "evicted")),
    ]
    hits, times = found_over(*records)
    assert (hits.before.requests, hits.after.requests, hits.change) == (2, 1, -0.5)
    assert (times.before.requests, times.change, hits.missing) == (2, 0.0, ())


def test_records_that_are_gone_and_routers_that_are_silent_are_said() -> None:
    records = [ended(870, outcome(500, "evicted")), ended(950, outcome(500, "evicted"))]
    gone, silent = found_over(*records, since_s=860, silent=2)[0].missing
    assert gone.startswith("records go back 140 s (--decision-ring, or a router began then)")
    assert gone.endswith("the span before has 40 s of its 100 s")
    assert silent == "2 routers did not answer: its requests are not counted"
    assert found_over(*records, since_s=960)[0].missing[0].endswith("has 0.0 ms of its 100 s")
    assert found_over(*records, since_s=800)[0].missing == ()


def test_requests_that_do_not_count_are_said() -> None:
    early = Outcome(ended="CANCELLED", before=(("queue", 3.0),), prompt_tokens=10)
    refused = [pb.DecisionRecord(time_unix_nano=each * S) for each in (850, 950, 960)]
    ends = sorted_ends(Records((ended(950, early),)), Records(tuple(refused)), 100.0, NOW)
    hits, times = changes(ends, hit_rate=True, latency=True)
    assert hits.missing[-2:] == (
        "requests refused at their arrival are not counted: 1 before, 2 now",
        "requests that got no blocks are not counted: 0 before, 1 now",
    )
    assert times.missing[-1] == "requests that had no first token are not counted: 0 before, 1 now"


def test_the_screen_of_a_fall() -> None:
    before = [ended(810 + n, outcome(800, "never_seen"), "red") for n in range(20)]
    after = [
        ended(910 + n, outcome(400, "evicted", 0.9, f"worker-{n % 2}"), "blue" if n % 2 else "red") for n in range(20)
    ]
    hits, times = found_over(*before, *after)
    lines = shown(hits)
    assert lines[0] == "The hit rate fell from 80 % to 40 %, by 40.0 points: mostly from prefixes that"
    assert "20 requests in the 300 s before, 20 in the last 300 s" in lines
    (evicted,) = [line for line in lines if line.startswith("  prefixes that were evicted")]
    assert evicted.split()[4:-1] == ["0", "%", "60", "%", "-60.0"]
    assert [line for line in lines if line.startswith("by ")] != []
    assert any(line.startswith("What to do: ") for line in lines)
    assert any(line.startswith("p50 100 ms -> 1.0 s") for line in shown(times))


def test_many_parts_share_a_line() -> None:
    before = [ended(800 + n, outcome(500, "evicted", worker=f"worker-{n}")) for n in range(30)]
    after = [ended(910 + n, outcome(10 * n, "evicted", worker=f"worker-{n}")) for n in range(30)]
    lines = shown(found_over(*before, *after)[0])
    assert sum(line.startswith("  worker-") for line in lines) == 5
    assert any(line.startswith("  all others") for line in lines)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("r1", "--hit-rate"), "--hit-rate: is about all requests of a span of time"),
        (("--latency", "--slowest"), "--latency: is about all requests"),
        (("--latency", "--since", "0s"), "--since: is '0s'; expected more than no time"),
        (("--latency", "--since", "5"), "--since: is '5'; expected a span of time"),
    ],
)
def test_flags_that_exclude_each_other_are_refused(words: tuple[str, ...], what: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        span_of(parser().parse_args(words))
    assert what in str(caught.value)


def test_the_span_is_that_of_since_or_five_minutes() -> None:
    assert span_of(parser().parse_args(["--hit-rate"])) == 300.0
    assert span_of(parser().parse_args(["--hit-rate", "--since", "2h"])) == 7200.0
