"""The port between the runner and what runs its steps, and how a failed step takes others with it.

After a failed step, all steps queued behind it fail too: the tokens and the K/V that they start from do not exist. Each
step belongs to a generation. A new generation begins when every sequence of the failed one has been removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from common.contracts.errors import EngineFailure
from common.contracts.lease import Copy, TierCopy
from common.contracts.types import BlockId, SequenceId, TokenLogprobs
from gpuworker.attention.interface import AttentionBackend
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.token_table import TokenTable
from gpuworker.models.step_model import StepModel
from gpuworker.runner.decode_frames import DecodeFrame
from gpuworker.runner.launcher import LaidOutStep
from gpuworker.sampling.rows import SampledTokens
from gpuworker.sampling.sampler import token_logprobs
from gpuworker.scheduling.batch_plan import StepResult
from gpuworker.scheduling.drafting import verified
from gpuworker.scheduling.stopping import FinishCause

_Tokens = dict[SequenceId, tuple[int, ...]]


class PlacedCheckpoint(NamedTuple):
    """The pages of a checkpoint, and the batch index of the sequence whose states it holds."""

    batch_index: int
    pages: tuple[BlockId, ...]


class AcceptedDrafts(NamedTuple):
    """How many drafts of a sequence were right in the step before, one at least; its layers keep states."""

    batch_index: int
    drafts: int


@dataclass(frozen=True, slots=True)
class RunnerStep:
    """A plan as arrays, for the S sequences that sample; the engine waits for `result`."""

    number: int
    generation: int
    copies: tuple[Copy | TierCopy, ...]
    work: LaidOutStep
    sequences: tuple[SequenceId, ...]  # [S]
    result: Future[StepResult]
    drafts: Mapping[SequenceId, tuple[int, ...]] = field(default_factory=dict)
    """Of the sequences that draft: they stand in `sequences` once more for each draft."""
    frame: DecodeFrame | None = None
    """Of a step whose arrays are written over once it is over."""
    accepted: tuple[AcceptedDrafts, ...] = ()
    """Of the step before, whether the sequences have rows in this one or not."""
    loads: tuple[PlacedCheckpoint, ...] = ()
    saves: tuple[PlacedCheckpoint, ...] = ()
    cleared: tuple[BlockId, ...] = ()
    """Pages of checkpoints that now are of K and V."""

    def report(self, sampled: SampledTokens, seconds: float, at_once: bool = False, copy_seconds: float = 0.0) -> None:
        """Set the result: the sampled tokens, or the vectors, by sequence; the tensors are on the host.

        Its copies took `copy_seconds`, if they were timed apart from the step.
        With `at_once` the calling thread fills the masks of the next step, if they wait for these tokens.
        """
        if self.work.pooling is not None and sampled.pooled is not None:
            self.result.set_result(self.work.pooling.result(self.number, sampled.pooled, seconds))
            return
        found, masks = sampled.tokens.tolist(), self.work.point.masks
        counted = self._verified(found, sampled.ended) if self.drafts else {}
        if masks is None:
            self._set_result(sampled, found, counted, self._forced(sampled), (seconds, copy_seconds))
            return
        # First: the masks of the next step, which runs already, wait for the tokens.
        forced, rest = masks.sampled(found, counted, at_once)
        try:
            self._set_result(sampled, found, counted, forced | self._forced(sampled), (seconds, copy_seconds))
        finally:
            rest()

    def _set_result(
        self, sampled: SampledTokens, found: list[int], counted: _Tokens, forced: _Tokens, times: tuple[float, float]
    ) -> None:
        """`times` are the seconds of the step, and of its copies."""
        work, masks = self.work, self.work.point.masks
        logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = {}
        for row, entry in token_logprobs(sampled, work.sampling).items():
            logprobs[self.sequences[row]] = (*logprobs.get(self.sequences[row], ()), entry)
        scored, ended = work.scored, {} if masks is None else masks.ended
        if sampled.ended:
            ended = ended | {self.sequences[row]: cause for row, cause in sampled.ended.items() if self._is_first(row)}
        of_prompts = {} if scored is None or sampled.scores is None else scored.logprobs(sampled.scores)
        # zip makes the tuples of one token each.
        tokens: _Tokens = dict(zip(self.sequences, zip(found, strict=True), strict=True))
        if self.drafts:
            tokens |= counted
            logprobs = {sequence: entries[: len(tokens[sequence])] for sequence, entries in logprobs.items()}
        seconds, copying = times
        self.result.set_result(StepResult(self.number, tokens, logprobs, seconds, ended, of_prompts, forced, copying))

    def _is_first(self, row: int) -> bool:
        """Whether a row is its sequence's own, and not that of a draft."""
        return row == 0 or self.sequences[row - 1] != self.sequences[row]

    def _forced(self, sampled: SampledTokens) -> _Tokens:
        return {self.sequences[row]: tokens for row, tokens in sampled.forced.items()}

    def _verified(self, found: Sequence[int], ended: Mapping[int, FinishCause]) -> _Tokens:
        """Return the samples that count, of each sequence that drafts: those with a mask, where it has masks.

        Behind a draft that completes its output, the follower of a sequence has ended.
        """
        usable = {} if self.work.point.masks is None else self.work.point.masks.usable
        verified_tokens = {}
        for sequence, drafts in self.drafts.items():
            first, rows = self.sequences.index(sequence), usable.get(sequence, len(drafts) + 1)
            rows = next((row for row in range(1, rows) if first + row in ended), rows)
            samples = tuple(found[first : first + rows])
            verified_tokens[sequence] = samples[: verified(drafts[: rows - 1], samples)]
        return verified_tokens


class Failures:
    """The last failure, and the generation that fails with it. The executor writes, the engine's thread reads."""

    def __init__(self) -> None:
        self._last: tuple[int, BaseException | None] = (0, None)

    def failed(self, generation: int) -> bool:
        """Whether a step of this generation has failed."""
        return self._last[0] == generation

    def note(self, generation: int, error: BaseException) -> None:
        """Make the later steps of this generation fail too."""
        if self._last[0] < generation:
            self._last = (generation, error)

    def refuse(self, generation: int) -> None:
        """Raise EngineFailure when a step before this one failed."""
        if self.failed(generation):
            raise EngineFailure("a step before this one failed") from self._last[1]

    def fail(self, step: RunnerStep, error: BaseException) -> None:
        """Report a failed step to the engine; any error becomes an EngineFailure."""
        self.note(step.generation, error)
        if (masks := step.work.point.masks) is not None:
            masks.failed()
        failure = error if isinstance(error, EngineFailure) else EngineFailure(f"a step failed: {error!r}")
        if failure is not error:
            failure.__cause__ = error
        step.result.set_exception(failure)


class StepExecutor(Protocol):
    """Runs steps in order. The engine's thread calls it and never waits for a step."""

    follows_constraints: bool
    """Whether its steps fill masks themselves, without Python."""
    repeats: bool
    """Whether a step may run on the arrays of an earlier one."""

    def write(self, batch_index: int, tokens: npt.NDArray[np.int32], generation: int, first: int = 0) -> None:
        """Write the tokens of a batch index from position `first` on; no unfinished step contains it."""
        ...

    def submit(self, step: RunnerStep) -> None:
        """Run a step behind those before it."""
        ...

    def close(self) -> None:
        """Finish the submitted steps."""
        ...


@dataclass(frozen=True, slots=True)
class ExecutorParts:
    """The parts that an executor runs steps with. `threads` compute on a CPU; the runner reads `failures`."""

    model: StepModel
    cache: KvCache
    attention: AttentionBackend
    tokens: TokenTable
    failures: Failures
    threads: int


ExecutorFactory = Callable[[ExecutorParts], StepExecutor]
