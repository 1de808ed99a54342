"""Seconds by phase: nothing is lost, and the first token divides them."""

from __future__ import annotations

import pytest

from router.core.diagnosis.outcome import Phase
from router.core.diagnosis.phase_clock import PhaseClock


def test_every_second_belongs_to_one_phase_and_the_first_token_divides_them() -> None:
    clock = PhaseClock(10.0)
    clock.enter(Phase.BLOCKS, 11.0)
    clock.enter(Phase.PREFILL, 11.5)
    clock.first_token(12.0)
    clock.enter(Phase.PREEMPTED, 12.25)
    clock.enter(Phase.DECODE, 13.25)
    assert clock.parts(14.0) == (
        (("queue", 1.0), ("blocks", 0.5), ("prefill", 0.5)),
        (("decode", 1.0), ("preempted", 1.0)),
    )


def test_seconds_move_between_phases_as_far_as_there_are_any() -> None:
    clock = PhaseClock(0.0)
    clock.enter(Phase.BLOCKS, 1.0)
    clock.shift(Phase.QUEUE, Phase.LOOKUP, 0.25)
    clock.shift(Phase.QUEUE, Phase.LOOKUP, 9.0)
    clock.shift(Phase.QUEUE, Phase.LOOKUP, -1.0)
    assert clock.parts(1.0) == ((("lookup", 1.0),), ())


def test_seconds_move_within_the_part_in_which_they_passed() -> None:
    clock = PhaseClock(0.0)
    clock.spent(Phase.CONSTRAINT, 0.5)
    clock.enter(Phase.PREFILL, 2.0)
    clock.first_token(3.0)
    clock.enter(Phase.DECODE, 5.0)
    clock.shift(Phase.PREFILL, Phase.STALLED, 1.0)
    clock.shift(Phase.DECODE, Phase.STALLED, 1.5)
    assert clock.parts(5.0) == (
        (("queue", 1.5), ("constraint", 0.5), ("prefill", 1.0)),
        (("stalled", 1.5), ("decode", 0.5)),
    )


def test_a_clock_that_goes_back_gives_no_negative_seconds() -> None:
    clock = PhaseClock(5.0)
    clock.enter(Phase.BLOCKS, 4.0)
    assert clock.parts(6.0) == ((("blocks", 2.0),), ())


def test_the_longest_unread_event_is_kept() -> None:
    clock = PhaseClock(0.0)
    for seconds in (0.1, 2.0, 0.5):
        clock.left_unread(seconds)
    assert clock.client_longest == pytest.approx(2.0)
