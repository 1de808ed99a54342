"""The pictures of traces: a line for each way to route, bars for what fits, and equal files for equal rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
from bench.lib.trace_plots import draw, points_of, write
from bench.lib.trace_rows import Row
from common.contracts.errors import InvalidConfig

DOCS = Path(__file__).parents[3] / "docs"


def replayed(pool: int, routing: str = "cost", beside: str = "none", **changes: object) -> Row:
    figures = {"hit_share": pool / 10_000, "goodput": 2.0}
    conditions = {"load": 1.0, "workers": 4, "requests": 100, "costs": "base=1ms", "links": "peer=1GB/s"}
    times = {"host_times": 2.0, "disk_times": 0.0, "slo_ttft": 2.0, "slo_itl": 0.1}
    named = {"trace": "talks", "pool": pool, "routing": routing, "beside": beside, "figures": figures}
    return {**conditions, **times, **named, **changes}


def fitting(reserved: int, paged: float) -> Row:
    figures = {"fit_paged": paged, "fit_buddy": 20.0, "fit_reserved": 8.5}
    figures |= {"tokens_paged": 0.96, "tokens_buddy": 0.6, "tokens_reserved": 0.25}
    return {"trace": "lengths", "requests": 100, "slots": 65_536, "reserved": reserved, "figures": figures}


def test_each_way_to_route_has_a_line_over_the_size_of_pools() -> None:
    rows = [replayed(2000), replayed(1000), replayed(1000, "round-robin"), replayed(1000, beside="uncached")]
    figure = draw("talks", [*rows, replayed(1000, workers=8, load=2.0), replayed(1, trace="other")])
    hits, more_hits, good, more_good = figure.get_axes()
    assert points_of(hits) == [[(256_000, 10.0), (512_000, 20.0)], [(256_000, 10.0)]]
    assert points_of(good) == [[(256_000, 0.5), (512_000, 0.5)], [(256_000, 0.5)], [(256_000, 0.5)]]
    assert points_of(more_good) == [[(256_000, 0.25)]]
    assert [axes.get_title(loc="left") for axes in (hits, more_hits)] == [
        "4 workers",
        "8 workers, arrivals 2 times as fast",
    ]
    assert list(more_good.get_xticks()) == [256_000, 512_000], "those of all suites"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.texts] == ["cost: prefix and load", "round robin", "no prefix cache"]


def test_bars_say_how_many_fit_in_each_kind_of_memory() -> None:
    left, right = draw("lengths", [fitting(4096, 33.4), fitting(2048, 44.6)]).get_axes()
    assert [text.get_text() for text in left.texts] == ["8.5", "20", "45", "8.5", "20", "33"]
    assert [text.get_text() for text in right.texts] == ["25", "60", "96"] * 2
    names = [label.get_text() for label in left.get_yticklabels()]
    assert names == ["lengths\nup to 2,048 tokens", "lengths\nup to 4,096 tokens"]


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([replayed(1000, trace="other")], "no row is of talks; replay it first"),
        ([replayed(1000), replayed(2000, costs="base=2ms")], "the rows differ by costs"),
        ([replayed(1000), replayed(2000, slo_itl=0.2)], "the rows differ by slo_itl"),
    ],
)
def test_rows_that_are_not_of_one_picture_are_refused(rows: list[Row], what: str) -> None:
    with pytest.raises(InvalidConfig, match=what):
        draw("talks", rows)


def test_equal_rows_are_equal_files_with_text(tmp_path: Path) -> None:
    rows = [replayed(1000), replayed(2000)]
    for name in ("a.svg", "b.svg"):
        write("talks", rows, tmp_path / name)
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    assert "100 requests of talks" in drawn


def test_the_pictures_of_the_guide_have_the_figures_of_its_tables() -> None:
    """They are drawn from the rows that the tables are of: a row of the table for each three bars."""
    guide, picture = (DOCS / "scale.md").read_text(), (DOCS / "capacity.svg").read_text()
    fits = re.findall(r"^\| (?:code|conv), [\d,]+ \| (\d+), (\d+), (\d+) \|", guide, re.MULTILINE)
    assert len(fits) == 6
    bars = re.findall(r">(\d+)</text>", picture)
    drawn = [tuple(bars[place : place + 3]) for place in range(len(bars) - 2)]
    assert all(each in drawn for each in fits)
    replays = (DOCS / "replays.svg").read_text()
    asked = (f"{int(count.replace(',', '')):,} requests of" for count in re.findall(r"has ([\d,]+) requests in", guide))
    assert all(words in replays for words in (*asked, "A step: base=20ms,decode=50us,prefill=50us."))
