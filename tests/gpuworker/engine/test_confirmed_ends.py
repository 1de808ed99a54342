"""The end of a prompt that was computed for another worker is told once the manager knows its blocks."""

from __future__ import annotations

import pytest

from common.contracts.clock import ManualClock
from common.contracts.lease import Admit, Attached, AttachOk, Confirmed, Connected, Detached, GrantBatch, Granted
from common.contracts.types import BlockId, FinishReason, SamplingParams, SequenceId
from gpuworker.engine.ports import EngineOutputs
from gpuworker.scheduling.outcomes import AgentConfig
from tests.support.gpuworker.engine_harness import EngineDriver
from tests.support.gpuworker.fake_engine_ports import ManualRunner, ScriptedChannel

CONFIG = AgentConfig(num_blocks=16, block_size=4, max_num_batched_tokens=16, max_num_seqs=4, runway_slots=32)
PROMPT_ALONE = SamplingParams(temperature=0.0, max_tokens=0)
TOLD = FinishReason.LENGTH


class Worker:
    """An engine whose turns and steps the test makes. One sequence decodes, so that no report is due by itself."""

    def __init__(self) -> None:
        self.channel, self.runner, self.outputs = ScriptedChannel(), ManualRunner(), list[EngineOutputs]()
        self.driver = EngineDriver(
            self.runner, CONFIG, self.channel, sink=self.outputs.append, clock=ManualClock(100.0)
        )
        self.channel.events.extend([Connected(), Attached(1, AttachOk(1, 8))])
        self.decodes, self._free = self.driver.submit([1, 2, 3, 4], 40), 0
        self.grant(self.decodes, 1, lease=tuple(map(BlockId, range(8, 16))))
        self.turn()
        self.step()

    def grant(self, sequence: SequenceId, blocks: int, lease: tuple[BlockId, ...] = ()) -> None:
        table = tuple(BlockId(self._free + each) for each in range(blocks))
        self._free += blocks
        self.channel.events.append(Granted(1, GrantBatch(8, admit=(Admit(sequence, table, 0),), lease=lease)))

    def turn(self) -> None:
        self.driver.engine.turn()

    def step(self) -> None:
        self.runner.step()
        self.turn()

    def compute(self, sampling: SamplingParams = PROMPT_ALONE) -> SequenceId:
        """Compute a prompt of two blocks in one step."""
        sequence = self.driver.submit(list(range(5, 13)), sampling.max_tokens or 0, sampling)
        self.grant(sequence, 2)
        self.turn()
        self.channel.reports.clear()
        while not any(block == BlockId(self._free - 1) for _, each in self.channel.reports for block, _ in each.seal):
            self.step()
        return sequence

    def ended(self) -> list[tuple[SequenceId, FinishReason]]:
        return [(end.sequence, end.reason) for each in self.outputs for end in each.finished]


def test_the_end_waits_until_the_report_of_its_blocks_was_applied() -> None:
    worker = Worker()
    sequence = worker.compute()
    report = worker.channel.reports[-1][1]
    assert [block for block, _ in report.seal] == [1, 2]
    assert report.finished == ((sequence, TOLD),)
    assert (worker.channel.confirms, worker.ended()) == ([1], [])
    worker.step()
    assert (worker.channel.confirms, worker.ended()) == ([1], [])
    worker.channel.events.append(Confirmed(1))
    worker.turn()
    assert worker.ended() == [(sequence, TOLD)]


def test_each_prompt_waits_for_its_own_report() -> None:
    worker = Worker()
    first, second = worker.compute(), worker.compute()
    assert worker.channel.confirms == [1, 1]
    worker.channel.events.append(Confirmed(1))
    worker.turn()
    assert worker.ended() == [(first, TOLD)]
    worker.channel.events.append(Confirmed(1))
    worker.turn()
    assert worker.ended() == [(first, TOLD), (second, TOLD)]


@pytest.mark.parametrize("event", [Detached(1), Connected()], ids=["lost", "anew"])
def test_nobody_waits_for_a_manager_that_is_lost(event: Detached | Connected) -> None:
    worker = Worker()
    ends = [(worker.compute(), TOLD), (worker.compute(), TOLD)]
    worker.channel.events.append(event)
    worker.turn()
    assert worker.ended() == ends
    worker.channel.events.append(Confirmed(1))  # of before
    worker.turn()
    assert worker.ended() == ends


def test_without_a_manager_the_end_is_told_at_once() -> None:
    worker = Worker()
    sequence = worker.driver.submit(list(range(5, 13)), 0, PROMPT_ALONE)
    worker.grant(sequence, 2)
    worker.turn()
    worker.channel.events.append(Detached(1))
    worker.turn()
    for _ in range(3):
        worker.step()
    assert (worker.channel.confirms, worker.ended()) == ([], [(sequence, TOLD)])


def test_other_ends_wait_for_nothing() -> None:
    worker = Worker()
    sequence = worker.compute(SamplingParams(temperature=0.0, max_tokens=1))
    assert (worker.channel.confirms, worker.ended()) == ([], [(sequence, TOLD)])


def test_a_cancelled_prompt_waits_for_nothing() -> None:
    worker = Worker()
    sequence = worker.driver.submit(list(range(5, 13)), 0, PROMPT_ALONE)
    worker.driver.engine.cancel_request(sequence, FinishReason.CANCELLED)
    worker.turn()
    assert (worker.channel.confirms, worker.ended()) == ([], [(sequence, FinishReason.CANCELLED)])
