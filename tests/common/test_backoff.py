"""How long a back-off pauses, exactly."""

from __future__ import annotations

import pytest

from common.backoff import Backoff


def test_each_failure_doubles_the_pause_up_to_the_longest() -> None:
    backoff = Backoff(first=0.5, longest=3.0)
    assert [backoff.pause(failures) for failures in range(1, 6)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_the_first_pause_may_be_the_longest() -> None:
    assert [Backoff(first=2.0, longest=2.0).pause(failures) for failures in (1, 2)] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("jitter", "pauses"),
    [(0.0, [4.0, 4.0, 4.0]), (0.5, [2.0, 3.0, 4.0]), (1.0, [0.0, 2.0, 4.0])],
    ids=["none", "the upper half", "full"],
)
def test_jitter_is_the_random_share_of_a_pause(jitter: float, pauses: list[float]) -> None:
    backoff = Backoff(first=1.0, longest=8.0, jitter=jitter)
    assert [backoff.pause(3, uniform) for uniform in (0.0, 0.5, 1.0)] == pauses


def test_a_thousand_failures_do_not_overflow() -> None:
    assert Backoff(first=0.1, longest=10.0).pause(1_000_000) == 10.0


@pytest.mark.parametrize(
    ("first", "longest", "jitter"), [(0.0, 1.0, 0.0), (2.0, 1.0, 0.0), (1.0, 2.0, 1.5), (1.0, 2.0, -0.1)]
)
def test_what_makes_no_sense_is_refused(first: float, longest: float, jitter: float) -> None:
    with pytest.raises(ValueError, match="expected 0 < first <= longest, and a jitter of 0 to 1"):
        Backoff(first, longest, jitter)
