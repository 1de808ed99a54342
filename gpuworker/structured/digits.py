"""Ends numbers that run away: a model that is weak or hot writes digits until `max_tokens` cuts the document.

JSON bounds neither the digits of a number nor those of a second's fraction. So after `MOST_DIGITS` digits in a row no
digit follows, unless nothing else may. Integers of 128 bits fit. Where a quote may follow, the digits belong to a text,
which may have as many as its author likes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

MOST_DIGITS: Final = 40
_DIGITS: Final = b"0123456789"
_Bits = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False, slots=True)
class DigitTokens:
    """The tokens of a vocabulary that begin with a digit, and those that begin with a quote, as masks [words].

    `tails` [vocab] has how many digits each token ends with, `whole` [vocab] whether these are all of the token.
    """

    digits: _Bits
    quotes: _Bits
    tails: tuple[int, ...]
    whole: tuple[bool, ...]

    @classmethod
    def of(cls, spell: Callable[[int], bytes], vocab_size: int) -> DigitTokens:
        texts = [spell(token) for token in range(vocab_size)]
        tails = tuple([len(text) - len(text.rstrip(_DIGITS)) for text in texts])
        whole = tuple([tail == len(text) for tail, text in zip(tails, texts, strict=True)])
        digits, quotes = (text[:1].isdigit() for text in texts), (text[:1] == b'"' for text in texts)
        return cls(_mask(digits), _mask(quotes), tails, whole)


class DigitRun:
    """Counts the digits at the end of one output."""

    def __init__(self, tokens: DigitTokens) -> None:
        self._tokens, self._length = tokens, 0

    def take(self, token: int) -> None:
        """Take in the next token."""
        tail = self._tokens.tails[token]
        self._length = tail + self._length if self._tokens.whole[token] else tail

    def copy(self) -> DigitRun:
        """Return a run of as many digits, which goes on apart from this one."""
        copied = DigitRun(self._tokens)
        copied._length = self._length
        return copied

    @property
    def short(self) -> bool:
        """Whether `limit` changes nothing."""
        return self._length < MOST_DIGITS

    def limit(self, bits: _Bits, may_end: bool) -> None:
        """Take the digits out of a mask where there are too many already."""
        if self.short or (bits & self._tokens.quotes).any():
            return
        others = bits & ~self._tokens.digits
        if may_end or others.any():
            bits[:] = others


def _mask(flags: Iterable[bool]) -> _Bits:
    packed = np.packbits(np.fromiter(flags, dtype=bool), bitorder="little")
    return np.pad(packed, (0, -len(packed) % 4)).view(np.uint32)
