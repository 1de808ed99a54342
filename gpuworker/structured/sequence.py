"""One sequence under a constraint: the position of its output in the grammar, and the tokens that may follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from common.types import FinishReason
from gpuworker.core.stopping import FinishCause
from gpuworker.sampling.rows import SampledRow
from gpuworker.structured.grammars import Grammar, complaint

if TYPE_CHECKING:
    from llguidance import LLMatcher

COMPLETE = FinishCause(FinishReason.STOP)
_Bits = npt.NDArray[np.uint32]


class Constrained:
    """Follows one sequence; only the mask thread uses it.

    `position` is that of the next token. `ending` says why no token follows: the output is complete, or the grammar
    cannot follow it any further. The grammar decides on the end. A complete output ends the sequence, ignore_eos or
    not. Before min_tokens, a token that would end the sequence is allowed only where the grammar demands it.
    """

    def __init__(self, grammar: Grammar, row: SampledRow, output: Sequence[int]) -> None:
        self.matcher: LLMatcher = grammar.matcher()
        self.ending: FinishCause | None = None
        self.position = self._begins_at = row.prompt_tokens
        self._grammar, self._ends_from = grammar, row.prompt_tokens + row.params.min_tokens
        self._stops = row.params.stop_token_ids
        for token in output:
            self.consume(token)

    def consume(self, token: int) -> None:
        """Take in the token at `position`."""
        if self.ending is None:
            if not self.matcher.consume_token(token):
                self.ending = self._failed()
            elif self.matcher.is_stopped():
                self.ending = COMPLETE
        self.position += 1

    def settle(self, bits: _Bits) -> None:
        """Turn the tokens that llguidance allows, [words], into those to sample; set `ending` if none remain."""
        if self.matcher.is_error():
            self.ending = self._failed()
            return
        ends = _forbid(bits, self._grammar.eos_ids)
        if not bits.any():
            self.ending = COMPLETE if ends else self._broken("nothing is allowed")
        elif self.position < self._ends_from:
            stops = _forbid(bits, self._stops)
            if not bits.any():
                _allow(bits, stops)
        elif self._grammar.ends_by_token:
            _allow(bits, ends)

    def _failed(self) -> FinishCause:
        why = complaint(self.matcher)
        self._grammar.worn |= why.startswith("lexer error")
        return self._broken(why)

    def _broken(self, why: str) -> FinishCause:
        where = f"after {self.position - self._begins_at} tokens"
        return FinishCause(FinishReason.ERROR, message=f"the constraint cannot be followed {where}: {why}")


def _forbid(bits: _Bits, tokens: Sequence[int]) -> list[int]:
    """Take tokens out; return those that were in."""
    known = 32 * len(bits)
    found = [token for token in tokens if 0 <= token < known and int(bits[token >> 5]) >> (token & 31) & 1]
    for token in found:
        bits[token >> 5] ^= np.uint32(1 << (token & 31))
    return found


def _allow(bits: _Bits, tokens: Sequence[int]) -> None:
    for token in tokens:
        bits[token >> 5] |= np.uint32(1 << (token & 31))
