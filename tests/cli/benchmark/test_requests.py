"""Requests of benchmarks: equal lengths, nothing shared, ids that the model knows."""

from __future__ import annotations

from cli.benchmark.requests import equal_requests


def test_equal_requests_are_equal_in_length_alone() -> None:
    workload = equal_requests(3, 20, 5, seed=1)
    assert [(len(each.prompt), each.max_new_tokens) for each in workload.initial] == [(20, 5)] * 3
    assert len({tuple(each.prompt) for each in workload.initial}) == 3


def test_the_ids_are_of_a_small_vocabulary() -> None:
    ids = {token for each in equal_requests(2, 50, 1, seed=0, vocabulary=5).initial for token in each.prompt}
    assert ids == {3, 4}
