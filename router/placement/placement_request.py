"""What is asked of a worker: the sequences to place there, and the verdict whether a worker may be chosen for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from common.contracts.adapters import AdapterRef
from router.placement.worker_model import Capacity, WorkerModel


class PlacementOutcome(StrEnum):
    PLACED = "placed"
    WAIT = "wait"
    NO_WORKER = "no_worker"
    TOO_LARGE = "too_large"


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """Sequences to place at one worker. `prompt_tokens` include output of an earlier run.

    `max_len` bounds prompt and output of one sequence.
    """

    request_id: str
    prompt_tokens: int
    max_len: int
    max_tokens: int
    sequences: int = 1
    traceparent: str = ""
    # Whether the tenant is below its share: its sequences may go to a worker whose slots others hold.
    entitled: bool = False
    # Workers that are not to serve it.
    avoids: frozenset[str] = frozenset()
    # Seconds until its deadline.
    left: float | None = None
    # Whether it passes what is before it at a worker, so that its own work alone can make it late.
    passes: bool = False
    # Leading tokens that another worker has computed: a worker that fetches blocks need not.
    computed_elsewhere: int = 0
    # What computes it; None: the base.
    adapter: AdapterRef | None = None

    def uncached(self, capacity: Capacity, hit_blocks: int) -> int:
        """Return the tokens that a worker computes which has, or fetches, so many blocks; at least the last one."""
        cached = hit_blocks * capacity.block_size
        if capacity.fetches_blocks:
            cached = max(cached, self.computed_elsewhere)
        return max(1, self.prompt_tokens - cached)


def verdict(worker: WorkerModel, placement: PlacementRequest, now: float) -> tuple[PlacementOutcome, str]:
    """Return PLACED when the worker may be chosen, else the outcome without it and the reason."""
    if reason := too_large(worker.capacity, placement):
        return PlacementOutcome.TOO_LARGE, reason
    if placement.adapter is not None and not worker.adapters.knows(placement.adapter):
        return PlacementOutcome.NO_WORKER, f"no adapter: it does not know {placement.adapter.name} with this content"
    if worker.worker_id in placement.avoids:
        return PlacementOutcome.NO_WORKER, "another worker is wanted: it has computed the prompt"
    if trouble := worker.trouble(now):
        return PlacementOutcome.NO_WORKER, f"{trouble[0].value}: {trouble[1]}"
    limit = max(slots_of(worker) * (ENTITLED if placement.entitled else 1), placement.sequences)
    if worker.sequences + placement.sequences > limit:
        return PlacementOutcome.WAIT, f"over limit: {worker.sequences} sequences of at most {limit}"
    return PlacementOutcome.PLACED, ""


# When a router should place requests: what does not count as standing still.
def waits_for_a_slot(head: PlacementRequest | None, queued: int, workers: Sequence[WorkerModel], now: float) -> str:
    """Return in words how many requests wait although a worker is idle enough for the next one; "" otherwise.

    `head` is the next one. A request that is too large, and workers that are full or in trouble, explain its wait.
    """
    if head is None:
        return ""
    idle = sum(_has_room(worker, head, now) for worker in workers)
    return f"{queued} requests wait for a worker, and {idle} workers have room for the next one" if idle else ""


def _has_room(worker: WorkerModel, head: PlacementRequest, now: float) -> bool:
    room = worker.sequences + head.sequences <= worker.capacity.max_num_seqs
    return room and verdict(worker, head, now)[0] is PlacementOutcome.PLACED


# Sequences at a worker per slot in its batch: some wait there, so that the batch stays full between two messages.
OVERCOMMIT = 2


# Times as many for tenants below their share: the slots of others do not count for them.
ENTITLED = 2


TOO_LARGE = "too large"


"""How the reason begins of a worker that could never hold the request; the request's sizes follow."""


def too_large(capacity: Capacity, placement: PlacementRequest) -> str:
    """Return why a worker of this capacity can never hold the request; "": it can."""
    if placement.max_len > capacity.max_model_len:
        return f"{TOO_LARGE}: {placement.max_len} tokens of at most {capacity.max_model_len}"
    needed = capacity.blocks(placement.prompt_tokens, placement.max_len)
    if needed > capacity.num_blocks:
        return f"{TOO_LARGE}: {needed} {capacity.unit} of {capacity.num_blocks} in its pool"
    return ""


def may_recover(worker: WorkerModel, placement: PlacementRequest) -> bool:
    """Return whether a worker that is in trouble now may serve the request later."""
    if placement.adapter is not None and not worker.adapters.knows(placement.adapter):
        return False
    return worker.worker_id not in placement.avoids and not worker.drains


def slots_of(worker: WorkerModel) -> int:
    """Return how many sequences a worker may have, those that wait there included."""
    return OVERCOMMIT * worker.capacity.max_num_seqs


def must_wait(worker: WorkerModel, placement: PlacementRequest, now: float) -> bool:
    """Return whether a worker could take the request later, and not now: too many sequences are there."""
    return verdict(worker, placement, now)[0] is PlacementOutcome.WAIT
