"""Tries whether outputs of a grammar can be followed: some pass a limit of llguidance, or end nowhere, after a while.

A worker would find that when the request runs. A few random outputs find it before the request is queued. Each takes
what the grammar forces, else a mark such as a quote or a comma, or any allowed token.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Final

from llguidance import LLMatcher, LLTokenizer

from common.contracts.limits import CONSTRAINT_TRIAL_SECONDS

_OUTPUTS: Final = 8
_TOKENS: Final = 48
_MARKS: Final = '"{}[],:0a '


def fault_of(matcher: LLMatcher, tokenizer: LLTokenizer, seconds: float = CONSTRAINT_TRIAL_SECONDS) -> str:
    """Return llguidance's words where an output cannot go on, "" where all could for so many seconds of the CPU."""
    until, marks = time.process_time() + seconds, _marks(tokenizer)
    for number in range(_OUTPUTS):
        fault = _fault_of_one(matcher.deep_copy(), random.Random(number), marks, until)
        if fault:
            return fault
    return ""


def _fault_of_one(matcher: LLMatcher, draw: random.Random, marks: Sequence[int], until: float) -> str:
    for _ in range(_TOKENS):
        if matcher.is_stopped() or time.process_time() > until:
            break
        forced = matcher.compute_ff_tokens()
        token = None if forced or matcher.is_error() else _any_of(matcher.compute_bitmask(), draw, marks)
        if not forced and token is None:
            return matcher.get_error() if matcher.is_error() else "no token is allowed"
        matcher.consume_tokens(forced if token is None else [token])
    return matcher.get_error() if matcher.is_error() else ""


def _any_of(mask: bytes, draw: random.Random, marks: Sequence[int]) -> int | None:
    """Return an allowed token; None when no token is allowed. Bit i of word w of the mask allows token 32 w + i."""
    words = memoryview(mask).cast("I")
    if draw.random() < 0.5:
        for mark in draw.sample(marks, len(marks)):
            if words[mark >> 5] >> (mark & 31) & 1:
                return mark
    begin = draw.randrange(len(words))
    for word in (*range(begin, len(words)), *range(begin)):
        if words[word]:
            found: int = 32 * word + draw.choice([bit for bit in range(32) if words[word] >> bit & 1])
            return found
    return None


def _marks(tokenizer: LLTokenizer) -> list[int]:
    spelt = [tokenizer.tokenize_str(mark) for mark in _MARKS]
    return [tokens[0] for tokens in spelt if len(tokens) == 1]
