"""Every layer has a window, so leading blocks leave the row. They stay cached."""

from __future__ import annotations

from typing import Any

import pytest

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import CachedBlock
from common.contracts.types import TRIMMED, BlockId, SequenceId
from tests.support.gpuworker.agent_harness import Driver, blocks, keys, report_of


def windowed() -> Driver:
    worker = Driver(num_blocks=8, block_size=4, window=6)
    worker.submit(0, range(10), max_tokens=12)
    worker.admit(0, [0, 1, 2])
    worker.lease([3, 4])
    return worker


def test_behaviour_12_blocks_out_of_every_window_are_trimmed() -> None:
    worker = windowed()
    report_of(worker)
    worker.step()
    # Position 10 reads 5..10: block 0 is out.
    assert report_of(worker).trim == ((0, 1),)
    assert worker.rows() == [(0, 10, 1, (TRIMMED, 1, 2), True)]


def test_behaviour_12_a_step_in_flight_still_reads_what_it_needs() -> None:
    worker = windowed()
    worker.step()
    for _ in range(3):
        first = worker.plan()
        second = worker.plan()
        worker.complete(first)
        oldest = second.rows[0].start
        trimmed = [n for n, block in enumerate(worker.agent.inventory().sequences[0].block_table) if block == TRIMMED]
        assert all(4 * n + 3 < oldest - 6 + 1 for n in trimmed)
        worker.complete(second)


def test_a_trimmed_block_keeps_its_content_and_says_where_it_stands() -> None:
    worker = windowed()
    first, second = keys(range(8), 4)
    assert report_of(worker).reserve[0].block_hashes == (first, second)
    worker.step()
    assert report_of(worker).seal == ((0, first), (1, second))
    assert worker.agent.inventory().cached_blocks == (
        CachedBlock(BlockId(0), first, -1, 1, first, 0),
        CachedBlock(BlockId(1), second, -1, 1, first, 1),
    )
    worker.agent.attached(0)
    worker.lease([0])
    assert worker.agent.inventory().cached_blocks == (CachedBlock(BlockId(1), second, -1, 1, first, 1),)


def again(window: int, table: list[int], n_shared: int, **more: Any) -> Driver:
    """Return a worker that has sealed blocks 0 and 1 of ten tokens, and is granted this table for the same."""
    worker = Driver(num_blocks=8, block_size=4, window=window)
    worker.submit(0, range(10))
    worker.admit(0, [0, 1, 2])
    worker.step()
    worker.agent.cancel_sequence(SequenceId(0))
    worker.submit(1, range(10), **more)
    worker.admit(1, table, n_shared)
    worker.agent.check_invariants()
    return worker


def test_a_sequence_begins_behind_hits_that_left_its_window() -> None:
    """With a window of 5, position 8 reads 4 to 8."""
    worker = again(5, [TRIMMED, 1, 5], 2)
    assert worker.rows() == [(1, 8, 2, (TRIMMED, 1, 5), True)]
    assert worker.agent.usage(SequenceId(1)).cached_tokens == 8
    assert worker.agent.inventory().sequences[1 - 1].block_table == blocks([TRIMMED, 1, 5])


@pytest.mark.parametrize(
    ("window", "table", "n_shared"),
    [
        (6, [TRIMMED, 1, 5], 2),
        (0, [TRIMMED, 1, 5], 2),
        (5, [TRIMMED, TRIMMED, 5], 2),
        (5, [TRIMMED, 5], 1),
        (5, [TRIMMED, 1, 5], 0),
        (5, [0, TRIMMED, 5], 2),
        (5, [TRIMMED, 2, 5], 2),
        (5, [TRIMMED, 0, 5], 2),
        (5, [-2, 1, 5], 2),
        (5, [TRIMMED] * 3, 3),
    ],
    ids=[
        "a block that is read", "no window", "nothing before", "not shared", "none shared", "a gap",
        "a block that is not full", "the block of another place", "no such block", "no block",
    ],
)  # fmt: skip
def test_a_table_that_lacks_what_the_sequence_reads_is_refused(window: int, table: list[int], n_shared: int) -> None:
    with pytest.raises(ProtocolViolation):
        again(window, table, n_shared)


def test_one_that_is_not_cached_takes_no_hit_behind_empty_places() -> None:
    with pytest.raises(ProtocolViolation, match="which is not the full block 1 of it, behind 1 that it lacks"):
        again(5, [TRIMMED, 1, 5], 2, no_cache=True)


def test_behaviour_12_trimmed_blocks_are_no_longer_held() -> None:
    worker = windowed()
    worker.step()
    worker.lease([0])
    worker.agent.check_invariants()
