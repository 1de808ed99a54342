"""Figures of replays: percentiles, shares and intervals with exact values."""

from __future__ import annotations

import math

import pytest
from rich.console import Console

from cli.replay.figures import Interval, figures_of, over_seeds, percentile, recorded_figures
from cli.replay.screen import drawn
from cli.replay.simulation import Replay, Replayed
from cli.replay.trace import Arrival, Measured, Trace

SERVED = Replayed(Arrival(1.0, 100, 5), "w0", 1.5, 2.5, 5, 40, 1)
SLOW = Replayed(Arrival(2.0, 100, 2), "w0", 4.0, 4.05, 2, 0, 0)
REFUSED = Replayed(Arrival(3.0, 100, 5), refused="Overloaded")
FIGURES = figures_of(Replay((SERVED, SLOW, REFUSED), {}, "", 10.0))


def test_percentiles_are_by_nearest_rank() -> None:
    values = [float(each) for each in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert percentile([3.0], 0.5) == 3.0
    assert math.isnan(percentile([], 0.5))


def test_what_was_refused_counts_as_that_alone() -> None:
    assert FIGURES["ttft_p50_s"] == 0.5
    assert FIGURES["ttft_p99_s"] == 2.0
    assert FIGURES["itl_p50_s"] == pytest.approx(0.05)
    assert FIGURES["hit_share"] == 0.2
    assert (FIGURES["preemptions"], FIGURES["refused"]) == (1, 1)
    assert FIGURES["tokens_per_s"] == pytest.approx(0.7)


def test_good_requests_have_an_early_first_token_and_a_steady_stream() -> None:
    assert FIGURES["goodput"] == pytest.approx(0.0)  # one stream is slow, the other's first token is late
    quick = Replayed(Arrival(1.0, 100, 5), "w0", 1.5, 1.9, 5)
    assert figures_of(Replay((quick,), {}, "", 4.0))["goodput"] == 0.25


def test_recorded_figures_are_of_what_was_measured() -> None:
    known = Arrival(0.0, 100, 11, measured=Measured(0.2, 1.2, 25))
    found = recorded_figures(Trace((known, Arrival(1.0, 50, 1)), 16))
    assert [found[name] for name in ("ttft_p50_s", "itl_p50_s", "hit_share")] == pytest.approx([0.2, 0.1, 0.25])
    assert recorded_figures(Trace((Arrival(1.0, 50, 1),), 16)) == {}


def test_intervals_hold_the_mean_over_seeds() -> None:
    found = over_seeds([{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 2.0}, {"a": 2.0, "b": 2.0}])
    assert found["b"] == Interval(2.0, 2.0, 2.0)
    assert found["a"].mean == 2.0
    assert 1.0 <= found["a"].low < 2.0 < found["a"].high <= 3.0


def test_a_table_has_a_column_for_each_replay_and_no_line_without_a_value() -> None:
    console = Console(width=80, record=True, file=None, force_terminal=False)
    with console.capture() as shown:
        recorded = {"ttft_p50_s": Interval(0.25, 0.25, 0.25)}
        console.print(drawn({"recorded": recorded, "replayed": over_seeds([FIGURES])}))
    lines = shown.get().splitlines()
    assert lines[0].split() == ["recorded", "replayed"]
    assert lines[1].split() == ["first", "token,", "median", "250.0", "ms", "500.0", "ms"]
    assert max(map(len, lines)) <= 80


def test_of_many_columns_the_interval_is_half_its_width() -> None:
    console = Console(width=80, record=True, file=None, force_terminal=False)
    shares = {"hit_share": Interval(0.5, 0.4, 0.62)}
    with console.capture() as shown:
        console.print(
            drawn({"replayed": shares, "a": shares, "b": shares, "c": {"hit_share": Interval(0.1, 0.1, 0.1)}})
        )
    assert shown.get().splitlines()[1].split("  ")[-2:] == ["50.0 % ± 11.0 %", "10.0 %"]
