"""Prometheus metrics of a worker, under vLLM's names with the prefix `quire:`; read from the engine when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gpuworker.ports import EngineLoad

_GAUGES: tuple[tuple[str, str, Callable[[EngineLoad], float]], ...] = (
    ("quire:num_requests_running", "Sequences that take part in steps.", lambda load: load.running),
    ("quire:num_requests_waiting", "Sequences that wait for blocks.", lambda load: load.waiting),
    ("quire:num_blocks", "Size of the KV pool in blocks.", lambda load: load.num_blocks),
    (
        "quire:kv_cache_usage_perc",
        "Share of the blocks that sequences or the lease pool hold, 0 to 1.",
        lambda load: 1 - load.unheld_blocks / load.num_blocks if load.num_blocks else 0.0,
    ),
    (
        "quire:pending_prefill_tokens",
        "Known tokens that are not computed yet.",
        lambda load: load.pending_prefill_tokens,
    ),
    ("quire:decode_step_seconds", "Learnt time of a step without prefill.", lambda load: load.decode_step_seconds),
    (
        "quire:prefill_seconds_per_token",
        "Learnt time of a prefilled token.",
        lambda load: load.prefill_seconds_per_token,
    ),
    ("quire:step_age_seconds", "Age of the running step; 0 when idle.", lambda load: load.step_age_seconds),
    ("quire:manager_attached", "1 while a session with the KV manager is open.", lambda load: load.manager_attached),
)


class EngineCollector:
    """Makes metrics from a snapshot of the engine at each scrape."""

    def __init__(self, load: Callable[[], EngineLoad], registry: CollectorRegistry) -> None:
        self._load = load
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        load = self._load()
        for name, text, value in _GAUGES:
            yield GaugeMetricFamily(name, text, value=float(value(load)))
        yield CounterMetricFamily("quire:engine_steps", "Completed steps.", value=load.steps)
        yield CounterMetricFamily("quire:engine_tokens_drawn", "Output tokens drawn.", value=load.tokens_drawn)
        yield CounterMetricFamily("quire:engine_tokens_scheduled", "Positions computed.", value=load.tokens_scheduled)
