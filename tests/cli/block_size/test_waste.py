"""`quire waste`: its output for the worked examples, to the character."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.commands import waste
from cli.main import main

THREE = """\
3 sequences with 7,000 tokens; percentages are of the 7,000 slots that hold a token
reservation             reserved   used  wasted  wasted %
contiguous, 4,096 each    12,288  7,000   5,288    75.5 %
blocks of 256              7,424  7,000     424     6.1 %
"""
FOUR = """\
4 sequences with 4,500 tokens; percentages are of the 4,500 slots that hold a token
reservation             reserved   used  wasted  wasted %
contiguous, 2,048 each     8,192  4,500   3,692    82.0 %
blocks of 16               4,544  4,500      44     1.0 %
blocks of 256              5,120  4,500     620    13.8 %
"""


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("800 2300 3900 --block-size 256 --max-len 4096", THREE),
        ("600 900 1300 1700 --block-size 16,256 --max-len 2048", FOUR),
    ],
)
def test_the_worked_examples(line: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["waste", *line.split()]) == 0
    assert [row.rstrip() for row in capsys.readouterr().out.splitlines()] == shown.splitlines()


@pytest.mark.parametrize("shown", [THREE, FOUR])
def test_the_guide_shows_the_same(shown: str) -> None:
    assert shown in (Path(__file__).parents[3] / "docs" / "usage.md").read_text()


def test_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert waste.main(["800", "2300", "3900", "--block-size", "256", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "lengths": [800, 2300, 3900],
        "contiguous": {"max_len": 4096, "reserved": 12_288, "used": 7000, "wasted": 5288, "waste": 5288 / 7000},
        "paged": [{"block_size": 256, "reserved": 7424, "used": 7000, "wasted": 424, "waste": 424 / 7000}],
    }


@pytest.mark.parametrize(("longest", "reserved"), [(1, 1), (1024, 1024), (1025, 2048)])
def test_by_default_a_reservation_is_the_power_of_two_that_holds_the_longest_sequence(
    longest: int, reserved: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert waste.main(["1", str(longest), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["contiguous"]["max_len"], shown["contiguous"]["reserved"]) == (reserved, 2 * reserved)
    assert [each["block_size"] for each in shown["paged"]] == [4, 8, 16, 32, 64, 128, 256]


def test_block_sizes_are_shown_once_the_smallest_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert waste.main(["100", "--block-size", "64, 16,64", "--json"]) == 0
    assert [each["block_size"] for each in json.loads(capsys.readouterr().out)["paged"]] == [16, 64]
