"""Deadlines: which workers keep one, and when a request is refused because none does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from common.contracts.clock import ManualClock
from router.placement import routing
from router.placement.placement_request import PlacementRequest
from router.placement.rates import StepLine
from router.placement.routing import LOOK_EVERY_S, MOST_PRICED, Router, WorkerCost
from router.placement.worker_model import Load, WorkerModel
from tests.support.router.placements import CAPACITY, STEP, TOKEN, chosen, placement, rejected, router, step_of, worker


def due(left: float, passes: bool = False) -> PlacementRequest:
    return replace(placement(), left=left, passes=passes)


def test_a_worker_that_keeps_the_deadline_is_taken_though_another_one_costs_less() -> None:
    """The cheap one has fast steps and slow prefill, so its first token comes later: 0.21 s, and 0.06 s."""
    cheap, soon = worker("cheap"), worker("soon")
    cheap.rates.prefill_token.value, soon.rates.prefill_token.value = 2 * TOKEN, TOKEN / 10
    soon.rates.step = StepLine(4)
    soon.rates.step.add(1, 5 * STEP, now=0.0)
    assert chosen(router().route(placement(), [cheap, soon], {})) == "cheap"
    assert chosen(router().route(due(0.3), [cheap, soon], {})) == "cheap"
    choice = router().route(due(0.1), [cheap, soon], {"cheap": 1})
    assert chosen(choice) == "soon"
    words = "too late: 0.100 s are left, and the first token is predicted in 0.178 s"
    assert rejected(choice) == {"cheap": words}


def test_what_is_before_a_request_that_passes_it_makes_no_worker_too_late() -> None:
    ahead = worker("w0", Load(unheld_blocks=64, pending_prefill_tokens=500))
    slow = worker("w1")
    slow.rates.step = StepLine(4)
    slow.rates.step.add(1, 100 * STEP, now=0.0)
    assert chosen(router().route(due(2.0, passes=True), [ahead, slow], {})) == "w0"
    assert chosen(router().route(due(2.0), [ahead, slow], {})) == "w0"
    assert rejected(router().route(due(0.2, passes=True), [ahead, slow], {})).keys() == {"w1"}
    assert rejected(router().route(due(0.2), [ahead, slow], {})).keys() == {"w1"}, "the soonest, though too late"


def test_of_many_workers_one_in_time_is_found_beyond_those_that_are_drawn() -> None:
    many = [worker(f"w{number}") for number in range(200)]
    for each in many[1:]:
        each.rates.prefill_token.value = 100 * TOKEN
    found = {router(seed).route(due(5.0), many, {}).decision.chosen for seed in range(20)}
    assert found == {"w0"}


@pytest.mark.searches
def test_deadlines_that_no_worker_keeps_look_at_all_of_many_only_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client may send any number of them. In between, the lower bounds of the last look stand for the others."""
    many, clock, priced = [worker(f"w{number}") for number in range(1000)], ManualClock(), list[str]()
    for number, each in enumerate(many):
        each.rates.prefill_token.value = TOKEN * (1000 - number)
    numbers, cost = itertools.count(), routing._cost

    def counted(model: WorkerModel, *args: Any) -> WorkerCost:
        priced.append(model.worker_id)
        return cost(model, *args)

    monkeypatch.setattr(routing, "_cost", counted)
    chooses = Router(clock, lambda: f"d{next(numbers)}", 1)
    asked: list[Callable[[], float]] = [
        lambda: chooses.route(due(0.01), many, {}).least_s,
        lambda: chooses.soonest_s(placement(), many, {}, has_room=False),
        lambda: chooses.soonest_s(placement(), many, {}, has_room=True),
    ]
    for ask in asked:
        clock.advance(2 * LOOK_EVERY_S)
        priced.clear()
        assert ask() == pytest.approx(100 * TOKEN + STEP), "that of the soonest of all"
        assert 1000 <= len(priced) <= 1000 + 3 * MOST_PRICED
        for again in asked * 5:
            priced.clear()
            assert again() == pytest.approx(100 * TOKEN + STEP)
            assert len(priced) <= 3 * MOST_PRICED
    clock.advance(2 * LOOK_EVERY_S)
    many[0].rates.prefill_token.value = TOKEN / 2
    assert chooses.route(due(0.01), many, {}).least_s == pytest.approx(50 * TOKEN + STEP)


SMALL = replace(CAPACITY, max_model_len=256)


@pytest.mark.searches
@pytest.mark.parametrize("first", [None, placement(prompt=400), placement(prompt=1), placement(sequences=4)])
def test_what_one_request_asked_refuses_no_other_one(first: PlacementRequest | None) -> None:
    """A few small workers are free, and the others are busy. A request that the small ones cannot hold came first."""
    busy = Load(running=1, unheld_blocks=64, pending_prefill_tokens=60_000)
    many = [worker(f"busy{number}", busy) for number in range(592)]
    many += [worker(f"free{number}", capacity=SMALL) for number in range(8)]
    chooses = router()
    for number in range(100):
        if first is not None:
            assert chooses.route(replace(first, left=1e-9), many, {}).least_s > 1e-9
        choice = chooses.route(replace(due(0.5), request_id=f"r{number}"), many, {})
        assert (chosen(choice)[:4], choice.least_s <= 0.5) == ("free", True)
        assert chooses.soonest_s(placement(), many, {}, has_room=False) == pytest.approx(100 * TOKEN + STEP)


@pytest.mark.searches
def test_a_request_that_may_be_in_time_at_a_worker_that_was_not_priced_is_not_refused() -> None:
    """The others lack blocks for it, and have some for a smaller one: their bounds are lower than that of w499."""
    busy = Load(running=3, unheld_blocks=3)
    many = [worker(f"w{number}", busy) for number in range(500)]
    for each in many[:499]:
        each.rates.finished(1000.0, 3, now=0.0)
    many[499].heartbeat(replace(busy, pending_prefill_tokens=50, unheld_blocks=64), now=0.0)
    choices = [router(seed).route(due(0.5), many, {}) for seed in range(20)]
    assert all(choice.least_s <= 0.5 for choice in choices)
    assert any(chosen(choice) != "w499" for choice in choices), "else every one of them was priced"


@pytest.mark.searches
def test_between_two_looks_at_all_a_full_worker_that_was_the_soonest_is_known() -> None:
    """It may be in time later, so it keeps the request from its refusal."""
    many = [worker(f"w{number}") for number in range(500)]
    for each in many[1:]:
        each.rates.prefill_token.value = 100 * TOKEN
    many[0].heartbeat(Load(running=8, unheld_blocks=64), now=0.0)
    chooses = router()
    for _ in range(20):
        choice = chooses.route(due(1.0), many, {})
        assert chosen(choice) != "w0"
        assert choice.least_s < 1.0


@pytest.mark.searches
def test_between_two_looks_at_all_a_worker_that_hangs_is_known() -> None:
    """It may go on at any moment. So what is before a request at the others refuses none."""
    ahead = Load(running=1, unheld_blocks=64, pending_prefill_tokens=10_000)
    many = [worker(f"w{number}", ahead) for number in range(500)]
    many[77].heartbeat(replace(ahead, pending_prefill_tokens=10**9, step_age_seconds=1e6), now=0.0)
    chooses = router()
    for number in range(20):
        asked = replace(due(1.0), request_id=f"r{number}")
        assert chooses.route(asked, many, {}).least_s == pytest.approx(100 * TOKEN + step_of(2))
        assert chooses.soonest_s(asked, many, {}, has_room=False) == pytest.approx(100 * TOKEN + step_of(2))


def test_where_every_worker_is_too_late_the_soonest_is_taken() -> None:
    slow, slower = worker("slow"), worker("slower")
    slow.rates.prefill_token.value, slower.rates.prefill_token.value = 2 * TOKEN, 3 * TOKEN
    choice = router().route(due(0.1), [slow, slower], {})
    assert chosen(choice) == "slow"
    assert choice.least_s == pytest.approx(100 * 2 * TOKEN + STEP)
    assert "too late: 0.100 s are left" in rejected(choice)["slower"]
