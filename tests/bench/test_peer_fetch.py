"""The benchmark of fetches between workers: every block that it counts has moved, and it says what a fetch gains."""

from __future__ import annotations

import pytest

from bench.peer_fetch import crossing, p99, pooled_ratio
from tests.support.bench_process import run_benchmark

pytestmark = [pytest.mark.rest, pytest.mark.timeout(600)]


def test_prefixes_of_the_other_worker_are_fetched() -> None:
    small = ("--shape", "small", "--dtype", "float32", "--lengths", "64,256", "--pairs", "2", "--rounds", "1")
    figures, _ = run_benchmark("peer_fetch", *small)
    # two that warm up and two of each length, and those beside the source's streams
    assert figures["blocks_fetched"] == 4 * 4 + 2 * 16
    assert figures["forecasts"] > 0
    assert all(figures[name] > 0 for name in ("ttft_ratio_64", "ttft_ratio_256", "source_itl_p99_ratio"))


def test_gaps_of_all_rounds_make_one_ratio() -> None:
    slow, quick = [*[1.0] * 98, 4.0, 4.0], [*[1.0] * 98, 2.0, 2.0]
    assert pooled_ratio([slow, slow], [quick, quick]) == (2.0, 2.0, 2.0)
    ratio, lower, upper = pooled_ratio([slow, quick], [quick, quick])
    assert (ratio, lower, upper) == (p99([*slow, *quick]) / 2.0, 1.0, 2.0)


def test_two_lines_cross_where_both_are_equal() -> None:
    assert crossing([0, 10], [5.0, 15.0], [0.0, 20.0]) == pytest.approx(5.0)
    assert crossing([0, 10], [0.0, 10.0], [1.0, 30.0]) == 0.0
    assert crossing([0, 10], [5.0, 30.0], [0.0, 20.0]) == -1.0
