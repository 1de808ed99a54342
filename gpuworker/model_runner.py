"""Runs steps on the device: the port of `gpuworker/core/batch_plan.py` over a model, a KV cache and a sampler.

The engine's thread turns a plan into arrays while the step before it still runs; one thread of the runner's own does
all work on the device, in order, and what it does between two forwards is as little as can be. A second thread puts
log-probabilities into words; on CUDA, where the first only launches kernels, it waits for all that they draw.
After a failed step all that were queued behind it fail too, until every sequence has been removed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from common.errors import EngineFailure
from common.lease import Copy
from common.types import SamplingParams, SequenceId, TokenLogprobs
from gpuworker.attention import AttentionBackend
from gpuworker.core.batch_plan import StepPlan, StepResult
from gpuworker.devices import default_threads
from gpuworker.kv_cache import KvCache
from gpuworker.sampler import Drawn, RowLogprobs, SampledRow, SamplingBatch, token_logprobs
from gpuworker.seats import Seats
from gpuworker.serial_thread import SerialThread
from gpuworker.step_inputs import StagedStep, pack_rows
from gpuworker.step_launch import EagerLauncher, LaidOutStep, LauncherFactory
from gpuworker.step_model import StepModel
from gpuworker.token_table import TokenTable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """How much a runner takes on: sequences at once, tokens of one sequence, threads on CPU (0: all cores but one)."""

    max_num_seqs: int
    max_model_len: int
    threads: int = 0


@dataclass(frozen=True, slots=True)
class _Step:
    """A plan as arrays, for the S sequences that sample; `result` is what the engine waits for."""

    number: int
    generation: int
    copies: tuple[Copy, ...]
    work: LaidOutStep
    sequences: tuple[SequenceId, ...]  # [S]
    result: Future[StepResult]


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose kernels are launched; what it drew is, or will be after `event`, on the host."""

    step: _Step
    drawn: Drawn
    begun: float
    event: torch.cuda.Event | None = None


class ModelRunner:
    """Implements `StepRunner`. All methods are called from the engine's thread."""

    def __init__(
        self,
        model: StepModel,
        cache: KvCache,
        attention: AttentionBackend,
        limits: RunnerLimits,
        eos_token_ids: tuple[int, ...] = (),
        launcher: LauncherFactory | None = None,
    ) -> None:
        self._model, self._cache = model, cache
        self._device, self._eos = model.device, eos_token_ids
        self._seats = Seats(limits.max_num_seqs, -(-limits.max_model_len // cache.block_size))
        self._tokens = TokenTable(limits.max_num_seqs, limits.max_model_len + 1, self._device)
        self._launcher = launcher(self._tokens) if launcher else EagerLauncher(model, attention, self._tokens)
        self._sampling: tuple[tuple[SequenceId, ...], SamplingBatch] | None = None
        # Steps of a generation in which one failed are not run: (generation, what failed).
        self._generation = 1
        self._failed: tuple[int, BaseException | None] = (0, None)
        # The number of threads is set in the thread that computes: matrix products obey only what their own thread set.
        threads = limits.threads or default_threads()
        self._thread = SerialThread("quire-runner", lambda: torch.set_num_threads(threads))
        self._collector = SerialThread("quire-collector")

    # ------------------------------------------------------------ the port

    def add(self, sequence: SequenceId, tokens: Sequence[int], sampling: SamplingParams, prompt_tokens: int) -> None:
        """See `StepRunner`. Raises ValueError when no seat is free or the tokens do not fit: the caller's mistake."""
        if len(tokens) >= self._tokens.width:
            raise ValueError(f"sequence {sequence} has {len(tokens)} tokens; {self._tokens.width - 1} fit")
        seat = self._seats.take(sequence, SampledRow(sampling, prompt_tokens, self._eos)).index
        known, generation = np.array(tokens, dtype=np.int32), self._generation
        self._thread.put(lambda: self._write_tokens(seat, known, generation))

    def remove(self, sequence: SequenceId) -> None:
        """See `StepRunner`; an unknown sequence is ignored."""
        self._seats.leave(sequence)
        self._sampling = None
        if not self._seats and self._failed[0] == self._generation:
            self._generation += 1

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """See `StepRunner`."""
        step = self._prepare(plan)
        self._thread.put(lambda: self._run(step))
        return step.result

    def close(self) -> None:
        """See `StepRunner`."""
        self._thread.close()
        self._collector.close()

    # ------------------------------------------------------------ the engine's thread

    def _prepare(self, plan: StepPlan) -> _Step:
        """Lay out the rows of a plan as arrays."""
        rows, on_cpu = plan.rows, self._device.type == "cpu"
        start = np.array([row.start for row in rows], dtype=np.int32)
        length = np.array([row.length for row in rows], dtype=np.int32)
        samples = np.array([row.samples for row in rows], dtype=bool)
        seats = self._seats.of_rows(rows)
        width = -(-int((start + length).max(initial=1)) // self._cache.block_size)
        packed = pack_rows(start, length, self._seats.block_table(seats, width), self._cache.block_size)
        staged = StagedStep(packed, seats, samples, self._tokens.width)
        sequences = tuple([row.sequence for row in rows if row.samples])
        sampling = self._sampling_batch(sequences)
        if on_cpu:
            sampling.prepare()
        return _Step(
            plan.step,
            self._generation,
            plan.copies,
            LaidOutStep(
                staged,
                staged.on(self._device) if on_cpu else None,
                sampling.at(packed.context_len[samples].astype(np.int64), seats[samples]),
                sampling,
            ),
            sequences,
            _begun(),
        )

    def _sampling_batch(self, sequences: tuple[SequenceId, ...]) -> SamplingBatch:
        """Return the batch of the last step where the same sequences sample again."""
        if self._sampling is None or self._sampling[0] != sequences:
            rows = [self._seats[sequence].sampled for sequence in sequences]
            self._sampling = (sequences, SamplingBatch(rows, self._model.vocab_size, self._device))
        return self._sampling[1]

    # ------------------------------------------------------------ the runner's thread

    def _write_tokens(self, seat: int, tokens: np.ndarray[tuple[int], np.dtype[np.int32]], generation: int) -> None:
        try:
            self._tokens.write(seat, tokens)
        except RuntimeError as error:  # of the device: the steps behind it start from tokens that are not there
            self._note_failure(generation, error)

    def _run(self, step: _Step) -> None:
        """Run a step, and say what it drew at once or have the collector say it."""
        try:
            launched = self._launch(step)
            if launched.event is None and launched.drawn.logprobs is None:
                step.result.set_result(_in_words(launched))
            else:
                self._collector.put(lambda: self._collect(launched))
        except EngineFailure as failure:
            self._fail(step, failure)
        except BaseException as error:  # whatever it is, who waits for the step must hear of it
            log.error("step %d failed", step.number, exc_info=True)
            self._fail(step, error)

    @torch.inference_mode()
    def _launch(self, step: _Step) -> _Launched:
        """Copy blocks and have the step computed."""
        if step.generation == self._failed[0]:
            raise EngineFailure("a step before this one failed") from self._failed[1]
        begun = time.perf_counter()
        if step.copies:
            self._cache.copy_blocks(step.copies)
        if not len(step.work.staged.seats):
            return _Launched(step, Drawn(torch.empty(0, dtype=torch.int64)), begun)
        return _to_host(step, self._launcher.launch(step.work), begun)

    def _collect(self, launched: _Launched) -> None:
        """Wait for what a step drew and say it; on the collector's thread."""
        try:
            if launched.event is not None:
                launched.event.synchronize()
            launched.step.result.set_result(_in_words(launched))
        except BaseException as error:  # as above
            log.error("step %d failed", launched.step.number, exc_info=True)
            self._fail(launched.step, error)

    def _fail(self, step: _Step, error: BaseException) -> None:
        """Make a failure of this step the failure of all that is queued behind it."""
        self._note_failure(step.generation, error)
        failure = error if isinstance(error, EngineFailure) else EngineFailure(f"a step failed: {error!r}")
        if failure is not error:
            failure.__cause__ = error
        step.result.set_exception(failure)

    def _note_failure(self, generation: int, error: BaseException) -> None:
        if self._failed[0] < generation:
            self._failed = (generation, error)


def _begun() -> Future[StepResult]:
    """Return a future that nobody can cancel."""
    future: Future[StepResult] = Future()
    future.set_running_or_notify_cancel()
    return future


def _in_words(launched: _Launched) -> StepResult:
    """Return what a step drew, by sequence."""
    step, drawn = launched.step, launched.drawn
    logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = {
        step.sequences[row]: (found,) for row, found in token_logprobs(drawn, step.work.sampling).items()
    }
    # zip makes the tuples of one token each.
    tokens = dict(zip(step.sequences, zip(drawn.tokens.tolist(), strict=True), strict=True))
    return StepResult(step.number, tokens, logprobs, time.perf_counter() - launched.begun)


def _to_host(step: _Step, drawn: Drawn, begun: float) -> _Launched:
    """Start moving what was drawn to the host, behind the kernels that draw it."""
    if drawn.tokens.device.type == "cpu":
        return _Launched(step, drawn, begun)
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
