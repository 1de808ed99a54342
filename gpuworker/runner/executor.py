"""The port between the runner and what runs its steps, and how a failed step takes others with it.

After a failed step, all steps queued behind it fail too: the tokens and the K/V that they start from do not exist. Each
step belongs to a generation. A new generation begins when every sequence of the failed one has been removed.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from common.errors import EngineFailure
from common.lease import Copy
from common.types import SequenceId, TokenLogprobs
from gpuworker.attention.interface import AttentionBackend
from gpuworker.core.batch_plan import StepResult
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.token_table import TokenTable
from gpuworker.models.step_model import StepModel
from gpuworker.runner.launcher import LaidOutStep
from gpuworker.sampling.rows import SampledTokens
from gpuworker.sampling.sampler import token_logprobs


@dataclass(frozen=True, slots=True)
class RunnerStep:
    """A plan as arrays, for the S sequences that sample; the engine waits for `result`."""

    number: int
    generation: int
    copies: tuple[Copy, ...]
    work: LaidOutStep
    sequences: tuple[SequenceId, ...]  # [S]
    result: Future[StepResult]

    def report(self, sampled: SampledTokens, seconds: float) -> None:
        """Set the result: the sampled tokens by sequence; the tensors are on the host."""
        logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = {
            self.sequences[row]: (found,) for row, found in token_logprobs(sampled, self.work.sampling).items()
        }
        # zip makes the tuples of one token each.
        found, masks = sampled.tokens.tolist(), self.work.point.masks
        tokens = dict(zip(self.sequences, zip(found, strict=True), strict=True))
        if masks is None:
            self.result.set_result(StepResult(self.number, tokens, logprobs, seconds))
            return
        masks.sampled(found)
        self.result.set_result(StepResult(self.number, tokens, logprobs, seconds, masks.ended))


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

    def write(self, batch_index: int, tokens: npt.NDArray[np.int32], generation: int) -> None:
        """Write the first tokens at a batch index; no unfinished step contains it."""
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
