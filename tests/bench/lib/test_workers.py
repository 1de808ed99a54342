"""The engines of benchmarks: what they count, and that a run in which anything failed gives no figure."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from bench.lib.workers import BenchWorker, random_prompts
from common.contracts.errors import EngineFailure
from gpuworker.scheduling.batch_plan import StepPlan, StepResult
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.scheduling.step_costs import StepCosts
from gpuworker.simulated.runner import SimulatedRunner
from gpuworker.simulated.tokens import SimulatedTokens

NO_COSTS, TOKENS = StepCosts(), SimulatedTokens(range(3, 1000))
CONFIG = AgentConfig(num_blocks=32, block_size=4, max_num_seqs=4)


class FailingRunner(SimulatedRunner):
    """Fails every step."""

    def submit_step(self, plan: StepPlan) -> Future[StepResult]:
        failed: Future[StepResult] = Future()
        failed.set_exception(EngineFailure("the device is gone"))
        return failed


class BrokenRunner(SimulatedRunner):
    """Raises where a runner may not, which ends the engine."""

    def submit_step(self, plan: StepPlan) -> Future[StepResult]:
        raise RuntimeError("a bug")


class RecordingRunner(SimulatedRunner):
    """Keeps the steps that it was given."""

    def __init__(self, costs: StepCosts, tokens: SimulatedTokens) -> None:
        super().__init__(costs, tokens)
        self.steps: list[Future[StepResult]] = []

    def submit_step(self, plan: StepPlan) -> Future[StepResult]:
        self.steps.append(super().submit_step(plan))
        return self.steps[-1]


def test_no_step_runs_after_a_load() -> None:
    """Two workers may share the memory of a model, and take turns."""
    runner = RecordingRunner(StepCosts(base=0.05), TOKENS)
    with BenchWorker(runner, CONFIG, manager=None) as worker:
        prompts = random_prompts(1, 9, seed=1)
        (tokens,) = worker.load(prompts, output_tokens=3).outputs.values()
        worker.stop_token_ids = frozenset(tokens[1:2])
        before = len(runner.steps)
        assert worker.load(prompts, output_tokens=9).tokens == 2
        assert len(runner.steps) - before == 3, "a step was queued behind the last token"
        assert all(step.done() for step in runner.steps)


def test_a_load_is_counted_to_its_end() -> None:
    with BenchWorker(SimulatedRunner(NO_COSTS, TOKENS), CONFIG, manager=None) as worker:
        run = worker.load(random_prompts(4, 9, seed=1), output_tokens=5)
    assert (run.tokens, run.prompt_tokens, len(run.first_tokens)) == (20, 36, 4)
    assert [len(tokens) for tokens in run.outputs.values()] == [5] * 4
    assert run.seconds > 0


def test_a_failed_step_gives_no_figures() -> None:
    with (
        BenchWorker(FailingRunner(NO_COSTS, TOKENS), CONFIG, manager=None) as worker,
        pytest.raises(EngineFailure, match="the device is gone"),
    ):
        worker.load(random_prompts(2, 9, seed=1), output_tokens=5)


def test_a_dead_engine_is_not_waited_for() -> None:
    with (
        pytest.raises(EngineFailure, match="a bug"),
        BenchWorker(BrokenRunner(NO_COSTS, TOKENS), CONFIG, manager=None) as worker,
        pytest.raises(EngineFailure, match="the engine ended"),
    ):
        worker.load(random_prompts(2, 9, seed=1), output_tokens=5)
