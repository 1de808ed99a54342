"""What an answer takes at least, and the room that answers take while they are collected and sent."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from common.contracts.errors import InvalidRequest, Overloaded
from common.contracts.limits import MAX_REPLY_BYTES, SMALL_ANSWER_BYTES
from common.contracts.types import SamplingParams
from quire.inference.v1 import inference_pb2 as pb
from router.api.shared.answer_size import AnswerRoom, check_least_size, checked_reply, least_tokens
from router.contracts.events import ValidatedRequest


def asked(**sampling: Any) -> ValidatedRequest:
    return ValidatedRequest((1, 2), SamplingParams(**{"max_tokens": 100, "n": 3} | sampling), 0.0)


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        ({"ignore_eos": True}, 300),
        ({}, 0),
        ({"min_tokens": 7}, 21),
        ({"ignore_eos": True, "stop": ("a",)}, 0),
        ({"ignore_eos": True, "stop_token_ids": (5,), "min_tokens": 2}, 6),
    ],
)
def test_only_what_comes_in_any_case_counts(sampling: dict[str, Any], tokens: int) -> None:
    assert least_tokens(asked(**sampling)) == tokens


def test_an_answer_that_will_be_too_large_is_refused_and_one_that_may_fit_is_not() -> None:
    requests = [asked(ignore_eos=True, logprobs=4), asked(ignore_eos=True)]
    size = 300 * (1 + 5 * 10) + 300 * 1
    check_least_size(requests, 1, 10, size)
    with pytest.raises(InvalidRequest, match=f"makes an answer of {size} bytes or more; at most {size - 1}"):
        check_least_size(requests, 1, 10, size - 1)


def test_log_probabilities_of_prompts_count_before_the_work() -> None:
    request = ValidatedRequest(tuple(range(101)), SamplingParams(max_tokens=1, prompt_logprobs=4), 0.0)
    check_least_size([request], 1, 10, 4_000)
    for entry, size in ((0, 4_000), (7, 2_800)):
        with pytest.raises(InvalidRequest, match=f"makes an answer of {size} bytes or more") as refused:
            check_least_size([request], 1, 10, size - 1, entry)
        assert refused.value.violations[0].field == "sampling.prompt_logprobs"


def test_a_growing_answer_ends_at_its_limit() -> None:
    place = AnswerRoom().place(1000)
    place.grow(1000)
    with pytest.raises(InvalidRequest, match="at most 1000; stream the answer"):
        place.grow(1)


def test_when_all_answers_are_too_large_the_next_large_one_ends_and_small_ones_go_on() -> None:
    room = AnswerRoom(2 * SMALL_ANSWER_BYTES)
    large, small = room.place(1 << 30), room.place(1 << 30)
    large.grow(2 * SMALL_ANSWER_BYTES)
    small.grow(100)
    with pytest.raises(Overloaded, match=r"router\.answers"):
        large.grow(1)
    large.leave()
    large.leave()
    assert room.taken == 100


def test_an_answer_that_is_forgotten_takes_no_room() -> None:
    room = AnswerRoom()
    room.place(1000).grow(10)
    gc.collect()
    assert room.taken == 0


def test_a_reply_too_large_for_a_message_is_refused() -> None:
    reply = pb.TokenizeResponse(token_ids=[5] * 10)
    assert checked_reply(reply) is reply
    with pytest.raises(InvalidRequest):
        checked_reply(pb.DetokenizeResponse(text="a" * MAX_REPLY_BYTES))
