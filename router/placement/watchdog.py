"""When a router should place requests: what does not count as standing still."""

from __future__ import annotations

from collections.abc import Sequence

from router.placement.placement import Outcome, PlacementRequest, verdict
from router.placement.worker_model import WorkerModel


def waits_for_a_place(head: PlacementRequest | None, queued: int, workers: Sequence[WorkerModel], now: float) -> str:
    """Return in words how many requests wait although a worker is idle enough for the next one; "" otherwise.

    `head` is the next one. A request that is too large, and workers that are full or in trouble, explain its wait.
    """
    if head is None:
        return ""
    idle = sum(_has_room(worker, head, now) for worker in workers)
    return f"{queued} requests wait for a worker, and {idle} workers have room for the next one" if idle else ""


def _has_room(worker: WorkerModel, head: PlacementRequest, now: float) -> bool:
    room = worker.sequences + head.sequences <= worker.capacity.max_num_seqs
    return room and verdict(worker, head, now)[0] is Outcome.PLACED
