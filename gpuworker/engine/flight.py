"""A step between its submission and its result."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from common.contracts.clock import Clock
from common.contracts.types import SequenceId
from gpuworker.engine.ports import StepRecord
from gpuworker.scheduling.batch_plan import StepPlan, StepResult

_NS = 1_000_000_000


@dataclass(slots=True)
class Flight:
    """A submitted step: the plan, its future, the predicted seconds, and when the device began it."""

    plan: StepPlan
    result: Future[StepResult]
    predicted: float
    planned: float
    """When its planning began, on the monotonic clock as all seconds here."""
    planned_ns: int
    """The same on the wall clock, which may be set while the step runs: it is read once for a step."""
    began: float = 0.0
    submitted: float | None = None
    after: float | None = None
    """When the step before it was over, if no other step was in flight then or since."""
    ahead: bool = False
    """Whether it was planned while another step was in flight."""

    def begin(self, clock: Clock) -> None:
        """Note that no other step is before it: at its submission, or when the step before it is over."""
        self.began = clock.monotonic()
        if self.submitted is None:
            self.submitted = self.began

    def wall_ns(self, instant: float) -> int:
        """Return the time of an instant for spans; those of one step have the order of their instants."""
        return self.planned_ns + round(max(0.0, instant - self.planned) * _NS)

    def record(self, result: StepResult, ended: float, traced: tuple[SequenceId, ...]) -> StepRecord:
        """Return what a span of the step says; `traced` are its sequences that have spans of their own."""
        plan = self.plan
        submitted = self.began if self.submitted is None else self.submitted
        decodes = sum(1 for row in plan.rows if row.samples and row.length == 1)
        return StepRecord(
            step=plan.step,
            begin_ns=self.planned_ns,
            end_ns=self.wall_ns(ended),
            decodes=decodes,
            prefill_tokens=plan.scheduled_tokens - plan.drafts - decodes,
            drafts=plan.drafts,
            predicted=self.predicted,
            planning=max(0.0, submitted - self.planned - plan.guessing),
            guessing=plan.guessing,
            waiting=self.began - submitted,
            running=result.seconds,
            finishing=max(0.0, ended - self.began - result.seconds),
            traced=traced,
        )
