"""The benchmark of ranks: it runs both engines on one small model, and its figures are those that it names."""

from __future__ import annotations

import os

import pytest

from tests.support.bench_process import run_benchmark


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_both_engines_run_each_load() -> None:
    figures, _ = run_benchmark("tensor_parallel", "--small", "--rows", "2", "--tokens", "8", "--pairs", "1")
    loads = ("decode2", "prompts")
    speeds = {f"{engine}_tokens_per_s_{load}" for engine in ("tp1", "tp2") for load in loads}
    ratios = {f"tp2_over_tp1_{load}" for load in (*loads, *(f"best_{load}" for load in loads), "same_cores")}
    assert set(figures) == speeds | ratios | {"rank_weight_share", "plan_us"}
    assert 0.5 <= figures["rank_weight_share"] < 0.6
    for load in loads:
        expected = figures[f"tp2_tokens_per_s_{load}"] / figures[f"tp1_tokens_per_s_{load}"]
        assert figures[f"tp2_over_tp1_{load}"] == pytest.approx(expected, rel=1e-2)


@pytest.mark.rest
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_ranks_on_two_hosts_run_each_load_beside_ranks_that_share_memory() -> None:
    flags = ("--small", "--rows", "2", "--tokens", "8", "--pairs", "1", "--hosts")
    figures, _ = run_benchmark("tensor_parallel", *flags)
    speeds = {f"{engine}_tokens_per_s_{load}" for engine in ("tp2", "hosts2") for load in ("decode2", "prompts")}
    assert speeds <= set(figures)
    assert figures["hosts2_over_tp2_same_cores"] > 0
