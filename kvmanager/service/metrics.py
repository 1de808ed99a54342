"""The manager's Prometheus metrics, named as in vLLM. Each scrape reads the figures from the ledgers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from common.contracts.transfers import TransferEnd
from common.contracts.types import KvGroup
from kvmanager.contracts.counts import PoolCounts, Totals
from kvmanager.ledger.ahead_table import AheadKind
from kvmanager.ledger.past_totals import added
from kvmanager.sessions.attachments import Attachments

_BUCKETS_S: Final = (25e-6, 50e-6, 100e-6, 200e-6, 400e-6, 800e-6, 1.6e-3, 3.2e-3, 6.4e-3, 25e-3, 100e-3)
_HOST_COPIES: Final = {"store": "host_stores", "load": "host_loads"}
_STATES: Final = ("free", "leased", "in_use", "cached", "pinned")
_TOTALS: Final = {
    "num_preemptions": "Sequences whose blocks were taken back.",
    "broken_stalls": "Those of them that were ordered because work stood still.",
    "kv_evictions": "Cached blocks that were forgotten for others.",
    "kv_retained_evictions": "Those of them that a request retained, because no others were left.",
    "kv_pinned_evictions": "Those of them that an operator had pinned, because no others were left.",
    "kv_host_declined": "Blocks that were evicted without a copy, because copies cost more than loads saved.",
    "kv_host_dropped": "Contents that left host memory for others, while neither a block nor the disk had them.",
    "kv_disk_stored": "Blocks that were saved to disk.",
    "kv_disk_loaded": "Blocks that were fetched from disk.",
    "kv_peer_loaded": "Blocks that were fetched from other workers.",
    "kv_disk_lost": "Contents on disk that could not be read, with what was behind them.",
    "kv_disk_unsaved": "Blocks that were not saved: no frame was to be had, or the block before is not on disk.",
    "kv_fetches": "Sequences that waited for blocks from the disk or from another worker.",
    "admissions": "Sequences that were admitted.",
    "chunked_grants": "Those of them that began with a part of their prompt's blocks.",
    "rejections": "Sequences that no pool of this size can hold.",
    "prefix_cache_queries": "Tokens of prompts that were looked up, in full blocks, once a request.",
    "prefix_cache_hits": "Tokens of prompts that were found, in full blocks, once a request.",
    "prefix_cache_partial_hits": "Admissions with a copy of a part of a cached block, once a request.",
    "prefix_cache_partial_hit_tokens": "Tokens of those parts; they are not among the hits in full blocks.",
    "recompute_cache_queries": "Tokens that were looked up again after a preemption, in full blocks.",
    "recompute_cache_hits": "Tokens that were found again after a preemption, in full blocks.",
    "prefix_cache_reset_blocks": "Cached blocks that resets of the prefix cache dropped.",
    "ignored_seals": "Sealed blocks whose parent was not cached.",
}
_FIELDS: Final = {
    "num_preemptions": "preemptions",
    "kv_evictions": "evictions",
    "kv_retained_evictions": "retained_evictions",
    "kv_pinned_evictions": "pinned_evictions",
    "kv_host_dropped": "host_drops",
    "kv_host_declined": "host_declined",
    "kv_disk_stored": "disk_stores",
    "kv_disk_loaded": "disk_loads",
    "kv_peer_loaded": "peer_loads",
    "kv_disk_lost": "disk_lost",
    "kv_disk_unsaved": "unsaved",
    "kv_fetches": "fetches",
    "prefix_cache_reset_blocks": "reset_blocks",
    "prefix_cache_partial_hits": "partial_hits",
    "prefix_cache_partial_hit_tokens": "partial_hit_tokens",
}
# The ledgers count blocks. vLLM's counters of these names, which dashboards read, count tokens.
_BLOCK_FIELDS: Final = {
    "prefix_cache_queries": "prefix_query_blocks",
    "prefix_cache_hits": "prefix_hit_blocks",
    "recompute_cache_queries": "recompute_query_blocks",
    "recompute_cache_hits": "recompute_hit_blocks",
}


class ReportTimes:
    """How many reports took how long. Each report is counted, so this costs a tenth of the library's histogram."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BUCKETS_S) + 1)
        self._seconds = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(_BUCKETS_S, seconds)] += 1
        self._seconds += seconds

    def family(self) -> Metric:
        """Return the histogram of `quire:report_handling_seconds`."""
        bounds = [*map(floatToGoString, _BUCKETS_S), "+Inf"]
        name, text = "quire:report_handling_seconds", "Seconds from a report's arrival to its answer."
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._seconds)


class ManagerMetrics(Collector):
    """Registers itself. Figures that have no worker have the manager's group; "": it is in none.

    `observe_report` takes the seconds from a report's arrival to its answer.
    """

    def __init__(self, registry: CollectorRegistry, attachments: Attachments, block_size: int) -> None:
        self._attachments, self._block_size = attachments, block_size
        self._group = attachments.leading.group
        self._reports = ReportTimes()
        self.observe_report = self._reports.observe
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield everything as it is now."""
        yield self._reports.family()
        pools = {worker: ledger.pool_counts() for worker, ledger in self._attachments.ledgers()}
        yield from _pool_gauges(pools)
        yield from _totals(self._accounts(pools), self._block_size)
        yield from self._sessions()
        yield from self._index()

    def _accounts(self, pools: dict[str, PoolCounts]) -> dict[str, Totals]:
        accounts = self._attachments.past.accounts()
        for worker, pool in pools.items():
            accounts[worker] = added(accounts.get(worker, Totals()), pool.totals)
        return accounts

    def _sessions(self) -> Iterable[Metric]:
        counts = self._attachments.counts
        yield self._gauge("workers", "Workers that are attached.", len(self._attachments.manager.workers()))
        yield self._gauge("manager_epoch", "Epoch of this manager.", self._attachments.index.epoch)
        leading = self._attachments.leading
        yield self._gauge("manager_leads", "1 while this manager leads, 0 while it stands by.", int(leading.leads()))
        yield self._counter("manager_takeovers", "Times that this manager became the leader.", leading.takeovers)
        yield self._gauge("pinned_prefixes", "Prefixes that operators pinned.", len(self._attachments.manager.pins))
        yield self._counter("sessions", "Sessions that were opened.", counts.opened)
        yield self._counter("sessions_refused", "Attaches that were refused.", counts.refused)
        yield self._counter("quarantines", "Sessions that broke the protocol and were ended.", counts.quarantined)

    def _index(self) -> Iterable[Metric]:
        publisher = self._attachments.index.publisher
        if publisher is None:
            return
        counts = publisher.counts
        yield self._gauge("index_queue", "Hashes whose change is not in the prefix index yet.", publisher.behind)
        elsewhere = "Workers that are attached here while another group publishes them."
        yield self._gauge("index_elsewhere", elsewhere, publisher.elsewhere)
        yield self._gauge("index_reachable", "Whether Redis took the last write.", int(publisher.reachable))
        yield self._counter("index_calls", "Calls that changed the prefix index.", counts.calls)
        yield self._counter("index_added", "Hashes written to the prefix index.", counts.added)
        yield self._counter("index_removed", "Hashes removed from the prefix index.", counts.removed)
        yield self._counter("index_republished", "Times that a worker's whole cache was published.", counts.republished)
        yield self._counter("index_outages", "Times that the prefix index could not be reached.", counts.outages)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._labelled(GaugeMetricFamily(f"quire:{name}", text, labels=("group",)), value)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._labelled(CounterMetricFamily(f"quire:{name}", text, labels=("group",)), value)

    def _labelled(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric((self._group,), value)
        return family


def _pool_gauges(pools: dict[str, PoolCounts]) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        "quire:kv_blocks",
        "Blocks, or pages where layers are groups, by what they are used for.",
        labels=("worker", "state"),
    )
    usage = GaugeMetricFamily(
        "quire:kv_cache_usage_perc", "Share of blocks in block tables or leased.", labels=("worker",)
    )
    retained = GaugeMetricFamily(
        "quire:kv_retained_blocks", "Cached blocks that a request retains: they leave last.", labels=("worker",)
    )
    kept = GaugeMetricFamily(
        "quire:kv_kept_pinned_blocks",
        "Cached blocks that an operator pinned: they leave last.",
        labels=("worker",),
    )
    groups = GaugeMetricFamily(
        "quire:kv_group_blocks",
        "Blocks of a group of layers, by what they are used for.",
        labels=("worker", "layers", "state"),
    )
    frames = GaugeMetricFamily(
        "quire:kv_host_frames",
        "Frames of host memory, room for a block each (a page where layers are groups), by what they are used for.",
        labels=("worker", "state"),
    )
    saved = GaugeMetricFamily(
        "quire:kv_disk_frames",
        "Frames on disk, room for a block each, by what they are used for; none once the disk is given up.",
        labels=("worker", "state"),
    )
    running = GaugeMetricFamily("quire:num_requests_running", "Sequences that hold a block table.", labels=("worker",))
    waiting = GaugeMetricFamily("quire:num_requests_waiting", "Sequences that wait.", labels=("worker", "reason"))
    for worker, pool in pools.items():
        for state in _STATES:
            blocks.add_metric((worker, state), getattr(pool, state))
        usage.add_metric((worker,), (pool.in_use + pool.leased + pool.pinned) / pool.num_blocks)
        retained.add_metric((worker,), pool.retained)
        kept.add_metric((worker,), pool.kept_pinned)
        for each in pool.groups:
            groups.add_metric((worker, _layers(each.group), "in_use"), each.in_use)
            groups.add_metric((worker, _layers(each.group), "cached"), each.cached)
        frames.add_metric((worker, "held"), pool.host_held)
        frames.add_metric((worker, "free"), pool.host_frames - pool.host_held)
        saved.add_metric((worker, "held"), pool.disk_held)
        saved.add_metric((worker, "free"), pool.disk_frames - pool.disk_held)
        running.add_metric((worker,), pool.running)
        waiting.add_metric((worker, "capacity"), pool.capacity)
        waiting.add_metric((worker, "deferred"), pool.deferred)
        waiting.add_metric((worker, "fetching"), pool.fetching)
    yield from (blocks, usage, retained, kept, groups, frames, saved, running, waiting)


def _layers(group: KvGroup) -> str:
    """Return the name of a group of layers: full, window of 128."""
    return f"{group.kind.value} of {group.span}" if group.span else group.kind.value


def _came_ahead(accounts: dict[str, Totals]) -> Metric:
    came = CounterMetricFamily(
        "quire:kv_ahead_loaded",
        "Blocks that came to host memory ahead of need, by who wanted them.",
        labels=("worker", "class"),
    )
    for worker, totals in accounts.items():
        for kind in AheadKind:
            came.add_metric((worker, kind.value), totals.ahead_loads.get(kind.value, 0))
    return came


def _value(totals: Totals, name: str, block_size: int) -> int:
    if name in _BLOCK_FIELDS:
        return int(getattr(totals, _BLOCK_FIELDS[name])) * block_size
    return int(getattr(totals, _FIELDS.get(name, name)))


def _totals(accounts: dict[str, Totals], block_size: int) -> Iterator[Metric]:
    for name, text in _TOTALS.items():
        family = CounterMetricFamily(f"quire:{name}", text, labels=("worker",))
        for worker, totals in accounts.items():
            family.add_metric((worker,), _value(totals, name, block_size))
        yield family
    reasons = CounterMetricFamily(
        "quire:prefix_cache_admissions", "Admissions by why no more was cached.", labels=("worker", "miss_reason")
    )
    for worker, totals in accounts.items():
        for reason, count in totals.misses_by_reason.items():
            reasons.add_metric((worker, reason), count)
    yield reasons
    copied = CounterMetricFamily(
        "quire:kv_host_blocks",
        "Blocks that were copied to host memory, and back.",
        labels=("worker", "direction"),
    )
    for worker, totals in accounts.items():
        for direction, name in _HOST_COPIES.items():
            copied.add_metric((worker, direction), getattr(totals, name))
    yield copied
    ends = CounterMetricFamily(
        "quire:kv_transfer_ends",
        "Transfers of single blocks, to disk, from there and from other workers, by how they ended.",
        labels=("worker", "end"),
    )
    for worker, totals in accounts.items():
        for end in TransferEnd:
            ends.add_metric((worker, end.name.lower()), totals.transfer_ends.get(end.name, 0))
    yield ends
    yield _came_ahead(accounts)
