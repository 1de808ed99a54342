"""Pools the hidden states of a prompt to one vector, at the end of the prompt's last chunk.

The hidden state of the last token needs nothing of earlier steps, so a prompt may begin with cached blocks. A mean
needs every token: its sum is carried from chunk to chunk in float32, and the sequence takes no prefix hit. A preempted
sequence is computed again from its first token, with a new sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import normalize

from common.checkpoint.pooling import Pooling, PoolingMode
from common.contracts.types import FinishReason, SequenceId
from gpuworker.attention.interface import Int32Array
from gpuworker.scheduling.batch_plan import ScheduledRow, StepResult
from gpuworker.scheduling.stopping import FinishCause

_NOT_FINITE = FinishCause(
    FinishReason.ERROR, message="the model's hidden states are not finite; try --dtype bfloat16 or float32"
)


@dataclass(slots=True)
class RunningSum:
    """The hidden states of a sequence so far. Steps add to it in order, on the thread that pools."""

    total: torch.Tensor | None = None  # [hidden_size] float32
    count: int = 0

    def add(self, hidden: torch.Tensor) -> None:
        """Add the hidden states [T, hidden_size] of a chunk."""
        more = hidden.sum(dim=0)
        self.total = more if self.total is None else self.total + more
        self.count += len(hidden)

    def mean(self) -> torch.Tensor:
        assert self.total is not None, "a prompt has tokens"
        return self.total / self.count


@dataclass(frozen=True, slots=True)
class StepPooling:
    """What a step pools: each row's length and sum, and the S sequences whose prompt ends in it."""

    pooling: Pooling
    lengths: tuple[int, ...]  # [R]
    sums: tuple[RunningSum, ...]  # [R]; none where the last token alone counts
    ends: tuple[bool, ...]  # [R]
    sequences: tuple[SequenceId, ...]  # [S]

    def pool(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the vectors [S, hidden_size] of the prompts that end; `hidden` [K, ...] are the kept tokens, in order.

        Call once a step, in the order of the steps.
        """
        vectors = hidden if self.pooling.mode is PoolingMode.LAST else self._means(hidden)
        return normalize(vectors, dim=1) if self.pooling.normalised else vectors

    def _means(self, hidden: torch.Tensor) -> torch.Tensor:
        for each, chunk in zip(self.sums, hidden.split(self.lengths), strict=True):
            each.add(chunk)
        means = [each.mean() for each, ends in zip(self.sums, self.ends, strict=True) if ends]
        return torch.stack(means) if means else hidden[:0]

    def result(self, step: int, vectors: torch.Tensor, seconds: float) -> StepResult:
        """Return the result of a step: its sequences end with their vectors [S, hidden_size], on the host."""
        packed = zip(self.sequences, vectors.numpy().astype("<f4"), strict=True)
        ended = {sequence: _end(vector) for sequence, vector in packed}
        return StepResult(step, dict.fromkeys(ended, ()), seconds=seconds, ended=ended)


def _end(vector: npt.NDArray[np.float32]) -> FinishCause:
    if not np.isfinite(vector).all():
        return _NOT_FINITE
    return FinishCause(FinishReason.STOP, embedding=vector.tobytes())


class Pooler:
    """The sums of the sequences that a runner holds. The engine's thread calls it."""

    def __init__(self, pooling: Pooling) -> None:
        self.pooling = pooling
        self._sums: dict[SequenceId, RunningSum] = {}

    @property
    def _means(self) -> bool:
        return self.pooling.mode is PoolingMode.MEAN

    def add(self, sequence: SequenceId) -> None:
        """Take over a sequence from its first token on."""
        self._sums[sequence] = RunningSum()

    def remove(self, sequence: SequenceId) -> None:
        self._sums.pop(sequence, None)

    def tokens(self, query_start: Int32Array, ends: npt.NDArray[np.bool_]) -> Int32Array:
        """Return the index of each token of a step whose hidden state is wanted, rising.

        `query_start` [R + 1] has the first token of each row; `ends` [R] marks those that end their prompt.
        """
        if self._means:
            return np.arange(query_start[-1], dtype=np.int32)
        last: Int32Array = query_start[1:][ends] - np.int32(1)
        return last

    def step(self, rows: Sequence[ScheduledRow]) -> StepPooling:
        return StepPooling(
            self.pooling,
            tuple([row.length for row in rows]),
            tuple([self._sums[row.sequence] for row in rows]) if self._means else (),
            tuple([row.samples for row in rows]),
            tuple([row.sequence for row in rows if row.samples]),
        )
