"""The parts of the time to the demo's first answer: what make made before, and what was there already."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cli.commands.demo import made_parts, parts_in_words


@pytest.fixture
def made(tmp_path: Path) -> str:
    """Make began at 1,000 s and left two stamps, 61 and 103.5 s later."""
    for name, seconds in (("serving", 1_061.0), ("kernels", 1_103.5)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (seconds, seconds))
    return f"packages={tmp_path / 'serving'} kernels={tmp_path / 'kernels'}"


def test_each_step_has_taken_from_the_end_of_the_one_before(made: str) -> None:
    assert made_parts(f"1000 {made}") == {"packages": 61.0, "kernels": 42.5}


def test_what_was_there_before_is_left_out(made: str) -> None:
    assert made_parts(f"1070 {made}") == {"kernels": 33.5}
    assert made_parts(f"2000 {made}") == made_parts("") == {}


def test_a_step_that_left_nothing_is_left_out(made: str) -> None:
    """Without a compiler there are no kernels."""
    assert made_parts(f"1000 packages={made.partition('=')[2].partition(' ')[0]} kernels=nowhere") == {"packages": 61.0}


def test_the_parts_are_summed() -> None:
    words = parts_in_words({"packages": 61.04, "start": 3.4, "first answer": 0.25})
    assert words == "To the first answer: packages 61.0 s + start 3.4 s + first answer 0.2 s = 64.7 s"
