"""A step between its submission and its result."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from common.clock import Clock
from common.types import SequenceId
from gpuworker.core.batch_plan import StepPlan, StepResult
from gpuworker.engine.ports import StepRecord

_NS = 1_000_000_000


@dataclass(slots=True)
class Flight:
    """A submitted step: the plan, its future, the predicted seconds, and when the device began it."""

    plan: StepPlan
    result: Future[StepResult]
    predicted: float
    planned_ns: int = 0
    """When its planning began."""
    began: float = 0.0
    began_ns: int = 0
    submitted_ns: int = 0
    after: float | None = None
    """When the step before it was over, if no other step was in flight then or since."""
    ahead: bool = False
    """Whether it was planned while another step was in flight."""

    def begin(self, clock: Clock) -> None:
        """Note that no other step is before it: at its submission, or when the step before it is over."""
        self.began, self.began_ns = clock.monotonic(), clock.time_ns()
        self.submitted_ns = self.submitted_ns or self.began_ns

    def record(self, result: StepResult, end_ns: int, traced: tuple[SequenceId, ...]) -> StepRecord:
        """Return what a span of the step says; `traced` are its sequences that have spans of their own."""
        plan = self.plan
        decodes = sum(1 for row in plan.rows if row.samples and row.length == 1)
        return StepRecord(
            step=plan.step,
            begin_ns=self.planned_ns,
            end_ns=end_ns,
            decodes=decodes,
            prefill_tokens=plan.scheduled_tokens - plan.drafts - decodes,
            drafts=plan.drafts,
            predicted=self.predicted,
            planning=max(0.0, (self.submitted_ns - self.planned_ns) / _NS - plan.guessing),
            guessing=plan.guessing,
            waiting=(self.began_ns - self.submitted_ns) / _NS,
            running=result.seconds,
            finishing=max(0.0, (end_ns - self.began_ns) / _NS - result.seconds),
            traced=traced,
        )
