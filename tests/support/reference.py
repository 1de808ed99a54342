"""The outputs of transformers for a prompt on the demo model, each alone in float32: the oracle of end-to-end tests."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli.demo_model import CHECKPOINT


@functools.cache
def _model() -> Any:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


@functools.cache
def tokenizer() -> Any:
    """Return the demo model's tokenizer as transformers loads it."""
    return AutoTokenizer.from_pretrained(CHECKPOINT)


def assert_greedy(asked: Sequence[Sequence[int]], found: Sequence[list[int]], count: int) -> None:
    """Fail unless each output is the `count` tokens that greedy generation returns, end-of-sequence ignored.

    One forward pass over prompt and output shows whether each token is the most likely one after all before it. That is
    what greedy generation returns, at a hundredth of its cost. Only an output that fails this is generated anew.
    """
    wanted = [
        tokens if len(tokens) == count and _is_greedy(tuple(prompt), tuple(tokens)) else greedy_tokens(prompt, count)
        for prompt, tokens in zip(asked, found, strict=True)
    ]
    assert found == wanted


def greedy_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """Return exactly `count` greedy tokens, end-of-sequence ignored."""
    return list(_generate(tuple(prompt), count))


def next_logprobs(tokens: Sequence[int]) -> torch.Tensor:
    """Return the log-probabilities [tokens - 1, vocab] of the token after each but the last."""
    with torch.inference_mode():
        logits: torch.Tensor = _model()(torch.tensor([list(tokens)])).logits[0, :-1]
    return logits.float().log_softmax(dim=-1)


def _is_greedy(prompt: tuple[int, ...], found: tuple[int, ...]) -> bool:
    with torch.inference_mode():
        logits = _model()(torch.tensor([[*prompt, *found[:-1]]])).logits  # [1, num_tokens, vocab_size]
    return tuple(logits[0, len(prompt) - 1 :].argmax(-1).tolist()) == found


@functools.cache
def _generate(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = _model().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return tuple(int(token) for token in out[0, len(prompt) :])


def chat_tokens(question: str, system: str = "") -> list[int]:
    """Return the token ids of a chat by the checkpoint's own template."""
    messages = [{"role": "user", "content": question}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    rendered = tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return [int(token) for token in rendered["input_ids"]]
