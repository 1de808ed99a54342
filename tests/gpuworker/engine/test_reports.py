"""When the engine reports: at once where others wait for it, else now and then, with all that came since."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.contracts.clock import ManualClock
from common.contracts.lease import Admit, Attached, AttachOk, Connected, Detached, GrantBatch, Granted, Report
from common.contracts.types import BlockId, FinishReason, SequenceId
from gpuworker.engine.engine import GATHER_SECONDS, ReportPace
from gpuworker.scheduling.batch_plan import ScheduledRow, StepPlan
from gpuworker.scheduling.outcomes import AgentConfig
from tests.support.gpuworker.engine_harness import EngineDriver
from tests.support.gpuworker.fake_engine_ports import ManualRunner, ScriptedChannel

CONFIG = AgentConfig(num_blocks=16, block_size=4, max_num_batched_tokens=16, max_num_seqs=4, runway_slots=32)
SHORT = GATHER_SECONDS / 100  # seconds of a step


class Worker:
    """An engine whose turns, steps and time the test makes; one sequence of 4 tokens runs."""

    def __init__(self, leased: int, target: int | None = None) -> None:
        self.clock, self.channel, self.runner = ManualClock(100.0), ScriptedChannel(), ManualRunner()
        self.driver = EngineDriver(self.runner, CONFIG, self.channel, clock=self.clock)
        self.sequence = self.driver.submit([1, 2, 3, 4], 40)
        lease = tuple(BlockId(block) for block in range(1, 1 + leased))
        grants = GrantBatch(target or leased, admit=(Admit(self.sequence, (BlockId(0),), 0),), lease=lease)
        self.channel.events.extend([Connected(), Attached(1, AttachOk(1, leased)), Granted(1, grants)])
        self.driver.engine.turn()

    def reports(self) -> list[Report]:
        """Return the reports since the last call."""
        found = [report for _, report in self.channel.reports]
        self.channel.reports.clear()
        return found

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.clock.advance(SHORT)
            self.runner.step()
            self.driver.engine.turn()


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(leased=10)
    made.reports()
    yield made
    made.driver.engine.cancel_request(made.sequence, FinishReason.CANCELLED)
    while made.runner.num_tokens:
        made.driver.engine.turn()
        if made.runner.submitted:
            made.runner.step()


def test_short_steps_share_a_report_which_has_all_of_them(worker: Worker) -> None:
    worker.step(6)
    assert not worker.reports()
    worker.step(4)  # a quarter of the runway is used up
    (report,) = worker.reports()
    assert [block for block, _ in report.seal] == [0, 1]
    assert [block for _, block in report.bind] == [2, 3]


def test_what_gathered_for_long_enough_is_reported(worker: Worker) -> None:
    worker.step(3)
    assert not worker.reports()
    worker.clock.advance(GATHER_SECONDS)
    worker.step()
    assert len(worker.reports()) == 1


def test_long_steps_gather_nothing(worker: Worker) -> None:
    for _ in range(12):
        worker.clock.advance(GATHER_SECONDS)
        worker.step()
    sealed = [[block for block, _ in report.seal] for report in worker.reports()]
    assert [each for each in sealed if each] == [[0], [1], [2]]


def test_drafts_use_up_the_runway() -> None:
    pace = ReportPace(runway_slots=32)
    pace.looked(0.0)
    row = ScheduledRow(SequenceId(1), 4, 1, (), True, drafts=(5, 6, 7))
    pace.completed(StepPlan(1, (row,), drafts=3))
    assert not pace.due(0.0)
    pace.completed(StepPlan(2, (row,), drafts=3))
    assert pace.due(0.0)


def test_what_others_wait_for_goes_at_once_with_all_that_waited(worker: Worker) -> None:
    worker.step(3)
    assert not worker.reports()
    other = worker.driver.submit([5, 6], 4)
    worker.driver.engine.turn()
    (report,) = worker.reports()
    assert [each.sequence for each in report.reserve] == [other]
    assert report.seal
    worker.step()
    assert not worker.reports()
    worker.driver.engine.cancel_request(other, FinishReason.CANCELLED)
    worker.driver.engine.turn()
    (report,) = worker.reports()
    assert report.finished == ((SequenceId(other), FinishReason.CANCELLED),)


def test_a_pool_that_runs_short_is_reported_at_once() -> None:
    worker = Worker(leased=5)
    (report,) = worker.reports()[-1:]
    assert report.lease_want in (7, 8)
    worker.step(2)
    assert not worker.reports(), "4 of 5 blocks are left"
    worker.step(4)
    assert worker.reports(), "less than half of what is wanted is left"


def test_a_pool_below_half_of_its_target_gathers_while_it_has_what_is_wanted() -> None:
    worker = Worker(leased=10, target=60)
    worker.reports()
    worker.step(6)
    assert not worker.reports()


@pytest.mark.parametrize(("leased", "reported"), [(4, True), (10, False)])
def test_an_admission_beyond_the_pool_is_reported_at_once(leased: int, reported: bool) -> None:
    worker = Worker(leased)
    other = worker.driver.submit([5, 6], 12)
    worker.driver.engine.turn()
    worker.reports()
    admit = Admit(SequenceId(other), (BlockId(12),), 0)
    worker.channel.events.append(Granted(1, GrantBatch(leased, admit=(admit,))))
    worker.driver.engine.turn()
    wants = [report.lease_want for report in worker.reports()]
    assert [want > leased for want in wants] == [True] * reported


def test_nothing_is_kept_back_once_no_step_runs(worker: Worker) -> None:
    worker.step(2)
    worker.reports()
    worker.driver.engine._stopping = True  # no further step is planned
    worker.step(2)
    assert not worker.runner.submitted
    (report,) = worker.reports()
    assert report.step == 4
    worker.driver.engine._stopping = False


def test_a_drain_is_told_at_once_and_again_in_each_session(worker: Worker) -> None:
    worker.driver.engine.drain()
    worker.driver.engine.turn()
    (report,) = worker.reports()
    assert report.draining
    worker.step(30)
    later = worker.reports()
    assert later
    assert not any(each.draining for each in later), "it was told"
    worker.channel.events.extend([Detached(1), Connected(), Attached(2, AttachOk(1, 10))])
    worker.driver.engine.turn()
    assert [each.draining for each in worker.reports()] == [True]
