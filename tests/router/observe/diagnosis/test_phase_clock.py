"""Seconds by phase: nothing is lost, and the first token divides them."""

from __future__ import annotations

import pytest

from router.observe.diagnosis.outcome import Phase
from router.observe.diagnosis.phase_clock import PhaseClock


def test_every_second_belongs_to_one_phase_and_the_first_token_divides_them() -> None:
    clock = PhaseClock(10.0)
    clock.enter(Phase.BLOCKS, 11.0)
    clock.enter(Phase.PREFILL, 11.5)
    clock.enter(Phase.DECODE, 12.0)
    clock.first_token()
    clock.enter(Phase.PREEMPTED, 12.25)
    clock.enter(Phase.DECODE, 13.25)
    assert clock.parts(14.0) == (
        (("reading", 1.0), ("blocks", 0.5), ("prefill", 0.5)),
        (("decode", 1.0), ("preempted", 1.0)),
    )


def test_seconds_move_between_phases_as_far_as_there_are_any() -> None:
    clock = PhaseClock(0.0)
    clock.enter(Phase.QUEUE, 0.0)
    clock.enter(Phase.BLOCKS, 1.0)
    clock.shift(Phase.QUEUE, Phase.LOOKUP, 0.25)
    clock.shift(Phase.QUEUE, Phase.LOOKUP, 9.0)
    clock.shift(Phase.QUEUE, Phase.LOOKUP, -1.0)
    assert clock.parts(1.0) == ((("lookup", 1.0),), ())


def test_seconds_move_within_the_part_in_which_they_passed() -> None:
    clock = PhaseClock(0.0)
    clock.spent(Phase.CONSTRAINT, 0.5)
    clock.enter(Phase.PREFILL, 2.0)
    clock.enter(Phase.PREFILL, 3.0)
    clock.first_token()
    clock.enter(Phase.DECODE, 5.0)
    clock.shift(Phase.PREFILL, Phase.STALLED, 1.0)
    clock.shift(Phase.DECODE, Phase.STALLED, 1.5)
    assert clock.parts(5.0) == (
        (("reading", 1.5), ("constraint", 0.5), ("prefill", 1.0)),
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


def placed(*still: tuple[float, float]) -> PhaseClock:
    """Return the clock of a request that was sent to a worker after 1 s; the router stood still in these spans."""
    clock = PhaseClock(
        0.0, lambda begin, end: sum(max(0.0, min(end, last) - max(begin, first)) for first, last in still)
    )
    clock.enter(Phase.BLOCKS, 1.0)
    return clock


def seconds(clock: PhaseClock, now: float) -> dict[str, float]:
    """Return the seconds before the first token, in steps of a hundredth."""
    return {name: round(value, 2) for name, value in clock.parts(now)[0]}


def test_a_worker_is_done_when_it_says_so_and_its_message_is_on_the_way_from_then_on() -> None:
    clock = placed()
    clock.enter(Phase.PREFILL, 3.0, done=1.5)
    assert seconds(clock, 3.0) == {"reading": 1.0, "blocks": 0.5, "on_the_way": 1.5}


def test_a_router_that_stands_still_is_the_reason_and_not_the_way() -> None:
    clock = placed((1.25, 2.5))
    clock.enter(Phase.PREFILL, 3.0, done=1.5)
    assert seconds(clock, 3.0) == {"reading": 1.0, "blocks": 0.5, "router_still": 1.25, "on_the_way": 0.25}


def test_a_router_that_stands_still_while_its_worker_works_costs_nothing() -> None:
    clock = placed((1.25, 1.75))
    clock.enter(Phase.PREFILL, 3.0, done=3.0)
    assert seconds(clock, 3.0) == {"reading": 1.0, "blocks": 2.0}


def test_messages_that_are_read_together_leave_the_worker_what_it_did_between_them() -> None:
    """The admission and the first token are of 1.1 and 1.4, and the router reads both at 3."""
    clock = placed((1.05, 3.0))
    clock.enter(Phase.PREFILL, 3.0, done=1.1)
    clock.enter(Phase.PREFILL, 3.0, done=1.4)
    clock.first_token()
    assert seconds(clock, 3.0) == {"reading": 1.0, "blocks": 0.1, "prefill": 0.3, "router_still": 1.6}
    way = placed()
    way.enter(Phase.PREFILL, 3.0, done=1.1)
    way.enter(Phase.DECODE, 3.0, done=1.4)
    assert seconds(way, 3.0) == {"reading": 1.0, "blocks": 0.1, "prefill": 0.3, "on_the_way": 1.6}


def test_what_was_on_the_way_before_a_message_of_the_router_stays_there() -> None:
    clock = placed()
    clock.enter(Phase.MOVED, 3.0, done=1.5)
    clock.enter(Phase.BLOCKS, 4.0)
    clock.enter(Phase.PREFILL, 4.5, done=9.0)
    assert seconds(clock, 4.5) == {"reading": 1.0, "blocks": 1.0, "on_the_way": 1.5, "moved": 1.0}


def test_the_time_to_the_first_token_stays_as_a_client_sees_it() -> None:
    """The worker went on while its first token was on the way: that shortens nothing."""
    clock = placed()
    clock.enter(Phase.DECODE, 3.0, done=1.5)
    clock.first_token()
    clock.enter(Phase.SENDING, 3.5, done=3.25)
    before, after = clock.parts(3.5)
    assert (dict(before)["on_the_way"], dict(after)) == (1.5, {"decode": 0.5})


def test_a_router_that_stands_still_takes_the_time_of_its_own_phases() -> None:
    clock = PhaseClock(0.0, lambda begin, end: max(0.0, min(end, 1.5) - max(begin, 0.5)))
    clock.enter(Phase.QUEUE, 2.0)
    assert seconds(clock, 2.0) == {"reading": 1.0, "router_still": 1.0}
