"""The benchmark of quality: its figures, and the text that it takes."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from bench.lib.real_text import extract, novel_of, real_text
from bench.quality import REFERENCE, TYPES, Quality, agreement, figures
from gpuworker.config import GpuWorkerSettings

TEXT = """Header
*** START OF THIS PROJECT GUTENBERG EBOOK X ***
One
 two.
*** END OF THIS PROJECT GUTENBERG EBOOK X ***
Footer"""


def test_figures_are_over_those_of_bf16() -> None:
    reference = Quality("BF16", (), lost=4.0, best=[1, 2, 3, 4])
    other = Quality("I8", (), lost=8.0, best=[1, 2, 0, 0], rates={1: [(30.0, 10.0), (20.0, 10.0), (10.0, 10.0)]})
    found = figures({REFERENCE: reference, "kv_int8": other})
    assert found[f"ppl_ratio_{REFERENCE}"] == found[f"agreement_{REFERENCE}"] == 1.0
    assert found["ppl_ratio_kv_int8"] == pytest.approx(2.718281828)
    assert (found["agreement_kv_int8"], found["tok_s_b1_kv_int8"], found["speed_b1_kv_int8"]) == (0.5, 20.0, 2.0)


def test_agreement_needs_the_same_places() -> None:
    with pytest.raises(ValueError, match="longer"):
        agreement(Quality("", (), 0.0, [1]), Quality("", (), 0.0, [1, 2]))


@pytest.mark.parametrize("name", TYPES)
def test_every_type_is_one_of_a_worker(name: str) -> None:
    GpuWorkerSettings(model=".", **TYPES[name])


def test_the_text_is_what_stands_between_the_marks() -> None:
    assert novel_of(TEXT) == "One two."


def test_the_text_is_taken_out_of_the_package(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "botchan.txt").write_text("text")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "test", "package-1/test")
    extract(tmp_path / "a.tar.gz", tmp_path / "found.txt")
    assert (tmp_path / "found.txt").read_text() == "text"


def test_a_text_that_is_missing_or_another_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="run `make quality-text`"):
        real_text(10, tmp_path / "none.txt")
    (tmp_path / "other.txt").write_text(TEXT)
    with pytest.raises(SystemExit, match="another text than the figures are for"):
        real_text(10, tmp_path / "other.txt")
