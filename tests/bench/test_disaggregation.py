"""The figures of workers for prompts against workers that do all, from made-up streams."""

from __future__ import annotations

import pytest

from bench.disaggregation import NOTES, Seen, compared


def seen(gap: float, seconds: float, fetched: int = 0) -> Seen:
    """Return what clients saw: of 100 gaps, 90 of 20 ms."""
    gaps = [0.02] * 90 + [gap] * 10
    return Seen(gaps, [0.1], [0.5, 0.7, 0.6], tokens=1000, seconds=seconds, fetched=fetched)


def test_the_figures_have_their_fixed_names() -> None:
    assert compared(seen(0.3, 10.0), seen(0.06, 10.0), 10).keys() == NOTES.keys()


def test_ratios_are_split_over_mixed() -> None:
    found = compared(seen(0.3, 10.0), seen(0.06, 12.5, fetched=8), 10)
    assert found["itl_p99_ratio"] == pytest.approx(0.2)
    assert found["throughput_ratio"] == pytest.approx(0.8)
    assert (found["fetched"], found["ttft_split_s"], found["failed"]) == (0.8, 0.6, 0.0)


def test_runs_add_up() -> None:
    both = seen(0.3, 10.0)
    both.add(seen(0.06, 12.5, fetched=2))
    assert (len(both.gaps), both.tokens, both.seconds, both.fetched) == (200, 2000, 22.5, 2)
