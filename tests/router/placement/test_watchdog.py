"""Which requests in the queue should have a slot, and what explains that they have none."""

from __future__ import annotations

from router.placement.placement_request import PlacementRequest, waits_for_a_slot
from router.placement.worker_model import Capacity, Load, WorkerModel

NOW = 100.0
HEAD = PlacementRequest(request_id="r", prompt_tokens=10, max_len=20, max_tokens=10, sequences=2)


def _worker(running: int = 0, blocks: int = 64, draining: bool = False, seen: float = NOW) -> WorkerModel:
    load = Load(running=running, unheld_blocks=blocks, draining=draining)
    return WorkerModel("w0", Capacity(blocks, 4, 8, 256), load, heartbeat_at=seen)


def test_an_idle_worker_beside_a_queue_is_a_stall() -> None:
    words = waits_for_a_slot(HEAD, 3, [_worker(running=6), _worker(running=7)], NOW)
    assert words == "3 requests wait for a worker, and 1 workers have room for the next one"


def test_without_a_queue_nothing_waits() -> None:
    assert waits_for_a_slot(None, 0, [_worker()], NOW) == ""


def test_what_explains_a_wait() -> None:
    full, small, draining, silent = _worker(running=7), _worker(blocks=2), _worker(draining=True), _worker(seen=0.0)
    assert waits_for_a_slot(HEAD, 3, [full, small, draining, silent], NOW) == ""
    assert waits_for_a_slot(HEAD, 3, [], NOW) == ""
