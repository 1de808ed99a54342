"""Cached tokens are those that other sequences computed, whatever the grant promised."""

from __future__ import annotations

from common.types import FinishReason, SequenceId
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
    worker.agent.cancel(ONE)
    done = worker.step()
    assert done.recounted == {TWO: 0}
    assert worker.agent.usage(TWO).cached_tokens == 0


def test_what_one_that_left_had_computed_is_cached() -> None:
    worker = two_sharers(max_num_batched_tokens=4)
    worker.step()
    worker.agent.cancel(ONE)
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


def test_the_end_of_a_sequence_says_what_was_cached() -> None:
    worker = two_sharers()
    worker.agent.cancel(ONE)
    worker.agent.departures()
    worker.step()
    worker.agent.cancel(TWO, FinishReason.STOP)
    (end,) = worker.agent.departures().finished
    assert end.usage.cached_tokens == 0
