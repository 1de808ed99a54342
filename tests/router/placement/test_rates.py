"""Learnt rates: exact values of averages and of the line through step times."""

from __future__ import annotations

import pytest

from router.placement.rates import Average, CountRate, StepLine


def test_the_first_sample_is_the_average() -> None:
    average = Average()
    average.add(3.0, now=1.0)
    assert average.value == 3.0


def test_a_sample_after_one_half_life_weighs_half() -> None:
    average = Average(half_life=10.0)
    average.add(4.0, now=0.0)
    average.add(8.0, now=10.0)
    assert average.value == pytest.approx(6.0)


def test_a_sample_at_the_same_moment_weighs_a_tenth() -> None:
    average = Average()
    average.add(0.0, now=5.0)
    average.add(10.0, now=5.0)
    assert average.value == pytest.approx(1.0)


def test_age_counts_from_the_last_sample() -> None:
    average = Average()
    assert average.age(7.0) == float("inf")
    average.add(1.0, now=5.0)
    assert average.age(7.0) == 2.0


def test_a_line_without_samples_predicts_nothing() -> None:
    assert StepLine(full_batch=8).predict(1) is None


def test_one_batch_size_predicts_a_full_batch_at_twice_the_empty_one() -> None:
    line = StepLine(full_batch=8)
    line.add(running=4, seconds=0.012, now=0.0)
    assert line.predict(4) == pytest.approx(0.012)
    empty, full = line.predict(0), line.predict(8)
    assert empty is not None
    assert full == pytest.approx(2 * empty)


def test_two_batch_sizes_fix_the_line() -> None:
    line = StepLine(full_batch=64)
    line.add(running=2, seconds=0.010, now=0.0)
    line.add(running=12, seconds=0.030, now=0.0)
    assert line.predict(7) == pytest.approx(0.020)
    assert line.predict(32) == pytest.approx(0.070)


def test_a_line_that_noise_made_fall_still_rises_by_half_the_assumed_slope() -> None:
    line = StepLine(full_batch=64)
    for now, running, seconds in ((0.0, 2, 0.03), (10.0, 12, 0.01)):
        line.add(running, seconds, now=now)
    alone, full = line.predict(0), line.predict(64)
    assert alone is not None
    assert full is not None
    middle_x, middle_y = (2 * 0.5 + 12) / 1.5, (0.03 * 0.5 + 0.01) / 1.5
    assert full - alone == pytest.approx(64 * middle_y / (64 + middle_x) / 2)


def test_a_count_rises_at_the_rate_between_its_oldest_and_newest_reading() -> None:
    rate = CountRate(window=5.0)
    assert rate.per_second() == 0.0
    for second in range(11):
        rate.add(100 * second if second < 6 else 500 + 300 * (second - 5), now=float(second))
    assert rate.per_second() == pytest.approx(300.0)
    for second in range(11, 17):
        rate.add(2000, now=float(second))
    assert rate.per_second() == 0.0


def test_readings_in_quick_succession_take_no_room() -> None:
    rate = CountRate(window=5.0)
    for tick in range(1000):
        rate.add(tick, now=tick / 10)
    assert len(rate._readings) < 30
    assert rate.per_second() == pytest.approx(10.0)


def test_a_count_that_falls_begins_anew() -> None:
    rate = CountRate()
    rate.add(1000, now=0.0)
    rate.add(2000, now=1.0)
    rate.add(5, now=2.0)
    assert rate.per_second() == 0.0
    rate.add(25, now=3.0)
    assert rate.per_second() == pytest.approx(20.0)
