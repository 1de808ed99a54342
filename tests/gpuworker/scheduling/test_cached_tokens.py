"""Cached tokens are those that other sequences computed, whatever the grant promised."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contracts.types import FinishReason, SequenceId
from tests.support.gpuworker.agent_harness import Driver

ONE, TWO = SequenceId(0), SequenceId(1)
PREFIX = list(range(8))


def two_sharers(**config: int) -> Driver:
    """Return a worker with two sequences of nine tokens, of which the second shares two blocks of four."""
    worker = Driver(num_blocks=16, **config)
    worker.submit(0, [*PREFIX, 50], max_tokens=9)
    worker.submit(1, [*PREFIX, 60], max_tokens=9)
    worker.admit(0, [0, 1, 2])
    worker.admit(1, [0, 1, 3], shared=2)
    return worker


def test_what_another_sequence_computed_is_cached() -> None:
    worker = two_sharers()
    assert worker.step().recounted == {}
    done = worker.step()
    assert (worker.agent.usage(ONE).cached_tokens, done.recounted) == (0, {})
    assert worker.agent.usage(TWO).cached_tokens == 8


def test_what_a_sequence_computes_for_one_that_left_is_not_cached() -> None:
    worker = two_sharers()
    worker.agent.cancel_sequence(ONE)
    done = worker.step()
    assert done.recounted == {TWO: 0}
    assert worker.agent.usage(TWO).cached_tokens == 0


def test_what_one_that_left_had_computed_is_cached() -> None:
    worker = two_sharers(max_num_batched_tokens=4)
    worker.step()
    worker.agent.cancel_sequence(ONE)
    assert worker.step().recounted == {}, "the prompt is not computed yet"
    assert worker.step().recounted == {TWO: 4}


def test_two_sequences_that_fill_one_prefix_in_turns_compute_each_token_once() -> None:
    worker = two_sharers(long_prefill_cap=4)
    computed = 0
    while worker.agent.usage(ONE).output_tokens == 0 or worker.agent.usage(TWO).output_tokens == 0:
        computed += worker.step().computed - sum(worker.agent.usage(each).output_tokens > 0 for each in (ONE, TWO))
        assert computed < 40
    usages = worker.agent.usage(ONE), worker.agent.usage(TWO)
    assert sum(usage.cached_tokens for usage in usages) == 8


def test_a_prompt_that_is_preempted_and_computed_again_keeps_its_count() -> None:
    worker = two_sharers()
    worker.step()
    worker.step()
    worker.preempt(1)
    worker.admit(1, [0, 1, 4], shared=2)
    done = worker.step()
    assert done.recounted == {}
    assert worker.agent.usage(TWO).cached_tokens == 8


def hit_of_32(max_num_batched_tokens: int = 16) -> Driver:
    """Return a worker whose second sequence has 65 tokens and a hit of 32, and has computed 16 more."""
    worker = Driver(num_blocks=16, block_size=16, max_num_batched_tokens=max_num_batched_tokens)
    worker.submit(0, range(33), max_tokens=9)
    worker.admit(0, [0, 1, 2])
    for _ in range(-(-33 // max_num_batched_tokens)):
        worker.step()
    worker.agent.cancel_sequence(ONE)
    worker.submit(1, range(65), max_tokens=9)
    worker.admit(1, [0, 1, 5, 6, 7], shared=2)
    worker.step()
    assert worker.agent.usage(TWO).cached_tokens == 32
    return worker


def again(worker: Driver, *row: int, shared: int) -> list[dict[SequenceId, int]]:
    """Preempt the second sequence, admit it on these blocks, compute its prompt; return what was corrected."""
    worker.preempt(1)
    worker.admit(1, list(row), shared=shared)
    before, recounted = worker.agent.usage(TWO).output_tokens, []
    while worker.agent.usage(TWO).output_tokens == before:
        recounted.append(dict(worker.step().recounted))
    return [each for each in recounted if each]


@pytest.mark.parametrize(("shared", "cached"), [(0, 0), (1, 16), (2, 32)])
def test_hits_that_a_preemption_lost_are_computed_and_so_not_cached(shared: int, cached: int) -> None:
    """48 tokens were there or computed, 16 of them by the sequence itself. A later run computes the others."""
    worker = hit_of_32()
    recounted = again(worker, *[0, 1][:shared], *range(8, 13 - shared), shared=shared)
    usage = worker.agent.usage(TWO)
    assert (usage.cached_tokens, usage.recomputed_tokens) == (cached, 16)
    assert recounted == ([] if cached == 32 else [{TWO: cached}])


def test_what_a_preempted_run_computed_is_not_cached_for_the_next_one() -> None:
    """The next run has all that the first one had or computed, as a hit of 48."""
    worker = hit_of_32()
    assert again(worker, 0, 1, 5, 8, 9, shared=3) == []
    usage = worker.agent.usage(TWO)
    assert (usage.cached_tokens, usage.recomputed_tokens) == (32, 0)


def test_a_lost_hit_is_lost_once() -> None:
    """A third run finds the blocks that the second one computed."""
    worker = hit_of_32()
    worker.preempt(1)
    worker.admit(1, [8, 9, 10, 11, 12])
    worker.step()
    worker.step()
    assert again(worker, 8, 9, 13, 14, 15, shared=2) == [{TWO: 0}]
    usage = worker.agent.usage(TWO)
    assert (usage.cached_tokens, usage.recomputed_tokens) == (0, 16)


def test_a_hit_that_is_lost_after_the_first_token_stays_cached_and_is_computed_again() -> None:
    worker = hit_of_32(64)
    assert worker.agent.usage(TWO).output_tokens == 1
    assert again(worker, 8, 9, 10, 11, 12, shared=0) == []
    usage = worker.agent.usage(TWO)
    assert (usage.cached_tokens, usage.recomputed_tokens) == (32, 65)


def test_a_worker_that_begins_anew_says_again_what_is_cached() -> None:
    """The prompt's last step fails: the number that it would have told is lost, and so are the blocks."""
    worker, after = hit_of_32(64), Driver(num_blocks=16, block_size=16)
    worker.submit(2, [*range(65), 70], max_tokens=9)
    three = SequenceId(2)
    worker.admit(2, [0, 1, 8, 9, 10], shared=2)
    worker.plan()
    after.agent.take_over([each for each in worker.agent.unfinished() if each.id == three])
    after.admit(2, [0, 1, 2, 3, 4])
    assert after.step().recounted == {three: 0}
    usage = after.agent.usage(three)
    assert (usage.cached_tokens, usage.output_tokens) == (0, 1)


OPERATIONS = st.lists(st.one_of(st.just("step"), st.just("cancel"), st.integers(0, 4)), min_size=4, max_size=14)


@given(budget=st.sampled_from([3, 4, 8, 32]), cap=st.sampled_from([0, 2]), operations=OPERATIONS)
def test_a_token_is_cached_or_computed_before_the_first_output_and_each_further_time_is_one_again(
    budget: int, cap: int, operations: list[str | int]
) -> None:
    """A number preempts the second sequence, and admits it with so many blocks of the first one, which fills them.

    The count from scratch knows the rows alone: which positions the second sequence computed, and how often.
    """
    worker = Driver(num_blocks=16, max_num_batched_tokens=budget, long_prefill_cap=cap)
    worker.submit(0, [*range(16), 50], max_tokens=9)
    worker.submit(1, [*range(16), 60], max_tokens=9)
    worker.admit(0, [0, 1, 2, 3, 4])
    worker.admit(1, [0, 1, 2, 3, 8], shared=4)
    before, every, there = set[int](), list[int](), 4
    for operation in [*operations, *["step"] * 20]:
        if operation == "cancel":
            worker.agent.cancel_sequence(ONE)
            there = 0
        elif isinstance(operation, int):
            shared = min(operation, there)
            worker.preempt(1)
            worker.admit(1, [0, 1, 2, 3][:shared] + [8, 9, 10, 11, 12][shared:], shared=shared)
        elif (plan := worker.agent.plan()) is not None:
            rows = [row for row in plan.rows if row.sequence == TWO]
            places = [place for row in rows for place in range(row.start, row.start + row.length)]
            before.update(places if not worker.agent.usage(TWO).output_tokens else ())
            every += places
            worker.complete(plan)
            usage, cached = worker.agent.usage(TWO), set(range(16)) - before
            assert usage.recomputed_tokens == len(every) - len(set(every)) + len(cached & set(every))
            assert not usage.output_tokens or usage.cached_tokens == len(cached)
    assert worker.agent.usage(TWO).output_tokens


def test_the_end_of_a_sequence_says_what_was_cached() -> None:
    worker = two_sharers()
    worker.agent.cancel_sequence(ONE)
    worker.agent.departures()
    worker.step()
    worker.agent.cancel_sequence(TWO, FinishReason.STOP)
    (end,) = worker.agent.departures().finished
    assert end.usage.cached_tokens == 0
