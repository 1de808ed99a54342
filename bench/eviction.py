"""What policies of eviction gain over LRU: five workloads on the pool core of the KV manager, against Belady's limit.

    python -m bench.eviction --seeds 1 2 --json

Nothing is timed but the cost of a block, and no model runs: hit rates are exact for their seeds, on any machine. The
policies were tuned on seed 0. The first quarter of each workload fills the pool and is not counted. A pool of so many
per cent has that share of the working set (`working_set`), and room for the largest request at least.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, get_args

from bench.cache_replay.clairvoyant import Clairvoyant, next_uses
from bench.cache_replay.replay import Replayed, pool_of, replay
from bench.cache_replay.workloads import WORKLOADS, CacheRequest, agents_and_scans, working_set
from bench.lib.harness import parser, progress, report
from common.contracts.types import BlockHash
from kvmanager.contracts.ledger_config import DEFAULTS, EvictionName

PARTS: Final = (0.05, 0.2, 0.5)
# Of agents among scans: a tenant retains a part of the pool, and what does not come again takes the rest.
RETENTION_PARTS: Final = (1.0, 2.0, 4.0)
POLICIES: Final[tuple[EvictionName, ...]] = tuple(get_args(EvictionName))


_RETENTION_NOTES: Final = {
    f"agents_hits_{DEFAULTS.eviction}_retained": "of agents among scans, which retain their blocks for 300 s",
    f"all_hits_{DEFAULTS.eviction}_retained": "of these and all requests beside them",
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
    whole, coming, cells = working_set(requests), next_uses(requests), []
    for part in PARTS:
        blocks = max(largest, round(part * whole))
        policies: dict[str, Replayed] = {policy: replay(pool_of(blocks, policy), requests) for policy in POLICIES}
        cells.append(Cell(workload, part, policies, _limit(blocks, requests, coming)))
        shares = ", ".join(f"{each} {cells[-1].share(each):.2f}" for each in POLICIES[1:])
        progress(f"{workload}, {part:.0%} of {whole} blocks: {shares}", end=True)
    return cells


def _limit(blocks: int, requests: Sequence[CacheRequest], coming: list[dict[BlockHash, int]]) -> Replayed:
    state = pool_of(blocks)
    order = Clairvoyant(coming, state.store.blocks, state.store.cache.entries)
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
    args = flags.parse_args()
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
    figures |= costs(cells)
    notes = {
        "share_of_belady_gain": f"{DEFAULTS.eviction}: (policy - LRU) / (limit - LRU), mean of workloads and pools",
        "workloads_beating_lru": f"of {len(WORKLOADS)}, mean of its pools",
        "least_hits_over_lru": "hits of the policy over those of LRU, in the worst workload and pool",
        **_RETENTION_NOTES,
        f"ns_per_block_{POLICIES[0]}": "look-up, reference, eviction, seal and release of a block, CPU time",
    }
    report("eviction", figures, notes, args.json)


if __name__ == "__main__":
    main()
