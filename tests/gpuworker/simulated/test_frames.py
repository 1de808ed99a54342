"""What a simulated worker reads that has host memory: a wrong frame changes each token from there on, and nothing else.

Blocks have 2 slots.
"""

from __future__ import annotations

import time

import pytest

from common.contracts.lease import Copy, TierCopy
from common.contracts.transfers import Medium, Place
from common.contracts.types import BlockId, FrameId, SamplingParams, SequenceId
from gpuworker.scheduling.batch_plan import ScheduledRow, StepPlan
from gpuworker.scheduling.step_costs import StepCosts, parse_costs
from gpuworker.simulated.memory import IMAGE_BYTES, SimulatedMemory
from gpuworker.simulated.runner import SimulatedRunner
from gpuworker.simulated.tokens import SimulatedTokens

PROMPT, OTHER = [7, 8, 9, 7, 8], [7, 8, 9, 9, 8]


def store(block: int, frame: int) -> TierCopy:
    return TierCopy(BlockId(block), BlockId(frame))


def load(frame: int, block: int) -> TierCopy:
    return TierCopy(BlockId(block), BlockId(frame), load=True)


FREE = StepCosts()


class Worker:
    """A runner whose steps are given one by one; the tokens of every sequence follow from the same seed."""

    def __init__(self, costs: StepCosts = FREE) -> None:
        self.tokens = SimulatedTokens(range(100, 200))
        self.memory = SimulatedMemory((), 2)
        self.runner = SimulatedRunner(costs, self.tokens, memory=self.memory)
        for number, tokens in enumerate((PROMPT, OTHER, PROMPT)):
            self.runner.add_sequence(SequenceId(number), tokens, SamplingParams(seed=1), len(tokens))

    def step(self, sequence: int, start: int, table: tuple[int, ...], *copies: Copy | TierCopy) -> int:
        """Run the rest of a prompt behind copies; return by how much its token is not the right one."""
        row = ScheduledRow(SequenceId(sequence), start, 5 - start, tuple(map(BlockId, table)), True, (), ())
        ((token,),) = self.runner.submit_step(StepPlan(1, (row,), copies)).result(60.0).sampled.values()
        return token - self.tokens.expected(1, 5, 1)[0]


@pytest.mark.parametrize(
    ("copies", "table", "off"),
    [
        ((store(0, 5), store(1, 6), load(5, 3), load(6, 4)), (3, 4, 7), 0),
        ((store(0, 5), store(1, 6), load(6, 3), load(5, 4)), (3, 4, 7), 1),
        ((store(0, 5), load(5, 3), load(6, 4)), (3, 4, 7), 1),
        ((load(5, 3), load(6, 4), store(0, 5), store(1, 6)), (3, 4, 7), 1),
    ],
    ids=["stored, then loaded", "each in the place of the other", "one was never stored", "loaded before"],
)
def test_a_prompt_goes_on_behind_what_frames_hold(
    copies: tuple[TierCopy, ...], table: tuple[int, ...], off: int
) -> None:
    worker = Worker()
    assert worker.step(0, 0, (0, 1, 2)) == 0
    assert worker.step(2, 4, table, *copies) == off


def test_a_frame_of_another_prompt_is_seen() -> None:
    worker = Worker()
    assert worker.step(0, 0, (0, 1, 2)) == 0
    assert worker.step(1, 2, (0, 3, 4), store(0, 0), store(1, 1)) == 0, "the first block is the same"
    assert worker.step(2, 4, (5, 6, 7), load(0, 5), load(1, 6)) == 0
    assert worker.step(1, 4, (5, 6, 7)) == 1, "the second one is not"


def test_a_copied_part_of_a_block_is_filled_up_by_its_sequence() -> None:
    worker = Worker()
    assert worker.step(0, 0, (0, 1, 2)) == 0
    assert worker.step(2, 3, (0, 3, 4), Copy(BlockId(1), BlockId(3), 3)) == 0


def test_an_image_of_a_block_goes_to_another_worker_and_a_wrong_one_is_seen() -> None:
    ours, theirs = Worker(), Worker()
    assert ours.step(0, 0, (0, 1, 2), store(1, 4)) == 0
    images = [bytes(ours.memory.take(Place(Medium.BLOCK, FrameId(number)))) for number in (0, 1, 2, 9)]
    assert {len(each) for each in images} == {IMAGE_BYTES}
    assert len(set(images)) == 4, "whole blocks, one that is not full, and nothing"
    assert ours.step(2, 4, (0, 1, 3), store(0, 5), store(1, 6)) == 0
    assert [bytes(ours.memory.take(Place(Medium.HOST, FrameId(number)))) for number in (5, 6)] == images[:2]
    for number, image in enumerate(images):
        theirs.memory.land(FrameId(number), image)
    assert theirs.step(2, 4, (7, 8, 9), load(0, 7), load(1, 8)) == 0
    assert theirs.step(0, 4, (7, 8, 9), load(1, 7), load(0, 8)) == 1, "each in the place of the other"
    assert theirs.step(2, 4, (7, 8, 9), load(0, 7), load(3, 8)) == 1, "nothing"


def test_copies_of_frames_take_their_time() -> None:
    costs = parse_costs("base=1ms,frame=2ms")
    assert (costs.of(3, 4), costs.frame) == (0.001, 0.002)
    result = Worker(costs)
    row = ScheduledRow(SequenceId(0), 0, 5, (BlockId(0), BlockId(1), BlockId(2)), True, (), ())
    plan = StepPlan(1, (row,), (store(3, 0), Copy(BlockId(3), BlockId(4), 2), store(4, 1)))
    began = time.perf_counter()
    done = result.runner.submit_step(plan).result(60.0)
    assert (done.seconds, done.copy_seconds) == (0.001, 0.004), "a copy between blocks costs nothing here"
    assert time.perf_counter() - began >= 0.005
