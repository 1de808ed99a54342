"""The overview: what the suite does now, its last minutes, the misses, and what reservations would waste."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from common.contracts.errors import QuireError
from common.contracts.types import KvGroup
from common.process.loop_turns import in_steps
from quire.inference.v1 import inference_pb2
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from router.api.grpc.manager_calls import ManagerCalls
from router.api.grpc.servicer import Routers
from router.api.page.history import History, Point
from router.api.page.query import Query
from router.api.page.records import MOST
from router.api.page.requests import Requests, ended_of
from router.observe.diagnosis.outcome import Outcome
from router.observe.pool_words import disk_problems, name_of, pages_of_block, pages_words
from router.observe.status import RouterStatus

Json = dict[str, Any]
# Reasons of the manager after which nothing more could have been cached.
_NO_MISS: Final = frozenset({"", "full_hit", "capped"})
_SLOWEST: Final = 8


class Overview:
    def __init__(
        self, status: RouterStatus, routers: Routers, manager: ManagerCalls, requests: Requests, history: History
    ) -> None:
        self._status, self._routers, self._manager = status, routers, manager
        self._requests, self._history = requests, history

    async def answer(self, query: Query) -> Json:
        status, loads = self._status.status(), self._status.loads()
        await self._routers.add_to(status)
        pools, failure = await self._pools()
        ended = await self._requests.ended(MOST)
        model = self._status.model()
        geometry, block_size = model.identity.kv_geometry, model.identity.block_size
        return {
            "version": status.version,
            "model": model.name,
            "block_size": block_size,
            "block_pages": pages_of_block(geometry),
            "pages": pages_words(geometry, block_size),
            "groups": [_group(each) for each in geometry.groups],
            "running": running_of(loads),
            "waiting": waiting_of(loads, status.queued_requests),
            "troubles": [*troubles(status, failure), *disk_problems(pools.values())],
            "workers": [worker_row(each, pools.get(each.worker_id)) for each in loads.workers],
            "history": columns(await in_steps(lambda each: each, self._history.each_point())),
            "hits": hits(outcome for _, outcome in ended),
            "slowest": [ended_of(*each) for each in slowest(ended)],
        }

    async def _pools(self) -> tuple[dict[str, pb.Pool], str]:
        try:
            found = await self._manager.pools(pb.GetPoolRequest())
        except QuireError as error:
            return {}, str(error).partition("\n")[0]
        silent = ", ".join(found.silent_groups)
        failure = f"no answer from group {silent}" if silent else ""
        return {each.worker_id: each for each in found.pools}, failure


def running_of(loads: inference_pb2.GetLoadsResponse) -> int:
    """Return how many sequences run, as the workers last said."""
    return sum(each.running_sequences for each in loads.workers)


def waiting_of(loads: inference_pb2.GetLoadsResponse, queued: int) -> int:
    """Return how many wait: at the workers for blocks, and those that are queued for a worker."""
    return queued + sum(each.waiting_sequences for each in loads.workers)


def columns(points: Sequence[Point]) -> dict[str, list[float | None]]:
    """Return the points by columns, which charts take."""
    return {name: [getattr(each, name) for each in points] for name in Point.__dataclass_fields__}


def hits(outcomes: Iterable[Outcome]) -> Json:
    """Return how many prompt tokens of requests that got blocks were cached, and why the others were not."""
    served = [each for each in outcomes if each.admissions and each.prompt_tokens]
    missed: Counter[str] = Counter()
    for each in served:
        if each.miss not in _NO_MISS:
            missed[each.miss] += each.prompt_tokens - each.cached_tokens
    return {
        "requests": len(served),
        "prompt_tokens": sum(each.prompt_tokens for each in served),
        "cached_tokens": sum(each.cached_tokens for each in served),
        "missed": [{"reason": reason, "tokens": tokens} for reason, tokens in missed.most_common() if tokens],
    }


def slowest(ended: Sequence[tuple[str, Outcome]]) -> list[tuple[str, Outcome]]:
    """Return the requests with the longest time to the first token."""
    return sorted(ended, key=lambda each: -each[1].first_token_s)[:_SLOWEST]


def troubles(status: inference_pb2.GetStatusResponse, failure: str) -> list[str]:
    """Return in words what is not as it should be."""
    found = [f"the KV manager: {failure}"] if failure else []
    if not status.redis_connected:
        found.append("Redis is not connected: the router goes by load and its own memory")
    if status.draining:
        found.append("this router is draining")
    return found + [f"{each.worker_id or each.address}: {each.reason}" for each in status.workers if each.reason]


def _group(group: KvGroup) -> Json:
    return {"name": name_of(group.kind, group.span), "pages": group.pages, "layers": len(group.layers)}


def worker_row(load: inference_pb2.WorkerLoad, pool: pb.Pool | None) -> Json:
    """Return one worker; without its pool, what the manager does not say is None."""
    row = {
        "worker": load.worker_id or load.address,
        "state": load.state,
        "disaggregation": load.disaggregation,
        "running": load.running_sequences,
        "waiting": load.waiting_sequences,
        "tokens_per_s": load.output_tokens_per_second,
        "blocks": load.num_blocks,
    }
    names = (
        "in_use", "leased", "cached", "free", "preemptions", "evictions",
        "host_frames", "host_held", "host_stores", "host_loads", "host_drops",
        "disk_frames", "disk_held", "disk_closed", "disk_stores", "disk_loads", "disk_lost",
        "unsaved", "fetching", "fetches", "peer_loads", "ahead",
    )  # fmt: skip
    held = [{"in_use": each.in_use, "cached": each.cached} for each in pool.groups] if pool is not None else []
    row |= {"groups": held, "transfer_ends": dict(pool.transfer_ends) if pool is not None else {}}
    row["ahead_loads"] = dict(pool.ahead_loads) if pool is not None else {}
    return row | {name: getattr(pool, name) if pool is not None else None for name in names}
