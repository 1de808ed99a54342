"""What a model of transformers continues a prompt with, by full forwards without a cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch


@torch.inference_mode()
def greedy_tokens(model: Any, prompt: Sequence[int], count: int, guess: Sequence[int] = ()) -> list[int]:
    """Return the `count` tokens that a model appends greedily to a prompt.

    One forward finds all tokens of a guess that are right, and the first one that is not. Each other takes a forward.
    """
    tokens, end = list(prompt), len(prompt) + count
    while len(tokens) < end:
        guessed = list(guess[len(tokens) - len(prompt) : count - 1])
        logits = model(input_ids=torch.tensor([[*tokens, *guessed]]), use_cache=False).logits[0]
        drawn = logits[len(tokens) - 1 :].argmax(-1).tolist()
        right = next((n for n, token in enumerate(guessed) if token != drawn[n]), len(guessed))
        tokens += drawn[: right + 1]
        guess = guess if right == len(guessed) else ()
    return tokens[len(prompt) :]


def random_prompt(length: int, vocab: int = 160) -> list[int]:
    """Return the prompt of a length, without the ids of special tokens."""
    draw = random.Random(length)
    return [draw.randrange(6, vocab) for _ in range(length)]
