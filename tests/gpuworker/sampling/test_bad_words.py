"""Bad words: the last token of a word is forbidden after output that ends with its other tokens, and only then."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from common.contracts.types import SamplingParams
from gpuworker.sampling.rows import SampledRow
from gpuworker.sampling.sampler import SamplingBatch, token_logprobs

VOCAB = 20
Words = tuple[tuple[int, ...], ...]


def allowed(cases: Sequence[tuple[list[int], list[int], Words]]) -> list[list[int]]:
    """Return the tokens that may follow each (prompt, output) under its words."""
    rows = [
        SampledRow(SamplingParams(temperature=0.0, logprobs=VOCAB, bad_words=words), len(prompt))
        for prompt, _, words in cases
    ]
    texts = [prompt + output for prompt, output, _ in cases]
    width = max(map(len, texts)) + 2
    table = torch.tensor([text + [19] * (width - len(text)) for text in texts], dtype=torch.int32)
    batch = SamplingBatch(rows, VOCAB, torch.device("cpu"))
    at = batch.at(np.array(list(map(len, texts)), dtype=np.int64), np.arange(len(cases), dtype=np.int32))
    found = token_logprobs(batch.sample(torch.zeros(len(cases), VOCAB), at, table), batch)
    return [sorted(token for token, _ in found[row].top) for row in range(len(cases))]


def without(*tokens: int) -> list[int]:
    return [token for token in range(VOCAB) if token not in tokens]


@pytest.mark.parametrize(
    ("prompt", "output", "words", "forbidden"),
    [
        ([1, 2], [], ((5,),), (5,)),
        ([1, 2], [3, 4], ((3, 4, 7),), (7,)),
        ([1, 2], [3, 4], ((4, 3, 7),), ()),
        ([1, 2], [4, 3, 4], ((3, 4, 7), (4, 8), (9,), (3, 9)), (7, 8, 9)),
        ([3, 4], [], ((3, 4, 7),), ()),  # what the prompt ends with does not count
        ([1, 3], [4], ((3, 4, 7),), ()),
        ([1, 3], [3, 4], ((3, 4, 7),), (7,)),
        ([1], [6, 6], ((6, 6, 6), (6, 6, 6, 6)), (6,)),
        ([1], [6], ((6, 0), (6, 0), (0,)), (0,)),
        ([1], [6], ((25,), (6, -3), ()), ()),  # no such tokens
    ],
)
def test_exact_values(prompt: list[int], output: list[int], words: Words, forbidden: tuple[int, ...]) -> None:
    assert allowed([(prompt, output, words)]) == [without(*forbidden)]


def test_rows_have_words_of_their_own_and_of_many_lengths() -> None:
    cases: list[tuple[list[int], list[int], Words]] = [
        ([1], [2, 3, 4, 5], ((2, 3, 4, 5, 6), (5, 7))),
        ([1, 2, 3], [], ()),
        ([1], [5], ((5, 7), (8,))),
    ]
    assert allowed(cases) == [without(6, 7), without(), without(7, 8)]


def test_what_is_forbidden_is_what_a_search_of_the_text_says() -> None:
    draw = random.Random(3)

    def tokens(most: int) -> list[int]:
        return [draw.randrange(3) for _ in range(draw.randrange(most))]

    cases = [(tokens(4), tokens(6), tuple((*tokens(4), draw.randrange(3)) for _ in range(3))) for _ in range(40)]
    cases = [([0, *prompt], output, words) for prompt, output, words in cases]
    wanted = [
        [t for t in range(VOCAB) if not any((*output, t)[-len(word) :] == word for word in words)]
        for _, output, words in cases
    ]
    assert allowed(cases) == wanted


def test_the_most_likely_token_is_passed_over() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 9] = 5.0, 3.0
    batch = SamplingBatch(
        [SampledRow(SamplingParams(temperature=0.0, bad_words=((4,),)), 1)], VOCAB, torch.device("cpu")
    )
    at = batch.at(np.array([1], dtype=np.int64), np.array([0], dtype=np.int32))
    assert batch.sample(logits, at, torch.zeros((1, 4), dtype=torch.int32)).tokens.tolist() == [9]
    assert not batch.plain
    assert batch.temperatures is None
