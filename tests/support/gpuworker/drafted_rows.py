"""A worker whose sequences guess the tokens that a test names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuworker.scheduling.batch_plan import StepPlan, StepResult
from gpuworker.scheduling.drafting import Speculation
from gpuworker.scheduling.outcomes import Completion
from tests.support.gpuworker.agent_harness import Driver

FIRST = 50
"""The token that every prompt here samples."""


class Script:
    """Guesses the tokens that a test names, and trusts them."""

    chance, behind = 1.0, None

    def __init__(self, guesses: Sequence[int]) -> None:
        self.guesses, self.seen = tuple(guesses), list[int]()

    def take(self, tokens: Sequence[int]) -> None:
        self.seen.extend(tokens)

    def propose(self, most: int) -> tuple[int, ...]:
        return self.guesses[:most]


def drafting(*guesses: int, **config: Any) -> tuple[Driver, list[Script]]:
    """Return a worker whose sequences guess that, and the drafters that it has made."""
    made: list[Script] = []

    def new_drafter(_tokens: Sequence[int], _speculation: Speculation) -> Script:
        made.append(Script(guesses))
        return made[-1]

    return Driver(new_drafter=new_drafter, **config), made


def begun(worker: Driver, sequence: int, prompt: int, row: list[int], max_tokens: int = 20, **more: Any) -> None:
    """Submit a prompt that may draft, and compute it."""
    start = 1000 * sequence
    worker.submit(sequence, range(start, start + prompt), max_tokens, speculation=Speculation(), **more)
    worker.admit(sequence, row)
    worker.step(FIRST)


def sampled(worker: Driver, plan: StepPlan, *tokens: int) -> Completion:
    """Complete a step of one row that drafts, of whose samples these count."""
    completion = worker.agent.complete(StepResult(plan.step, {plan.rows[0].sequence: tokens}))
    worker.agent.check_invariants()
    return completion
