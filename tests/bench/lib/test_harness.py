"""What every benchmark reports with: medians and their intervals, the table, and the line for machines."""

from __future__ import annotations

import json
import os

import pytest

from bench.lib.harness import median_interval, progress, report


def test_equal_samples_leave_no_doubt() -> None:
    assert median_interval([1.25] * 20) == (1.25, 1.25, 1.25)


def test_two_samples_leave_all_of_it() -> None:
    """Of two samples a resample has the median 1, 2 or 3 with probability 1/4, 1/2, 1/4."""
    assert median_interval([3.0, 1.0]) == (2.0, 1.0, 3.0)


def test_the_interval_of_many_samples_is_that_of_order_statistics() -> None:
    """For n = 101 it lies at the ranks 51 +- 1.96 sqrt(n) / 2, which is 51 +- 9.8."""
    median, lower, upper = median_interval([float(value) for value in range(101)])
    assert median == 50.0
    assert lower == pytest.approx(50 - 9.8, abs=1.5)
    assert upper == pytest.approx(50 + 9.8, abs=1.5)


def test_the_same_samples_give_the_same_interval() -> None:
    samples = [0.9, 1.0, 1.1, 1.4, 0.8]
    assert median_interval(samples) == median_interval(samples)


def test_the_last_line_is_one_object_of_three_parts(capsys: pytest.CaptureFixture[str]) -> None:
    report("waste", {"example": 5288, "part": 0.12345678}, {"example": "what it means"}, as_json=True)
    *table, last = capsys.readouterr().out.splitlines()
    said = json.loads(last)
    assert said.keys() == {"bench", "machine", "figures"}
    assert (said["bench"], said["figures"]) == ("waste", {"example": 5288.0, "part": 0.123457})
    assert said["machine"]["cores"] == os.cpu_count()
    assert all(said["machine"][name] for name in ("processor", "python", "system"))
    (line,) = (line for line in table if line.startswith("example"))
    assert line.split(maxsplit=2) == ["example", "5288", "what it means"]


def test_people_who_ask_for_no_json_get_none(capsys: pytest.CaptureFixture[str]) -> None:
    report("waste", {"example": 5288}, {}, as_json=False)
    assert "{" not in capsys.readouterr().out


def test_progress_is_for_terminals(capsys: pytest.CaptureFixture[str]) -> None:
    progress("run 1 of 2")
    progress("run 2 of 2", end=True)
    assert capsys.readouterr().err == ""
