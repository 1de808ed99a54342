"""The figures of a decision log on disk."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from common.decisions.log_writer import DecisionLogWriter, LogCounts


class LogMetrics(Collector):
    """Zeros where a service keeps no log."""

    def __init__(self, registry: CollectorRegistry, writer: DecisionLogWriter | None) -> None:
        self._counts = LogCounts() if writer is None else writer.counts
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        counts = self._counts
        yield CounterMetricFamily("quire:decision_log_records", "Decision records written to disk.", counts.written)
        dropped = CounterMetricFamily(
            "quire:decision_log_dropped", "Decision records that are not on disk, by what refused them.", labels=("by",)
        )
        dropped.add_metric(("queue",), counts.queue_full)
        dropped.add_metric(("disk",), counts.not_written)
        yield dropped
        yield GaugeMetricFamily("quire:decision_log_bytes", "Bytes of the decision log on disk.", counts.bytes)
