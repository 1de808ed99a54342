"""The router's Prometheus metrics, named in vLLM's manner."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.samples import Exemplar

from common.errors import Cancelled, DeadlineExceeded, EngineFailure, Overloaded, QuireError, RateLimited, Unavailable
from common.types import FinishReason
from router.core.diagnosis.outcome import Outcome, Phase
from router.core.events import Finished
from router.core.tail_rules import Rule

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# Outcomes of a lookup in the prefix index: an answer, a part of it in time, none, or skipped after many failures.
LOOKUPS = ("answered", "cut", "failed", "skipped")
# The phases before a request has blocks.
_QUEUE = (Phase.READING, Phase.QUEUE, Phase.LOOKUP, Phase.CONSTRAINT, Phase.BLOCKS, Phase.MANAGER_AWAY)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000, 100_000)


class RouterMetrics:
    """Figures of requests as clients see them. Times are in seconds.

    A trace id beside a time is an exemplar: it leads from a bar of the histogram to the trace of one request.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.requests = self._counter("requests", "requests that asked to be served, refused ones too")
        self.prompt_tokens = self._counter("prompt_tokens", "prompt tokens of admitted requests")
        self.cached_tokens = self._counter("prompt_tokens_cached", "prompt tokens that the prefix cache served")
        self.generation_tokens = self._counter("generation_tokens", "output tokens sent to clients")
        self.finished = Counter(
            "quire:request_success", "sequences that ended by themselves", ["finished_reason"], registry=registry
        )
        self.failed = Counter("quire:request_failure", "requests that failed", ["reason"], registry=registry)
        self._lookups = Counter(
            "quire:prefix_lookups", "lookups in the prefix index by outcome", ["outcome"], registry=registry
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
        self._begin_at_zero()
        self.migrations = self._counter("migrations", "sequences that went on at another worker")
        self.resumed = self._counter("requests_resumed", "requests of another router that went on at this one")
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "arrival to first token", _SECONDS)
        self.inter_token_latency = self._histogram("inter_token_latency_seconds", "gap between outputs", _SECONDS)
        self.queue_time = self._histogram("request_queue_time_seconds", "arrival to blocks granted", _SECONDS)
        self.latency = self._histogram("e2e_request_latency_seconds", "arrival to end of the sequence", _SECONDS)
        self.routing = self._histogram("routing_seconds", "prefix lookup and wait for a worker", _SECONDS)
        self.request_prompt = self._histogram("request_prompt_tokens", "prompt tokens a request", _TOKENS)
        self.request_generation = self._histogram("request_generation_tokens", "output tokens a sequence", _TOKENS)

    def _begin_at_zero(self) -> None:
        """Expose every label from the start: a rate misses the event with which a counter first appears."""
        for reason in FinishReason:
            self.finished.labels(reason.value)
        for error in (Overloaded, RateLimited, Unavailable, DeadlineExceeded, Cancelled, EngineFailure, QuireError):
            self.failed.labels(error.reason)
        for outcome in LOOKUPS:
            self._lookups.labels(outcome)
        for rule in Rule:
            self.kept.labels(rule.value)
            self.left_out.labels(rule.value)

    def watch(self, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Read these gauges whenever metrics are exposed."""
        self._gauge("num_requests_running", "requests that a worker has").set_function(running)
        self._gauge("num_requests_waiting", "requests that wait for a worker").set_function(waiting)

    def watch_workers(self, connected: Callable[[], float], index_connected: Callable[[], float]) -> None:
        """Read these gauges whenever metrics are exposed."""
        self._gauge("workers_connected", "workers with an open stream").set_function(connected)
        self._gauge("prefix_index_connected", "1 while Redis answers, asked every second").set_function(index_connected)

    def looked_up(self, outcome: str) -> None:
        """Count a lookup in the prefix index; `outcome` is one of LOOKUPS."""
        self._lookups.labels(outcome).inc()

    def first_token(self, seconds: float, trace_id: str) -> None:
        """Count the first token of a sequence; `trace_id` is "" where the request is not traced."""
        self.time_to_first_token.observe(seconds, _exemplar(trace_id))

    def done(self, event: Finished, trace_id: str) -> None:
        """Count the end of one sequence; `trace_id` as for `first_token`."""
        self.finished.labels(event.reason.value).inc()
        self.latency.observe(event.timings.total_seconds, _exemplar(trace_id))
        self.request_generation.observe(event.usage.output_tokens)

    def blocks_granted(self, seconds: float, trace_id: str) -> None:
        """Count the wait of a request for a worker and blocks; `trace_id` as for `first_token`."""
        self.queue_time.observe(seconds, _exemplar(trace_id))

    def traced(self, outcome: Outcome, trace_id: str, sampled: bool) -> None:
        """Let the times of a request that has ended point at its trace.

        A sampled one is known from its beginning: then only its longest gap is still to be named.
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
        self.failed.labels(error.reason).inc()

    def _counter(self, name: str, help_: str) -> Counter:
        return Counter(f"quire:{name}", help_, registry=self._registry)

    def _gauge(self, name: str, help_: str) -> Gauge:
        return Gauge(f"quire:{name}", help_, registry=self._registry)

    def _histogram(self, name: str, help_: str, buckets: tuple[float, ...]) -> TracedHistogram:
        return TracedHistogram(f"quire:{name}", help_, buckets=buckets, registry=self._registry)


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
