"""How far the loading of a model is: lines where no terminal shows a bar, and transformers' own bar on one."""

from __future__ import annotations

import itertools
import sys
import threading
from pathlib import Path

import pytest
from transformers.utils.logging import set_tqdm_hook, tqdm

from gpuworker.checkpoints.progress import pauses_from, telling_progress

SECONDS = 120.0


class Line:
    """Waits for a line that has certain words."""

    def __init__(self, words: str) -> None:
        self._words, self.came = words, threading.Event()

    def __call__(self, line: str) -> None:
        if self._words in line:
            self.came.set()


def test_lines_count_the_tensors_that_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(64 << 20))
    line = Line("loading weights: 1 of 3 tensors (0.1 GiB), ")
    with telling_progress(tmp_path, first=0.001, say=line):
        for index in tqdm({"a": 1, "b": 2, "c": 3}.items(), desc="Loading weights"):
            assert index[0] == "a" or line.came.wait(SECONDS)


def test_before_the_first_tensor_a_line_tells_the_time(tmp_path: Path) -> None:
    line = Line("making the model: ")
    with telling_progress(tmp_path, first=0.001, say=line):
        assert line.came.wait(SECONDS)


def test_each_line_comes_after_twice_the_time_up_to_a_bound() -> None:
    assert list(itertools.islice(pauses_from(2.0), 8)) == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 64.0, 64.0]


def test_other_bars_are_left_to_transformers(tmp_path: Path) -> None:
    with telling_progress(tmp_path):
        assert list(tqdm([1, 2], desc="Something else")) == [1, 2]


def test_a_terminal_keeps_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with telling_progress(tmp_path):
        assert set_tqdm_hook(None) is None
