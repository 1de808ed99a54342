"""The benchmark of many workers, on a few requests."""

from __future__ import annotations

import pytest

from bench.scale import arrivals
from tests.support.bench_process import run_benchmark


def test_every_second_request_begins_with_a_prefix_of_some_group() -> None:
    trace = arrivals(workers=2, requests=200, rate=50.0)
    assert [bool(each.blocks) for each in trace.arrivals[:4]] == [False, True, False, True]
    assert {each.blocks for each in trace.arrivals if each.blocks} == {
        tuple(range(first, first + 3)) for first in (0, 3, 6, 9)
    }
    assert trace.seconds == pytest.approx(2.0, rel=0.3)


def test_each_number_of_workers_and_routers_has_its_figures() -> None:
    few = ("--workers", "2", "70", "--routers", "1", "2", "--requests", "80", "--decisions", "5", "--entries", "512")
    figures, _ = run_benchmark("scale", *few)
    levels = ("2_1", "2_2", "70_1", "70_2")
    assert all(figures[f"{name}_{each}"] > 0 for name in ("decision_us", "full_us") for each in (2, 70))
    assert all(0 < figures[f"prefix_us_{each}"] < 20 * figures[f"fetch_us_{each}"] for each in (2, 70))
    assert all(figures[f"busiest_{each}"] >= 1 for each in levels)
    # Prompts have four blocks and outputs four; the last token is never written.
    assert all(figures[f"index_entries_{each}"] <= 7 * 80 for each in levels)
    ratio = figures["ttft_p99_ms_70_2"] / figures["ttft_p99_ms_70_1"]
    assert figures["p99_ratio_2_routers_70"] == pytest.approx(ratio)
    assert figures["hit_share_2_1"] > figures["hit_share_70_1"]
    assert figures["index_bytes"] > 0
    assert 0 < figures["share_redis_us"] < figures["share_call_redis_us"]
    assert 0 < figures["share_router_us"] < figures["share_call_us"]
    assert figures["share_stream_kib"] > 0
