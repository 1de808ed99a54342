"""The plot of `quire bench`: a panel for each kind of figure, as PNG and as SVG."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

from cli.benchmark.plot import draw, write
from tests.support.bench_report import REPORT


def test_a_panel_shows_each_kind_of_figure() -> None:
    figure = draw(REPORT)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    widths = [[bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)] for axes in figure.axes]
    names = [[label.get_text() for label in axes.get_yticklabels()] for axes in figure.axes]
    plt.close(figure)
    assert [title.split()[0] for title in titles] == ["Output", "Milliseconds", "Tokens"]
    assert widths == [[40.0, 290.0], [250.0, 1300.0], [1.5, 1.0]]
    assert names[2] == ["quantisation int8", "threads 2"]


def test_a_kind_that_was_not_measured_has_no_panel() -> None:
    figure = draw(replace(REPORT, comparisons=()))
    panels = len(figure.axes)
    plt.close(figure)
    assert panels == 2


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_the_suffix_is_the_format(name: str, begins: bytes, tmp_path: Path) -> None:
    write(REPORT, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)
