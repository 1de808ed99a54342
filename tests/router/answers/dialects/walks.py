"""Random walks through the masks of a grammar, over the demo's tokenizer with the marks of dialects added or not."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

import cli
from common.constraint_grammar import grammar_of, parser_limits
from common.contracts.types import Constraint, ConstraintKind
from router.answers.dialects.lark import whole_tokens

_TOKENIZER = Path(cli.__file__).parent / "demo_model" / "checkpoint" / "tokenizer.json"
_MOST_TOKENS = 600
_CLOSERS = ('"', "}", "]", ")", '"}', '"}}')


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as llguidance knows it, and those of its tokens that llguidance compares as a whole."""

    tokens: LLTokenizer
    special: Mapping[str, int]
    eos: int

    def encode(self, text: str) -> list[int]:
        return self.tokens.tokenize_str(text, parse_special=True)

    def spell(self, text: str) -> list[int]:
        return self.tokens.tokenize_str(text)


def vocabulary(marks: Sequence[str], is_special: bool) -> Vocabulary:
    """Return the demo's vocabulary with these marks as tokens, marked special or not."""
    tokenizer = Tokenizer.from_file(str(_TOKENIZER))
    tokenizer.add_tokens([AddedToken(mark, special=is_special, normalized=False) for mark in marks])
    added = [(token.content, number, token.special) for number, token in tokenizer.get_added_tokens_decoder().items()]
    eos = 0
    return Vocabulary(LLTokenizer(tokenizer.to_str(), eos_token=[eos]), whole_tokens(added), eos)


def matcher(words: Vocabulary, lark: str) -> LLMatcher:
    """Return the matcher of a grammar; fails where the grammar is wrong."""
    made = LLMatcher(
        words.tokens, grammar_of(Constraint(ConstraintKind.GRAMMAR, lark)), log_level=0, limits=parser_limits()
    )
    assert not made.is_error(), (made.get_error(), lark)
    return made


def walk(words: Vocabulary, grammar: LLMatcher, marks: Sequence[str], rng: random.Random) -> str | None:
    """Return an output that the masks allowed and that ended; None for one that did not end in time.

    Marks and closing characters are tried more often than chance would: free text ends at last, and calls come.
    """
    at, output = grammar.deep_copy(), list[int]()
    while len(output) < _MOST_TOKENS:
        steps = next(_steps(words, at, marks, rng))
        if steps == [words.eos]:
            return words.tokens.decode_bytes(output).decode()
        assert at.consume_tokens(steps), at.get_error()
        output += steps
        if at.is_stopped():
            return words.tokens.decode_bytes([token for token in output if token != words.eos]).decode()
    return None


def _steps(words: Vocabulary, at: LLMatcher, marks: Sequence[str], rng: random.Random) -> Iterator[list[int]]:
    """Yield what may come next: a mark, a closer or the end where chance favours them; then any token of the mask."""
    mask = np.unpackbits(np.frombuffer(at.compute_bitmask(), np.uint8), bitorder="little")
    assert not at.is_error(), at.get_error()
    favoured = [words.encode(mark) for mark in rng.sample(marks, len(marks))] if rng.random() < 0.2 else []
    if rng.random() < 0.3:
        favoured += [words.spell(closer) for closer in rng.sample(_CLOSERS, len(_CLOSERS))]
    if mask[words.eos] and rng.random() < 0.15:
        yield [words.eos]
    yield from (tokens for tokens in favoured if at.validate_tokens(tokens) == len(tokens))
    yield [int(rng.choice(np.flatnonzero(mask)))]
