"""The load benchmark: the search for a saturation, its flags, and two seconds of it against a simulated worker."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from bench.load import _cores, flags
from bench.open_loop.modes import Row, highest_carried, saturation
from tests.support.bench_process import run_benchmark

ROOT = Path(__file__).parents[2]


def search(carries: float, guess: float, probes: int, valid: bool = True) -> tuple[float, list[float]]:
    """Return the rate that is found, 0 for none, and those that were tried, where rates up to `carries` are carried."""

    async def probe(rate: float) -> Row:
        return {"rate": rate, "steady": float(rate <= carries), "valid": float(valid)}

    rows = asyncio.run(saturation(probe, guess, probes))
    found = highest_carried(rows)
    return (found["rate"] if found else 0.0), [row["rate"] for row in rows]


def test_a_search_goes_up_while_the_load_is_carried() -> None:
    assert search(1000.0, 80.0, 3) == (125.0, [80.0, 100.0, 125.0])


def test_a_search_halves_what_lies_between() -> None:
    assert search(90.0, 80.0, 4) == (90.0, [80.0, 100.0, 90.0, 95.0])


def test_a_search_goes_down_until_the_load_is_carried() -> None:
    assert search(60.0, 100.0, 4) == (56.25, [100.0, 75.0, 56.25, 65.625])


def test_what_an_invalid_run_carried_does_not_count() -> None:
    assert search(1000.0, 80.0, 2, valid=False) == (0.0, [80.0, 60.0])


def test_cores_are_read_by_role() -> None:
    assert _cores("router=0,clients=2-3") == {"router": [0], "clients": [2, 3]}
    assert _cores("") == {}


def test_nothing_is_pinned_by_default() -> None:
    assert flags().parse_args([]).pin == ""


def test_two_seconds_of_load_are_counted_and_checked(tmp_path: Path) -> None:
    words = ["--rates", "10", "--seconds", "1.5", "--warm", "0.5", "--output-tokens", "20", "--clients", "1"]
    said, _ = run_benchmark("load", *words, "--results", str(tmp_path / "load.jsonl"))
    row = json.loads((tmp_path / "load.jsonl").read_text())
    assert (row["engine"], row["routers"], row["rate"], row["faults"]) == ("simulated", 1, 10.0, 0)
    assert said["requests_s_simulated_10rps"] == pytest.approx(row["requests_s"], abs=1e-5)
    assert 1.0 <= row["offered_requests_s"] <= 30.0
    assert row["tokens_s"] > 0
    assert row["ttft_p50_ms"] >= 8.0, "a step takes 8 ms"
    assert row["router_us_per_token"] > 0
    assert {status for status in row if status.startswith("status_")} == set(), "nothing was refused"
