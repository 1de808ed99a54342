"""Rates and percentiles between samples, and what reservations would take; exact numbers."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

from router.api.page.history import KEPT, History, Point, Sample, Slots, quantile, slots
from router.api.page.parts import buckets_of, total_of

INFINITE = float("inf")


def history(*samples: Sample) -> list[Point]:
    found = History(lambda: samples[0])
    for each in samples:
        found.add(each)
    return found.points()


def test_a_rate_is_between_two_samples() -> None:
    points = history(Sample(10.0, 100.0), Sample(12.0, 160.0), Sample(14.0, 160.0))
    assert [(each.at, each.tokens_per_s) for each in points] == [(12.0, 30.0), (14.0, 0.0)]


def test_one_sample_has_no_rate() -> None:
    assert history(Sample(10.0, 100.0)) == []


def test_percentiles_are_of_the_last_30_seconds() -> None:
    slow = ((0.1, 0.0), (1.0, 8.0), (INFINITE, 8.0))
    fast = ((0.1, 4.0), (1.0, 12.0), (INFINITE, 12.0))
    samples = (
        Sample(0.0, 0.0, ((0.1, 0.0), (1.0, 0.0), (INFINITE, 0.0))),
        Sample(2.0, 0.0, slow),
        Sample(40.0, 0.0, fast),
    )
    first, last = history(*samples)
    assert first.first_p50 == pytest.approx(0.55)
    assert last.first_p50 == pytest.approx(0.05)
    assert last.gap_p50 is None


def test_a_clock_that_is_set_back_begins_anew() -> None:
    assert history(Sample(10.0, 100.0), Sample(12.0, 160.0), Sample(5.0, 170.0), Sample(7.0, 190.0)) == history(
        Sample(5.0, 170.0), Sample(7.0, 190.0)
    )


def test_the_history_is_bounded() -> None:
    points = history(*(Sample(float(number), 0.0) for number in range(KEPT + 50)))
    assert (len(points), points[-1].at) == (KEPT - 1, KEPT + 49.0)


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [
        ((0, 0, 0), 0.5, None),
        ((10, 10, 10), 0.5, 0.5),
        ((5, 10, 10), 0.5, 1.0),
        ((5, 10, 10), 0.95, 1.9),
        ((0, 4, 10), 0.95, 2.0),
        ((0, 10, 10), 0.5, 1.5),
    ],
)
def test_quantiles(counts: tuple[int, ...], share: float, value: float | None) -> None:
    buckets = tuple(zip((1.0, 2.0, INFINITE), map(float, counts), strict=True))
    assert quantile(buckets, share) == pytest.approx(value)


def test_no_bucket_has_no_quantile() -> None:
    assert quantile((), 0.5) is None


def test_buckets_of_a_histogram_are_cumulative() -> None:
    histogram = Histogram("seconds", "of something", buckets=(0.1, 1.0), registry=CollectorRegistry())
    for seconds in (0.05, 0.5, 0.5, 7.0):
        histogram.observe(seconds)
    assert buckets_of(histogram) == ((0.1, 1.0), (1.0, 3.0), (INFINITE, 4.0))


def test_total_of_a_counter() -> None:
    counter = Counter("tokens", "of something", registry=CollectorRegistry())
    counter.inc(7)
    assert total_of(counter) == 7.0


def test_slots_of_blocks_and_of_reservations() -> None:
    assert slots([(17, 100), (32, 40)], 16, 2048) == Slots(stored=49, paged=64, contiguous=140, context=4096)


def test_a_sequence_beyond_its_limit_reserves_what_it_has() -> None:
    assert slots([(50, 40)], 16, 48) == Slots(stored=50, paged=64, contiguous=50, context=50)
