"""Scores prompts: the log-probability of each next token, its rank, and the most likely tokens at its place.

The logits are the model's own, without penalties, bias and temperature. The rows of logits that score stand behind
those that sample. A step has a bounded number of them (`AgentConfig.max_scored_tokens`), so memory does not grow with
prompts.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.contracts.types import SamplingParams, SequenceId, TokenLogprobs
from gpuworker.memory.devices import sent
from gpuworker.native.library import best
from gpuworker.sampling.rows import Int32Array, Int64Array, PromptScores
from gpuworker.scheduling.batch_plan import StepPlan


# The largest values of a row, in an order that depends on the row alone.
def best_tokens(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest `count` of float32 values [n, vocab] and their ids, of equal ones the lowest ids first.

    By itself topk orders equal values in a way that depends on `count`, which is that of the batch. Keys of 64 bits are
    all different: above, the value as an integer of the same order; below, the id, counted down.
    """
    bits = values.view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    last = values.shape[1] - 1
    keys = (ordered << 32) + torch.arange(last, -1, -1, device=values.device)
    ids = last - (keys.topk(count, dim=-1)[0] & 0xFFFFFFFF)
    return values.gather(1, ids), ids


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """The part of one sequence: so many rows, each with the `top` most likely tokens."""

    sequence: SequenceId
    count: int
    top: int


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """The K rows of a step that score, one sequence after the other."""

    keep: Int32Array  # [K], index of each token in the step
    targets: Int64Array  # [K], the next token
    sequences: tuple[ScoredSequence, ...]

    @property
    def top_count(self) -> int:
        return max(each.top for each in self.sequences)

    def logprobs(self, scores: PromptScores) -> dict[SequenceId, tuple[TokenLogprobs, ...]]:
        """Return the scores of each sequence, whose tensors are on the host."""
        entries = self._entries(scores)
        return {
            each.sequence: tuple([next(entries).of_best(each.top) for _ in range(each.count)])
            for each in self.sequences
        }

    def _entries(self, scores: PromptScores) -> Iterator[_Entry]:
        columns = (scores.logprobs, scores.ranks, scores.top_ids, scores.top)
        lists = (self.targets.tolist(), *(column.tolist() for column in columns))
        return map(_Entry, *lists)


@dataclass(frozen=True, slots=True)
class _Entry:
    token: int
    logprob: float
    rank: int
    top_ids: list[int]
    top: list[float]

    def of_best(self, count: int) -> TokenLogprobs:
        pairs = zip(self.top_ids[:count], self.top[:count], strict=True)
        return TokenLogprobs(self.token, self.logprob, tuple(each for each in pairs if each[1] > -math.inf), self.rank)


class ScoredPrompts:
    """The prompts of sequences whose log-probabilities are wanted."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._prompts: dict[SequenceId, tuple[Int64Array, int]] = {}

    def add(self, sequence: SequenceId, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Keep a prompt if it may be scored."""
        if sampling.prompt_logprobs is not None:
            top = min(sampling.prompt_logprobs, self._vocab_size)
            self._prompts[sequence] = np.array(prompt, dtype=np.int64), top

    def remove(self, sequence: SequenceId) -> None:
        self._prompts.pop(sequence, None)

    def scored_by(self, plan: StepPlan) -> ScoredTokens | None:
        """Return what a step scores; None where that is nothing, as in nearly all steps."""
        if not plan.scored:
            return None
        begins = np.cumsum([0, *(row.length for row in plan.rows)])
        keep, targets, sequences = [], [], []
        for part in plan.scored:
            row = plan.rows[part.row]
            prompt, top = self._prompts[row.sequence]
            first = int(begins[part.row]) - row.start
            keep.append(np.arange(first + part.start, first + part.end, dtype=np.int32))
            targets.append(prompt[part.start + 1 : part.end + 1])
            sequences.append(ScoredSequence(row.sequence, part.end - part.start, top))
        return ScoredTokens(np.concatenate(keep), np.concatenate(targets), tuple(sequences))


def score(logits: torch.Tensor, scored: ScoredTokens) -> PromptScores:
    """Return the scores of K rows from their logits [K, vocab] float32."""
    library = best() if logits.device.type == "cpu" else None
    if library is None:
        return _score(logits, scored)
    native = NativeScores(scored, logits, library, torch.get_num_threads())
    library.quire_score_tokens(ctypes.byref(native.call))
    return native.scores()


def _score(logits: torch.Tensor, scored: ScoredTokens) -> PromptScores:
    targets = sent(torch.from_numpy(scored.targets), logits.device)[:, None]
    logprobs = logits.log_softmax(dim=-1)
    own = logits.gather(1, targets)
    top, top_ids = best_tokens(logprobs, scored.top_count)
    return PromptScores(logprobs.gather(1, targets)[:, 0], (logits > own).sum(dim=-1) + 1, top_ids, top)


class ScoreCall(ctypes.Structure):
    """quire_score."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "targets", "logprobs", "ranks", "top_ids", "top")),
        ("logits_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("count", "vocab", "top_count", "threads")),
    )


class NativeScores:
    """Inputs and outputs of one native call, whose memory lives as long as this object."""

    def __init__(self, scored: ScoredTokens, logits: torch.Tensor, library: ctypes.CDLL, threads: int) -> None:
        count, top_count = len(scored.targets), scored.top_count
        self._logprobs, self._ranks = torch.empty(count), torch.empty(count, dtype=torch.int32)
        self._top_ids = torch.zeros((count, top_count), dtype=torch.int32)
        self._top = torch.zeros((count, top_count))
        self._kept = (scored.targets, logits)
        self.call = ScoreCall(
            logits=logits.data_ptr(),
            targets=scored.targets.ctypes.data,
            logprobs=self._logprobs.data_ptr(),
            ranks=self._ranks.data_ptr(),
            top_ids=self._top_ids.data_ptr(),
            top=self._top.data_ptr(),
            logits_stride=logits.stride(0),
            count=count,
            vocab=logits.shape[1],
            top_count=top_count,
            threads=threads,
        )

    def scores(self) -> PromptScores:
        return PromptScores(self._logprobs, self._ranks, self._top_ids, self._top)
