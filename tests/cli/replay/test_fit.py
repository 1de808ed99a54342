"""A fit finds the costs that a replay had, from what a log of it says."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from cli.replay.fit import (
    Stream,
    costs_of,
    errors,
    fit,
    least_squares,
    nonnegative,
    nonnegative_median,
    slope,
    step_costs,
)
from cli.replay.simulation import ReplayOptions, replay
from cli.replay.trace import Arrival, Measured, Trace
from cli.replay.worker import Timing
from gpuworker.scheduling.step_costs import StepCosts

OPTIONS = ReplayOptions(workers=2, num_blocks=2048)
TRUE = Timing(StepCosts(base=0.008, decode=60e-6, prefill=90e-6), message=0.001)


def measured(requests: int) -> Trace:
    """Return a log of a suite with the true costs."""
    rng, at, arrivals = random.Random(1), 0.0, []
    for number in range(requests):
        at += rng.expovariate(60.0)
        blocks = tuple(range(100 * (number % 20), 100 * (number % 20) + 4))
        arrivals.append(Arrival(at, rng.choice((64, 200, 512)), rng.choice((8, 32)), blocks))
    trace = Trace(tuple(arrivals), 16)
    found = replay(trace, replace(OPTIONS, timing=TRUE)).requests
    known = []
    for arrival, each in zip(trace.arrivals, found, strict=True):
        assert each.first_token_s is not None
        assert each.finished_at is not None
        took = each.finished_at - each.arrival.at
        times = Measured(each.first_token_s, took, each.cached_tokens, each.worker)
        known.append(replace(arrival, measured=times))
    return replace(trace, arrivals=tuple(known))


def test_a_fit_finds_the_costs_and_comes_near_the_recorded_times() -> None:
    found = fit(measured(150), OPTIONS, replay)
    costs = found.timing.costs
    assert (costs.base, costs.prefill) == pytest.approx((TRUE.costs.base, TRUE.costs.prefill), rel=0.05)
    assert costs.decode == pytest.approx(TRUE.costs.decode, rel=0.2)
    assert max(abs(found.errors[name]) for name in ("ttft_p50_s", "itl_p50_s")) < 0.1


def test_a_trace_without_times_has_no_fit() -> None:
    with pytest.raises(ValueError, match="no measurements"):
        fit(Trace((Arrival(0.0, 16, 4),), 16), OPTIONS, replay)


def test_requests_of_one_token_are_fitted_by_their_first_tokens() -> None:
    lines = [
        Arrival(float(at), tokens, 1, measured=Measured(0.01 + 1e-4 * tokens, 0.01 + 1e-4 * tokens, 0, "w0"))
        for at, tokens in enumerate((100, 200, 400))
    ]
    assert costs_of(Trace(tuple(lines), 16)).prefill == pytest.approx(1e-4)


def test_the_steps_of_streams_give_their_costs_exactly() -> None:
    """One stream alone, two beside each other, and one that a prompt of 101 tokens interrupts."""
    base, row, token = 0.01, 0.001, 0.0002

    def stream(worker: str, steps: int, rows: int, positions: int, uncached: int = 1) -> Stream:
        return Stream(worker, uncached, steps + 1, 1.0, 1.0 + base * steps + row * rows * steps + token * positions)

    alone, twins = stream("a", 10, 1, 0), [stream("b", 20, 2, 0)] * 2
    long = stream("c", 50, 1, 100)
    prompt = Stream("c", 101, 1, 1.2, 1.2)
    found = step_costs([alone, *twins, long, prompt])
    assert found is not None
    assert (found.base, found.decode, found.prefill) == pytest.approx((base, row, token))


def test_without_a_second_token_nothing_says_what_a_step_costs() -> None:
    assert step_costs([Stream("a", 5, 1, 1.0, 1.0)]) is None


def test_least_squares_leave_out_what_is_negative_or_not_determined() -> None:
    lines = [(1.0, 2.0), (1.0, 3.0), (1.0, 5.0)]
    assert least_squares(lines, [5.0, 7.0, 11.0]) == pytest.approx([1.0, 2.0])
    assert least_squares([(1.0, 2.0), (2.0, 4.0)], [3.0, 6.0]) == pytest.approx([3.0, 0.0])
    assert nonnegative(lines, [4.0, 3.0, 1.0])[1] == 0.0


def test_a_stream_that_stalled_moves_the_costs_little() -> None:
    lines = [(1.0, float(rows)) for rows in range(1, 10)]
    wanted = [0.01 + 0.001 * rows for _, rows in lines]
    wanted[4] += 3.0
    assert nonnegative_median(lines, wanted, [1.0] * 9) == pytest.approx([0.01, 0.001], rel=0.01)


def test_times_below_nothing_cost_nothing() -> None:
    assert nonnegative_median([[1.0]] * 3, [-1.0, -1.0, 0.0], [1.0] * 3) == [0.0]


def test_slopes_are_those_of_the_line_through_the_points() -> None:
    assert slope([1, 2, 3, 4], [10, 12, 14, 16]) == pytest.approx(2.0)
    assert math.isnan(slope([1, 1, 1], [1, 2, 3]))
    assert math.isnan(slope([1, 2], [1, 2]))


def test_errors_are_relative_and_of_times_alone() -> None:
    recorded = {"ttft_p50_s": 0.2, "itl_p50_s": math.nan, "hit_share": 0.5}
    assert errors(recorded, {"ttft_p50_s": 0.3, "itl_p50_s": 1.0, "hit_share": 0.5}) == pytest.approx(
        {"ttft_p50_s": 0.5}
    )
