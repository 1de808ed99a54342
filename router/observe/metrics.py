"""The router's Prometheus metrics, named in vLLM's manner."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from common.contracts.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailure,
    Overloaded,
    QuireError,
    RateLimited,
    Unavailable,
)
from common.contracts.types import FinishReason
from router.contracts.events import Finished
from router.contracts.ports import KnownPool, RedisState
from router.observe.diagnosis.outcome import Outcome, Phase
from router.observe.gen_ai import ServerMetrics
from router.observe.tail_rules import Rule

M = TypeVar("M", Counter, "TracedHistogram")

# The label of tenants beyond those that are named; a tenant of this name counts as one of them.
OTHER: Final = "other"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# Outcomes of a lookup in the prefix index: an answer, a part of it in time, none, or skipped after many failures.
LOOKUPS = ("answered", "cut", "failed", "skipped")
# What became of notices by which routers tell each other of their load.
NOTICES = ("sent", "taken", "refused", "failed")
# The phases before a request has blocks.
_QUEUE = (Phase.READING, Phase.QUEUE, Phase.LOOKUP, Phase.CONSTRAINT, Phase.BLOCKS, Phase.FETCH, Phase.MANAGER_AWAY)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000, 100_000)


class RouterMetrics:
    """Figures of the router. Those of requests, as clients see them, have the name of the model.

    `tenants` of them are named beside it: the first ones that come, while the others are `other`. With 0 no figure has
    that label. Times are in seconds. Those by OpenTelemetry's names are `of_server`, with other names of the model too.
    """

    def __init__(
        self, registry: CollectorRegistry, model: str = "", tenants: int = 0, aliases: Collection[str] = ()
    ) -> None:
        self._registry, self._most = registry, tenants
        self._of_requests = CollectorRegistry()
        registry.register(_OfModel(self._of_requests, model))
        self._tenant: tuple[str, ...] = ("tenant",) if tenants else ()
        self.requests = self._counter("requests", "requests that asked to be served, refused ones too")
        self.prompt_tokens = self._counter("prompt_tokens", "prompt tokens of admitted requests")
        self.cached_tokens = self._counter("prompt_tokens_cached", "prompt tokens that the prefix cache served")
        self.generation_tokens = self._counter("generation_tokens", "output tokens sent to clients")
        self.finished = self._counter("request_success", "sequences that ended by themselves", "finished_reason")
        self.failed = self._counter("request_failure", "requests that failed", "reason")
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "arrival to first token", _SECONDS)
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "time between two outputs of a sequence", _SECONDS
        )
        self.queue_time = self._histogram("request_queue_time_seconds", "arrival to blocks granted", _SECONDS)
        self.latency = self._histogram("e2e_request_latency_seconds", "arrival to end of the sequence", _SECONDS)
        self.request_prompt = self._histogram("request_prompt_tokens", "prompt tokens a request", _TOKENS)
        self.request_generation = self._histogram("request_generation_tokens", "output tokens a sequence", _TOKENS)
        self._tenant = ()
        self.migrations = self._counter("migrations", "sequences that went on at another worker")
        self.resumed = self._counter("requests_resumed", "requests of another router that went on at this one")
        self.routing = self._histogram("routing_seconds", "prefix lookup and wait for a worker", _SECONDS)
        self._lookups = Counter(
            "quire:prefix_lookups", "lookups in the prefix index by outcome", ["outcome"], registry=registry
        )
        self._notices = Counter(
            "quire:load_notices", "notices of load between routers by outcome", ["outcome"], registry=registry
        )
        self.kept = Counter(
            "quire:kept_requests", "requests that a tail rule keeps for `quire why`", ["rule"], registry=registry
        )
        self.left_out = Counter(
            "quire:kept_requests_left_out", "requests beyond the rate of their tail rule", ["rule"], registry=registry
        )
        self.refusals = Counter(
            "quire:refusals", "answers with an error", ["api", "method", "code", "reason"], registry=registry
        )
        self._by_tenant: dict[str, RequestMetrics] = {}
        self._named = 0
        self.of_server = ServerMetrics(registry, model, aliases)
        self._begin_at_zero()

    def of(self, tenant: str) -> RequestMetrics:
        """Return the figures of the requests of a tenant; "" where no key tells callers apart."""
        name = tenant if self._most else ""
        found = self._by_tenant.get(name)
        if found is None:
            if name not in ("", OTHER) and self._named == self._most:
                return self.of(OTHER)
            self._named += name not in ("", OTHER)
            found = self._by_tenant[name] = RequestMetrics(self, (name,) if self._most else ())
        return found

    def _begin_at_zero(self) -> None:
        """Expose every label from the start: a rate misses the event with which a counter first appears."""
        self.of("")
        for outcome in LOOKUPS:
            self._lookups.labels(outcome)
        for outcome in NOTICES:
            self._notices.labels(outcome)
        for rule in Rule:
            self.kept.labels(rule.value)
            self.left_out.labels(rule.value)

    def watch(self, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Read these gauges whenever metrics are exposed."""
        for name, help_, read in (
            ("num_requests_running", "requests that a worker has", running),
            ("num_requests_waiting", "requests that wait for a worker", waiting),
        ):
            Gauge(f"quire:{name}", help_, registry=self._of_requests).set_function(read)

    def watch_workers(self, pool: KnownPool, redis: RedisState) -> None:
        """Read these gauges whenever metrics are exposed."""
        for name, help_, read in (
            ("workers_connected", "workers with an open stream", lambda: len(pool.models())),
            ("prefix_index_connected", "1 while Redis answers, asked every second", lambda: redis.connected),
        ):
            Gauge(f"quire:{name}", help_, registry=self._registry).set_function(read)

    def watch_others(self, others: Callable[[], int]) -> None:
        """Read this gauge whenever metrics are exposed."""
        gauge = Gauge("quire:other_routers", "other routers that tell this one of their load", registry=self._registry)
        gauge.set_function(others)

    def noticed(self, outcome: str) -> None:
        """Count a notice of load; `outcome` is one of NOTICES."""
        self._notices.labels(outcome).inc()

    def looked_up(self, outcome: str) -> None:
        """Count a lookup in the prefix index; `outcome` is one of LOOKUPS."""
        self._lookups.labels(outcome).inc()

    def _counter(self, name: str, help_: str, *labels: str) -> Counter:
        return Counter(f"quire:{name}", help_, (*labels, *self._tenant), registry=self._of_requests)

    def _histogram(self, name: str, help_: str, buckets: tuple[float, ...]) -> TracedHistogram:
        registry = self._of_requests
        return TracedHistogram(f"quire:{name}", help_, self._tenant, buckets=buckets, registry=registry)


class RequestMetrics:
    """Figures of the requests of one tenant, or of all where metrics name no tenant.

    A trace id beside a time is an exemplar: it leads from a bar of the histogram to the trace of one request.
    """

    def __init__(self, whole: RouterMetrics, tenant: tuple[str, ...]) -> None:
        self._whole, self._tenant = whole, tenant
        self.requests = self._own(whole.requests)
        self.prompt_tokens = self._own(whole.prompt_tokens)
        self.cached_tokens = self._own(whole.cached_tokens)
        self.generation_tokens = self._own(whole.generation_tokens)
        self.time_to_first_token = self._own(whole.time_to_first_token)
        self.inter_token_latency = self._own(whole.inter_token_latency)
        self.queue_time = self._own(whole.queue_time)
        self.latency = self._own(whole.latency)
        self.request_prompt = self._own(whole.request_prompt)
        self.request_generation = self._own(whole.request_generation)
        for reason in FinishReason:
            whole.finished.labels(reason.value, *tenant)
        for error in (Overloaded, RateLimited, Unavailable, DeadlineExceeded, Cancelled, EngineFailure, QuireError):
            whole.failed.labels(error.reason, *tenant)

    def _own(self, metric: M) -> M:
        return metric.labels(*self._tenant) if self._tenant else metric

    def first_token(self, seconds: float, trace_id: str) -> None:
        """Count the first token of a sequence; `trace_id` is "" where the request is not traced."""
        self.time_to_first_token.observe(seconds, _exemplar(trace_id))

    def done(self, event: Finished, trace_id: str) -> None:
        """Count the end of one sequence; `trace_id` as for `first_token`."""
        self._whole.finished.labels(event.reason.value, *self._tenant).inc()
        self.latency.observe(event.timings.total_seconds, _exemplar(trace_id))
        self.request_generation.observe(event.usage.output_tokens)

    def blocks_granted(self, seconds: float, trace_id: str) -> None:
        """Count the wait of a request for a worker and blocks; `trace_id` as for `first_token`."""
        self.queue_time.observe(seconds, _exemplar(trace_id))

    def traced(self, outcome: Outcome, trace_id: str, sampled: bool) -> None:
        """Let the times of a request that has ended point at its trace.

        A sampled one is known from its beginning: then only its longest inter-token latency is still to be named.
        """
        if outcome.longest_gap:
            self.inter_token_latency.point(outcome.longest_gap, trace_id)
        if sampled:
            return
        if outcome.admissions:
            before = dict(outcome.before)
            self.queue_time.point(sum(before.get(phase, 0.0) for phase in _QUEUE), trace_id)
        if outcome.has_first_token:
            self.time_to_first_token.point(outcome.first_token_s, trace_id)
            self.latency.point(outcome.total_s, trace_id)

    def refused(self, error: QuireError) -> None:
        self._whole.failed.labels(error.reason, *self._tenant).inc()


class _OfModel(Collector):
    """Gives each figure of a registry the name of the model; one that is "" is none."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry, self._label = registry, {"model_name": model} if model else {}

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [each._replace(labels={**self._label, **each.labels}) for each in metric.samples]
            yield metric


class TracedHistogram(Histogram):
    """A histogram whose bars may point at a trace later: which requests are kept is known at their end alone."""

    def observe_each(self, value: float, count: int) -> None:
        """Count a value so many times."""
        self._sum.inc(value * count)
        self._buckets[bisect_left(self._upper_bounds, value)].inc(count)

    def point(self, value: float, trace_id: str) -> None:
        """Let the bucket of a value that was observed earlier point at a trace."""
        place = bisect_left(self._upper_bounds, value)
        self._buckets[place].set_exemplar(Exemplar({"trace_id": trace_id}, value, time.time()))


def _exemplar(trace_id: str) -> dict[str, str] | None:
    return {"trace_id": trace_id} if trace_id else None
