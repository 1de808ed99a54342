"""The check of a stream's tokens: silent on the right ones, and precise on each way in which they can be wrong."""

from __future__ import annotations

import pytest

from bench.open_loop.token_check import TokenCheck
from gpuworker.simulated.tokens import SimulatedTokens

TOKENS = SimulatedTokens([100 + place for place in range(50)])
SEED, POSITION = 9, 64
DUE = TOKENS.expected(SEED, POSITION, 8)


def check(*messages: tuple[int, ...], due: int = 8) -> list[str]:
    one = TokenCheck(TOKENS, SEED, POSITION)
    for message in messages:
        one.take(message)
    one.end(due)
    return one.faults


def test_the_right_tokens_raise_nothing_however_they_are_packed() -> None:
    assert check(DUE) == check(DUE[:1], DUE[1:4], (), DUE[4:]) == []


def test_a_lost_token_is_found() -> None:
    assert check(DUE[:3], DUE[4:]) == ["1 lost before token 3", "ended with 7 tokens; 8 were due"]


def test_lost_tokens_within_a_message_are_found() -> None:
    assert check((*DUE[:2], *DUE[5:])) == ["3 lost before token 2", "ended with 5 tokens; 8 were due"]


def test_a_repeated_token_is_found() -> None:
    assert check(DUE[:3], DUE[2:]) == ["the stream went back by 1 at token 3", "ended with 9 tokens; 8 were due"]


def test_tokens_out_of_order_are_found() -> None:
    swapped = (*DUE[:3], DUE[4], DUE[3], *DUE[5:])
    assert check(swapped) == [
        "1 lost before token 3",
        "the stream went back by 2 at token 4",
        "1 lost before token 5",
    ]


def test_a_token_that_nobody_draws_is_found() -> None:
    assert check((7, *DUE[1:])) == ["token 0 is 7, which no simulated worker draws"]


def test_a_stream_that_ends_early_is_found() -> None:
    assert check(DUE[:6]) == ["ended with 6 tokens; 8 were due"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_tokens_of_another_sequence_are_found(seed: int) -> None:
    assert TOKENS.phase(seed) != TOKENS.phase(SEED)
    assert len(check(TOKENS.expected(seed, POSITION, 8))) == 1
