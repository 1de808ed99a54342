"""What holds sequences up for want of blocks: waits and stalls by the second, and whose time it was."""

from __future__ import annotations

from common.contracts.types import SequenceId
from gpuworker.engine.engine import DelayWatch
from gpuworker.engine.ports import Delayed

A, B = SequenceId(1), SequenceId(2)


def watch(*away: tuple[float, float]) -> DelayWatch:
    """Return a watch over a manager that was away between these times."""
    return DelayWatch(lambda begin, end: sum(max(0.0, min(end, last) - max(begin, first)) for first, last in away))


def test_a_wait_counts_where_the_manager_was_away_alone() -> None:
    delays = watch((3.0, 5.0))
    delays.waits(A, 1.0)
    delays.waits(A, 4.0)
    delays.waits(B, 1.0)
    assert list(delays.admitted(B, 2.0)) == []
    assert list(delays.admitted(A, 9.0)) == [Delayed(A, 0.0, 2.0)]
    assert list(delays.admitted(A, 10.0)) == []


def test_a_stall_ends_with_the_plan_that_finds_a_block() -> None:
    delays = watch((2.0, 2.5))
    assert list(delays.planned((A,), 1.0)) == []
    assert list(delays.planned((A, B), 2.0)) == []
    assert list(delays.planned((B,), 3.0)) == [Delayed(A, 2.0, 0.5)]
    assert list(delays.planned((), 4.0)) == [Delayed(B, 2.0, 0.5)]


def test_short_stalls_are_told_once_they_add_up() -> None:
    delays, told = watch(), []
    for number in range(5):
        told += [*delays.planned((A,), number + 0.0), *delays.planned((), number + 0.0078125)]
    assert told == [Delayed(A, 3 * 0.0078125, 0.0)]
    assert list(delays.left(A, 9.0)) == [Delayed(A, 2 * 0.0078125, 0.0)]
    assert list(delays.left(A, 9.0)) == []


def test_a_sequence_that_ends_tells_what_it_waited_for() -> None:
    delays = watch((0.0, 9.0))
    delays.waits(A, 1.0)
    list(delays.planned((B,), 2.0))
    assert list(delays.left(A, 3.0)) == [Delayed(A, 0.0, 2.0)]
    assert list(delays.left(B, 4.0)) == [Delayed(B, 2.0, 2.0)]
