"""Several routers over the same workers: each counts its own requests at once, others by heartbeats and by notices."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import pytest

from common.contracts.clock import ManualClock
from router.placement.placement_request import PlacementOutcome, PlacementRequest
from router.placement.routing import (
    MOST_AT_HOME,
    MOST_PRICED,
    OTHERS_CHANGED,
    Router,
    is_home,
    places_at_home,
    shortlist,
)
from router.placement.shared_load import Notice, SharedLoad, Told, worker_key
from router.placement.worker_model import Capacity, Load, WorkerModel
from tests.support.router.placements import STEP as STEP_S
from tests.support.router.placements import TOKEN, chosen, placement, router, step_of, terms, worker

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


# ---------------------------------------------------------------- routers that tell each other


CROWD = Capacity(num_blocks=4096, block_size=16, max_num_seqs=4, max_model_len=512)


def shared_workers(count: int, told: Mapping[int, Told], number: int = 1) -> tuple[SharedLoad, list[WorkerModel]]:
    """Return the workers of a router that another one has told what it has at some of them."""
    shared, models = SharedLoad(b"a" * 8), [worker(f"w{place}", capacity=CROWD) for place in range(count)]
    for model in models:
        model.share = shared.join(model.worker_id, b"i")
    if told:
        keys = {worker_key(f"w{place}", b"i"): each for place, each in told.items()}
        assert shared.hear(Notice(b"b" * 8, number, True, keys), 0.0)
    return shared, models


def homes(models: Sequence[WorkerModel], home: Collection[int]) -> None:
    for place, model in enumerate(models):
        assert model.share is not None
        model.share.home = place in home


def test_a_worker_that_another_router_has_just_filled_is_avoided_and_the_record_says_so() -> None:
    _, models = shared_workers(2, {0: Told(2, 200)})
    homes(models, {0, 1})
    choice = router().route(placement(), models, {"w0": 2})
    assert chosen(choice) == "w1"
    # Without them w0 saves the prefill of 32 tokens. They add 200 tokens, 1.5 steps, and slower steps of 20 tokens.
    added = 200 * TOKEN + 1.5 * STEP_S + 20 * (step_of(3) - step_of(1))
    words = f"w0: they add {added:.3f} s there, and it was cheaper by {32 * TOKEN:.3f} s"
    assert choice.decision.reasons == (f"{OTHERS_CHANGED} {words}",)
    (candidate,) = [each for each in choice.decision.candidates if each.name == "w0"]
    assert dict(candidate.figures)["others_s"] == pytest.approx(added)
    assert candidate.cost == pytest.approx(sum(seconds for _, seconds in candidate.terms))


def test_a_choice_that_others_did_not_change_has_no_such_reason() -> None:
    _, models = shared_workers(2, {0: Told(2, 200)})
    homes(models, {0, 1})
    choice = router().route(placement(), models, {"w1": 2})
    assert chosen(choice) == "w1"
    assert choice.decision.reasons == ()
    _, alone = shared_workers(2, {})
    assert router().route(placement(), alone, {"w0": 2}).decision.reasons == ()


def test_what_others_told_refuses_nobody() -> None:
    _, models = shared_workers(1, {0: Told(10**6, 10**6)})
    choice = router().route(replace(placement(), left=1.0), models, {})
    assert choice.outcome is PlacementOutcome.PLACED
    assert choice.least_s == pytest.approx(100 * TOKEN + STEP_S)
    assert models[0].has_batch_slot()


def test_a_worker_of_another_home_costs_one_more_such_request() -> None:
    _, models = shared_workers(2, {0: Told(1, 0)})
    homes(models, {1})
    choice = router().route(placement(), models, {})
    assert chosen(choice) == "w1"
    unseen = terms(choice, "w0")["unseen"]
    assert unseen == pytest.approx(100 * TOKEN + STEP_S)
    assert "unseen" not in terms(choice, "w1")
    # It is taken where the one at home is busier than that.
    models[1].placed(1, 200, 1)
    assert chosen(router().route(placement(), models, {})) == "w0"


def test_a_longer_hit_than_all_at_home_have_costs_nothing_more() -> None:
    _, models = shared_workers(3, {0: Told(1, 0)})
    homes(models, {1, 2})
    for hits, has in (({"w0": 2, "w1": 1}, False), ({"w0": 2, "w1": 2}, True), ({}, True)):
        choice = router().route(placement(), models, hits)
        assert ("unseen" in terms(choice, "w0")) == has


def test_of_many_workers_those_at_home_are_priced_first() -> None:
    _, models = shared_workers(300, {0: Told(1, 0)})
    at_home = [place for place, each in enumerate(models) if is_home(each)]
    assert len(at_home) == 150
    assert places_at_home(models) == at_home
    found = shortlist(models, {}, 7, at_home)
    assert MOST_AT_HOME < len(found) <= MOST_PRICED
    assert sum(is_home(each) for each in found) >= MOST_AT_HOME
    homes(models, {5, 6})
    assert {"w5", "w6"} <= {each.worker_id for each in shortlist(models, {}, 7, places_at_home(models))}
    homes(models, range(300))
    assert places_at_home(models) == ()
    assert shortlist(models, {}, 7, ()) == shortlist(models, {}, 7)


def test_which_of_many_are_at_home_follows_each_move() -> None:
    shared, models = shared_workers(300, {})
    chooser = router()
    chooser.route(placement(), models, {})
    for number in range(1, 8):
        shared.hear(Notice(bytes([number] * 8), 1, True, {worker_key("w0", b"i"): Told(1, 0)}), 0.0)
    assert MOST_AT_HOME < sum(map(is_home, models)) < 40
    # By lot alone there would be 8 among the 64 that are priced.
    assert sum(map(is_home, chooser._shortlist(models, {}, "d2"))) >= MOST_AT_HOME


class Burst:
    """Routers that choose at the same moment: each knows what it placed itself, and what was told before."""

    def __init__(self, tells: bool) -> None:
        self._shared = [SharedLoad(bytes([number] * 8)) for number in range(ROUTERS)]
        self._models = [[WorkerModel(f"w{place}", CAPACITY, Load(), 0.0) for place in range(12)] for _ in self._shared]
        ids = itertools.count(1)
        self._routers = [Router(ManualClock(), lambda: f"d{next(ids)}", number) for number in range(ROUTERS)]
        self.tells = tells
        for shared, models in zip(self._shared, self._models, strict=True):
            for model in models if tells else ():
                model.share = shared.join(model.worker_id, b"i")
                model.placed(1, 0, 1)
        self.exchange()

    def exchange(self) -> None:
        for said in [shared.tell(0.0) for shared in self._shared]:
            for other in self._shared if said is not None else ():
                assert said is not None
                other.hear(said, 0.0)

    def place(self) -> Counter[str]:
        found = Counter[str]()
        for chooser, models in zip(self._routers, self._models, strict=True):
            choice = chooser.route(PlacementRequest("r", 64, 128, 64), models, {})
            assert choice.worker is not None
            choice.worker.placed(1, 64, 1)
            found[choice.worker.worker_id] += 1
        return found


def test_routers_that_choose_at_the_same_moment_do_not_meet() -> None:
    told = Burst(tells=True)
    rounds = [told.place()]
    for _ in range(3):
        told.exchange()
        rounds.append(told.place())
    assert [max(each.values()) for each in rounds] == [1, 1, 1, 1]
    assert max(sum(rounds, Counter[str]()).values()) == 1  # twelve requests, twelve workers
