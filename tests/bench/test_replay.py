"""The benchmark of replays, on a few requests."""

from __future__ import annotations

from tests.support.bench_process import run_benchmark


def test_a_few_requests_are_replayed_and_recorded() -> None:
    few = ("--replayed", "40", "--requests", "16", "--rate", "40", "--simulate", "base=5ms,prefill=50us")
    figures, _ = run_benchmark("replay", *few)
    assert (figures["identical_runs"], figures["recorded"]) == (1, 16)
    assert figures.keys() == {
        "identical_runs", "requests_per_s", "times_real_time", "ttft_error_p50", "ttft_error_p90", "itl_error_p50",
        "recorded",
    }  # fmt: skip
