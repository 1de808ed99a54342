"""Doubles of the engine's ports: runners whose steps end on command or at once, and a manager that the test plays."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from common.contracts.errors import EngineFailure
from common.contracts.lease import Attach, Inventory, LeaseEvent, Report
from common.contracts.types import SamplingParams, SequenceId
from gpuworker.scheduling.batch_plan import StepPlan, StepResult
from tests.support.gpuworker.engine_harness import PATIENCE


class ManualRunner:
    """Runs a step on command. Every row of a step samples the token that `draws` returns for its plan, 7 by default."""

    def __init__(self, draws: Callable[[StepPlan], int] = lambda plan: 7) -> None:
        self._draws = draws
        self._changed = threading.Condition()
        self.submitted: deque[tuple[StepPlan, Future[StepResult]]] = deque()
        self.num_tokens: dict[SequenceId, list[int]] = {}
        self.submissions = 0
        self._released = False

    def add_sequence(
        self,
        sequence: SequenceId,
        tokens: Sequence[int],
        sampling: SamplingParams,
        prompt_tokens: int,
        adapter: object | None = None,
    ) -> None:
        assert sequence not in self.num_tokens
        self.num_tokens[sequence] = list(tokens)

    def remove(self, sequence: SequenceId) -> None:
        del self.num_tokens[sequence]

    def submit_step(self, plan: StepPlan) -> Future[StepResult]:
        assert {row.sequence for row in plan.rows} <= self.num_tokens.keys()
        future: Future[StepResult] = Future()
        with self._changed:
            released = self._released
            if not released:
                self.submitted.append((plan, future))
            self.submissions += 1
            self._changed.notify_all()
        if released:
            future.set_result(self._result(plan))
        return future

    def close(self) -> None:
        assert not self.num_tokens, "sequences that were never removed"

    def await_submissions(self, count: int) -> None:
        """Wait until so many steps were submitted in all."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.submissions >= count, PATIENCE)

    def step(self) -> StepPlan:
        """Complete the oldest step; wait for one if there is none."""
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.submitted), PATIENCE)
            plan, future = self.submitted.popleft()
        future.set_result(self._result(plan))
        return plan

    def _result(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, {r.sequence: (self._draws(plan),) for r in plan.rows if r.samples})

    def release(self) -> None:
        """Complete the running steps, and from now on each step as it is submitted."""
        with self._changed:
            self._released = True
            running, self.submitted = self.submitted, deque()
        for plan, future in running:
            future.set_result(self._result(plan))

    def fail(self) -> None:
        """Fail every step that runs or waits."""
        with self._changed:
            failed, self.submitted = self.submitted, deque()
        for _, future in failed:
            future.set_exception(EngineFailure("the device is gone"))


class InstantRunner(ManualRunner):
    """Runs each step at once when it is submitted."""

    def __init__(self, draws: Callable[[StepPlan], int] = lambda plan: 7) -> None:
        super().__init__(draws)
        self.release()


class ScriptedChannel:
    """A manager that the test plays."""

    def __init__(self) -> None:
        self.events: deque[LeaseEvent] = deque()
        self.attached: list[tuple[Attach, Inventory]] = []
        self.reports: list[tuple[int, Report]] = []
        self.confirms: list[int] = []
        self.reconnects = 0
        self.away: list[tuple[float, float]] = []

    def poll(self) -> list[LeaseEvent]:
        events = list(self.events)
        for _ in events:
            self.events.popleft()
        return events

    def attach(self, attach: Attach, inventory: Inventory) -> None:
        self.attached.append((attach, inventory))

    def send_report(self, session: int, report: Report) -> None:
        self.reports.append((session, report))

    def confirm(self, session: int) -> None:
        self.confirms.append(session)

    def reconnect(self) -> None:
        self.reconnects += 1

    def away_seconds(self, begin: float, end: float) -> float:
        """Return the part of a time in which the test played no manager."""
        return sum(max(0.0, min(end, last) - max(begin, first)) for first, last in self.away)
