"""What policies of eviction gain over LRU: five workloads on the pool core of the KV manager, against Belady's limit.

    python -m bench.eviction --seeds 1 2 --json
    python -m bench.eviction --trace conversation_trace.jsonl.gz --token-seconds 0.03
    python -m bench.eviction --sessions --requests 1500 --seeds 1 2 3 4 --json

Nothing is timed but the cost of a block, and no model runs: hit rates are exact for their seeds, on any machine. The
policies were tuned on seed 0. The first quarter of each workload fills the pool and is not counted. A pool of so many
per cent has that share of the working set (`working_set`), and room for the largest request at least.

With `--sessions` sessions retain their blocks for a think time that is learned (`cache_replay/think_times.py`), in all
cases or only while what all of them retain fits their share of the pool. `disturbed` has two of a hundred requests
retained for a second: how far a hit rate strays by chance.

With `--trace` the requests of a recorded trace are served instead, one after the other, or as its arrival times have
them. The policies were not tuned on any.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, get_args

from bench.cache_replay.clairvoyant import Clairvoyant, Uses, uses_of
from bench.cache_replay.replay import Replayed, pool_of, replay
from bench.cache_replay.think_times import retained
from bench.cache_replay.traces import requests_of
from bench.cache_replay.workloads import (
    WORKLOADS,
    CacheRequest,
    agents_and_chats,
    agents_and_scans,
    by_recency,
    working_set,
)
from bench.lib.harness import parser, progress, report
from cli.replay.trace import Trace, read_trace
from common.contracts.errors import InvalidConfig
from common.contracts.lease import LAST_BLOCK, RetainedBlocks
from kvmanager.contracts.ledger_config import DEFAULTS, EvictionName

PARTS: Final = (0.05, 0.2, 0.5)
# Of agents among scans: a tenant retains a part of the pool, and what does not come again takes the rest.
RETENTION_PARTS: Final = (1.0, 2.0, 4.0)
SESSIONS: Final = {
    "slow_tools": (agents_and_scans, RETENTION_PARTS),
    "agents_and_chats": (agents_and_chats, (0.2, 0.5, 1.0)),
}
"""Workloads with sessions, and their pools."""
POLICIES: Final[tuple[EvictionName, ...]] = tuple(get_args(EvictionName))


_RETENTION_NOTES: Final = {
    f"agents_hits_{DEFAULTS.eviction}_retained": "of agents among scans, which retain their blocks for 300 s",
    f"all_hits_{DEFAULTS.eviction}_retained": "of these and all requests beside them",
}


_SESSION_NOTES: Final = {
    "slow_tools_learned_mean": "hits of all requests over those without retention; tasks wait minutes for tools",
    "agents_and_chats_learned_mean": "the same; most requests are of sessions that come back after seconds or minutes",
    "slow_tools_asked_mean": "clients ask for retention themselves, for 300 s",
}


_TRACE_NOTES: Final = {
    "worst_loss_vs_lru": f"{DEFAULTS.eviction}: hits over those of LRU, less 1, in the worst cell",
    "mean_share_of_gain": f"{DEFAULTS.eviction}: (policy - LRU) / (limit - LRU), mean of all cells",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload on one pool: what each policy gave, and the limit."""

    workload: str
    part: float
    policies: dict[str, Replayed]
    limit: Replayed

    def share(self, policy: str) -> float:
        """Return which part of the limit's gain over LRU the policy has."""
        lru = self.policies["lru"].found
        gap = self.limit.found - lru
        return (self.policies[policy].found - lru) / gap if gap else 0.0

    def against_lru(self, policy: str) -> float:
        return self.policies[policy].found / max(1, self.policies["lru"].found)


def measure(workload: str, requests: Sequence[CacheRequest]) -> list[Cell]:
    """Replay one workload under every policy, on a pool of each size."""
    largest = max(len(each.prompt) + len(each.output) for each in requests)
    whole, uses, cells = working_set(requests), uses_of(requests), []
    for part in PARTS:
        blocks = max(largest, round(part * whole))
        policies: dict[str, Replayed] = {policy: replay(pool_of(blocks, policy), requests) for policy in POLICIES}
        cells.append(Cell(workload, part, policies, _limit(blocks, requests, uses)))
        shares = ", ".join(f"{each} {cells[-1].share(each):.2f}" for each in POLICIES[1:])
        progress(f"{workload}, {part:.0%} of {whole} blocks: {shares}", end=True)
    return cells


def _limit(blocks: int, requests: Sequence[CacheRequest], uses: Uses) -> Replayed:
    state = pool_of(blocks)
    order = Clairvoyant(uses, state.store.blocks, state.store.cache.entries)
    state.store.eviction = order
    state.store.retention.follow(order)
    state.empty()
    return replay(state, requests, order.now_at)


def figures_of(cells: Sequence[Cell], policy: str) -> dict[str, float]:
    """Return the figures of one policy over all cells."""
    workloads = dict.fromkeys(each.workload for each in cells)
    gains = {name: statistics.fmean(c.share(policy) for c in cells if c.workload == name) for name in workloads}
    return {
        "share_of_belady_gain": statistics.fmean(each.share(policy) for each in cells),
        "workloads_beating_lru": float(sum(gain > 0 for gain in gains.values())),
        "least_hits_over_lru": min(each.against_lru(policy) for each in cells),
        **{f"share_{name}": gain for name, gain in gains.items()},
    }


def on_trace(trace: Trace, sizes: Sequence[int], pools: Sequence[int], token_seconds: float) -> dict[str, float]:
    """Return hit rates by size of block and of pool; pools are counted in blocks of the trace."""
    figures, cells = dict[str, float](), list[Cell]()
    for size in sizes:
        requests = requests_of(trace, size, token_seconds)
        uses = uses_of(requests)
        largest = max(len(each.prompt) + len(each.output) for each in requests)
        for pool in pools:
            blocks = pool * trace.block_size // size
            if blocks < largest:
                raise ValueError(f"a pool of {blocks} blocks of {size} tokens; the largest request has {largest}")
            policies: dict[str, Replayed] = {policy: replay(pool_of(blocks, policy), requests) for policy in POLICIES}
            cell = Cell(f"blocks of {size}", float(pool), policies, _limit(blocks, requests, uses))
            cells.append(cell)
            figures |= {f"{name}_{pool}_{size}": run.hit_rate for name, run in policies.items()}
            figures[f"limit_{pool}_{size}"] = cell.limit.hit_rate
            shares = ", ".join(f"{each} {cell.share(each):.2f}" for each in POLICIES[1:])
            progress(f"{cell.workload}, pool {pool}: {shares}", end=True)
    default = DEFAULTS.eviction
    figures["worst_loss_vs_lru"] = min(each.against_lru(default) for each in cells) - 1.0
    figures["mean_share_of_gain"] = statistics.fmean(each.share(default) for each in cells)
    return figures


def retention(requests: Sequence[CacheRequest]) -> dict[str, float]:
    """Return hit rates, means of the pools: without retention, and with it at the default share.

    `agents` are the requests that ask for it, `all` are those with the scans and the single requests.
    """
    largest = max(len(each.prompt) + len(each.output) for each in requests)
    whole, found = working_set(requests), dict[str, float]()
    for policy in POLICIES:
        for share, words in ((0.0, "plain"), (DEFAULTS.retention_share, "retained")):
            runs = [
                replay(pool_of(max(largest, round(part * whole)), policy, share), requests) for part in RETENTION_PARTS
            ]
            agents = statistics.fmean(run.found_retained / run.asked_retained for run in runs)
            found[f"agents_hits_{policy}_{words}"] = agents
            found[f"all_hits_{policy}_{words}"] = statistics.fmean(run.hit_rate for run in runs)
            progress(f"agents and scans, {policy}, {words}: {agents:.3f} of the agents' blocks", end=True)
    return found


def think_times(seeds: Sequence[int], count: int) -> dict[str, float]:
    """Return hits over those without retention: the mean of seeds and pools, and the least of them."""
    found = dict[str, float]()
    for name, (make, parts) in SESSIONS.items():
        ratios: dict[str, list[float]] = {words: [] for words in ("learned", "fitted", "disturbed")}
        for seed in seeds:
            requests = make(seed, count)
            largest, whole = max(len(each.prompt) + len(each.output) for each in requests), working_set(requests)
            plain, rng = [replace(each, retention=()) for each in requests], random.Random(seed)
            brief = (RetainedBlocks(0, LAST_BLOCK, 60, 1.0),)
            disturbed = [replace(each, retention=brief if rng.random() < 0.02 else ()) for each in requests]
            for part in parts:
                blocks = max(largest, round(part * whole))
                loads = {
                    "learned": [*retained(requests, blocks)],
                    "fitted": [*retained(requests, blocks, DEFAULTS.retention_share)],
                    "disturbed": disturbed,
                }
                if any(each.retention for each in requests):
                    ratios.setdefault("asked", [])
                    loads["asked"] = list(requests)
                base = replay(pool_of(blocks, DEFAULTS.eviction), plain).found
                for words, load in loads.items():
                    run = replay(pool_of(blocks, DEFAULTS.eviction, DEFAULTS.retention_share), load)
                    ratios[words].append(run.found / base)
                progress(f"{name}, {part:.0%}: " + ", ".join(f"{k} {v[-1]:.3f}" for k, v in ratios.items()), end=True)
        for words, each in ratios.items():
            found |= {f"{name}_{words}_mean": statistics.fmean(each), f"{name}_{words}_least": min(each)}
    return found


def loss_by_recency(seed: int, count: int) -> float:
    """Return the hits of the default policy over those of LRU, less 1, in the worst pool of a load that suits LRU."""
    requests = by_recency(seed, count)
    largest, whole = max(len(each.prompt) + len(each.output) for each in requests), working_set(requests)
    found = []
    for part in PARTS:
        blocks = max(largest, round(part * whole))
        best = replay(pool_of(blocks, "lru"), requests).found
        found.append(replay(pool_of(blocks, DEFAULTS.eviction), requests).found / best - 1.0)
    return min(found)


def costs(cells: Sequence[Cell]) -> dict[str, float]:
    """Return the nanoseconds of a block by policy: its look-up, reference, eviction, seal and release together."""
    found = {}
    for policy in POLICIES:
        runs = [each.policies[policy] for each in cells]
        found[f"ns_per_block_{policy}"] = 1e9 * sum(run.seconds for run in runs) / sum(run.touched for run in runs)
    return found


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--requests", type=int, default=6000, help="requests of each workload")
    flags.add_argument("--seeds", type=int, nargs="+", default=[1], help="seeds of the workloads; 0 was tuned on")
    flags.add_argument("--retention", action="store_true", help="measure agents among scans alone")
    flags.add_argument("--sessions", action="store_true", help="measure retention for learned think times alone")
    flags.add_argument("--trace", type=Path, metavar="FILE", help="replay this trace alone: Mooncake's, or a log")
    flags.add_argument("--block-sizes", type=int, nargs="+", default=[512], help="tokens of a block, with --trace")
    what = "pools in blocks of the trace, with --trace"
    flags.add_argument("--pools", type=int, nargs="+", default=[1_000, 3_000, 10_000, 30_000], help=what)
    what = "seconds for each token of an output, for which a request keeps its blocks; 0: requests come one by one"
    flags.add_argument("--token-seconds", type=float, default=0.0, help=what)
    args = flags.parse_args()
    if args.trace is not None:
        try:
            figures = on_trace(read_trace(args.trace), args.block_sizes, args.pools, args.token_seconds)
        except (InvalidConfig, ValueError) as error:
            flags.error(str(error))
        report("eviction", figures, _TRACE_NOTES, args.json)
        return
    if args.sessions:
        report("eviction", think_times(args.seeds, args.requests), _SESSION_NOTES, args.json)
        return
    if args.retention:
        report("eviction", retention(agents_and_scans(args.seeds[0], args.requests)), _RETENTION_NOTES, args.json)
        return
    cells = [
        cell
        for seed in args.seeds
        for name, make in WORKLOADS.items()
        for cell in measure(name, make(seed, args.requests))
    ]
    figures = figures_of(cells, DEFAULTS.eviction)
    for policy in POLICIES[1:]:
        if policy != DEFAULTS.eviction:
            figures |= {f"{key}_{policy}": value for key, value in figures_of(cells, policy).items()}
    figures |= retention(agents_and_scans(args.seeds[0], args.requests))
    figures["loss_by_recency"] = min(loss_by_recency(seed, args.requests) for seed in args.seeds)
    figures |= costs(cells)
    notes = {
        "share_of_belady_gain": f"{DEFAULTS.eviction}: (policy - LRU) / (limit - LRU), mean of workloads and pools",
        "workloads_beating_lru": f"of {len(WORKLOADS)}, mean of its pools",
        "least_hits_over_lru": "hits of the policy over those of LRU, in the worst workload and pool",
        "loss_by_recency": f"{DEFAULTS.eviction}: the same, less 1, on a workload beside these, for which LRU is best",
        **_RETENTION_NOTES,
        f"ns_per_block_{POLICIES[0]}": "look-up, reference, eviction, seal and release of a block, CPU time",
    }
    report("eviction", figures, notes, args.json)


if __name__ == "__main__":
    main()
