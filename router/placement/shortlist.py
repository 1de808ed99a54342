"""The workers that a routing decision prices, and those that its record names: all of a few, some of many.

A price costs ten microseconds, so a thousand of them would cost more than the request. Above MOST_PRICED workers those
with the longest hits are priced, and others that are drawn at random: the cheapest of d drawn ones has on average the
rank n / (d + 1), and routers that draw differently do not all run to one worker (Mitzenmacher, "The Power of Two
Choices in Randomized Load Balancing", 2001).
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from common.contracts.types import Candidate
from router.placement.worker_model import WorkerModel

MOST_PRICED = 64
MOST_HOLDERS = 16
# Seconds between two looks at all workers for a deadline. A heartbeat may be as old.
LOOK_EVERY_S = 0.1
# Of the candidates with a cost, and of those that were filtered out.
MOST_NAMED = 8


def shortlist(workers: Sequence[WorkerModel], hits: Mapping[str, int], seed: int) -> Sequence[WorkerModel]:
    """Return the workers to price, in the given order; `hits` are blocks by worker id."""
    if len(workers) <= MOST_PRICED:
        return workers
    holders = set[int]()
    if hits:
        held = [(hits[worker.worker_id], place) for place, worker in enumerate(workers) if worker.worker_id in hits]
        holders = {place for _, place in heapq.nlargest(MOST_HOLDERS, held)}
    drawn = random.Random(seed).sample(range(len(workers)), MOST_PRICED - len(holders))
    return [workers[place] for place in sorted(holders.union(drawn))]


def named(candidates: Sequence[Candidate], chosen: str) -> tuple[Candidate, ...]:
    """Return the candidates that a record names: the chosen one, the cheapest, the best holder, some filtered out."""
    if len(candidates) <= MOST_NAMED:
        return tuple(candidates)
    priced = [each for each in candidates if each.cost is not None]
    out = [each for each in candidates if each.cost is None]
    kept = {each.name for each in heapq.nsmallest(MOST_NAMED, priced, key=lambda each: each.cost or 0.0)}
    kept |= {each.name for each in heapq.nlargest(MOST_NAMED, out, key=_hits)}
    kept |= {chosen, max(candidates, key=_hits).name}
    return tuple([each for each in candidates if each.name in kept])


def _hits(candidate: Candidate) -> float:
    return dict(candidate.figures).get("hit_blocks", 0.0)


def unnamed(candidates: Sequence[Candidate], kept: Sequence[Candidate], workers: int) -> Iterator[tuple[str, float]]:
    """Yield counts of the workers that a record does not name: not priced, dearer, and filtered out by reason."""
    if len(candidates) < workers:
        yield "not_priced", float(workers - len(candidates))
    names = {each.name for each in kept}
    rest = [each for each in candidates if each.name not in names]
    counts = Counter(each.rejected.partition(":")[0] if each.rejected else "dearer" for each in rest)
    for reason, count in sorted(counts.items()):
        yield f"more_{reason.replace(' ', '_')}", float(count)
