"""Runs steps on a Python thread that does all work on the device; the work between two forwards is kept short.

A second thread formats log-probabilities. On CUDA, where the first thread only launches kernels, the second also waits
for the sampled tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.contracts.errors import EngineFailure
from common.contracts.lease import Copy, TierCopy
from common.contracts.types import BlockId
from gpuworker.memory.layout import state_group
from gpuworker.memory.state_store import StateStore
from gpuworker.models.step_model import RecurrentStates
from gpuworker.runner.executor import ExecutorParts, PlacedCheckpoint, RunnerStep
from gpuworker.runner.launcher import EagerLauncher, LauncherFactory, StepLauncher
from gpuworker.sampling.rows import PromptScores, RowLogprobs, SampledTokens
from gpuworker.serial_thread import SerialThread

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose kernels are launched; the sampled tokens are on the host, or will be after `event`.

    `copied` returns the seconds of its copies, which are a part of those since it was `begun`.
    """

    step: RunnerStep
    sampled: SampledTokens
    begun: float
    copied: Callable[[], float]
    event: torch.cuda.Event | None = None

    def report(self) -> None:
        """Report the tokens, which are on the host."""
        passed, copied = time.perf_counter() - self.begun, self.copied()
        self.step.report(self.sampled, max(0.0, passed - copied), copy_seconds=copied)


class _Checkpoints:
    """Moves the states of sequences between their places and pages."""

    def __init__(self, states: RecurrentStates, store: StateStore) -> None:
        self._states, self._store = states, store

    def clear(self, pages: Sequence[BlockId]) -> None:
        self._store.clear(pages)

    def load(self, checkpoints: Sequence[PlacedCheckpoint]) -> None:
        for place, pages in checkpoints:
            self._store.load(pages, self._states.kept[place])

    def save(self, checkpoints: Sequence[PlacedCheckpoint]) -> None:
        for place, pages in checkpoints:
            self._store.save(self._states.kept[place], pages)


class ThreadExecutor:
    """Implements `StepExecutor` over a launcher. A CPU computes with as many threads as the parts say."""

    follows_constraints = False
    repeats = False

    def __init__(self, launcher: StepLauncher, parts: ExecutorParts) -> None:
        self._launcher, self._cache, self._tokens, self._failures = launcher, parts.cache, parts.tokens, parts.failures
        self._states, self._checkpoints = parts.model.states, _checkpoints_of(parts)
        device = parts.tokens.flat.device
        self._on_cuda = device.type == "cuda"
        self._thread = SerialThread("quire-runner", lambda: _computing(parts.threads, device))
        self._collector = SerialThread("quire-collector")

    def write(self, batch_index: int, tokens: npt.NDArray[np.int32], generation: int, first: int = 0) -> None:
        self._thread.put(lambda: self._write(batch_index, tokens, generation, first))

    def submit(self, step: RunnerStep) -> None:
        self._thread.put(lambda: self._run(step))

    def close(self) -> None:
        self._thread.close()
        self._collector.close()

    def _write(self, batch_index: int, tokens: npt.NDArray[np.int32], generation: int, first: int) -> None:
        try:
            self._tokens.write(batch_index, tokens, first)
        except BaseException as error:  # later steps start from tokens that do not exist, whatever the error is
            log.error("the tokens of a sequence could not be written", exc_info=True)
            self._failures.note(generation, error)

    def _run(self, step: RunnerStep) -> None:
        """Run a step; report its tokens now, or have the collector report them."""
        try:
            launched = self._launch(step)
            sampled = launched.sampled
            if launched.event is None and sampled.logprobs is None and sampled.scores is None:
                launched.report()
            else:
                self._collector.put(lambda: self._collect(launched))
        except EngineFailure as failure:
            self._failures.fail(step, failure)
        except BaseException as error:  # the future of the step must end, whatever the error is
            log.error("step %d failed", step.number, exc_info=True)
            self._failures.fail(step, error)

    def _launch(self, step: RunnerStep) -> _Launched:
        """Copy blocks, let states follow the drafts that were right, load some, launch the step and save some.

        Pages are cleared even behind a failed step: later ones rely on it.
        """
        refused, copied = self._failures.failed(step.generation), _nothing_copied
        begun = time.perf_counter()
        if step.copies and not refused:
            copied = self._copy(step.copies)  # of what is cleared then, too
        if self._checkpoints is not None and step.cleared:
            self._checkpoints.clear(step.cleared)
        self._failures.refuse(step.generation)
        if self._states is not None:
            for place, drafts in step.accepted:
                self._states.accept(place, drafts)
        if self._checkpoints is not None:
            self._checkpoints.load(step.loads)
        if not len(step.work.staged.batch_index):
            return _Launched(step, SampledTokens(torch.empty(0, dtype=torch.int64)), begun, copied)
        sampled = self._launcher.launch(step.work)
        if self._checkpoints is not None:
            self._checkpoints.save(step.saves)
        return _to_host(step, sampled, begun, copied)

    def _copy(self, copies: Sequence[Copy | TierCopy]) -> Callable[[], float]:
        """Copy blocks; return what tells the seconds of that once the step is over."""
        if not self._on_cuda:
            begun = time.perf_counter()
            self._cache.copy_blocks(copies)
            took = time.perf_counter() - begun
            return lambda: took
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self._cache.copy_blocks(copies)
        end.record()
        return lambda: _seconds_between(begin, end)

    def _collect(self, launched: _Launched) -> None:
        """Wait for the tokens of a step and report them; on the collector's thread."""
        step = launched.step
        try:
            if launched.event is not None:
                launched.event.synchronize()
            launched.report()
        except BaseException as error:  # as above
            log.error("step %d failed", step.number, exc_info=True)
            self._failures.fail(step, error)


def _nothing_copied() -> float:
    return 0.0


def _seconds_between(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def thread_executor(launcher: LauncherFactory | None = None) -> Callable[[ExecutorParts], ThreadExecutor]:
    """Return the factory of executors over `launcher`; None launches steps kernel by kernel."""

    def make(parts: ExecutorParts) -> ThreadExecutor:
        tokens = parts.tokens
        steps = launcher(tokens) if launcher else EagerLauncher(parts.model, parts.attention, tokens)
        return ThreadExecutor(steps, parts)

    return make


def _checkpoints_of(parts: ExecutorParts) -> _Checkpoints | None:
    states = parts.model.states
    if states is None or state_group(parts.cache.geometry.groups) is None:
        return None
    return _Checkpoints(states, StateStore(parts.cache))


@contextmanager
def _computing(threads: int, device: torch.device) -> Iterator[None]:
    """Prepare a thread that computes: the number of threads of matrix products is a setting of the calling thread."""
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with torch.inference_mode():
        yield


def _to_host(step: RunnerStep, sampled: SampledTokens, begun: float, copied: Callable[[], float]) -> _Launched:
    """Start moving the sampled tokens to the host, after the kernels that sample them."""
    if sampled.tokens.device.type == "cpu":
        return _Launched(step, sampled, begun, copied)
    found, scores = sampled.logprobs, sampled.scores
    moved = SampledTokens(
        _pinned(sampled.tokens),
        found and RowLogprobs(found.rows, _pinned(found.sampled), _pinned(found.top_ids), _pinned(found.top)),
        scores and PromptScores(*map(_pinned, (scores.logprobs, scores.ranks, scores.top_ids, scores.top))),
        None if sampled.pooled is None else _pinned(sampled.pooled),
    )
    event = torch.cuda.Event()
    event.record()
    return _Launched(step, moved, begun, copied, event)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
