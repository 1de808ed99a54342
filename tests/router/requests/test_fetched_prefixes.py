"""A hot prefix at the dispatcher: who is sent to fetch it, what counts as fetched, when a source has enough to do."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import cast

import pytest

from cli.replay.router import ReplayIndex, ReplayRouter
from cli.replay.worker import ReplayWorker
from common.contracts.clock import ManualClock
from common.contracts.types import BlockHash, Decision, KvGeometry, PoolIdentity
from kvmanager.contracts.index_events import Stored
from router.placement.fair_queue import ONE_FLOW
from router.placement.placement_request import PlacementRequest
from router.placement.routing import Router
from router.placement.worker_model import Capacity, Load
from router.requests.dispatcher import Job, Placement

IDENTITY = PoolIdentity("made up", "none", 16, KvGeometry(1, 1, 1, 1, "float32"))
CAPACITY = Capacity(4096, 16, 64, 1 << 16, fetches_blocks=True)
PREFIX = [BlockHash(bytes([n] * 16)) for n in range(1, 7)]
TOKENS = 6 * 16 + 4
STEP, TOKEN, BLOCK, SETUP = 0.01, 0.001, 0.004, 0.003
MEASURED = Load(
    running=1, unheld_blocks=4000, steps=1, decode_step_seconds=STEP, prefill_seconds_per_token=TOKEN,
    fetch_seconds_per_block=BLOCK, fetch_setup_seconds=SETUP,
)  # fmt: skip


class Named:
    """A worker that runs nothing."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id


class Side:
    """A router over `holder`, which has the prefix and much to do, and idle workers that have nothing."""

    def __init__(self, cold: int, queue: int = 10_000, capacity: Capacity = CAPACITY) -> None:
        self.decisions, self.clock, ids = list[Decision](), ManualClock(), itertools.count()
        index = ReplayIndex()
        chooser = Router(self.clock, lambda: f"d{next(ids)}", 0)
        self.router = ReplayRouter(IDENTITY, chooser, index, self, self.clock, 1 << 20)
        for name in ("holder", *(f"cold-{n}" for n in range(cold))):
            self.router.pool.add(cast("ReplayWorker", Named(name)), capacity, 0.0)
            self.router.pool.heartbeat(name, MEASURED, 0.0)
            idle = replace(MEASURED, running=0)
            load = replace(MEASURED, pending_prefill_tokens=queue) if name == "holder" else idle
            self.router.pool.heartbeat(name, load, 0.0)
        index.apply("holder", [Stored(depth, key, depth) for depth, key in enumerate(PREFIX)])

    def record(self, decision: Decision) -> None:
        self.decisions.append(decision)

    async def place(self, number: int = 0) -> Placement:
        request = PlacementRequest(f"r{number}", TOKENS, TOKENS + 8, 8)
        job = Job(request, PREFIX, 0, None)
        return await self.router.dispatcher.place_job(job, self.router.dispatcher.ticket(0, ONE_FLOW))

    def terms(self, place: int = -1) -> dict[str, float]:
        decision = self.decisions[place]
        return dict(next(each.terms for each in decision.candidates if each.name == decision.worker))

    @property
    def fetches(self) -> list[tuple[str, float]]:
        """The choices that expect a fetch, and its seconds."""
        found = [(each.worker, self.terms(place).get("fetch", 0.0)) for place, each in enumerate(self.decisions)]
        return [(worker, round(seconds, 6)) for worker, seconds in found if seconds]


async def test_what_is_fetched_is_not_counted_as_computed() -> None:
    side = Side(cold=1)
    placed = await side.place()
    model = placed.reservations[0].model
    assert (placed.worker_id, model.pending_prefill_tokens) == ("cold-0", 4)
    assert side.fetches == [("cold-0", round(SETUP + 6 * BLOCK, 6))]
    assert CAPACITY.num_blocks - model.unheld_blocks == 96 + 7, "fetched blocks take room"


async def test_requests_behind_the_first_one_hit_what_it_fetches() -> None:
    """One fetch feeds a burst at one worker; the manager lets them share it."""
    side = Side(cold=1)
    for number in range(5):
        assert (await side.place(number)).worker_id == "cold-0"
    assert len(side.fetches) == 1
    assert dict(side.decisions[-1].candidates[-1].figures)["hit_blocks"] == 6.0


async def test_a_burst_orders_no_more_fetches_of_one_source_than_pay() -> None:
    """Computing takes 96 ms, so a fetch may take 86.4: with 24 ms each, those of three workers, and the setup."""
    side = Side(cold=16)
    placed = [(await side.place(number)).worker_id for number in range(200)]
    assert "holder" not in placed
    waits = [seconds for _, seconds in side.fetches]
    assert waits == [round(SETUP + n * 6 * BLOCK, 6) for n in (1, 2, 3)]
    assert len({worker for worker, _ in side.fetches}) == 3
    assert len(set(placed)) == 17 - 1, "those that fetch nothing compute it once, when the queues are longer than that"


async def test_a_source_is_free_again_once_it_has_served() -> None:
    side = Side(cold=16)
    for number in range(4):
        side.router.dispatcher.cache_lost("cold-0")
        await side.place(number)
    served = len(side.fetches) * 6 * BLOCK
    for later, busy in ((0.0, served), (0.01, served - 0.01), (1.0, 0.0)):
        side.clock.now = later
        held = side.router.dispatcher._held({"holder": 6})
        assert held is not None
        assert held.busy_s == pytest.approx(busy)


async def test_workers_that_pass_no_blocks_are_no_sources() -> None:
    side = Side(cold=2, capacity=replace(CAPACITY, fetches_blocks=False))
    placed = await side.place()
    assert (placed.reservations[0].model.pending_prefill_tokens, side.fetches) == (TOKENS, [])
    assert side.router.dispatcher._held({"holder": 6}) is None
