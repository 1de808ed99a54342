"""The picture of replays: a panel for each figure, a bar for each replay, an interval where seeds differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from cli.replay.figures import Interval
from cli.replay.plot import draw, write


def exact(value: float) -> Interval:
    return Interval(value, value, value)


NAMES = ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "hit_share", "preemptions", "goodput", "refused")
COLUMNS = {
    "recorded": {"ttft_p50_s": exact(0.03), "preemptions": exact(float("nan"))},
    "replayed": dict.fromkeys(NAMES, exact(0.02)),
    "lru": {**dict.fromkeys(NAMES, exact(0.04)), "hit_share": Interval(0.3, 0.2, 0.5)},
}


@pytest.fixture(name="figure")
def _figure() -> Iterator[Figure]:
    figure = draw(COLUMNS, "12 requests")
    yield figure
    plt.close(figure)


def panel(figure: Figure, begins: str) -> Axes:
    (found,) = [axes for axes in figure.axes if axes.get_title(loc="left").startswith(begins)]
    return found


def widths(axes: Axes) -> list[float]:
    return [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)]


def test_each_figure_has_a_panel_in_its_unit(figure: Figure) -> None:
    assert len(figure.axes) == len(NAMES)
    assert widths(panel(figure, "First token, median")) == pytest.approx([30.0, 20.0, 40.0])
    assert widths(panel(figure, "Prompt tokens")) == pytest.approx([2.0, 30.0])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(COLUMNS)


def test_what_a_log_does_not_say_is_said_to_be_unknown(figure: Figure) -> None:
    assert [text.get_text() for text in panel(figure, "Preemptions").texts] == ["not known", "0.02", "0.04"]
    assert widths(panel(figure, "Preemptions")) == [0.02, 0.04]


def test_an_interval_has_whiskers_and_an_exact_figure_has_none(figure: Figure) -> None:
    (whisker,) = panel(figure, "Prompt tokens").containers[-1:]
    (bar,) = whisker[2]
    (line,) = bar.get_segments()
    assert line[:, 0] == pytest.approx([20.0, 50.0])
    assert [each for each in panel(figure, "Goodput").containers if "Errorbar" in type(each).__name__] == []


def test_a_figure_that_is_zero_everywhere_is_drawn() -> None:
    figure = draw({"replayed": dict.fromkeys(NAMES, exact(0.0))}, "")
    assert all((axes.get_xlim(), len(axes.get_xticks())) == ((0, 1), 0) for axes in figure.axes)
    plt.close(figure)


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_the_suffix_is_the_format(name: str, begins: bytes, tmp_path: Path) -> None:
    write(COLUMNS, "12 requests", tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)
