"""The picture of the load benchmark: a line for each number of routers, filled dots where the load was carried."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
from bench.open_loop import plot as load_plot
from cli.plots import ACCENT


def row(offered: float, routers: int = 1, steady: float = 1.0, **fields: object) -> dict[str, object]:
    figures = {
        "offered_tokens_s": offered,
        "offered_requests_s": offered / 100,
        "goodput_requests_s": offered / 100,
        "ttft_p50_ms": 20.0,
        "ttft_p99_ms": 60.0,
    }
    return {"engine": "simulated", "cv": 1.0, "routers": routers, "steady": steady, "valid": 1.0, **figures, **fields}


def test_each_number_of_routers_has_a_line() -> None:
    figure = load_plot.draw([row(1000.0), row(2000.0, steady=0.0), row(3000.0, routers=2)], "t")
    latencies, goodput = figure.get_axes()
    assert [line.get_linestyle() for line in latencies.lines if line.get_marker() == "None"] == ["-", "--", "-", "--"]
    assert {"1 router", "2 routers"} < {text.get_text() for text in figure.texts}
    assert [text.get_text() for text in goodput.texts] == ["offered"]
    assert latencies.get_xlim() == pytest.approx((0.0, 1.08 * 3000.0))
    assert goodput.get_ylim() == pytest.approx((0.0, 1.15 * 30.0))


def test_what_was_not_carried_is_a_ring() -> None:
    _, goodput = load_plot.draw([row(1000.0), row(2000.0, steady=0.0), row(3000.0, valid=0.0)], "t").get_axes()
    dots = [line.get_markerfacecolor() for line in goodput.lines if line.get_marker() == "o"]
    assert dots == [ACCENT, "white", "white"]


def test_only_poisson_arrivals_at_simulated_workers_are_drawn(tmp_path: Path) -> None:
    rows = [row(1000.0), row(9000.0, cv=3.0), row(9000.0, engine="real")]
    results = tmp_path / "load.jsonl"
    results.write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert load_plot.draw(rows, "t").get_axes()[0].get_xlim()[1] == pytest.approx(1.08 * 1000.0)
    assert load_plot.write(results) == tmp_path / "load.png"
    assert (tmp_path / "load.png").stat().st_size > 10_000
