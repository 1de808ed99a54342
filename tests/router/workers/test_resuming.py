"""What a client may say that it has of a request that goes on at another router."""

from __future__ import annotations

import pytest

from common.contracts.errors import InvalidRequest, NotFound
from router.workers.resuming import Continuation, Orphan, Received


def orphan(index: int = 0, earlier: tuple[int, ...] = (), tokens: int = 5, **fields: int) -> Orphan:
    return Orphan(1, index, 3, earlier, tokens, Continuation(), **fields)  # type: ignore[arg-type]


def test_tokens_of_earlier_workers_count() -> None:
    Received("r1", (7,)).check([orphan(earlier=(1, 2))], logprobs=False)
    with pytest.raises(InvalidRequest, match=r"output_tokens_received\[0\]: is 8, and the output has 7 tokens"):
        Received("r1", (8,)).check([orphan(earlier=(1, 2))], logprobs=False)


def test_every_wrong_count_is_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        Received("r1", (6, 5, 1)).check([orphan(), orphan(1)], logprobs=False)
    assert [each.field[-2] for each in caught.value.violations] == ["0", "2"]


def test_no_count_is_none() -> None:
    received = Received("r1", (2,))
    assert (received.of(0), received.of(1)) == (2, 0)
    received.check([orphan(), orphan(1)], logprobs=True)


@pytest.mark.parametrize(("has", "again"), [(3, False), (4, True)])
def test_log_probabilities_that_the_client_lacks_must_be_there(has: int, again: bool) -> None:
    """An API that reads the whole output again needs all of them."""
    dropped = orphan(logprobs_dropped=4)
    Received("r1", (4,)).check([dropped], logprobs=True)
    Received("r1", (has,), again=again).check([dropped], logprobs=False)
    with pytest.raises(NotFound, match="kept no longer"):
        Received("r1", (has,), again=again).check([dropped], logprobs=True)


def test_log_probabilities_of_an_earlier_worker_are_gone() -> None:
    with pytest.raises(NotFound, match="0 to 1 are kept no longer"):
        Received("r1", (0,)).check([orphan(earlier=(1, 2))], logprobs=True)


def test_log_probabilities_of_the_prompt_are_those_of_the_first_sequence() -> None:
    scored = orphan(prompt_logprobs_before=2, prompt_logprobs_dropped=1)
    Received("r1", (), prompt_logprobs=3).check([scored, orphan(1, prompt_logprobs_before=9)], logprobs=False)
    with pytest.raises(NotFound, match="the first 3"):
        Received("r1", (), prompt_logprobs=2).check([scored], logprobs=False)
