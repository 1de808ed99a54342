"""The workloads: the very ids that the peers were fed, by digest; what scaling keeps; how a conversation goes on."""

from __future__ import annotations

import pytest

from bench.lib.workloads import VOCABULARY, make, passages_of, warm_up
from cli.benchmark.requests import Workload


@pytest.mark.parametrize(
    ("name", "digest"), [("W1", "e502679dccf9"), ("W2", "263b27bd0786"), ("W3", "9c33d70ef987"), ("W4", "994ee06a6dbb")]
)
def test_the_ids_are_those_that_every_engine_is_fed(name: str, digest: str) -> None:
    assert make(name).digest == digest


@pytest.mark.parametrize(("name", "requests"), [("W1", 64), ("W2", 64), ("W3", 16 * 4), ("W4", 1)])
def test_the_sizes_of_the_workloads(name: str, requests: int) -> None:
    assert make(name).num_requests == requests


@pytest.mark.parametrize(("name", "kept"), [("W1", 32), ("W2", 32), ("W3", 8), ("W4", 1)])
def test_scaling_takes_the_first_requests_as_they_are(name: str, kept: int) -> None:
    whole, half = make(name), make(name, scale=0.5)
    assert len(half.initial) == kept
    lengths = [(len(each.prompt), each.max_new_tokens) for each in whole.initial]
    assert [(len(each.prompt), each.max_new_tokens) for each in half.initial] == lengths[:kept]


def test_no_scale_leaves_nothing_to_run() -> None:
    assert len(make("W3", scale=0.001).initial) == 1


def test_a_conversation_sends_its_history_again_and_ends() -> None:
    workload = make("W3", scale=0.1)
    request, sizes = workload.initial[0], [64]
    while (following := workload.follow_up(request, [7] * 48)) is not None:
        assert following.prompt[: len(request.prompt) + 48] == request.prompt + [7] * 48
        assert (following.conversation, following.turn) == (0, request.turn + 1)
        request = following
        sizes.append(len(request.prompt))
    assert sizes == [64, 176, 288, 400]


def test_a_single_request_has_no_next_turn() -> None:
    workload = make("W4")
    assert workload.follow_up(workload.initial[0], [1]) is None


def test_requests_of_one_workload_share_their_head_alone() -> None:
    prompts = [each.prompt for each in make("W2", scale=0.25).initial]
    assert len({tuple(prompt[:768]) for prompt in prompts}) == 1
    assert len({tuple(prompt[768:]) for prompt in prompts}) == len(prompts) == 16


def test_another_seed_draws_other_ids_of_the_same_lengths() -> None:
    first, second = make("W3", seed=0), make("W3", seed=1)
    assert [len(each.prompt) for each in first.initial] == [len(each.prompt) for each in second.initial]
    assert first.digest != second.digest


def test_every_id_is_in_the_vocabulary_and_none_is_special() -> None:
    def ids(workload: Workload) -> set[int]:
        return {token for each in workload.initial for token in each.prompt}

    found = ids(make("W1")) | ids(warm_up())
    assert min(found) >= 3
    assert max(found) < VOCABULARY


@pytest.mark.parametrize("name", ["W1", "W2", "W3", "W4"])
def test_prompts_may_be_passages_of_a_text(name: str) -> None:
    text = list(range(9, 3009))
    first, again = (make(name, draw=passages_of(text)) for _ in range(2))
    assert first.digest == again.digest
    for each in first.initial:
        own = each.prompt[768:] if name == "W2" else each.prompt
        assert own == list(range(own[0], own[0] + len(own)))
        assert own[-1] < 3009


def test_a_text_of_the_longest_prompt_is_long_enough() -> None:
    assert len(warm_up(draw=passages_of(range(249))).initial[-1].prompt) == 248
