"""When the mover of draining workers' sequences looks for places: heartbeats of large, full pools must cost nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from common.contracts.clock import ManualClock
from router.placement.worker_model import Capacity, Load, WorkerModel
from router.requests.dispatcher import Placement
from router.requests.frontend import DrainMover
from router.requests.run import Phase, RequestRun, Running
from router.requests.submitter import Submitter
from router.workers.pool import WorkerPool

PLACES = 2


@dataclass
class Pool:
    """Counts how often all workers are looked at."""

    workers: list[WorkerModel]
    leaving: set[object]
    looks: int = 0

    def migrating(self) -> set[object]:
        return self.leaving

    def models(self) -> list[WorkerModel]:
        self.looks += 1
        return self.workers


@dataclass
class Places:
    """A submitter without room that counts the attempts."""

    attempts: int = 0

    def book_place(self, run: RequestRun, running: Running) -> Placement | None:
        self.attempts += 1
        return None


@dataclass
class World:
    """One worker that drains with sequences, and one other."""

    clock: ManualClock = field(default_factory=lambda: ManualClock(100.0))
    submitter: Places = field(default_factory=Places)
    sequences: int = 3

    def __post_init__(self) -> None:
        client = object()
        capacity = Capacity(64, 4, PLACES, 256)
        self.draining = WorkerModel("w0", capacity, Load(running=PLACES, draining=True, migrating=True), 100.0)
        self.other = WorkerModel("w1", capacity, Load(), 100.0)
        self.pool = Pool([self.draining, self.other], {client})
        running = [
            Running(cast("Any", None), cast("Any", client), phase=Phase.AT_WORKER) for _ in range(self.sequences)
        ]
        self.lists = 0

        def unfinished() -> list[Running]:
            self.lists += 1
            return running

        run = cast("RequestRun", type("Run", (), {"unfinished": staticmethod(unfinished)})())
        self.mover = DrainMover(cast("WorkerPool", self.pool), cast("Submitter", self.submitter), {run}, self.clock)


@pytest.fixture
def world() -> World:
    return World()


def test_heartbeats_within_a_tenth_of_a_second_are_one_chance(world: World) -> None:
    for _ in range(100):
        world.mover.capacity_changed(world.other)
        world.mover.capacity_changed(world.draining)
        world.mover.capacity_changed()
    assert (world.submitter.attempts, world.lists) == (world.sequences, 1)
    world.clock.advance(0.11)
    world.mover.capacity_changed(world.draining)
    assert (world.submitter.attempts, world.lists) == (2 * world.sequences, 2)


def test_a_heartbeat_of_a_full_worker_is_no_chance(world: World) -> None:
    world.other.heartbeat(Load(running=PLACES), 100.0)
    for _ in range(10):
        world.mover.capacity_changed(world.other)
        world.clock.advance(1.0)
    assert (world.pool.looks, world.lists, world.submitter.attempts) == (0, 0, 0)


def test_where_all_others_are_full_no_list_of_sequences_is_made(world: World) -> None:
    world.other.heartbeat(Load(running=PLACES), 100.0)
    for _ in range(10):
        world.mover.capacity_changed(world.draining)
        world.mover.capacity_changed()
        world.clock.advance(1.0)
    assert (world.lists, world.submitter.attempts) == (0, 0)


def test_a_place_at_another_draining_worker_is_none(world: World) -> None:
    world.other.heartbeat(Load(draining=True), 100.0)
    world.mover.capacity_changed(world.draining)
    assert world.lists == 0


def test_without_a_draining_worker_nothing_is_looked_at(world: World) -> None:
    world.pool.leaving.clear()
    world.mover.capacity_changed()
    assert (world.pool.looks, world.lists) == (0, 0)


def test_of_many_sequences_few_are_tried_at_once_and_all_in_their_turn() -> None:
    world = World(sequences=20)
    for _ in range(5):
        before = world.submitter.attempts
        world.mover.capacity_changed(world.other)
        assert world.submitter.attempts - before == 8
        world.clock.advance(0.2)
