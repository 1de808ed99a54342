"""What happens with many workers: the cost of a decision, herding of routers, reports, prefix index, shared load.

    python -m bench.scale --workers 10 100 1000 --routers 1 2 8 --json

A decision is one of a real dispatcher over made-up loads: of workers with room, and of full ones, where a request waits
and each heartbeat tries it again. The rest is replayed in virtual time: requests of 64 + 64 tokens, 50 a second for
each worker, of which every second begins with one of many prefixes. Bytes of the index are measured in a real Redis.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, cast

from redis.asyncio import Redis

from bench.lib.harness import parser, progress, report
from cli.replay.figures import figures_of
from cli.replay.notices import Sharing
from cli.replay.router import ReplayIndex, ReplayRouter
from cli.replay.simulation import Replay, ReplayOptions, replay
from cli.replay.trace import Arrival, Trace
from cli.replay.worker import ReplayWorker
from common.contracts.clock import Clock, ManualClock, SystemClock
from common.contracts.types import BlockHash, Decision, KvGeometry, PoolIdentity
from common.process.local_redis import redis_at
from kvmanager.contracts.index_events import Stored
from kvmanager.contracts.ports import IndexCall, WorkerEntry
from kvmanager.index.store import RedisIndexStore
from router.placement.fair_queue import ONE_FLOW
from router.placement.placement_request import PlacementRequest
from router.placement.routing import Router
from router.placement.shared_load import SharedLoad
from router.placement.worker_model import Capacity, Load, WorkerModel
from router.requests.dispatcher import Job
from router.workers.load_sharing import EXCHANGE_S, LoadSharing, load_key

PROMPT, OUTPUT, SHARED_BLOCKS = 64, 64, 3
_CAPACITY: Final = Capacity(4096, 16, 256, 1 << 20)
_IDENTITY: Final = PoolIdentity("scale", "none", 16, KvGeometry(1, 1, 1, 1, "float32"))
_SHARING_IDENTITY: Final = replace(_IDENTITY, tokenizer_fingerprint="scale", arithmetic="scale", pooling="none")
_SHARING_ROUTERS: Final = 8
_CALL: Final = 256
_UNNUMBERED: Final = re.compile(r"_\d+")
_PREFIX: Final = [BlockHash(bytes([number] * 16)) for number in range(1, 4)]
_NOTES: Final = {
    "decision_us": "a request placed and its slot released, workers with room",
    "prefix_us": "the same for a prompt that two workers have, where no worker fetches",
    "fetch_us": "the same where all fetch: each one that is priced has a fetch to price",
    "fetch_ratio": "fetch_us over prefix_us, measured in turns",
    "full_us": "a request that waits tried again while all workers are full, as at each end of another",
    "heartbeat_us": "a heartbeat of a full worker while a request waits",
    "requests_per_s": "replayed a second of CPU time",
    "ttft_p50_ms": "virtual",
    "ttft_p99_ms": "virtual",
    "p99_ratio_routers": "of ttft_p99_ms, over that of one router",
    "busiest": "requests of the worker with the most, over the mean",
    "hit_share": "prompt tokens from the cache",
    "reports_per_s": "to the KV manager, a virtual second",
    "index_changes_per_s": "blocks published or withdrawn, a virtual second",
    "index_entries": "at the end",
    "peak_mib": "of this process, until then",
    "share_router_us": "of a router's CPU for each of its placements, to tell of it and to hear 7 other routers",
    "share_redis_us": "of Redis' CPU for each placement, told to 7 other routers",
    "share_call_us": "of a router's CPU for a call, which tells 60 workers and hears 420",
    "share_call_redis_us": "of Redis' CPU for such a call",
    "share_stream_kib": "of Redis' memory for the stream",
    "index_bytes": "of Redis' memory for an entry with one holder",
    "index_write_us": "of a Redis core for an entry, in calls of 256",
}


class _Nowhere:
    """Takes decisions and keeps none."""

    def record(self, decision: Decision) -> None:
        pass


def arrivals(workers: int, requests: int, rate: float, seed: int = 0) -> Trace:
    """Return Poisson arrivals, `rate` a second and worker; every second request begins with a prefix of its group."""
    rng, at, found = random.Random(seed), 0.0, []
    groups = 2 * workers
    for number in range(requests):
        at += rng.expovariate(rate * workers)
        first = SHARED_BLOCKS * rng.randrange(groups)
        found.append(Arrival(at, PROMPT, OUTPUT, tuple(range(first, first + SHARED_BLOCKS)) if number % 2 else ()))
    return Trace(tuple(found), 16)


# ---------------------------------------------------------------- one decision


def _router(workers: int, load: Load, fetches: bool = False, clock: Clock | None = None) -> ReplayRouter:
    clock, ids, index = clock or SystemClock(), itertools.count(), ReplayIndex()
    chooser = Router(clock, lambda: f"d{next(ids)}", 0)
    router = ReplayRouter(_IDENTITY, chooser, index, _Nowhere(), clock, 1 << 20)
    capacity = replace(_CAPACITY, fetches_blocks=fetches)
    for number in range(workers):
        worker = cast("ReplayWorker", _Named(f"worker-{number}"))
        router.pool.add(worker, capacity, clock.monotonic())
        router.pool.heartbeat(worker.worker_id, load, clock.monotonic())
    for name in ("worker-0", "worker-1"):
        index.apply(name, [Stored(depth, key, depth) for depth, key in enumerate(_PREFIX)])
    return router


class _Named:
    """A worker that runs nothing."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id


def _job(number: int, hashes: Sequence[BlockHash] = ()) -> Job:
    return Job(PlacementRequest(f"r{number}", PROMPT, PROMPT + OUTPUT, OUTPUT), hashes, 0, None)


async def decision_us(workers: int, times: int) -> float:
    """Return the median of CPU microseconds from a request to its placement and release, workers with room."""
    load = Load(running=20, unheld_blocks=3000, steps=1, decode_step_seconds=0.01)
    router, found = _router(workers, load), list[int]()
    for number in range(times):
        began = time.thread_time_ns()
        placement = await router.dispatcher.place_job(_job(number), router.dispatcher.ticket(0, ONE_FLOW))
        placement.reservations[0].release()
        found.append(time.thread_time_ns() - began)
    return statistics.median(found) / 1e3


async def fetch_us(workers: int, times: int) -> tuple[float, float]:
    """Return the same of prompts that two workers have, where none fetches, and where all do; measured in turns."""
    load = Load(running=20, unheld_blocks=3000, steps=1, decode_step_seconds=0.01, prefill_seconds_per_token=1e-3)
    # Time stands still, so that no heartbeat is late on a busy machine.
    routers = [_router(workers, load, fetches, ManualClock()) for fetches in (False, True)]
    found: tuple[list[int], list[int]] = ([], [])
    for number in range(times):
        for router, spent in zip(routers, found, strict=True):
            began = time.thread_time_ns()
            ticket = router.dispatcher.ticket(0, ONE_FLOW)
            placement = await router.dispatcher.place_job(_job(number, _PREFIX), ticket)
            placement.reservations[0].release()
            spent.append(time.thread_time_ns() - began)
    return statistics.median(found[0]) / 1e3, statistics.median(found[1]) / 1e3


async def full_us(workers: int, times: int) -> tuple[float, float]:
    """Return the medians of CPU microseconds while a request waits: of an attempt to place it, and of a heartbeat."""
    load = Load(running=256, waiting=768, steps=1, decode_step_seconds=0.01)
    router, tries, beats = _router(workers, load), list[int](), list[int]()
    waits = asyncio.create_task(router.dispatcher.place_job(_job(0), router.dispatcher.ticket(0, ONE_FLOW)))
    await asyncio.sleep(0)
    for number in range(times):
        began = time.thread_time_ns()
        router.dispatcher.capacity_changed()
        tried = time.thread_time_ns()
        router.pool.heartbeat(f"worker-{number % workers}", load, time.monotonic())
        tries.append(tried - began)
        beats.append(time.thread_time_ns() - tried)
    assert not waits.done(), "the request was placed"
    waits.cancel()
    await asyncio.gather(waits, return_exceptions=True)
    return statistics.median(tries) / 1e3, statistics.median(beats) / 1e3


# ---------------------------------------------------------------- a replay


def replayed(workers: int, routers: int, requests: int, rate: float, sharing: Sharing | None) -> dict[str, float]:
    """Replay made-up arrivals and return the figures of a level."""
    trace = arrivals(workers, requests, rate)
    began = time.process_time()
    found = replay(trace, ReplayOptions(workers=workers, routers=routers, sharing=sharing))
    took, figures = time.process_time() - began, figures_of(found)
    return {
        "requests_per_s": requests / took,
        "ttft_p50_ms": 1000 * figures["ttft_p50_s"],
        "ttft_p99_ms": 1000 * figures["ttft_p99_s"],
        "busiest": _busiest(found) * workers,
        "hit_share": figures["hit_share"],
        "reports_per_s": found.reports / found.seconds,
        "index_changes_per_s": found.index_changes / found.seconds,
        "index_entries": found.index_entries,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _busiest(found: Replay) -> float:
    """Return the share of the worker with the most requests."""
    counts = Counter(each.worker for each in found.requests if not each.refused)
    return max(counts.values()) / counts.total()


# ---------------------------------------------------------------- Redis


async def index_costs(entries: int) -> tuple[float, float]:
    """Return the bytes of an entry in Redis, and the microseconds of its CPU that writing one takes."""
    with redis_at(None) as url:
        redis = Redis.from_url(url)
        store = RedisIndexStore(redis, _IDENTITY.namespace, 3600.0, 60.0)
        epoch = await store.acquire(1, 0)
        slot = await store.register(epoch, WorkerEntry("worker-0", "aa" * 16, "127.0.0.1:1", 7))
        assert isinstance(slot, int)
        before = await _state(redis)
        rng = random.Random(0)
        for _ in range(0, entries, _CALL):
            added = [BlockHash(rng.randbytes(16)) for _ in range(_CALL)]
            await store.update(epoch, slot, 7, IndexCall(adds=tuple(added)))
        after = await _state(redis)
        await redis.aclose()
    written = -(-entries // _CALL) * _CALL
    return (after[0] - before[0]) / written, 1e6 * (after[1] - before[1]) / written


async def sharing_costs(routers: int, calls: int) -> dict[str, float]:
    """Return what routers take that tell each other of their load at 1,000 workers, while each places 2,000 a second.

    In the 10 ms from one call to the next each places 20 requests, 20 first tokens come, and 20 sequences leave.
    """
    rng, clock, each = random.Random(0), ManualClock(), round(2000 * EXCHANGE_S)
    with redis_at(None) as url:
        redis, pool = Redis.from_url(url), _KnownPool()
        sides = [SharedLoad(bytes([number] * 8)) for number in range(routers)]
        shares = [[side.join(f"worker-{number}", b"") for number in range(1000)] for side in sides]
        told = [LoadSharing(redis, pool, side, clock) for side in sides]
        router_s, before = 0.0, 0.0
        for number in range(calls + 1):
            if number == 1:  # the first call of each makes a connection
                router_s, before = 0.0, (await _state(redis))[1]
            clock.advance(EXCHANGE_S)
            for sharing, workers in zip(told, shares, strict=True):
                for share in rng.sample(workers, 3 * each):
                    share.set_own(rng.randrange(1, 20), rng.randrange(1000))
                began = time.thread_time()
                await sharing.exchange()
                router_s += time.thread_time() - began
        cpu = (await _state(redis))[1]
        kept = await redis.memory_usage(load_key(_SHARING_IDENTITY.namespace))
        await redis.aclose()
    made = calls * routers
    return {
        "share_router_us": 1e6 * router_s / made / each,
        "share_redis_us": 1e6 * (cpu - before) / made / each,
        "share_call_us": 1e6 * router_s / made,
        "share_call_redis_us": 1e6 * (cpu - before) / made,
        "share_stream_kib": (kept or 0) / 1024,
    }


class _KnownPool:
    """A pool whose identity is known."""

    identity = _SHARING_IDENTITY

    def models(self) -> Sequence[WorkerModel]:
        return ()


async def _state(redis: Redis) -> tuple[float, float]:
    """Return the memory in bytes and the CPU seconds of a Redis."""
    found = await redis.info()
    return float(found["used_memory"]), float(found["used_cpu_user"]) + float(found["used_cpu_sys"])


def main(argv: Sequence[str] | None = None) -> int:
    flags = parser(__doc__)
    flags.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000], help="numbers of workers")
    flags.add_argument("--routers", type=int, nargs="+", default=[1, 2, 8], help="numbers of routers")
    flags.add_argument("--requests", type=int, default=0, help="of a replay (default: 100 for each worker)")
    flags.add_argument("--rate", type=float, default=50.0, help="requests a second and worker")
    flags.add_argument("--apart", action="store_true", help="several routers tell each other nothing of their load")
    flags.add_argument("--decisions", type=int, default=200, help="measured decisions")
    flags.add_argument("--entries", type=int, default=100_000, help="entries written to Redis; 0: nothing there")
    args = flags.parse_args(argv)
    figures, sharing = dict[str, float](), None if args.apart else Sharing()
    for workers in args.workers:
        figures[f"decision_us_{workers}"] = asyncio.run(decision_us(workers, args.decisions))
        plain, fetching = asyncio.run(fetch_us(workers, args.decisions))
        figures |= {f"prefix_us_{workers}": plain, f"fetch_us_{workers}": fetching}
        figures[f"fetch_ratio_{workers}"] = fetching / plain
        figures[f"full_us_{workers}"], figures[f"heartbeat_us_{workers}"] = asyncio.run(
            full_us(workers, args.decisions)
        )
        for routers in args.routers:
            progress(f"{workers} workers, {routers} routers")
            level = replayed(workers, routers, args.requests or 100 * workers, args.rate, sharing)
            figures |= {f"{name}_{workers}_{routers}": value for name, value in level.items()}
            alone = figures.get(f"ttft_p99_ms_{workers}_1")
            if alone and routers > 1:
                figures[f"p99_ratio_{routers}_routers_{workers}"] = level["ttft_p99_ms"] / alone
    if args.entries:
        figures["index_bytes"], figures["index_write_us"] = asyncio.run(index_costs(args.entries))
        figures |= asyncio.run(sharing_costs(_SHARING_ROUTERS, args.decisions))
    notes = {name: _NOTES[_UNNUMBERED.sub("", name)] for name in figures}
    report("scale", figures, notes, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
