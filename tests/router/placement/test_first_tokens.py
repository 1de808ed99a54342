"""What a prediction of a first token is worth by what happened after others of its size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement.first_tokens import KEPT, MOST_LOWERED, FirstTokens, Foretold, Happened


def after(*pairs: tuple[float, float]) -> FirstTokens:
    """Return what was learnt from pairs of predicted and actual seconds."""
    found = FirstTokens()
    for predicted, actual in pairs:
        found.note_first_token(Happened(predicted, actual), 0.0)
    return found


def test_a_prediction_of_which_nothing_is_known_counts_as_it_is() -> None:
    found = FirstTokens().about(4.0)
    assert (found.seconds, found.how_sure) == (4.0, "no such prediction was measured")


def test_predictions_that_were_four_times_too_high_count_a_quarter() -> None:
    found = after((4.0, 1.0), (5.0, 1.25), (6.0, 1.5)).about(4.4)
    assert found.seconds == 4.4 / 4
    words = "the last 3 such predictions were 4 times what happened; it was 4.400 s before it was lowered for that"
    assert found.how_sure == words


def test_the_median_counts_and_the_words_have_the_range() -> None:
    found = after((4.0, 4.0), (4.0, 2.0), (4.0, 1.0)).about(4.0)
    assert found.seconds == 2.0
    assert found.how_sure.startswith("the last 3 such predictions were between 1 and 4 times what happened")


def test_predictions_that_were_too_low_raise_none() -> None:
    found = after((4.0, 8.0), (4.0, 5.0)).about(4.0)
    assert (found.seconds, found.how_sure) == (
        4.0,
        "the last 2 such predictions were between 0.5 and 0.8 times what happened",
    )


def test_short_predictions_say_nothing_of_a_long_one() -> None:
    learnt = after((0.1, 0.001), (1.9, 0.1), (16.0, 0.1))
    assert learnt.about(4.0).seconds == 4.0
    assert after((2.0, 1.0)).about(4.0).seconds == 2.0
    assert after((15.9, 7.95)).about(4.0).seconds == 2.0


def test_a_prediction_is_lowered_by_sixteen_at_most() -> None:
    assert after((4.0, 0.0)).about(4.0).seconds == 4.0 / MOST_LOWERED


def test_the_last_outcomes_of_a_size_count() -> None:
    learnt = after(*[(4.0, 4.0)] * KEPT, *[(4.0, 1.0)] * KEPT)
    assert learnt.about(4.0).seconds == 1.0
    assert len(learnt.about(4.0).measured) == KEPT


def test_who_waited_in_vain_raises_what_counts_and_is_told_apart() -> None:
    learnt = after((4.0, 1.0))
    Foretold(learnt, 4.0, began=10.0, deadline=13.0).ended(13.0)
    found = learnt.about(4.0)
    assert found.seconds == 2.0, "the median of a quarter and three quarters"
    assert found.how_sure.startswith(
        "the last such prediction was 4 times what happened; 1 had no first token by the deadline"
    )


@pytest.mark.parametrize(("deadline", "now"), [(None, 1e6), (13.0, 11.0), (10.0, 10.0), (9.0, 10.0)])
def test_an_end_before_the_deadline_says_nothing(deadline: float | None, now: float) -> None:
    learnt = FirstTokens()
    Foretold(learnt, 4.0, began=10.0, deadline=deadline).ended(now)
    assert learnt.about(4.0).measured == ()


def test_a_first_token_is_measured_from_the_prediction() -> None:
    learnt = FirstTokens()
    Foretold(learnt, 4.0, began=10.0, deadline=None).came(11.0)
    assert learnt.about(4.0).measured == (Happened(4.0, 1.0),)


def test_one_of_those_refused_is_tried_when_nothing_was_measured_for_a_while() -> None:
    learnt = FirstTokens()
    assert [learnt.may_try(4.0, now) for now in (0.0, 29.9, 30.0, 31.0, 59.9, 60.0)] == [
        False, False, True, False, False, True,
    ]  # fmt: skip


def test_nobody_is_tried_while_such_predictions_are_measured() -> None:
    learnt = FirstTokens()
    assert not learnt.may_try(4.0, 0.0)
    for now in range(100):
        learnt.note_first_token(Happened(5.0, 5.0), float(now))
        assert not learnt.may_try(4.0, float(now))


@given(st.floats(1.0, MOST_LOWERED), st.lists(st.floats(0.01, 1.0), min_size=32, max_size=80))
def test_once_one_was_tried_a_constant_error_refuses_only_those_that_would_be_late(
    error: float, lefts: list[float]
) -> None:
    """All predictions are 4 s, and `error` times too high. A request comes each second, with a part of them left."""
    learnt, actual = FirstTokens(), 4.0 / error
    for now, left in enumerate(lefts):
        if learnt.about(4.0).seconds > 4.0 * left and not learnt.may_try(4.0, float(now)):
            assert not learnt.about(4.0).measured or 4.0 * left < actual
            continue
        came = actual <= 4.0 * left
        learnt.note_first_token(Happened(4.0, actual if came else 4.0 * left, came), float(now))
    assert learnt.about(4.0).measured, "one of the first 31 is tried, or none was refused"
