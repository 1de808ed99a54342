"""The histogram of what reports took, as Prometheus reads it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvmanager.service.metrics import ReportTimes


class Exposed(Collector):
    def __init__(self, times: ReportTimes) -> None:
        self._times = times

    def collect(self) -> list[Metric]:
        return [self._times.family()]


def exposed(*seconds: float) -> dict[str, float]:
    times, registry = ReportTimes(), CollectorRegistry()
    for each in seconds:
        times.observe(each)
    registry.register(Exposed(times))
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix("quire:report_handling_seconds_"): float(value) for name, value in pairs}


def test_a_bucket_counts_all_that_took_no_longer() -> None:
    found = exposed(25e-6, 26e-6, 0.09, 7.0)
    assert found['bucket{le="2.5e-05"}'] == 1
    assert found['bucket{le="5e-05"}'] == 2
    assert found['bucket{le="0.025"}'] == 2
    assert found['bucket{le="0.1"}'] == 3
    assert found['bucket{le="+Inf"}'] == found["count"] == 4
    assert found["sum"] == 25e-6 + 26e-6 + 0.09 + 7.0


def test_before_the_first_report_all_buckets_are_there() -> None:
    found = exposed()
    assert len(found) == 14
    assert set(found.values()) == {0.0}
