"""Runs steps on the device: the port of `gpuworker/core/batch_plan.py` over a model, a KV cache and a sampler.

The engine's thread turns a plan into arrays while the step before it still runs; one thread of the runner's own does
all work on the device, in order. On CUDA that thread only launches kernels, and a second one waits for what they drew.
After a failed step all that were queued behind it fail too, until every sequence has been removed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from common.errors import EngineFailure
from common.lease import Copy
from common.types import SamplingParams, SequenceId, TokenLogprobs
from gpuworker.attention import AttentionBackend, Int32Array
from gpuworker.core.batch_plan import StepPlan, StepResult
from gpuworker.devices import default_threads
from gpuworker.kv_cache import KvCache
from gpuworker.models.hosted import HostedModel
from gpuworker.sampler import Drawn, RowLogprobs, SampledRow, SamplingBatch, token_logprobs
from gpuworker.seats import Seats
from gpuworker.step_inputs import PackedRows, attention_arrays, attention_metadata, pack_rows, to_device

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """How much a runner takes on: sequences at once, tokens of one sequence, threads on CPU (0: all cores but one)."""

    max_num_seqs: int
    max_model_len: int
    threads: int = 0


@dataclass(frozen=True, slots=True)
class _Step:
    """A plan as arrays: R rows, of which S sample."""

    number: int
    generation: int
    copies: tuple[Copy, ...]
    rows: PackedRows
    seats: Int32Array  # [R]
    keep: Int32Array  # [S], index of the last token of each row that samples
    sampled_seats: Int32Array  # [S]
    draw_at: npt.NDArray[np.int64]  # [S], positions of the tokens to draw
    sequences: tuple[SequenceId, ...]  # [S]
    sampling: SamplingBatch


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose kernels are launched; what it drew is, or will be after `event`, on the host."""

    step: _Step
    drawn: Drawn
    begun: float
    event: torch.cuda.Event | None


class ModelRunner:
    """Implements `StepRunner`. All methods are called from the engine's thread."""

    def __init__(
        self,
        model: HostedModel,
        cache: KvCache,
        attention: AttentionBackend,
        limits: RunnerLimits,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self._model, self._cache, self._attention = model, cache, attention
        self._device, self._eos = model.device, eos_token_ids
        self._seats = Seats(limits.max_num_seqs, -(-limits.max_model_len // cache.block_size))
        shape = (limits.max_num_seqs, limits.max_model_len + 1)
        self._tokens = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self._sampling: tuple[tuple[SequenceId, ...], SamplingBatch] | None = None
        # Steps of a generation in which one failed are not run: (generation, what failed).
        self._generation = 1
        self._failed: tuple[int, BaseException | None] = (0, None)
        # The number of threads is set in the thread that computes: matrix products obey only what their own thread set.
        threads = limits.threads or default_threads()
        self._thread = ThreadPoolExecutor(1, "quire-runner", torch.set_num_threads, (threads,))
        self._collector = ThreadPoolExecutor(1, "quire-collector") if self._device.type == "cuda" else None

    # ------------------------------------------------------------ the port

    def add(self, sequence: SequenceId, tokens: Sequence[int], sampling: SamplingParams, prompt_tokens: int) -> None:
        """See `StepRunner`. Raises ValueError when no seat is free or the tokens do not fit: the caller's mistake."""
        if len(tokens) >= self._tokens.shape[1]:
            raise ValueError(f"sequence {sequence} has {len(tokens)} tokens; {self._tokens.shape[1] - 1} fit")
        seat = self._seats.take(sequence, SampledRow(sampling, prompt_tokens, self._eos))
        known = np.array(tokens, dtype=np.int32)
        self._watch(self._thread.submit(self._write_tokens, seat.index, known))

    def remove(self, sequence: SequenceId) -> None:
        """See `StepRunner`; an unknown sequence is ignored."""
        self._seats.leave(sequence)
        self._sampling = None
        if not self._seats and self._failed[0] == self._generation:
            self._generation += 1

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """See `StepRunner`."""
        step = self._prepare(plan)
        if self._collector is None:
            done = self._thread.submit(lambda: self._collect(self._launch(step)))
        else:
            launched = self._watch(self._thread.submit(self._launch, step))
            done = self._collector.submit(lambda: self._collect(launched.result()))
        result: Future[StepResult] = Future()
        result.set_running_or_notify_cancel()
        self._watch(done).add_done_callback(lambda finished: _resolve(finished, result))
        return result

    def close(self) -> None:
        """See `StepRunner`."""
        self._thread.shutdown(wait=True)
        if self._collector is not None:
            self._collector.shutdown(wait=True)

    # ------------------------------------------------------------ the engine's thread

    def _prepare(self, plan: StepPlan) -> _Step:
        """Lay out the rows of a plan as arrays."""
        start = np.array([row.start for row in plan.rows], dtype=np.int32)
        length = np.array([row.length for row in plan.rows], dtype=np.int32)
        samples = np.array([row.samples for row in plan.rows], dtype=bool)
        seats = np.array([self._seats[row.sequence].index for row in plan.rows], dtype=np.int32)
        width = -(-int((start + length).max(initial=1)) // self._cache.block_size)
        rows = pack_rows(start, length, self._seats.block_table(plan.rows, width), self._cache.block_size)
        sequences = tuple(row.sequence for row in plan.rows if row.samples)
        return _Step(
            number=plan.step,
            generation=self._generation,
            copies=plan.copies,
            rows=rows,
            seats=seats,
            keep=rows.query_start[1:][samples] - 1,
            sampled_seats=seats[samples],
            draw_at=rows.context_len[samples].astype(np.int64),
            sequences=sequences,
            sampling=self._sampling_batch(sequences),
        )

    def _sampling_batch(self, sequences: tuple[SequenceId, ...]) -> SamplingBatch:
        """Return the batch of the last step where the same sequences sample again."""
        if self._sampling is None or self._sampling[0] != sequences:
            rows = [self._seats[sequence].sampled for sequence in sequences]
            self._sampling = (sequences, SamplingBatch(rows, self._model.vocab_size, self._device))
        return self._sampling[1]

    # ------------------------------------------------------------ the runner's thread

    @torch.inference_mode()
    def _write_tokens(self, seat: int, tokens: Int32Array) -> None:
        self._tokens[seat, : len(tokens)] = torch.from_numpy(tokens).to(self._device)

    @torch.inference_mode()
    def _launch(self, step: _Step) -> _Launched:
        """Copy blocks, run the model, draw, and write what was drawn into the token table."""
        if step.generation == self._failed[0]:
            raise EngineFailure("a step before this one failed") from self._failed[1]
        begun = time.perf_counter()
        self._cache.copy_blocks(step.copies)
        rows = step.rows
        if not len(rows.context_len):
            return _Launched(step, Drawn(torch.empty(0, dtype=torch.int64)), begun, None)
        arrays = [rows.row_of_token, rows.positions, step.seats, step.keep, step.sampled_seats]
        *tables, row, positions, seats, keep, sampled = to_device([*attention_arrays(rows), *arrays], self._device)
        self._attention.begin(attention_metadata(rows, tables))
        positions = positions.long()
        token_ids = self._tokens[seats[row].long(), positions].long()
        logits = self._model.forward(token_ids, positions, keep.long(), self._attention)
        drawn = step.sampling.sample(logits, step.draw_at, self._tokens, sampled)
        at = torch.from_numpy(step.draw_at).to(self._device)
        self._tokens[sampled.long(), at] = drawn.tokens.int()
        return _to_host(step, drawn, begun)

    def _collect(self, launched: _Launched) -> StepResult:
        """Wait for what a step drew and put it into words."""
        if launched.event is not None:
            launched.event.synchronize()
        step, drawn = launched.step, launched.drawn
        tokens: dict[SequenceId, tuple[int, ...]] = {
            sequence: (token,) for sequence, token in zip(step.sequences, drawn.tokens.tolist(), strict=True)
        }
        logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = {
            step.sequences[row]: (found,) for row, found in token_logprobs(drawn, step.sampling).items()
        }
        return StepResult(step.number, tokens, logprobs, time.perf_counter() - launched.begun)

    def _watch(self, work: Future[T]) -> Future[T]:
        """Make a failure of this work the failure of all that is queued behind it."""
        generation = self._generation

        def note(done: Future[T]) -> None:
            error = done.exception()
            if error is not None and self._failed[0] < generation:
                self._failed = (generation, error)

        work.add_done_callback(note)
        return work


def _resolve(done: Future[StepResult], result: Future[StepResult]) -> None:
    """Hand on the outcome of a step; whatever it raised becomes an EngineFailure."""
    error = done.exception()
    if error is None:
        result.set_result(done.result())
        return
    failure = error if isinstance(error, EngineFailure) else EngineFailure(f"a step failed: {error!r}")
    if failure is not error:
        failure.__cause__ = error
    result.set_exception(failure)


def _to_host(step: _Step, drawn: Drawn, begun: float) -> _Launched:
    """Start moving what was drawn to the host, behind the kernels that draw it."""
    if drawn.tokens.device.type == "cpu":
        return _Launched(step, drawn, begun, None)
    found = drawn.logprobs
    moved = Drawn(
        _pinned(drawn.tokens),
        found and RowLogprobs(found.rows, _pinned(found.drawn), _pinned(found.top_ids), _pinned(found.top)),
    )
    event = torch.cuda.Event()
    event.record()
    return _Launched(step, moved, begun, event)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
