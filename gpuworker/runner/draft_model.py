"""Guesses with a draft model: a smaller model with a runner, a KV cache and a table of tokens of its own.

The engine's thread calls it while no step of the target is in flight, and waits. Guesses are sampled as the target
samples: by the same parameters, seed and position, because equal uniform numbers make equal tokens likelier. So a
wrong guess costs time and changes no token.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Final

from common.contracts.types import SamplingParams, SequenceId
from gpuworker.runner.model_runner import ModelRunner
from gpuworker.scheduling.batch_plan import ScheduledRow, StepPlan, StepResult
from gpuworker.scheduling.draft_store import DraftStore
from gpuworker.scheduling.drafting import Drafter, DraftPrices, Speculation
from gpuworker.scheduling.model_drafter import DraftState, ModelDrafter, Trust

log = logging.getLogger(__name__)

_WEIGHT: Final = 0.1  # of the last measurement
_FORGETTING: Final = 0.998  # of a price, a plan: one that was measured too high would never be measured again
_ENOUGH: Final = 16  # positions of a step beyond one a sequence, from which the price of a position is learnt
_NEVER: Final = 1e9  # seconds of a guess, where the model has failed
_IN_FLIGHT: Final = 2


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What a draft model can take: positions of a sequence and of a step, and ids of tokens.

    It guesses ids below `guessable`, those of the target.
    """

    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int
    guessable: int


@dataclass(slots=True)
class _Turn:
    """One sequence that gets guesses."""

    drafter: ModelDrafter
    state: DraftState
    count: int
    guesses: list[int]


class RunnerDraftModel:
    """Implements `DraftModel` over a runner. The engine's thread calls all methods."""

    def __init__(self, runner: ModelRunner, store: DraftStore, limits: DraftLimits, words: str = "draft model") -> None:
        self._runner, self._store, self._limits, self._words = runner, store, limits, words
        self._trust, self._steps = Trust(), 0
        self._guess_seconds, self._catch_up_seconds = 0.0, 0.0
        self.failure: Exception | None = None
        """Why the model guesses no more."""

    def new_drafter(self, tokens: Sequence[int], speculation: Speculation) -> ModelDrafter:
        """Implement `DraftModel`."""
        return ModelDrafter(tokens, speculation, self._trust)

    def priced(self, prices: DraftPrices) -> DraftPrices:
        """Implement `DraftModel`."""
        if self.failure is not None:
            return replace(prices, guess=_NEVER)
        self._guess_seconds, self._catch_up_seconds = (
            _FORGETTING * each for each in (self._guess_seconds, self._catch_up_seconds)
        )
        return replace(prices, guess=self._guess_seconds, catch_up=self._catch_up_seconds)

    def guess(self, wanted: Sequence[tuple[Drafter, int]]) -> float:
        """Implement `DraftModel`. A failed step of the draft model ends its guesses, and nothing else."""
        began = time.perf_counter()
        try:
            self._guess(self._turns(wanted))
        except Exception as failure:
            # Broad: a guess is never needed, and the engine's thread must not end for one.
            log.exception("the draft model failed, and guesses no more")
            self.failure, self._trust.failed = failure, True
        return time.perf_counter() - began

    def release(self, drafter: Drafter) -> None:
        """Implement `DraftModel`."""
        if isinstance(drafter, ModelDrafter) and (sequence := self._store.release(drafter)) is not None:
            self._runner.remove(sequence)

    def forget_prices(self) -> None:
        """Forget what steps cost, because they are measured anew."""
        self._guess_seconds, self._catch_up_seconds = 0.0, 0.0

    def in_words(self) -> str:
        """Return a line about the model's memory and steps, for the log and the start of a worker."""
        guess, position = 1e3 * self._guess_seconds, 1e3 * self._catch_up_seconds
        return f"{self._words}; a guess takes {guess:.2f} ms, a token of a prompt {position:.3f} ms"

    def close(self) -> None:
        self._runner.close()

    # ------------------------------------------------------------ states of sequences

    def _turns(self, wanted: Sequence[tuple[Drafter, int]]) -> list[_Turn]:
        turns: list[_Turn] = []
        for drafter, count in wanted:
            if not isinstance(drafter, ModelDrafter):
                continue
            drafter.forget_guesses()
            if not self._can_follow(drafter, count):
                self.release(drafter)
                drafter.give_up()
            elif (state := self._state_of(drafter, count, {turn.state.sequence for turn in turns})) is not None:
                turns.append(_Turn(drafter, state, count, []))
            else:
                drafter.wait()
        return turns

    def _can_follow(self, drafter: ModelDrafter, count: int) -> bool:
        """Whether the model knows all tokens and positions of a sequence; a padded vocabulary may have more ids."""
        seen = 0 if drafter.state is None else drafter.state.computed
        known = max(drafter.tokens[seen:], default=0) < self._limits.vocab_size
        return known and len(drafter.tokens) + count <= self._limits.max_model_len

    def _state_of(self, drafter: ModelDrafter, count: int, kept: set[SequenceId]) -> DraftState | None:
        """Return the state of a sequence, with blocks and with the tokens that it has by now."""
        new = drafter.state is None
        lost = self._store.place(drafter, len(drafter.tokens) + count, kept)
        for sequence in lost or ():
            self._runner.remove(sequence)
        if lost is None:
            return None
        state, tokens = drafter.state, drafter.tokens
        assert state is not None
        if new:
            sampling = _plain(drafter.sampling or SamplingParams(temperature=0.0), self._limits.vocab_size)
            self._runner.add_sequence(state.sequence, tokens, sampling, drafter.prompt_tokens)
        elif state.written < len(tokens):
            self._runner.rewrite(state.sequence, state.written, tokens[state.written :])
        state.written = len(tokens)
        state.computed = min(state.computed, len(tokens) - 1)
        return state

    # ------------------------------------------------------------ guessing

    def _guess(self, turns: list[_Turn]) -> None:
        """Compute the text that the model does not have yet, then guess one token of each sequence at a time."""
        ready = self._catch_up(turns)
        began, depth = time.perf_counter(), max((turn.count for turn in ready), default=0)
        flights: deque[Future[StepResult]] = deque()
        for n in range(1, depth):
            if len(flights) == _IN_FLIGHT:
                self._take(flights.popleft(), ready)
            flights.append(self._submit([_next_row(turn, n) for turn in ready if turn.count > n]))
        while flights:
            self._take(flights.popleft(), ready)
        if depth > 1:
            self._learn_guess((time.perf_counter() - began) / (depth - 1))
        for turn in ready:
            turn.drafter.guessed(self._usable(turn.guesses))

    def _catch_up(self, turns: list[_Turn]) -> list[_Turn]:
        """Run the step that ends with the first guesses; return the turns that have one. A long text takes several."""
        rows, ready, left = [], [], self._limits.max_num_batched_tokens
        for turn in sorted(turns, key=lambda turn: len(turn.drafter.tokens) - turn.state.computed):
            state, missing = turn.state, len(turn.drafter.tokens) - turn.state.computed
            length = min(missing, left)
            if length:
                rows.append(ScheduledRow(state.sequence, state.computed, length, state.blocks, length == missing))
                left -= length
            if length == missing:
                ready.append(turn)
            else:
                state.computed += length
        if rows:
            began = time.perf_counter()
            self._take(self._submit(rows), ready)
            self._learn_first(sum(row.length for row in rows), len(rows), time.perf_counter() - began)
        return ready

    def _submit(self, rows: list[ScheduledRow]) -> Future[StepResult]:
        self._steps += 1
        return self._runner.submit_step(StepPlan(self._steps, tuple(rows)))

    def _take(self, flight: Future[StepResult], turns: list[_Turn]) -> None:
        sampled = flight.result().sampled
        for turn in turns:
            turn.guesses += sampled.get(turn.state.sequence, ())

    def _usable(self, guesses: list[int]) -> list[int]:
        """Return the guesses before the first that is not a token of the target: a padded vocabulary may have more."""
        wrong = next((at for at, token in enumerate(guesses) if token >= self._limits.guessable), len(guesses))
        return guesses[:wrong]

    # ------------------------------------------------------------ prices

    def _learn_first(self, positions: int, rows: int, seconds: float) -> None:
        if positions - rows < _ENOUGH:
            self._learn_guess(seconds)
        else:
            each = max(0.0, seconds - self._guess_seconds) / (positions - rows)
            self._catch_up_seconds = _blend(self._catch_up_seconds, each)

    def _learn_guess(self, seconds: float) -> None:
        self._guess_seconds = _blend(self._guess_seconds, seconds)


def _next_row(turn: _Turn, n: int) -> ScheduledRow:
    """Return the row that computes guess n of a sequence, from 1 on, and samples the next one."""
    return ScheduledRow(turn.state.sequence, len(turn.drafter.tokens) + n - 1, 1, turn.state.blocks, True)


def _plain(sampling: SamplingParams, vocab_size: int) -> SamplingParams:
    """Return the parameters by which a draft model samples: no probabilities, no masks, and ids that it has."""
    return replace(
        sampling,
        logprobs=None,
        prompt_logprobs=None,
        logprob_token_ids=(),
        constraint=None,
        thought=None,
        stop_token_ids=tuple([token for token in sampling.stop_token_ids if token < vocab_size]),
        logit_bias=tuple([(token, bias) for token, bias in sampling.logit_bias if token < vocab_size]),
    )


def _blend(average: float, sample: float) -> float:
    return sample if math.isclose(average, 0.0) else average + _WEIGHT * (sample - average)
