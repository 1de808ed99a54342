"""Advice on the block size: what a log is read as, what each size costs to the token, which one is taken and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.block_size.advice import BlockSizeCost, costs, expected_hit, expected_prefix, recommend
from cli.block_size.request_log import LoggedRequest, read_log
from cli.commands import advise_block_size
from common.contracts.errors import InvalidRequest

# ------------------------------------------------------------ the log


def test_a_log_is_read_in_every_form_that_it_comes_in() -> None:
    lines = [
        '{"prompt_tokens": 10, "output_tokens": 3}',
        "",
        '{"ts": "2026-01-01", "msg": "finished: length", "prompt_tokens": 8, "cached_tokens": 4, "output_tokens": 2}',
        '{"id": "x", "usage": {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8}}',
        '{"ts": "2026-01-01", "msg": "worker w found"}',
    ]
    assert read_log(lines) == [LoggedRequest(10, 3), LoggedRequest(8, 2, 4), LoggedRequest(7, 1)]


def test_every_line_that_makes_no_sense_is_named() -> None:
    lines = [
        '{"prompt_tokens": 0, "output_tokens": 3}',
        "not json",
        '{"prompt_tokens": 5, "output_tokens": "3"}',
        "[1, 2]",
        '{"prompt_tokens": 5, "output_tokens": 3, "cached_tokens": 5}',
    ]
    with pytest.raises(InvalidRequest) as caught:
        read_log(lines)
    assert [each.field for each in caught.value.violations] == [f"line {number}" for number in range(1, 6)]
    words = str(caught.value)
    assert "prompt_tokens is 0; expected a whole number of at least 1" in words
    assert "cached_tokens is 5; expected less than the 5 tokens of the prompt" in words


def test_a_log_without_requests_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no line has prompt_tokens"):
        read_log(['{"msg": "hello"}'])


# ------------------------------------------------------------ what a size costs


def test_a_hit_in_blocks_of_another_size_is_averaged_over_where_the_prefix_may_end() -> None:
    """8 tokens were served in blocks of 4: the prefix had 8, 9, 10 or 11. Blocks of 2 serve 8, 8, 10, 10 of it."""
    assert expected_hit(8, 4, 100, 2) == 9.0
    assert expected_hit(8, 4, 100, 4) == 8.0
    assert expected_hit(8, 4, 100, 8) == 8.0
    assert expected_hit(8, 4, 100, 16) == 0.0
    assert expected_prefix(8, 4, 100) == 9.5


def test_the_last_token_of_a_prompt_is_never_served() -> None:
    """Of a prompt of 10, at most 9 were shared: the prefix had 8 or 9."""
    assert expected_prefix(8, 4, 10) == 8.5


def test_costs_are_exact_for_one_request() -> None:
    """5 prompt tokens, 3 to draw: two blocks of 4 over three steps of 5, 6 and 7 tokens; one of 8 as well."""
    rows = {row.block_size: row for row in costs([LoggedRequest(5, 3)], 16)}
    assert rows[4].waste == rows[8].waste == pytest.approx(6 / 18)
    assert rows[16].waste == pytest.approx(30 / 18)
    assert rows[4].blocks == pytest.approx(1000 * 2 / 8)
    assert (rows[4].hits, rows[4].missed, rows[4].speed) == (None, 0.0, None)


def test_hits_and_what_they_miss_are_shares_of_the_prompts() -> None:
    requests = [LoggedRequest(20, 4, 8), LoggedRequest(12, 4, 0)]
    rows = {row.block_size: row for row in costs(requests, 4)}
    assert rows[4].hits == pytest.approx(8 / 32)
    assert rows[4].missed == pytest.approx(1.5 / 32)
    assert rows[16].hits == 0.0
    assert rows[16].missed == pytest.approx(9.5 / 32)


def test_speeds_are_relative_to_the_fastest() -> None:
    rows = {row.block_size: row for row in costs([LoggedRequest(5, 3)], 16, {16: 50.0, 32: 100.0})}
    assert (rows[16].speed, rows[32].speed, rows[64].speed) == (0.5, 1.0, None)


# ------------------------------------------------------------ the choice


def cost(block_size: int, waste: float, missed: float = 0.0, speed: float | None = None) -> BlockSizeCost:
    return BlockSizeCost(block_size, waste, 0.0, None, missed, 1000 / block_size, speed)


def test_without_speeds_the_largest_that_loses_little_enough_is_taken() -> None:
    rows = [cost(4, 0.01), cost(8, 0.02), cost(16, 0.04), cost(32, 0.08)]
    assert recommend(rows, 0.05).block_size == 16
    assert recommend(rows, 0.5).block_size == 32


def test_missed_hits_count_as_waste_does() -> None:
    assert recommend([cost(4, 0.01), cost(8, 0.02, missed=0.02), cost(16, 0.03, missed=0.03)], 0.05).block_size == 8


def test_where_none_loses_little_enough_the_one_that_loses_least_is_taken() -> None:
    assert recommend([cost(4, 0.2), cost(8, 0.1), cost(16, 0.3)], 0.05).block_size == 8


def test_with_speeds_the_smallest_of_the_fastest_is_taken() -> None:
    rows = [cost(4, 0.01, speed=0.8), cost(8, 0.02, speed=0.97), cost(16, 0.03, speed=0.985), cost(32, 0.04, speed=1.0)]
    assert recommend(rows, 0.05).block_size == 16
    assert recommend(rows, 0.035).block_size == 8, "97 % is as fast as 98.5 %"


# ------------------------------------------------------------ the command


def write_log(path: Path, count: int = 50) -> Path:
    lines = [{"prompt_tokens": 300 + index, "output_tokens": 40, "cached_tokens": 256} for index in range(count)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_the_command_prints_every_size_and_why_it_takes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(tmp_path / "requests.jsonl")
    assert advise_block_size.main([str(log), "--sample", "10"]) == 0
    first, heading, *rows, last = capsys.readouterr().out.splitlines()
    assert first == "50 requests, 10 counted: 322 prompt and 40 output tokens on average"
    assert heading.split()[:4] == ["block", "size", "waste", "runway"]
    assert [row.split()[0] for row in rows] == ["4", "8", "16", "32", "64", "128", "256"]
    assert last.startswith("take --block-size 16: it loses 4.")
    assert "blocks of 32 would lose" in last
    assert advise_block_size.main([str(log), "--sample", "10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["chosen"]) == (50, 16)
    assert [each["block_size"] for each in found["sizes"]] == [4, 8, 16, 32, 64, 128, 256]


def test_measured_speeds_decide_among_what_loses_little_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, speeds = write_log(tmp_path / "requests.jsonl"), tmp_path / "phases.json"
    figures = {"tok_s_block4_general": 90.0, "tok_s_block8_general": 100.0, "tok_s_block16_general": 95.0}
    speeds.write_text("a table\n" + json.dumps({"bench": "phases", "figures": figures}))
    assert advise_block_size.main([str(log), "--speeds", str(speeds)]) == 0
    assert "take --block-size 8:" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "{}", '{"figures": {}}', "[]"])
def test_speeds_that_are_none_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    log, speeds = write_log(tmp_path / "requests.jsonl"), tmp_path / "phases.json"
    speeds.write_text(content)
    assert advise_block_size.main([str(log), "--speeds", str(speeds)]) == 2
    assert str(speeds) in capsys.readouterr().err


def test_a_log_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert advise_block_size.main([str(tmp_path / "none.jsonl")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_thinning_keeps_the_first_and_spreads_over_all() -> None:
    assert advise_block_size.thinned(range(10), 4) == [0, 2, 5, 7]
    assert advise_block_size.thinned(range(3), 4) == [0, 1, 2]
