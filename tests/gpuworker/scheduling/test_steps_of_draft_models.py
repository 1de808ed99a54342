"""Steps with the drafts of a draft model: for whom it guesses, how many, and when it forgets a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common.contracts.types import SequenceId
from gpuworker.scheduling.draft_tally import DraftKind, DraftTally
from gpuworker.scheduling.drafting import Drafter, DraftPrices, Speculation
from tests.support.gpuworker.agent_harness import Driver
from tests.support.gpuworker.drafted_rows import FIRST, Script, begun, sampled


class Recorded:
    """A draft model that guesses the tokens that a test names, and records what it was asked for."""

    def __init__(self, *guesses: int, seconds: float = 0.0) -> None:
        self.guesses, self.seconds = guesses, seconds
        self.asked: list[list[int]] = []
        self.released: list[Drafter] = []
        self.made: list[Asked] = []

    def new_drafter(self, _tokens: Sequence[int], _speculation: Speculation) -> Asked:
        self.made.append(Asked())
        return self.made[-1]

    def priced(self, prices: DraftPrices) -> DraftPrices:
        return replace(prices, guess=self.seconds)

    def guess(self, wanted: Sequence[tuple[Drafter, int]]) -> float:
        self.asked.append([count for _, count in wanted])
        for drafter, count in wanted:
            assert isinstance(drafter, Asked)
            drafter.guesses = self.guesses[:count]
        return 0.25

    def release(self, drafter: Drafter) -> None:
        self.released.append(drafter)


class Asked(Script):
    """Has guesses when its draft model was asked for some."""

    chance, behind = 0.9, 1  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(())


def with_a_model(model: Recorded, **config: Any) -> Driver:
    return Driver(new_drafter=model.new_drafter, draft_model=model, **config)


def test_a_draft_model_guesses_for_all_sequences_at_once() -> None:
    model = Recorded(7, 8)
    worker = with_a_model(model)
    for sequence in (0, 1):
        worker.submit(sequence, range(10 * sequence, 10 * sequence + 5), 20, speculation=Speculation())
        worker.admit(sequence, [2 * sequence, 2 * sequence + 1])
    worker.step(FIRST)
    plan = worker.plan()
    assert [row.drafts for row in plan.rows] == [(7, 8), (7, 8)]
    assert model.asked == [[15, 15]], "0.9 ** 16 is less than one in five"
    assert plan.guessing == 0.25


def test_guesses_end_before_the_limit_of_the_sequence() -> None:
    model = Recorded(7, 8, 9)
    worker = with_a_model(model)
    begun(worker, 0, 5, [3, 4], max_tokens=3)
    assert worker.plan().rows[0].drafts == (7,)
    assert model.asked == [[1]]


def test_no_guesses_are_asked_for_that_do_not_pay() -> None:
    model = Recorded(7, seconds=10.0)
    worker = with_a_model(model)
    begun(worker, 0, 5, [3, 4])
    plans = [worker.plan(), worker.plan()]
    assert [(plan.drafts, plan.guessing) for plan in plans] == [(0, 0.0), (0, 0.0)]
    assert model.asked == []


def test_the_usage_names_the_drafts_of_a_model() -> None:
    model = Recorded(7, 8, 9)
    worker = with_a_model(model)
    begun(worker, 0, 5, [3, 4])
    completion = sampled(worker, worker.plan(), 7, 1)
    assert completion.drafts == {DraftKind.MODEL: DraftTally(2, 1)}, "two slots are left in its blocks"
    usage = worker.agent.usage(SequenceId(0))
    assert (usage.drafted_tokens, usage.accepted_draft_tokens) == (2, 1)
    assert (usage.model_drafted_tokens, usage.accepted_model_draft_tokens) == (2, 1)


def test_a_sequence_that_ends_is_released_and_a_preempted_one_is_not() -> None:
    model = Recorded(7)
    worker = with_a_model(model)
    begun(worker, 0, 5, [3, 4])
    worker.preempt(0)
    assert model.released == []
    worker.agent.cancel_sequence(SequenceId(0))
    assert model.released == model.made
