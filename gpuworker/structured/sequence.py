"""One sequence under a constraint: the position of its output in the grammar, and the tokens that may follow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from common.contracts.errors import QuireError
from common.contracts.types import FinishReason
from gpuworker.sampling.rows import SampledRow
from gpuworker.scheduling.stopping import FinishCause
from gpuworker.structured.digits import DigitRun
from gpuworker.structured.grammars import DEAD_END, Grammar, GrammarCompiler, complaint

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger(__name__)
COMPLETE = FinishCause(FinishReason.STOP)
_WORN = "lexer error"
_WORD = 0xFFFFFFFF
_MAX_RUN = 256  # tokens of a forced run that are kept: a run is shortened token by token
_Bits = npt.NDArray[np.uint32]


class Constrained:
    """Follows one sequence; only the mask thread uses it.

    `position` is that of the next token. `ending` says why no token follows: the output is complete, or the grammar
    cannot follow it any further. The grammar decides on the end. A complete output ends the sequence, ignore_eos or
    not. Before min_tokens, a token that would end the sequence is allowed only where the grammar demands it.

    All sequences of a grammar share one lexer, which may be worn by others. So a sequence that meets its limit begins
    again on the grammar that `anew` returns, once, with the tokens that it has. If that fails too, its own constraint
    is to blame.
    """

    def __init__(
        self, grammar: Grammar, row: SampledRow, output: Sequence[int], anew: Callable[[], Grammar] | None = None
    ) -> None:
        self.matcher: LLMatcher = grammar.matcher()
        self.ending: FinishCause | None = None
        self.position = self._begins_at = row.prompt_tokens
        self._grammar, self._anew, self._ends_from = grammar, anew, row.prompt_tokens + row.params.min_tokens
        self._stops = row.params.stop_token_ids
        self._field = row.params.constraint.kind.value if row.params.constraint is not None else ""
        self._output: list[int] = []
        self._digits = None if grammar.digits is None else DigitRun(grammar.digits)
        self._run: tuple[int, ...] = ()
        for token in output:
            self.consume(token)

    @classmethod
    def by(cls, grammars: GrammarCompiler, row: SampledRow, output: Sequence[int]) -> Constrained:
        """Return what follows a sequence by the constraint of its parameters."""
        constraint = row.params.constraint
        assert constraint is not None
        return cls(grammars.compile(constraint), row, output, lambda: grammars.compile(constraint))

    def consume(self, token: int) -> None:
        """Take in the token at `position`."""
        if self.ending is None:
            self._output.append(token)
            if self._run:
                self._run = self._run[1:] if self._run[0] == token else ()
            if self._digits is not None:
                self._digits.take(token)
            if not self.matcher.consume_token(token) and not self._begun_again():
                self.ending = self._failed()
            elif self.matcher.is_stopped():
                self.ending = COMPLETE
        self.position += 1

    @property
    def plain(self) -> bool:
        """Whether `settle` changes nothing of a mask that allows any token besides the ends of a text."""
        ends_count = self._grammar.ends_by_token and self.position >= self._ends_from
        return ends_count and (self._digits is None or self._digits.short) and not self.matcher.is_error()

    def settle(self, bits: _Bits) -> None:
        """Turn the tokens that llguidance allows, [words], into those to sample; set `ending` if none remain."""
        if self.matcher.is_error() and self._begun_again():
            self.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self.matcher.is_error():
            self.ending = self._failed()
        else:
            self.ending = self._limit(bits, self.position, self._digits)

    def settle_drafts(self, bits: _Bits, drafts: Sequence[int]) -> int:
        """Settle the masks behind drafts, [drafts, words], of which llguidance left those at 0 that it could not fill.

        Return how many masks may be used: those before the first draft that the grammar does not allow, or that makes
        the output complete. The output itself stays as it is.
        """
        digits = None if self._digits is None else self._digits.copy()
        usable = 0
        for position, (mask, draft) in enumerate(zip(bits, drafts, strict=True), start=self.position + 1):
            if digits is not None:
                digits.take(draft)
            if not mask.any() or self._limit(mask, position, digits) is not None:
                break
            usable += 1
        return usable

    def forced_run(self) -> tuple[int, ...]:
        """Return the tokens that the grammar forces from `position` on, _MAX_RUN at most, unless it did before."""
        if self._run:
            return ()
        self._run = tuple(self.matcher.compute_ff_tokens()[:_MAX_RUN])
        return self._run

    def _limit(self, bits: _Bits, position: int, digits: DigitRun | None) -> FinishCause | None:
        """Turn the tokens that llguidance allows at a position into those to sample; return why none remain."""
        ends = forbid(bits, self._grammar.eos_ids)
        if digits is not None:
            digits.limit(bits, bool(ends))
        if not bits.any():
            return COMPLETE if ends else self._broken(DEAD_END, self._field)
        if position < self._ends_from:
            stops = forbid(bits, self._stops)
            if not bits.any():
                allow(bits, stops)
        elif self._grammar.ends_by_token:
            allow(bits, ends)
        return None

    def _begun_again(self) -> bool:
        """Begin again on a lexer of its own, if a worn one was the fault; return whether all tokens pass there."""
        if not complaint(self.matcher).startswith(_WORN):
            return False
        self._grammar.worn = True
        anew, self._anew = self._anew, None
        if anew is None:
            return False
        try:
            self._grammar = anew()
        except QuireError:
            return False
        self.matcher = self._grammar.matcher()
        return all(self.matcher.consume_token(token) for token in self._output)

    def _failed(self) -> FinishCause:
        from common.constraint_grammar import passes_a_limit

        why = complaint(self.matcher)
        to_blame = why == DEAD_END or why.startswith(_WORN) or passes_a_limit(why)
        return self._broken(why, self._field if to_blame else "")

    def _broken(self, why: str, wrong_field: str) -> FinishCause:
        what = f"the constraint cannot be followed after {self.position - self._begins_at} tokens: {why}"
        return FinishCause(FinishReason.ERROR, message=what, wrong_field=wrong_field)


def unfollowable(error: BaseException) -> FinishCause:
    """Return how a sequence ends that an error of any kind keeps from being followed; a panic is not an Exception."""
    if isinstance(error, QuireError):  # the constraint was not checked before
        return FinishCause(FinishReason.ERROR, message=str(error))
    log.error("a constraint could not be followed", exc_info=error)
    return FinishCause(FinishReason.ERROR, message=f"the constraint could not be followed: {error!r}")


def allow_others(bits: _Bits, ends: Sequence[int]) -> list[bool]:
    """Return which of the masks [C, words] allow any token besides the ends of a text.

    llguidance fills no mask with nothing: what allows no end allows another token.
    """
    known = [token for token in ends if 0 <= token < 32 * bits.shape[1]]
    found = np.zeros(len(bits), dtype=np.uint32)
    for token in known:
        found |= bits[:, token >> 5] & np.uint32(1 << (token & 31))
    others = found == 0
    for row in np.flatnonzero(found).tolist():
        rest = bits[row].copy()
        forbid(rest, known)
        others[row] = rest.any()
    flags: list[bool] = others.tolist()
    return flags


def forbid(bits: _Bits, tokens: Sequence[int]) -> list[int]:
    """Take tokens out; return those that were in."""
    known = 32 * len(bits)
    found = [token for token in tokens if 0 <= token < known and int(bits[token >> 5]) >> (token & 31) & 1]
    for token in found:
        bits[token >> 5] ^= np.uint32(1 << (token & 31))
    return found


def allow(bits: _Bits, tokens: Sequence[int]) -> None:
    for token in tokens:
        bits[token >> 5] |= np.uint32(1 << (token & 31))
