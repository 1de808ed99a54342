"""Runs steps on the device: implements the port of `gpuworker/core/batch_plan.py` over a model and a KV cache.

The engine's thread turns a plan into arrays while the previous step still runs. An executor then runs the step:
`gpuworker/runner/thread_executor.py`, or `gpuworker/runner/native_executor.py` where a step is one native call.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from common.types import SamplingParams, SequenceId
from gpuworker.attention.interface import AttentionBackend
from gpuworker.attention.step_inputs import StagedStep, pack_rows
from gpuworker.core.batch_plan import StepPlan, StepResult
from gpuworker.engine.ports import MaskLateness
from gpuworker.memory.devices import default_threads
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.token_table import TokenTable
from gpuworker.models.step_model import StepModel
from gpuworker.runner.executor import ExecutorFactory, ExecutorParts, Failures, RunnerStep
from gpuworker.runner.input_batch import InputBatch
from gpuworker.runner.launcher import LaidOutStep
from gpuworker.sampling.rows import SampledRow
from gpuworker.sampling.sampler import SamplingBatch
from gpuworker.structured.grammars import GrammarCompiler
from gpuworker.structured.mask_thread import GrammarMaskThread


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """The capacity of a runner: sequences at once, tokens of one sequence, threads on a CPU (0: all cores but one)."""

    max_num_seqs: int
    max_model_len: int
    threads: int = 0


class ModelRunner:
    """Implements `StepRunner`: lays out each step, and hands it to the executor that `executor` makes.

    The engine's thread calls all methods.
    """

    def __init__(
        self,
        model: StepModel,
        cache: KvCache,
        attention: AttentionBackend,
        limits: RunnerLimits,
        executor: ExecutorFactory,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self._model, self._block_size = model, cache.block_size
        self._device, self._eos = model.device, eos_token_ids
        self._batch = InputBatch(limits.max_num_seqs, -(-limits.max_model_len // cache.block_size))
        self._tokens = TokenTable(limits.max_num_seqs, limits.max_model_len + 1, self._device)
        self._sampling: tuple[tuple[SequenceId, ...], SamplingBatch] | None = None
        self._generation, self._failures = 1, Failures()
        self.grammars: GrammarCompiler | None = None
        """What compiles constraints; None where the runner follows none."""
        self._masks: GrammarMaskThread | None = None
        threads = limits.threads or default_threads()
        self.executor = executor(ExecutorParts(model, cache, attention, self._tokens, self._failures, threads))

    def constrain(self, grammars: GrammarCompiler) -> None:
        """Accept sequences with constraints too, which `grammars` compiles. Call once, before the first sequence."""
        self.grammars, self._masks = grammars, GrammarMaskThread(grammars)

    @property
    def mask_lateness(self) -> MaskLateness:
        """How often and how long sampling has waited for masks; any thread may read it."""
        return MaskLateness() if self._masks is None else self._masks.lateness

    # ------------------------------------------------------------ the port

    def add(self, sequence: SequenceId, tokens: Sequence[int], sampling: SamplingParams, prompt_tokens: int) -> None:
        """Implement `StepRunner`.

        Raises ValueError for three mistakes of the caller: no batch index is free, the tokens do not fit, or the
        sequence has a constraint and the runner has no grammars.
        """
        if len(tokens) >= self._tokens.width:
            raise ValueError(f"sequence {sequence} has {len(tokens)} tokens; {self._tokens.width - 1} fit")
        row = SampledRow(sampling, prompt_tokens, self._eos)
        if sampling.constraint is not None:
            if self._masks is None:
                raise ValueError(
                    f"sequence {sequence} has a constraint, and the runner has no grammars: see `constrain`"
                )
            self._masks.add(sequence, row, tokens[prompt_tokens:])
        self.executor.write(self._batch.add(sequence, row).index, np.array(tokens, dtype=np.int32), self._generation)

    def remove(self, sequence: SequenceId) -> None:
        """Implement `StepRunner`; an unknown sequence is ignored."""
        left = self._batch.remove(sequence)
        if self._masks is not None and left is not None and left.params.constraint is not None:
            self._masks.remove(sequence)
        self._sampling = None
        if not self._batch and self._failures.failed(self._generation):
            self._generation += 1

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        step = self._lay_out(plan)
        self.executor.submit(step)
        return step.result

    def close(self) -> None:
        self.executor.close()
        if self._masks is not None:
            self._masks.close()

    # ------------------------------------------------------------ laying out

    def _lay_out(self, plan: StepPlan) -> RunnerStep:
        """Return a plan as arrays; on a CPU also as tensors, which are the same memory."""
        rows, on_cpu = plan.rows, self._device.type == "cpu"
        start = np.array([row.start for row in rows], dtype=np.int32)
        length = np.array([row.length for row in rows], dtype=np.int32)
        samples = np.array([row.samples for row in rows], dtype=bool)
        batch_index = self._batch.indices_of(rows)
        width = -(-int((start + length).max(initial=1)) // self._block_size)
        packed = pack_rows(start, length, self._batch.block_table(batch_index, width), self._block_size)
        staged = StagedStep(packed, batch_index, samples, self._tokens.width)
        sequences = tuple([row.sequence for row in rows if row.samples])
        sampling = self._sampling_batch(sequences)
        if on_cpu:
            sampling.prepare()
        positions, masks = packed.context_len[samples].astype(np.int64), None
        if len(sampling.constrained):
            assert self._masks is not None, "`add` takes no constraint without it"
            masks = self._masks.masks(sequences, sampling.constrained, positions)
        point = sampling.at(positions, batch_index[samples], masks)
        work = LaidOutStep(staged, staged.on(self._device) if on_cpu else None, point, sampling)
        return RunnerStep(plan.step, self._generation, plan.copies, work, sequences, _begun())

    def _sampling_batch(self, sequences: tuple[SequenceId, ...]) -> SamplingBatch:
        """Return the batch of the last step where the same sequences sample again."""
        if self._sampling is None or self._sampling[0] != sequences:
            rows = [self._batch[sequence].row for sequence in sequences]
            self._sampling = (sequences, SamplingBatch(rows, self._model.vocab_size, self._device))
        return self._sampling[1]


def _begun() -> Future[StepResult]:
    """Return a future that cannot be cancelled."""
    future: Future[StepResult] = Future()
    future.set_running_or_notify_cancel()
    return future
