"""How long admitted sequences wait for their first step, and for whom the worker computes meanwhile."""

from __future__ import annotations

from common.contracts.types import BlockId, SequenceId
from gpuworker.engine.engine import StartWatch
from gpuworker.engine.ports import Started
from gpuworker.scheduling.batch_plan import ScheduledRow, StepPlan
from gpuworker.scheduling.outcomes import Loaded

A, B, C = SequenceId(1), SequenceId(2), SequenceId(3)


def plan(**lengths: int) -> StepPlan:
    rows = {"a": A, "b": B, "c": C}
    return StepPlan(1, tuple(ScheduledRow(rows[name], 0, n, (BlockId(0),), True) for name, n in lengths.items()))


def name(sequence: SequenceId) -> str:
    return f"r{sequence}"


def test_a_sequence_in_the_next_step_waited_for_nobody() -> None:
    watch = StartWatch()
    watch.admitted(A, 5.0)
    assert list(watch.stepped(plan(a=10), 5.25, name)) == [Started(A, 0.25, 0, "")]
    assert not watch


def test_positions_of_others_count_until_the_first_step_and_the_longest_prompt_is_named() -> None:
    watch = StartWatch()
    watch.admitted(B, 1.0)
    for began in (1.0, 2.0):
        assert list(watch.stepped(plan(a=100, c=1), began, name)) == []
    assert list(watch.stepped(plan(c=1, b=20), 3.0, name)) == [Started(B, 2.0, 202, "r1")]


def test_decodes_of_others_are_counted_and_not_named() -> None:
    watch = StartWatch()
    watch.admitted(B, 1.0)
    watch.stepped(plan(a=1, c=1), 1.0, name)
    assert list(watch.stepped(plan(b=20), 1.5, name)) == [Started(B, 0.5, 2, "")]


def test_a_step_that_began_before_the_admission_makes_no_negative_wait() -> None:
    watch = StartWatch()
    watch.admitted(A, 2.0)
    assert list(watch.stepped(plan(a=1), 1.0, name)) == [Started(A, 0.0, 0, "")]


def test_sequences_that_left_are_forgotten() -> None:
    watch = StartWatch()
    for each in (A, B):
        watch.admitted(each, 0.0)
    watch.left(A)
    watch.left(C)
    assert [each.sequence for each in watch.stepped(plan(a=1, b=1), 0.0, name)] == [B]
    watch.admitted(A, 0.0)
    watch.clear()
    assert not watch


def test_loads_of_the_first_step_are_told_with_what_computing_them_would_take() -> None:
    watch = StartWatch()
    watch.admitted(A, 1.0)
    loaded = {A: Loaded(3, 0.25), C: Loaded(1, 0.25)}
    assert list(watch.stepped(plan(a=10), 2.0, name, loaded, 0.5)) == [Started(A, 1.0, 0, "", Loaded(3, 0.25), 1.5)]


def test_loads_of_an_earlier_step_are_none_of_the_wait() -> None:
    watch = StartWatch()
    watch.admitted(A, 1.0)
    assert list(watch.stepped(plan(b=10), 1.0, name, {A: Loaded(2, 0.25)})) == []
    assert list(watch.stepped(plan(a=10), 3.0, name)) == [Started(A, 1.75, 10, "r2", Loaded(2, 0.25), 0.0)]
