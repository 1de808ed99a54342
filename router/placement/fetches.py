"""What a worker fetches of a prompt that another one has, in predicted seconds: where the KV manager would order that.

    fetch  =  setup + what the source serves before + blocks x seconds a block

It pays by the rule of the KV manager (`pays_to_fetch`), so a worker is priced as it will be served. What a router has
just sent to be fetched from a source is before the next fetch from there, as it is at the manager. So a burst of one
prefix spreads over as many workers as its source can feed in time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from common.contracts.transfers import pays_to_fetch
from router.placement.worker_model import Load, WorkerModel, WorkerState


class FetchRates(NamedTuple):
    """Seconds of a fetch: constant, and a block."""

    setup: float
    block: float

    def seconds(self, blocks: int) -> float:
        return self.setup + blocks * self.block if blocks > 0 else 0.0


# Assumed until a worker has fetched a block.
PRIOR: Final = FetchRates(1e-3, 1e-3)


def measured_rates(load: Load) -> FetchRates | None:
    """Return what a worker reports; None until it has fetched a block. An older worker reports no setup."""
    block = load.fetch_seconds_per_block
    return FetchRates(load.fetch_setup_seconds, block) if block > 0.0 else None


def usual_rates(workers: Iterable[WorkerModel]) -> FetchRates:
    """Return the mean of what the workers report, which is assumed for one that has fetched nothing."""
    known = [rates for each in workers if (rates := measured_rates(each.load)) is not None]
    if not known:
        return PRIOR
    return FetchRates(sum(each.setup for each in known) / len(known), sum(each.block for each in known) / len(known))


def passes_blocks(worker: WorkerModel) -> bool:
    """Return whether a worker fetches cached blocks from others, and others from it."""
    return worker.capacity.fetches_blocks and worker.capacity.prefix_caching


@dataclass(frozen=True, slots=True)
class Held:
    """Leading blocks of a prompt that `source` has for others; it has to serve earlier fetches for `busy_s`."""

    source: WorkerModel
    blocks: int
    busy_s: float = 0.0


def find_held(sources: Mapping[str, WorkerModel], published: Mapping[str, int], now: float) -> Held | None:
    """Return the worker with the most published blocks of a prompt that others can fetch; None: there is none.

    Of equals it is the one that has the least to serve, as the KV manager chooses. `sources` are by worker id.
    """
    best: Held | None = None
    for worker_id, blocks in published.items():
        if not blocks or (best is not None and blocks < best.blocks) or (source := sources.get(worker_id)) is None:
            continue
        held = Held(source, blocks, max(0.0, source.serves_until - now))
        if best is not None and blocks == best.blocks and held.busy_s >= best.busy_s:
            continue
        trouble = source.trouble(now)
        if trouble is None or trouble[0] is WorkerState.DRAINING:
            best = held
    return best


class PricedFetch(NamedTuple):
    """So many blocks in predicted seconds; the source serves them for `served_s` of these."""

    source: WorkerModel
    blocks: int
    seconds: float
    served_s: float


def price_fetch(
    worker: WorkerModel, held: Held, hit_blocks: int, most_blocks: int, token_s: float, usual: FetchRates
) -> PricedFetch | None:
    """Return what a worker fetches that has `hit_blocks` of a prompt, at most `most_blocks` with them; None: nothing.

    Computing a token takes `token_s` there.
    """
    blocks, capacity = min(held.blocks, most_blocks) - hit_blocks, worker.capacity
    if blocks <= 0 or not capacity.fetches_blocks or not capacity.prefix_caching:
        return None
    setup, block = measured_rates(worker.load) or usual
    served_s = blocks * block
    seconds = held.busy_s + setup + served_s
    if not pays_to_fetch(seconds, blocks * capacity.block_size * token_s):
        return None
    return PricedFetch(held.source, blocks, seconds, served_s)
