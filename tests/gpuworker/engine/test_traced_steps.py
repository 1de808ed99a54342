"""Traced sequences: prefill chunks are told step by step, decode steps as one sum at the end."""

from __future__ import annotations

from common.contracts.types import BlockId, SequenceId
from gpuworker.engine.engine import TracedSteps
from gpuworker.engine.ports import Chunk
from gpuworker.scheduling.batch_plan import ScheduledRow, StepPlan

FIRST, SECOND = SequenceId(1), SequenceId(2)


def row(sequence: SequenceId, start: int, length: int, samples: bool, drafts: tuple[int, ...] = ()) -> ScheduledRow:
    return ScheduledRow(sequence, start, length, (BlockId(0),), samples, drafts=drafts)


def stepped(traced: TracedSteps, number: int, *rows: ScheduledRow) -> list[Chunk]:
    return traced.stepped(StepPlan(number, rows, (), ()), 100 * number, 100 * number + 50)


def test_prefill_is_told_at_once_and_decoding_at_the_end() -> None:
    traced = TracedSteps()
    traced.follow(FIRST, prompt_tokens=10)
    assert stepped(traced, 1, row(FIRST, 0, 8, False), row(SECOND, 0, 1, True)) == [Chunk(FIRST, 0, 8, 100, 150)]
    assert stepped(traced, 2, row(FIRST, 8, 2, True)) == [Chunk(FIRST, 8, 2, 200, 250)]
    assert stepped(traced, 3, row(FIRST, 10, 1, True, (7, 8))) == []
    assert stepped(traced, 4, row(FIRST, 12, 1, True)) == []
    assert traced.ended(FIRST) == (Chunk(FIRST, 10, 2, 300, 450, decode=True, drafts=2, steps=2),)
    assert traced.ended(FIRST) == ()
    assert not traced


def test_work_that_a_preemption_lost_is_a_chunk() -> None:
    traced = TracedSteps()
    traced.follow(FIRST, prompt_tokens=2)
    stepped(traced, 1, row(FIRST, 2, 1, True))
    assert stepped(traced, 2, row(FIRST, 0, 4, True)) == [Chunk(FIRST, 0, 4, 200, 250)]
    assert stepped(traced, 3, row(FIRST, 4, 1, True)) == []
    (decoded,) = traced.ended(FIRST)
    assert (decoded.steps, decoded.begin_ns, decoded.end_ns) == (2, 100, 350)


def test_a_sequence_without_a_decode_step_ends_with_nothing_and_others_are_not_followed() -> None:
    traced = TracedSteps()
    traced.follow(FIRST, prompt_tokens=2)
    traced.follow(SECOND, prompt_tokens=2)
    stepped(traced, 1, row(FIRST, 0, 2, True), row(SECOND, 2, 1, True))
    assert traced.ended(FIRST) == ()
    traced.keep({FIRST})
    assert traced.ended(SECOND) == ()


def test_decoding_ends_after_it_began_where_the_wall_clock_is_set_back_between_two_steps() -> None:
    traced = TracedSteps()
    traced.follow(FIRST, prompt_tokens=2)
    stepped(traced, 5, row(FIRST, 2, 1, True))
    stepped(traced, 1, row(FIRST, 3, 1, True))
    (decoded,) = traced.ended(FIRST)
    assert (decoded.begin_ns, decoded.end_ns) == (500, 500)
