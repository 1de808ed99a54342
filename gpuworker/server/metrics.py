"""Prometheus metrics of a worker, under vLLM's names with the prefix `quire:`; read from the engine when scraped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from gpuworker.engine.ports import EngineLoad, KvEventCounts, MaskLateness, RankLoad
from gpuworker.engine.step_rates import STEP_BOUNDS, StepTimes
from gpuworker.engine.transfers import Transfers
from gpuworker.peers.carriers import CARRIERS
from gpuworker.scheduling.draft_tally import DraftKind, DraftTally
from gpuworker.scheduling.images import ImageMover
from gpuworker.server.orphans import OrphanEnd, Orphans

_ROUND_TRIP_BUCKETS_S: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

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


def lease_round_trips(registry: CollectorRegistry) -> Callable[[float], None]:
    """Register the histogram of round trips to the KV manager; return the function that observes one, in seconds."""
    return Histogram(
        "quire:lease_round_trip_seconds",
        "Seconds from a report to the KV manager until the grants that answer it are here.",
        buckets=_ROUND_TRIP_BUCKETS_S,
        registry=registry,
    ).observe


class EngineCollector:
    """Makes metrics from a snapshot of the engine at each scrape."""

    def __init__(self, load: Callable[[], EngineLoad], registry: CollectorRegistry) -> None:
        self._load = load
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        load = self._load()
        for name, text, value in _GAUGES:
            yield GaugeMetricFamily(name, text, value=float(value(load)))
        yield CounterMetricFamily("quire:engine_steps", "Completed steps.", value=load.steps)
        yield CounterMetricFamily("quire:engine_tokens_sampled", "Output tokens sampled.", value=load.tokens_sampled)
        yield CounterMetricFamily("quire:engine_tokens_scheduled", "Positions computed.", value=load.tokens_scheduled)
        yield from _drafts(load)
        steps = HistogramMetricFamily("quire:step_seconds", "Time of a step, by what was in it.", labels=("kind",))
        for kind, times in (("decode", load.decode_times), ("mixed", load.mixed_times)):
            steps.add_metric((kind,), _buckets(times), sum_value=times.seconds)
        yield steps


def _drafts(load: EngineLoad) -> Iterator[Metric]:
    """Yield the counts of drafts by what guessed them."""
    drafted = CounterMetricFamily(
        "quire:spec_decode_num_draft_tokens", "Guessed tokens that steps verified, by what guessed.", labels=("kind",)
    )
    accepted = CounterMetricFamily(
        "quire:spec_decode_num_accepted_tokens", "Guessed tokens that were right, by what guessed.", labels=("kind",)
    )
    for kind in DraftKind:
        tally = load.drafts.get(kind, DraftTally())
        drafted.add_metric((kind.value,), tally.drafted)
        accepted.add_metric((kind.value,), tally.accepted)
    yield drafted
    yield accepted


class MaskCollector:
    """Makes metrics of constrained steps at each scrape."""

    def __init__(self, lateness: Callable[[], MaskLateness], registry: CollectorRegistry) -> None:
        self._lateness = lateness
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        steps, late, seconds = self._lateness()
        yield CounterMetricFamily("quire:constrained_steps", "Steps with constrained sequences.", value=steps)
        yield CounterMetricFamily(
            "quire:late_mask_steps", "Steps with constrained rows whose sampling waited for masks.", value=late
        )
        yield CounterMetricFamily("quire:late_mask_seconds", "For how long they waited, in all.", value=seconds)


class RankCollector:
    """Makes metrics of a worker's ranks at each scrape; with one rank it makes none."""

    def __init__(self, load: Callable[[], RankLoad], registry: CollectorRegistry) -> None:
        self._load = load
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        load = self._load()
        if load.ranks == 1:
            return
        yield GaugeMetricFamily("quire:ranks", "Processes that run the steps of this worker together.", load.ranks)
        yield CounterMetricFamily("quire:rank_plans", "Plans of steps that rank 0 has sent.", value=load.plans)
        yield CounterMetricFamily(
            "quire:rank_plan_seconds",
            "Processor time of the engine's thread for them, in all.",
            value=load.plan_seconds,
        )
        lost = GaugeMetricFamily(
            "quire:rank_lost", "1 when a rank is lost, with why: the worker ends.", labels=["reason"]
        )
        if load.lost:
            lost.add_metric([load.lost], 1)
        yield lost


class DiskCollector:
    """Makes metrics of the disk cache at each scrape; a worker without one has none."""

    def __init__(self, disk: ImageMover, transfers: Transfers, registry: CollectorRegistry) -> None:
        self._disk, self._transfers = disk, transfers
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        usable = "1 while the disk cache is in use, 0 once it was given up."
        yield GaugeMetricFamily("quire:disk_usable", usable, value=float(self._disk.usable))
        took = "Learnt time of fetching a block from disk into host memory; 0 while it is not known."
        yield GaugeMetricFamily("quire:disk_read_seconds", took, value=self._transfers.read_seconds)


class KvEventCollector:
    """Makes metrics of the KV events of this worker, at each scrape; a worker without subscribers has none."""

    def __init__(self, counts: Callable[[], KvEventCounts], registry: CollectorRegistry) -> None:
        self._counts = counts
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        counts = self._counts()
        for name, what, count in (
            ("quire:kv_event_batches", "Batches of KV events that were published.", counts.batches),
            ("quire:kv_event_changes", "Changes of the cache in these batches.", counts.changes),
            ("quire:kv_event_replays", "Requests for a replay that were answered.", counts.replays),
            (
                "quire:kv_event_overruns",
                "Times that a subscriber's queue was full: it missed batches.",
                counts.overruns,
            ),
        ):
            yield CounterMetricFamily(name, what, value=float(count))
        failed = "1 once no KV events are published any more, because of an error that the log has."
        yield GaugeMetricFamily("quire:kv_events_failed", failed, value=float(counts.failed))


class CarrierCollector:
    """Makes metrics of the images of blocks that passed between this worker and others, at each scrape."""

    def __init__(
        self, fetched: Callable[[], Counter[str]], served: Callable[[], Counter[str]], registry: CollectorRegistry
    ) -> None:
        self._fetched, self._served = fetched, served
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        for name, what, count in (
            ("quire:fetched_images", "Images of blocks that came from other workers, by carrier.", self._fetched),
            ("quire:served_images", "Images of blocks that other workers have fetched, by carrier.", self._served),
        ):
            images, found = CounterMetricFamily(name, what, labels=("carrier",)), count()
            for carrier in CARRIERS:
                images.add_metric((carrier,), found[carrier])
            yield images


def _buckets(times: StepTimes) -> list[tuple[str, float]]:
    """Return (upper bound, steps up to it), the form that prometheus_client expects."""
    bounds = (*map(str, STEP_BOUNDS), "+Inf")
    return list(zip(bounds, accumulate(times.counts), strict=True))


class OrphanCollector:
    """Makes metrics of the sequences of lost routers at each scrape."""

    def __init__(self, orphans: Orphans, registry: CollectorRegistry) -> None:
        self._orphans = orphans
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        orphans = self._orphans
        yield GaugeMetricFamily(
            "quire:orphans",
            "Abandoned sequences: their router is lost, and they are kept for another one.",
            value=len(orphans),
        )
        yield GaugeMetricFamily("quire:orphan_bytes", "Bytes of their prompts and outputs.", value=orphans.size)
        outcomes = CounterMetricFamily("quire:orphan_fates", "What became of abandoned sequences.", labels=("fate",))
        for outcome in OrphanEnd:
            outcomes.add_metric((outcome.value,), orphans.outcomes[outcome])
        yield outcomes
