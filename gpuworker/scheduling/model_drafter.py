"""Follows one sequence for a draft model: what the model guessed, how often that was right, and what it has computed.

Where n-grams are right more often, or the client's prediction is, they guess in place of the model: they cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from common.contracts.types import BlockId, SequenceId
from gpuworker.scheduling.drafting import MAX_DRAFTS, NgramDrafter, Speculation

HOPE: Final = 0.6
"""The share of right guesses of a draft model, before anything is known."""

_WEIGHT: Final = 0.15  # of the last guess, in the share of right ones of a sequence
_WEIGHT_OF_ALL: Final = 0.05  # the same, in that of all sequences
_RECOVERY: Final = (
    0.01  # of what is missing to HOPE, for a token that was not guessed: what is never tried is not learnt
)


class Trust:
    """The share of a draft model's guesses that were right, of all sequences: what a new one begins with."""

    def __init__(self) -> None:
        self.share = HOPE
        # Whether the model guesses no more.
        self.failed = False

    def judge(self, right: bool) -> None:
        self.share += _WEIGHT_OF_ALL * (right - self.share)

    def of_new(self) -> float:
        """Return the share for a new sequence; a low one rises a little with each."""
        self.share += _WEIGHT_OF_ALL * max(0.0, HOPE - self.share)
        return self.share


@dataclass(slots=True)
class DraftState:
    """What a draft model has of a sequence, under the number `sequence`.

    The K and V of positions before `computed` are in `blocks`. The model's table of tokens is that of the sequence up
    to `written`; refused guesses may stand behind.
    """

    sequence: SequenceId
    blocks: tuple[BlockId, ...] = ()
    computed: int = 0
    written: int = 0


class ModelDrafter:
    """Implements `Drafter` with a draft model's guesses. `state` is None while the model knows nothing of it."""

    def __init__(self, tokens: Sequence[int], speculation: Speculation, trust: Trust) -> None:
        self.tokens = list(tokens)
        self.prompt_tokens = len(tokens) - speculation.output_before
        self.sampling = speculation.sampling
        self.state: DraftState | None = None
        self._ngrams = NgramDrafter(tokens, speculation)
        self._guesses: tuple[int, ...] = ()
        self._trust, self._share, self._able = trust, trust.of_new(), True

    @property
    def _guesses_well(self) -> bool:
        """Whether the model's guesses are to be preferred to those of n-grams."""
        return self._able and not self._trust.failed and self._share > self._ngrams.chance

    @property
    def behind(self) -> int | None:
        if not self._guesses_well:
            return None
        return len(self.tokens) - (0 if self.state is None else self.state.computed)

    @property
    def chance(self) -> float:
        return self._share if self._guesses_well else self._ngrams.chance

    def take(self, tokens: Sequence[int]) -> None:
        self._ngrams.take(tokens)
        for token in tokens:
            self._judge(token)
            self.tokens.append(token)

    def propose(self, most: int) -> tuple[int, ...]:
        return self._ngrams.propose(most) if self.behind is None else self._guesses[:most]

    def guessed(self, guesses: Sequence[int]) -> None:
        """Note what the model guesses to follow: each guess but the last is computed already."""
        assert self.state is not None
        self._guesses = tuple(guesses)
        self.state.computed = len(self.tokens) + max(0, len(guesses) - 1)
        self.state.written = len(self.tokens) + len(guesses)

    def forget_guesses(self) -> None:
        self._guesses = ()

    def give_up(self) -> None:
        """Guess with n-grams alone from now on."""
        self._able, self._guesses = False, ()

    def wait(self) -> None:
        """Note that the model has no room for the sequence now: as after a wrong guess, it is tried less often."""
        self._share -= _WEIGHT * self._share
        self._guesses = ()

    def _judge(self, token: int) -> None:
        """Compare a token with the guess for it, if there is one."""
        if not self._guesses:
            if self._share < HOPE and (self.state is None or self._caught_up):
                self._share += _RECOVERY * (HOPE - self._share)
            return
        right = self._guesses[0] == token
        self._share += _WEIGHT * (right - self._share)
        self._trust.judge(right)
        if right:
            self._guesses = self._guesses[1:]
            return
        self._guesses = ()
        if self.state is not None:
            self.state.computed = min(self.state.computed, len(self.tokens))
            self.state.written = min(self.state.written, len(self.tokens))

    @property
    def _caught_up(self) -> bool:
        """Whether a guess costs little: not where the model must compute a long text before it."""
        return self.state is not None and len(self.tokens) - self.state.computed <= MAX_DRAFTS + 1
