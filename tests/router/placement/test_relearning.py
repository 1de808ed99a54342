"""A worker that was disturbed once, and has been idle since, gets work again, and its rates recover."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from common.contracts.clock import ManualClock
from router.placement.placement_request import PlacementRequest
from router.placement.routing import Choice, Router
from router.placement.worker_model import Capacity, Load, WorkerModel

CAPACITY = Capacity(num_blocks=4096, block_size=16, max_num_seqs=32, max_model_len=512)
STEP, TOKEN, OUTPUT = 0.01, 0.0001, 64
BEAT, GAP = 0.5, 0.25


class Pool:
    """Workers whose steps take 10 ms, under one request every quarter of a second; what they report is an average."""

    def __init__(self, learnt: dict[str, float]) -> None:
        self.clock, numbers = ManualClock(), itertools.count(1)
        self._router = Router(self.clock, lambda: f"d{next(numbers)}", seed=1)
        self.models = {name: WorkerModel(name, CAPACITY, Load(unheld_blocks=4096), 0.0) for name in learnt}
        self._learnt, self._steps = dict(learnt), dict.fromkeys(learnt, 100)
        self._ends: dict[str, list[float]] = {name: [] for name in learnt}
        self.choices: list[Choice] = []
        self.beat()

    def beat(self) -> None:
        """Let every worker take its steps of the last half second, and report the rates that follow."""
        now = self.clock.monotonic()
        for name, model in self.models.items():
            left = [end for end in self._ends[name] if end > now]
            busy = bool(self._ends[name])
            for _ in self._ends[name][len(left) :]:
                model.placed(-1, 0, 0)
            self._ends[name] = left
            if busy:
                self._steps[name] += round(BEAT / STEP)
                self._learnt[name] += (1 - 0.9 ** (BEAT / STEP)) * (STEP - self._learnt[name])
            model.heartbeat(
                Load(
                    running=len(left),
                    unheld_blocks=4096,
                    decode_step_seconds=self._learnt[name],
                    prefill_seconds_per_token=TOKEN,
                    steps=self._steps[name],
                ),
                now,
            )

    def request(self) -> str:
        """Route one request; return the worker."""
        choice = self._router.route(PlacementRequest("r", 64, 64 + OUTPUT, OUTPUT), list(self.models.values()), {})
        assert choice.worker is not None
        choice.worker.placed(1, 0, 0)
        name = choice.worker.worker_id
        self._ends[name].append(self.clock.monotonic() + OUTPUT * STEP)
        self.choices.append(choice)
        return name

    def run(self, seconds: float) -> list[str]:
        """Let so much time pass; return who got each request."""
        chosen = []
        for _ in range(round(seconds / BEAT)):
            for _ in range(round(BEAT / GAP)):
                chosen.append(self.request())
                self.clock.advance(GAP)
            self.beat()
        return chosen


def test_a_worker_that_was_disturbed_gets_work_again_within_two_minutes() -> None:
    pool = Pool({"w0": STEP, "w1": 50 * STEP})
    assert "w1" not in pool.run(20.0)
    assert "w1" in pool.run(100.0)


def test_it_then_learns_better_and_gets_its_share() -> None:
    pool = Pool({"w0": STEP, "w1": 50 * STEP})
    pool.run(180.0)
    shares = Counter(pool.run(60.0))
    assert shares["w1"] >= shares.total() // 4
    predicted = pool.models["w1"].rates.step.predict(1)
    assert predicted is not None
    assert predicted < 2 * STEP


def test_the_record_says_how_far_each_worker_was_trusted() -> None:
    pool = Pool({"w0": STEP, "w1": 50 * STEP})
    pool.run(30.0)
    ages = dict(pool.choices[-1].decision.signal_ages)
    figures = {each.name: dict(each.figures) for each in pool.choices[-1].decision.candidates}
    assert ages["w1.rates"] - ages["w0.rates"] == pytest.approx(29.5)
    assert figures["w1"]["trust"] == pytest.approx(0.5 ** (29.5 / 10.0))
    assert "trust" not in figures["w0"]


def test_a_pool_that_rests_as_a_whole_forgets_nothing() -> None:
    pool = Pool({"w0": STEP, "w1": 3 * STEP})
    pool.clock.advance(3600.0)
    pool.beat()
    assert [pool.request() for _ in range(2)] == ["w0", "w0"]
