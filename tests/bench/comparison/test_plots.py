"""The picture of a comparison: a column for each workload, a row for each figure, and who has no prefix cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.comparison.test_ratios import line, three_turns

pytest.importorskip("matplotlib")
from bench.comparison import plots


def test_each_setting_has_a_column_and_ours_stands_first() -> None:
    lines = [*three_turns(), line("ours", 90, workload="W2", prefix_caching="on")]
    figure = plots.draw(lines, "title")
    axes = figure.get_axes()
    assert len(axes) == 3 * 2
    assert [label.get_text() for label in axes[0].get_yticklabels()][:2] == ["Quire", "vLLM"]
    assert axes[0].get_title("right") == "1.25×"
    assert axes[1].get_title("right") == "", "no peer ran there"
    words = {text.get_text() for text in axes[1].texts}
    assert words == {"90", "no prefix cache", "not run"}


@pytest.mark.parametrize(
    ("milliseconds", "words"), [(8.46, "8.5 ms"), (3.0, "3 ms"), (120.4, "120 ms"), (3440, "3.4 s"), (41000, "41 s")]
)
def test_durations_are_written_as_people_do(milliseconds: float, words: str) -> None:
    assert plots.duration(milliseconds) == words


def test_a_file_is_drawn_for_each_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [*three_turns(), line("ours", 90, dtype="bfloat16")]
    results = tmp_path / "peers.jsonl"
    results.write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr("sys.argv", ["bench.comparison.plots", str(results)])
    plots.main()
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["peers-bfloat16.png", "peers-float32.png"]
