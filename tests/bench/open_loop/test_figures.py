"""Figures of the load benchmark from hand-made requests: percentiles, goodput, backlog, costs, when a run counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.open_loop.figures import Slo, Window, costs, figures, in_flight, is_steady, latencies
from bench.open_loop.plan import FINISHED, Seen, Trace

WINDOW = Window(10.0, 12.0, Slo(ttft=0.1, itl=0.05), lateness=0.02)


def trace(intended: float, *gaps: float, status: str = FINISHED, late: float = 0.0, counts: int = 1) -> Trace:
    """Return a request whose messages came after these gaps, the first after when it was due."""
    made = Trace(intended, sent=intended + late, status=status)
    now = intended
    for gap in gaps:
        now += gap
        made.add(now, counts)
    made.done = now
    return made


def of(*traces: Trace, cpu: float = 0.1) -> dict[str, float]:
    return figures(Seen.of(traces, cpu), WINDOW, output_tokens=2, cpu={"router": 0.5})


def test_latencies_count_from_when_a_request_was_due() -> None:
    ttft, tpot, worst = latencies(Seen.of([trace(1.0, 0.25, 0.1, 0.3, late=0.2)]))
    assert (ttft[0], tpot[0]) == (pytest.approx(0.25), pytest.approx(0.2))
    assert worst[0] == pytest.approx(np.percentile([0.1, 0.3], 99))


def test_tokens_of_one_message_are_no_time_apart() -> None:
    _, tpot, _ = latencies(Seen.of([trace(1.0, 0.25, 0.3, counts=2)]))
    assert tpot[0] == pytest.approx(0.3 / 3)


def test_a_single_token_has_no_gap_and_none_no_first() -> None:
    ttft, tpot, worst = latencies(Seen.of([trace(1.0, 0.25), trace(1.0, status="UNAVAILABLE")]))
    assert ttft.tolist() == [0.25, np.inf]
    assert np.isnan(tpot).all()
    assert np.isnan(worst).all()


def test_only_what_is_due_within_the_window_counts() -> None:
    found = of(trace(9.9, 0.05, 0.01), trace(10.5, 0.05, 0.01), trace(11.5, 0.07, 0.01), trace(12.0, 0.05))
    assert (found["offered_requests_s"], found["offered_tokens_s"]) == (1.0, 2.0)
    assert found["ttft_p50_ms"] == pytest.approx(60.0)
    assert found["ttft_p90_ms"] == pytest.approx(68.0)
    assert found["itl_p99_ms"] == pytest.approx(10.0)


def test_throughput_counts_the_tokens_that_come_within_the_window() -> None:
    found = of(trace(9.9, 0.05, 0.1), trace(11.9, 0.05, 0.2))
    assert found["tokens_s"] == pytest.approx(2 / 2.0), "one of each request"
    assert found["requests_s"] == pytest.approx(0.5)


def test_goodput_is_of_requests_that_keep_both_bounds() -> None:
    kept, slow, stuttering, refused = (
        trace(10.1, 0.09, 0.04),
        trace(10.2, 0.11, 0.01),
        trace(10.3, 0.01, 0.06),
        trace(10.4, status="RESOURCE_EXHAUSTED"),
    )
    found = of(kept, slow, stuttering, refused)
    assert (found["goodput_requests_s"], found["goodput_share"]) == (0.5, 0.25)
    assert found["status_RESOURCE_EXHAUSTED"] == 1


def test_a_single_token_keeps_the_bound_on_gaps() -> None:
    assert of(trace(10.1, 0.09))["goodput_share"] == 1.0


def test_what_is_in_flight_was_due_and_has_not_ended() -> None:
    seen = Seen.of([trace(1.0, 2.0), trace(2.0, 0.5), trace(4.0, 1.0)])
    assert [in_flight(seen, moment) for moment in (0.5, 2.2, 2.9, 3.5, 4.5)] == [0, 2, 1, 0, 1]


@pytest.mark.parametrize(("late", "cpu", "valid"), [(0.01, 0.5, 1.0), (0.03, 0.5, 0.0), (0.01, 0.95, 0.0)])
def test_a_run_whose_clients_fall_behind_is_invalid(late: float, cpu: float, valid: float) -> None:
    assert of(trace(10.1, 0.05, late=late), cpu=cpu)["valid"] == valid


def steady(seen: Seen, **changed: float) -> bool:
    carried = {"in_flight": 50.0, "backlog_growth": 0.0, "tokens_s": 1000.0, "offered_tokens_s": 1000.0}
    return is_steady({**carried, "ttft_p99_ms": 90.0, "itl_p99_ms": 40.0, **changed}, WINDOW, seen)


def test_a_load_is_carried_unless_its_backlog_grows_or_its_tokens_lack_or_are_late() -> None:
    seen = Seen.of([trace(10.1, 0.05)])
    assert steady(seen)
    assert not steady(seen, backlog_growth=31.0)
    assert steady(seen, backlog_growth=29.0), "less than the noise of a steady number of 50"
    assert not steady(seen, tokens_s=890.0)
    assert not steady(seen, ttft_p99_ms=101.0)
    assert not steady(seen, itl_p99_ms=51.0)


def test_nothing_may_be_refused_or_lost() -> None:
    assert not steady(Seen.of([trace(10.1, 0.05, status="UNAVAILABLE")]))
    faulty = trace(10.1, 0.05)
    faulty.faults.append("1 lost before token 3")
    assert not steady(Seen.of([faulty]))


def test_costs_are_reported_by_token_and_by_request() -> None:
    seen = Seen.of([trace(1.0, 0.1, 0.1), trace(1.0, 0.1, 0.1)])
    assert costs(seen, {"router": 0.008}) == pytest.approx(
        {"router_us_per_token": 2000.0, "router_ms_per_request": 4.0}
    )


def test_what_several_clients_saw_is_one_run_and_survives_a_file(tmp_path: Path) -> None:
    first = Seen.of([trace(1.0, 0.5, 0.25), trace(2.0, status="UNAVAILABLE")], 0.25)
    second = Seen.of([trace(3.0, 0.5)], 0.5)
    second.faults.append("1 lost before token 0")
    path = str(tmp_path / "seen.npz")
    Seen.joined([first, second]).save(path)
    seen = Seen.load(path)
    assert seen.first.tolist() == [0, 2, 2, 3]
    assert seen.times.tolist() == [1.5, 1.75, 3.5]
    assert seen.status.tolist() == ["OK", "UNAVAILABLE", "OK"]
    assert (seen.faults, seen.cpu) == (["1 lost before token 0"], [0.25, 0.5])
