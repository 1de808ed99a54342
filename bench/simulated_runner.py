"""A step runner without a model: each step takes a fixed time, and holds the GIL for a part of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from common.types import SamplingParams, SequenceId
from gpuworker.core.batch_plan import StepPlan, StepResult


class SimulatedRunner:
    """Implements `StepRunner`. A step holds the GIL for `held` seconds, then sleeps until `step` seconds have passed.

    The token drawn at a position is a fixed function of sequence and position, so runs can be compared.
    """

    def __init__(self, step: float, held: float) -> None:
        self._step, self._held = step, held
        self._lengths: dict[SequenceId, int] = {}
        self._thread = ThreadPoolExecutor(1, "simulated-step")

    def add(self, sequence: SequenceId, tokens: Sequence[int], sampling: SamplingParams, prompt_tokens: int) -> None:
        """See `StepRunner`."""
        self._lengths[sequence] = len(tokens)

    def remove(self, sequence: SequenceId) -> None:
        """See `StepRunner`."""
        del self._lengths[sequence]

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """See `StepRunner`."""
        return self._thread.submit(self._run, plan)

    def close(self) -> None:
        """See `StepRunner`."""
        self._thread.shutdown(wait=True)

    def _run(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        while time.perf_counter() - began < self._held:
            pass  # a loop of bytecode keeps the GIL unless another thread has asked for it for 5 ms
        time.sleep(max(0.0, began + self._step - time.perf_counter()))
        drawn = {
            row.sequence: (7 + (row.sequence * 31 + row.start + row.length) % 1000,) for row in plan.rows if row.samples
        }
        return StepResult(plan.step, drawn, seconds=time.perf_counter() - began)
