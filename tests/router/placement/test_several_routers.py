"""Several routers over the same workers: each counts its own requests at once, others by heartbeats."""

from __future__ import annotations

import itertools
import random

import pytest

from common.contracts.clock import ManualClock
from router.placement.placement_request import PlacementRequest
from router.placement.routing import Router
from router.placement.worker_model import Capacity, Load, WorkerModel

CAPACITY = Capacity(num_blocks=4096, block_size=16, max_num_seqs=64, max_model_len=512)
ROUTERS, BEAT, STEP = 3, 0.1, 0.01


class Fleet:
    """Three routers that share two workers; a request takes half a second, a heartbeat comes every tenth of one."""

    def __init__(self, workers: int = 2, seed: int = 0) -> None:
        self.clock, self._rng = ManualClock(), random.Random(seed)
        names = [f"w{number}" for number in range(workers)]
        self.running: dict[str, list[tuple[float, int]]] = {name: [] for name in names}
        self._routers = [self._router(number) for number in range(ROUTERS)]
        self._models = [
            [WorkerModel(name, CAPACITY, Load(unheld_blocks=4096), 0.0) for name in names] for _ in range(3)
        ]
        self.beat()

    def _router(self, number: int) -> Router:
        ids = itertools.count(1)
        return Router(self.clock, lambda: f"router-{number}-{next(ids)}", seed=0)

    def beat(self) -> None:
        """Let every worker report its load to all routers."""
        for models in self._models:
            for model in models:
                count = len(self.running[model.worker_id])
                load = Load(running=count, unheld_blocks=4096, decode_step_seconds=STEP, prefill_seconds_per_token=1e-4)
                model.heartbeat(load, self.clock.monotonic())

    def request(self) -> None:
        """Let one of the routers, by lot, place a request."""
        number, now = self._rng.randrange(ROUTERS), self.clock.monotonic()
        choice = self._routers[number].route(PlacementRequest("r", 64, 128, 64), self._models[number], {})
        assert choice.worker is not None
        choice.worker.placed(1, 0, 0)
        self.running[choice.worker.worker_id].append((now + 0.5, number))

    def advance(self, seconds: float) -> None:
        """Let time pass, and requests end."""
        self.clock.advance(seconds)
        for name, running in self.running.items():
            ended = [each for each in running if each[0] <= self.clock.monotonic()]
            for each in ended:
                running.remove(each)
                next(model for model in self._models[each[1]] if model.worker_id == name).placed(-1, 0, 0)

    def widest(self, beats: int, requests_a_beat: int) -> int:
        """Return the widest difference between two workers that was seen over so many heartbeats."""
        widest = 0
        for _ in range(beats):
            for _ in range(requests_a_beat):
                self.request()
                self.advance(BEAT / requests_a_beat)
                counts = [len(running) for running in self.running.values()]
                widest = max(widest, max(counts) - min(counts))
            self.beat()
        return widest


@pytest.mark.searches
def test_two_workers_of_three_routers_stay_level() -> None:
    # 40 requests are under way at a time. With heartbeats as old as requests are, all 40 go from one to the other.
    assert Fleet().widest(beats=300, requests_a_beat=8) <= 12


def test_a_burst_between_two_heartbeats_is_spread_by_each_router() -> None:
    fleet = Fleet()
    for _ in range(60):
        fleet.request()
    counts = [len(running) for running in fleet.running.values()]
    assert sum(counts) == 60
    assert max(counts) - min(counts) <= ROUTERS


def test_work_of_the_others_counts_from_their_next_heartbeat_on() -> None:
    fleet = Fleet()
    fleet.running["w0"] = [(100.0, 1)] * 20
    fleet.beat()
    for _ in range(18):
        fleet.request()
    assert len(fleet.running["w1"]) >= 17
