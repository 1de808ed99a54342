"""The page's parts, put together: a history that is always kept, and the sources of its data."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from common.contracts.clock import Clock
from router.api.grpc.decision_servicer import DecisionServicer
from router.api.grpc.manager_calls import ManagerCalls
from router.api.grpc.servicer import Routers
from router.api.page import records, routing
from router.api.page.answers import Source
from router.api.page.blocks import Blocks, block_asked, map_asked
from router.api.page.history import Buckets, History, Sample, slots
from router.api.page.overview import Overview, running_of, waiting_of
from router.api.page.records import Records
from router.api.page.requests import Requests, most_of, name_of
from router.api.page.routing import Routing
from router.api.page.site import Site
from router.observe.metrics import RouterMetrics
from router.observe.status import RouterStatus
from router.requests.frontend import RouterFrontend


class Sampler:
    """Reads what the history keeps: some 0.1 ms every two seconds."""

    def __init__(self, metrics: RouterMetrics, frontend: RouterFrontend, status: RouterStatus) -> None:
        self._metrics, self._frontend, self._status = metrics, frontend, status

    def take(self, now: float) -> Sample:
        model = self._status.model()
        loads = self._status.loads()
        held = slots(self._frontend.lengths(), model.identity.block_size, model.max_model_len)
        return Sample(
            at=now,
            tokens=total_of(self._metrics.generation_tokens),
            first_token=buckets_of(self._metrics.time_to_first_token),
            gap=buckets_of(self._metrics.inter_token_latency),
            running=running_of(loads),
            waiting=waiting_of(loads, loads.queued_requests),
            **held._asdict(),
        )


def total_of(counter: Counter) -> float:
    """Return the value of a counter, of all tenants together."""
    (metric,) = counter.collect()
    return sum(each.value for each in metric.samples if each.name.endswith("_total"))


def buckets_of(histogram: Histogram) -> Buckets:
    """Return bounds and counts of a histogram, of all tenants together."""
    (metric,) = histogram.collect()
    counts: dict[float, float] = {}
    for each in metric.samples:
        if "le" in each.labels:
            bound = float(each.labels["le"])
            counts[bound] = counts.get(bound, 0.0) + each.value
    return tuple(counts.items())


def history_of(sampler: Sampler, clock: Clock) -> History:
    return History(lambda: sampler.take(clock.time_ns() / 1e9))


def site_of(
    decisions: DecisionServicer,
    manager: ManagerCalls,
    status: RouterStatus,
    routers: Routers,
    history: History,
    clock: Clock,
    from_elsewhere: bool,
) -> Site:
    """Return the page; other machines may read it if `from_elsewhere`."""
    listed = Records(decisions, manager)
    requests, blocks = Requests(listed, decisions), Blocks(manager)
    overview = Overview(status, routers, manager, requests, history)
    sources = {
        "overview": Source(overview.answer),
        "decisions": Source(listed.answer, records.PARAMETERS, records.asked),
        "requests": Source(requests.listed, frozenset(("limit",)), most_of),
        "request": Source(requests.one, frozenset(("id",)), name_of),
        "routing": Source(Routing(listed, requests).answer, frozenset(("limit", "worker")), routing.asked),
        "blocks": Source(blocks.map, frozenset(("worker", "first", "limit", "sequence")), map_asked),
        "block": Source(blocks.one, frozenset(("worker", "block")), block_asked),
    }
    return Site(sources, clock, from_elsewhere)
