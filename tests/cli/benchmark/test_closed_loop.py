"""Figures of a run from what its client saw: exact values on two made-up requests."""

from __future__ import annotations

import pytest

from cli.benchmark.closed_loop import Record, agreement, decode_rate, figures, medians, percentile, step_seconds
from cli.benchmark.requests import Request


def made_up() -> list[Record]:
    """Two requests: three tokens at 1, 2 and 4 s, and two that come together at 3 s."""
    first, second = Record(Request("a", [1] * 10, 3), 0.5), Record(Request("b", [2] * 6, 2), 1.0)
    assert not first.add([7], 1.0)
    assert not first.add([8], 2.0)
    assert first.add([9], 4.0)
    assert second.add([7, 7], 3.0)
    second.cached_tokens = 4
    return [first, second]


def test_the_figures_of_a_run() -> None:
    found = figures(4.0, made_up())
    assert (found["requests"], found["prompt_tokens"], found["output_tokens"]) == (2, 16, 5)
    assert (found["output_tok_s"], found["total_tok_s"]) == (1.25, 5.25)
    assert found["prefix_hit_rate"] == 0.25


def test_first_tokens_count_from_submission_and_gaps_within_a_request() -> None:
    found = figures(4.0, made_up())
    assert found["ttft_p50_ms"] == pytest.approx(1e3 * (0.5 + 2.0) / 2)
    assert found["itl_p50_ms"] == pytest.approx(1e3), "gaps of 1, 2 and 0 seconds"
    assert found["itl_mean_ms"] == pytest.approx(1e3)
    assert found["itl_p99_ms"] == pytest.approx(1980.0)
    assert found["e2e_p50_ms"] == pytest.approx(1e3 * (3.5 + 2.0) / 2)


def test_a_single_token_has_no_gap() -> None:
    record = Record(Request("a", [1], 1), 0.0)
    record.add([5], 1.0)
    assert figures(1.0, [record])["itl_mean_ms"] == 0.0


def test_percentiles_lie_between_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 10.0], 0.99) == pytest.approx(9.9)
    assert percentile([], 0.5) == 0.0


def test_medians_are_taken_figure_by_figure() -> None:
    assert medians([{"a": 1.0, "b": 9.0}, {"a": 3.0, "b": 7.0}, {"a": 2.0, "b": 8.0}]) == {"a": 2.0, "b": 8.0}


def test_agreement_counts_equal_places_of_common_requests() -> None:
    assert agreement({"a": [1, 2, 3, 4], "b": [5]}, {"a": [1, 2, 9, 4]}) == 0.75
    assert agreement({"a": [1, 2]}, {"a": [1]}) == 0.5, "a token that is missing does not agree"
    assert agreement({"a": [1]}, {}) == 0.0


def record(times: list[float]) -> Record:
    return Record(Request("r", [1], len(times)), 0.0, times, [7] * len(times))


def test_a_decode_step_counts_while_all_decode() -> None:
    """The gap of 9 s is from before the second request's first token, that of 5 s from after the first one's end."""
    first, second = record([0.0, 9.0, 10.0, 11.0, 12.0]), record([9.5, 10.5, 11.5, 16.5])
    assert step_seconds([first, second]) == 1.0


def test_the_decode_rate_counts_tokens_while_all_decode() -> None:
    """From 9.5 to 11.5 s: two tokens of the first request, two of the second."""
    first, second = record([0.0, 9.0, 10.0, 11.0, 12.0]), record([9.5, 10.5, 11.5])
    assert decode_rate([first, second]) == 4 / 2.0


def test_requests_that_never_decode_together_have_the_rate_of_the_whole_run() -> None:
    assert decode_rate([record([1.0, 2.0]), record([3.0, 4.0])]) == 4 / 4.0
