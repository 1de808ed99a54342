"""What a model of transformers continues a prompt with, by full forwards without a cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch


@torch.inference_mode()
def greedy_tokens(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Return the `count` tokens that a model appends greedily to a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def random_prompt(length: int, vocab: int = 160) -> list[int]:
    """Return the prompt of a length, without the ids of special tokens."""
    draw = random.Random(length)
    return [draw.randrange(6, vocab) for _ in range(length)]
