"""When a rank counts as lost, and what differs between ranks."""

from __future__ import annotations

import signal

from gpuworker.plane.rank_watch import LOOK_S, STILL_LOOKS, BeatWatch, differences, how_it_ended, stood_still_words


def test_a_rank_that_stands_still_is_found_within_two_seconds() -> None:
    watch, now, looks = BeatWatch({1: 5, 2: 9}, 0.0), 0.0, 0
    while (found := watch.still({1: 5 + looks, 2: 9}, now := now + LOOK_S)) is None:
        looks += 1
    assert (found, looks + 1) == (2, STILL_LOOKS)
    assert now < 1.5
    assert stood_still_words(found) == "rank 2 stood still for 1.2 s"


def test_a_machine_that_slept_loses_no_rank() -> None:
    """Looks that came late count for nothing, however many there are."""
    watch, now = BeatWatch({1: 5}, 0.0), 0.0
    for _ in range(3 * STILL_LOOKS):
        now += 10.0
        assert watch.still({1: 5}, now) is None


def test_a_beat_clears_what_was_counted() -> None:
    watch, now = BeatWatch({1: 0}, 0.0), 0.0
    for look in range(5 * STILL_LOOKS):
        now += LOOK_S
        assert watch.still({1: look // (STILL_LOOKS - 1)}, now) is None


def test_counters_that_wrap_around_are_beats() -> None:
    watch = BeatWatch({1: 2**32 - 1}, 0.0)
    assert watch.still({1: 0}, LOOK_S) is None


def test_how_a_rank_ended_is_said() -> None:
    assert how_it_ended(-signal.SIGKILL) == "was ended by SIGKILL"
    assert how_it_ended(1) == "ended with status 1"
    assert how_it_ended(-99) == "was ended by signal 99"


def test_each_difference_is_named() -> None:
    own = {"version": "0.2.0", "the checkpoint": "ab", "torch": "2.13.0"}
    others = {2: own | {"version": "0.1.0"}, 1: {"version": "0.2.0", "the checkpoint": "cd"}}
    assert differences(own, others) == [
        "rank 1 has the checkpoint cd, and rank 0 has ab",
        "rank 1 has torch none, and rank 0 has 2.13.0",
        "rank 2 has version 0.1.0, and rank 0 has 0.2.0",
    ]
