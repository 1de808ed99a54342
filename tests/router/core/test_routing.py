"""The choice of a worker: each term of the cost by hand, each filter with its reason, ties, and no hot spot."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from common.clock import ManualClock
from common.types import Decision
from router.core import routing
from router.core.optimistic import OptimisticIndex
from router.core.placement import Outcome, PlacementRequest
from router.core.rates import StepLine
from router.core.routing import TIE_SECONDS, Choice, Router, WorkerCost
from router.core.shortlist import LOOK_EVERY_S, MOST_PRICED
from router.core.worker_model import Capacity, Load, WorkerModel
from tests.router.core.test_optimistic import block_hashes

CAPACITY = Capacity(num_blocks=64, block_size=16, max_num_seqs=4, max_model_len=512)
STEP, TOKEN = 0.01, 0.001


def worker(name: str, load: Load | None = None, capacity: Capacity = CAPACITY) -> WorkerModel:
    """Return a worker that has shown a step of 10 ms for one sequence and 1 ms a prompt token."""
    model = WorkerModel(name, capacity, Load(unheld_blocks=capacity.num_blocks), heartbeat_at=0.0)
    model.heartbeat(Load(running=1, decode_step_seconds=STEP, prefill_seconds_per_token=TOKEN), now=0.0)
    model.heartbeat(load or Load(unheld_blocks=capacity.num_blocks), now=0.0)
    return model


def router(seed: int = 1) -> Router:
    numbers = itertools.count(1)
    return Router(ManualClock(), lambda: f"d{next(numbers)}", seed)


def placement(prompt: int = 100, output: int = 20, sequences: int = 1) -> PlacementRequest:
    return PlacementRequest("r", prompt, prompt + output, output, sequences)


def terms(choice: Choice, name: str) -> dict[str, float]:
    return dict(next(candidate.terms for candidate in choice.decision.candidates if candidate.name == name))


def rejected(choice: Choice) -> dict[str, str]:
    return {candidate.name: candidate.rejected for candidate in choice.decision.candidates if candidate.rejected}


def test_hits_at_workers_that_have_left_count_for_nothing() -> None:
    found = router().route(placement(), [worker("w0"), worker("w1")], {"gone": 6, "w1": 1})
    assert found.decision.chosen == "w1"
    assert found.hit_blocks == 1


def test_of_many_workers_a_few_with_room_are_found_and_only_those_priced() -> None:
    full = Load(running=2 * CAPACITY.max_num_seqs)
    many = [worker(f"w{number}", full if number % 250 else None) for number in range(1000)]
    found = {router(seed).route(placement(), many, {}).decision.chosen for seed in range(20)}
    assert found == {"w0", "w250", "w500", "w750"}
    without_room = router().route(placement(), [worker(f"w{number}", full) for number in range(1000)], {})
    assert (without_room.outcome, without_room.worker) == (Outcome.WAIT, None)


# ------------------------------------------------------------ the terms


def test_an_idle_worker_costs_its_prefill_and_its_steps() -> None:
    found = terms(router().route(placement(prompt=100, output=20), [worker("w0")], {}), "w0")
    assert found["queue_delay"] == 0.0
    assert found["prefill"] == pytest.approx(100 * TOKEN + STEP)
    assert found["decode_pressure"] == pytest.approx(20 * STEP)


def test_a_hit_saves_its_prefill() -> None:
    found = terms(router().route(placement(prompt=100), [worker("w0")], {"w0": 5}), "w0")
    assert found["prefill"] == pytest.approx(20 * TOKEN + STEP)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    choice = router().route(placement(prompt=32), [worker("w0")], {"w0": 2})
    assert terms(choice, "w0")["prefill"] == pytest.approx(16 * TOKEN + STEP)
    assert choice.decision.candidates[0].figures == (("hit_blocks", 1.0),)


def test_prompt_tokens_ahead_delay_the_start() -> None:
    busy = worker("w0", Load(unheld_blocks=64, pending_prefill_tokens=500))
    assert terms(router().route(placement(), [busy], {}), "w0")["queue_delay"] == pytest.approx(500 * TOKEN)


def step_of(running: int) -> float:
    """Return the seconds of a step of so many sequences: a full batch of 4 is taken to be twice as slow as none."""
    return STEP * (1 + (running - 1) / 5)


def test_the_steps_in_flight_at_a_busy_worker_delay_the_start() -> None:
    """Half of the one that runs, in the mean, and the one that is planned behind it."""
    busy = worker("w0", Load(running=2, unheld_blocks=64))
    found = terms(router().route(placement(), [busy], {}), "w0")
    assert found["queue_delay"] == pytest.approx(1.5 * step_of(3))
    assert found["prefill"] == pytest.approx(100 * TOKEN + step_of(3))


def test_steps_in_flight_make_no_deadline_hopeless() -> None:
    """They are a mean: the request may come just before both are over."""
    choice = router().route(placement(), [worker("w0", Load(running=2, unheld_blocks=64))], {})
    assert choice.least_s == pytest.approx(100 * TOKEN + step_of(3))
    assert choice.first_token_s == pytest.approx(choice.least_s + 1.5 * step_of(3))


def test_prompts_in_flight_delay_the_start_and_make_no_deadline_hopeless() -> None:
    """Their steps may be about to end; of what is not planned yet, every token is before the request."""
    load = Load(running=1, unheld_blocks=64, pending_prefill_tokens=500, prefill_tokens_in_flight=400)
    choice = router().route(placement(), [worker("w0", load)], {})
    assert terms(choice, "w0")["queue_delay"] == pytest.approx(500 * TOKEN + 1.5 * step_of(2))
    assert choice.least_s == pytest.approx((500 - 400) * TOKEN + 100 * TOKEN + step_of(2))


def test_a_full_batch_delays_by_the_time_until_a_place_is_free() -> None:
    full = worker("w0", Load(running=4, unheld_blocks=64))
    full.rates.sequence.add(8.0, now=0.0)
    delay = terms(router().route(placement(), [full], {}), "w0")["queue_delay"]
    assert delay == pytest.approx(1 * 8.0 / 4 + 1.5 * step_of(4))


def test_a_stay_that_was_measured_has_the_wait_at_the_worker_in_it() -> None:
    """Six are there and stay for 8 s each, so six leave in 8 s. The request is the third beyond the batch."""
    full = worker("w0", Load(running=4, waiting=2, unheld_blocks=64))
    full.rates.sequence.add(8.0, now=0.0)
    delay = terms(router().route(placement(), [full], {}), "w0")["queue_delay"]
    assert delay == pytest.approx(3 * 8.0 / 6 + 1.5 * step_of(4))


@pytest.mark.parametrize(("most_output", "tokens"), [(0, 64), (500, 64), (5, 5)])
def test_a_stay_that_is_assumed_is_bounded_by_what_the_sequences_may_sample(most_output: int, tokens: int) -> None:
    full = worker("w0", Load(running=0, unheld_blocks=64))
    full.placed(sequences=4, prefill_tokens=0, blocks=0, most_output=4 * most_output)
    delay = terms(router().route(placement(), [full], {}), "w0")["queue_delay"]
    assert delay == pytest.approx(tokens * step_of(4) / 4 + 1.5 * step_of(4))
    full.placed(sequences=-2, prefill_tokens=0, blocks=0, most_output=-2 * most_output)
    full.placed(sequences=2, prefill_tokens=0, blocks=0)
    assert full.most_output == (most_output or float("inf")), "those of which nothing is known do not count"


def test_missing_blocks_delay_by_the_time_until_they_are_free() -> None:
    full = worker("w0", Load(running=1, unheld_blocks=4))
    full.rates.sequence.add(6.0, now=0.0)
    found = terms(router().route(placement(prompt=100), [full], {}), "w0")
    assert found["queue_delay"] == pytest.approx((7 - 4) * 6.0 / 60 + 1.5 * step_of(2))


def waited_for_blocks(outstanding: list[tuple[int, int]], waiting: int = 1) -> float:
    """Return the wait behind two that hold 50 blocks and stay for 6 s; this router has (sequences, blocks) there."""
    full = worker("w0")
    for sequences, blocks in outstanding:
        full.placed(sequences, prefill_tokens=0, blocks=blocks)
    full.heartbeat(Load(running=2, waiting=waiting, unheld_blocks=14), now=0.0)
    full.rates.sequence.add(6.0, now=0.0)
    found = terms(router().route(placement(prompt=24 * 16 - 1), [full], {}), "w0")
    return found["queue_delay"] - 1.5 * step_of(min(4, 3 + waiting))


def test_those_that_wait_for_blocks_at_the_worker_get_theirs_first() -> None:
    """One waits for 10 blocks like the others, so one departure is its own. The 10 that miss are 0.4 of another one."""
    assert waited_for_blocks([(3, 30)]) == pytest.approx((1 + 10 / 25) * 6.0 / 3)
    assert waited_for_blocks([]) == pytest.approx((10 / 25) * 6.0 / 3), "nobody knows what it waits for"


def test_a_sequence_that_wants_hardly_a_block_makes_no_wait_for_blocks_long() -> None:
    """All of its prompt but a block is cached. The others do not free one block each for that."""
    assert waited_for_blocks([(1, 1)]) == pytest.approx((1 + 10 / 25) * 6.0 / 3)
    assert waited_for_blocks([(1, 1)], waiting=2) == pytest.approx((2 + 10 / 25) * 6.0 / 4)


def test_sequences_that_were_adopted_say_nothing_of_the_blocks_that_one_waits_for() -> None:
    """The heartbeats had their blocks before this router took them over."""
    assert waited_for_blocks([(2, 20), (1, 0)]) == pytest.approx((1 + 10 / 25) * 6.0 / 3)
    full = worker("w0")
    full.placed(3, 0, 30)
    full.placed(9, 0, 0)
    assert full.wanted_blocks == 10
    full.placed(-9, 0, 0)
    full.placed(-1, 0, -10)
    assert full.wanted_blocks == 10
    full.placed(-2, 0, -20)
    assert full.wanted_blocks == 0


def test_a_worker_without_its_manager_is_a_second_dearer() -> None:
    alone = worker("w0", Load(unheld_blocks=64, manager_attached=False))
    assert terms(router().route(placement(), [alone], {}), "w0")["queue_delay"] == 1.0


def test_a_fuller_batch_makes_slower_steps() -> None:
    one, three = worker("w0"), worker("w1", Load(running=2, unheld_blocks=64))
    choice = router().route(placement(), [one, three], {})
    assert terms(choice, "w1")["decode_pressure"] > terms(choice, "w0")["decode_pressure"]


def test_a_new_worker_is_assumed_to_be_like_the_others() -> None:
    new = WorkerModel("new", CAPACITY, Load(unheld_blocks=64), heartbeat_at=0.0)
    choice = router().route(placement(), [worker("w0"), new], {})
    assert terms(choice, "new") == pytest.approx(terms(choice, "w0"))


def test_predicted_time_to_the_first_token_leaves_out_the_steps_after_it() -> None:
    choice = router().route(placement(prompt=100), [worker("w0")], {})
    assert choice.first_token_s == pytest.approx(100 * TOKEN + STEP)


# ------------------------------------------------------------ the choice


def chosen(choice: Choice) -> str:
    assert choice.worker is not None
    return choice.worker.worker_id


def test_a_hit_wins_over_an_equal_worker() -> None:
    assert chosen(router().route(placement(), [worker("w0"), worker("w1")], {"w1": 3})) == "w1"


def test_a_long_queue_outweighs_a_hit() -> None:
    busy = worker("w1", Load(unheld_blocks=64, pending_prefill_tokens=50))
    assert chosen(router().route(placement(), [worker("w0"), busy], {"w1": 3})) == "w0"
    assert chosen(router().route(placement(), [worker("w0"), busy], {"w1": 4})) == "w1"


def test_equal_workers_are_taken_by_lot_and_the_lot_can_be_drawn_again() -> None:
    first, again = router(seed=7), router(seed=7)
    workers = [worker(f"w{n}") for n in range(4)]
    picks = [chosen(first.route(placement(), workers, {})) for _ in range(100)]
    assert [chosen(again.route(placement(), workers, {})) for _ in range(100)] == picks
    assert min(Counter(picks).values()) >= 10
    assert set(picks) == {"w0", "w1", "w2", "w3"}


def test_a_difference_below_the_tie_is_none() -> None:
    nearly = worker("w1")
    nearly.rates.prefill_token.value = TOKEN + TIE_SECONDS / 200
    choice = router().route(placement(), [worker("w0"), nearly], {})
    assert dict(choice.decision.figures)["tied"] == 2


# ------------------------------------------------------------ deadlines


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


# ------------------------------------------------------------ the filters


def test_a_worker_with_twice_its_batch_is_over_limit() -> None:
    choice = router().route(placement(), [worker("w0", Load(running=4, waiting=4, unheld_blocks=64))], {})
    assert choice.outcome is Outcome.WAIT
    assert rejected(choice) == {"w0": "over limit: 8 sequences of at most 8"}


def test_more_sequences_than_the_limit_fit_an_idle_worker() -> None:
    assert router().route(placement(sequences=20), [worker("w0")], {}).outcome is Outcome.PLACED


def test_a_request_larger_than_every_pool_is_refused_with_the_numbers() -> None:
    small = worker("w0", capacity=Capacity(num_blocks=8, block_size=16, max_num_seqs=4, max_model_len=4096))
    choice = router().route(placement(prompt=120, output=20), [small], {})
    assert choice.outcome is Outcome.TOO_LARGE
    assert rejected(choice) == {"w0": "too large: 9 blocks of 8 in its pool"}


def test_a_request_whose_last_token_alone_is_beyond_the_pool_is_placed() -> None:
    small = worker("w0", capacity=Capacity(num_blocks=8, block_size=16, max_num_seqs=4, max_model_len=4096))
    assert router().route(placement(prompt=120, output=9), [small], {}).outcome is Outcome.PLACED
    assert router().route(placement(prompt=120, output=10), [small], {}).outcome is Outcome.TOO_LARGE


def test_a_request_longer_than_the_context_is_refused_with_the_numbers() -> None:
    choice = router().route(placement(prompt=500, output=20), [worker("w0")], {})
    assert choice.outcome is Outcome.TOO_LARGE
    assert rejected(choice) == {"w0": "too large: 520 tokens of at most 512"}


def test_a_larger_worker_that_is_busy_is_waited_for() -> None:
    small = worker("small", capacity=Capacity(num_blocks=4, block_size=16, max_num_seqs=4, max_model_len=512))
    busy = worker("busy", Load(running=8, unheld_blocks=64))
    assert router().route(placement(), [small, busy], {}).outcome is Outcome.WAIT


def test_draining_and_hung_workers_are_left_out_with_their_reasons() -> None:
    draining = worker("draining", Load(unheld_blocks=64, draining=True))
    hung = worker("hung", Load(unheld_blocks=64, step_age_seconds=12.0, step_predicted_seconds=0.01))
    choice = router().route(placement(), [draining, hung], {}, absent=[("lost", "connecting: refused")])
    assert choice.outcome is Outcome.NO_WORKER
    assert rejected(choice) == {
        "lost": "connecting: refused",
        "draining": "draining: it finishes what it has and takes nothing new",
        "hung": "hung: its step runs for 12.0 s; at most 5.0 s expected",
    }


# ------------------------------------------------------------ the record


def test_the_record_has_every_candidate_and_the_age_of_each_signal() -> None:
    clock = ManualClock(3.0)
    late = Router(clock, lambda: "d1", seed=5)
    old, new = worker("w0"), worker("w1")
    new.heartbeat(Load(unheld_blocks=64), now=2.5)
    record: Decision = late.route(placement(), [old, new], {"w1": 2}).decision
    assert (record.decision_id, record.chosen, record.request_id) == ("d1", "w1", "r")
    assert [candidate.name for candidate in record.candidates] == ["w0", "w1"]
    assert all(candidate.cost is not None for candidate in record.candidates)
    assert dict(record.signal_ages) == {
        "w0.heartbeat": 3.0,
        "w0.rates": 3.0,
        "w1.heartbeat": 0.5,
        "w1.rates": 3.0,
    }
    assert dict(record.figures) == {"prompt_tokens": 100.0, "tied": 1.0, "seed": 5.0}


def test_a_candidates_terms_sum_to_its_cost() -> None:
    choice = router().route(placement(), [worker("w0", Load(running=3, unheld_blocks=9))], {"w0": 1})
    (candidate,) = choice.decision.candidates
    assert candidate.cost == pytest.approx(sum(value for _, value in candidate.terms))


# ------------------------------------------------------------ no hot spot


def test_a_thousand_requests_with_one_prefix_do_not_pile_up_on_one_worker() -> None:
    """Requests come faster than a worker serves them; all share 6 of their 7 blocks, remembered optimistically."""
    capacity = Capacity(num_blocks=4096, block_size=16, max_num_seqs=64, max_model_len=512)
    workers = [worker(f"w{n}", capacity=capacity) for n in range(4)]
    memory, choose, served = OptimisticIndex(), router(), Counter[str]()
    running: list[WorkerModel] = []
    for number in range(1000):
        keys = block_hashes("shared" + chr(ord("A") + number % 26))
        hits = memory.lookup(keys, now=0.0)
        choice = choose.route(placement(prompt=113), workers, hits)
        while choice.worker is None:
            running.pop(0).placed(sequences=-1, prefill_tokens=-113 + 96, blocks=-8)
            choice = choose.route(placement(prompt=113), workers, hits)
        choice.worker.placed(sequences=1, prefill_tokens=113 - 96, blocks=8)
        memory.remember(choice.worker.worker_id, keys, now=0.0)
        running.append(choice.worker)
        served[choice.worker.worker_id] += 1
    assert sum(served.values()) == 1000
    assert min(served.values()) >= 200
    assert max(served.values()) <= 300


def test_a_quiet_trickle_with_one_prefix_stays_on_one_worker() -> None:
    workers = [worker(f"w{n}") for n in range(4)]
    memory, choose, served = OptimisticIndex(), router(), Counter[str]()
    for _ in range(50):
        keys = block_hashes("shared")
        choice = choose.route(placement(prompt=100), workers, memory.lookup(keys, now=0.0))
        memory.remember(chosen(choice), keys, now=0.0)
        served[chosen(choice)] += 1
    assert len(served) == 1


def test_without_any_worker_nothing_is_chosen() -> None:
    choice = router().route(placement(), [], {})
    assert (choice.outcome, choice.worker, choice.decision.chosen) == (Outcome.NO_WORKER, None, "no_worker")
