"""The benchmark of prefetches: what was prefetched is there, and blocks come while streams run."""

from __future__ import annotations

import pytest

from tests.support.bench_process import run_benchmark

pytestmark = [pytest.mark.rest, pytest.mark.timeout(600)]


def test_prefixes_come_before_they_are_asked_for_and_beside_streams() -> None:
    small = ("--shape", "small", "--dtype", "float32", "--lengths", "256", "--pairs", "1", "--rounds", "1")
    figures, _ = run_benchmark("prefetch", *small)
    assert figures["blocks_came"] >= 16
    assert all(figures[name] > 0 for name in ("ttft_over_fetched_256", "ttft_over_computed_256", "throughput_ratio"))
