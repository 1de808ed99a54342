"""What a worker costs a request: each term by hand."""

from __future__ import annotations

import pytest

from router.placement.worker_model import Load, WorkerModel
from tests.support.router.placements import CAPACITY, STEP, TOKEN, placement, router, step_of, terms, worker


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
