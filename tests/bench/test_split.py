"""The cost of the split: its figures from made-up runs, and one real pair through a manager process."""

from __future__ import annotations

import pytest

from bench.lib.workers import BenchWorker, Run, random_prompts
from bench.split import Pair, figures_of, notes_of
from common.contracts.types import SamplingParams, SequenceId
from gpuworker.scheduling.batch_plan import StepPlan
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.scheduling.step_costs import StepCosts
from gpuworker.simulated.runner import SimulatedRunner
from gpuworker.simulated.tokens import SimulatedTokens
from tests.support.bench_process import run_benchmark

TOKENS = SimulatedTokens(range(3, 1000))


def pair(remote_seconds: float, embedded_seconds: float, cpu: float = 0.001, added: float = 0.002) -> Pair:
    """Return a pair of runs of 1000 tokens."""
    remote = Run(seconds=remote_seconds, tokens=1000)
    embedded = Run(seconds=embedded_seconds, tokens=1000)
    return Pair(remote, embedded, cpu, 0.010 + added, 0.010)


@pytest.mark.parametrize("name", ["sim", "cpu"])
def test_the_figures_have_their_fixed_names_and_what_they_mean(name: str) -> None:
    figures = figures_of(name, [pair(2.0, 1.0)] * 3)
    assert {f"slowdown_{name}", f"slowdown_{name}_upper"} <= figures.keys() == notes_of(name, "").keys()


def test_the_slowdown_is_embedded_over_remote_throughput() -> None:
    figures = figures_of("sim", [pair(1.2, 1.0)] * 2 + [pair(1.0, 1.0)] * 1)
    assert figures["slowdown_sim"] == pytest.approx(1.2)
    assert figures["slowdown_sim_lower"] == pytest.approx(1.0)
    assert figures["slowdown_sim_upper"] == pytest.approx(1.2)
    assert figures["pairs_sim"] == 3


def test_costs_of_the_manager_are_reported_by_token_and_by_request() -> None:
    figures = figures_of("cpu", [pair(1.0, 1.0, cpu=0.004, added=0.001), pair(1.0, 1.0, cpu=0.006, added=0.003)])
    assert figures["manager_cpu_us_per_token_cpu"] == pytest.approx(5.0)
    assert figures["ttft_added_ms_cpu"] == pytest.approx(2.0)
    assert figures["tokens_per_second_remote_cpu"] == pytest.approx(1000.0)


def test_a_run_counts_every_token_of_every_sequence() -> None:
    config = AgentConfig(num_blocks=64, block_size=16, max_num_seqs=4)
    with BenchWorker(SimulatedRunner(StepCosts(), TOKENS), config, None) as worker:
        prompts = random_prompts(4, 20, seed=1)
        first, second = worker.load(prompts, 5), worker.load(prompts, 5)
    assert (first.tokens, first.prompt_tokens, first.cached_tokens) == (20, 80, 0)
    assert [len(output) for output in first.outputs.values()] == [5] * 4
    assert len(first.first_tokens) == 4
    assert second.cached_tokens == 4 * 16, "the same prompts again, whose full blocks are there"


def test_a_simulated_step_takes_its_time() -> None:
    runner = SimulatedRunner(StepCosts(base=0.02), TOKENS, held=0.005)
    runner.add_sequence(SequenceId(1), [1, 2], SamplingParams(), 2)
    result = runner.submit_step(StepPlan(step=3, rows=(), copies=())).result(60.0)
    runner.remove(SequenceId(1))
    runner.close()
    assert (result.step, result.sampled) == (3, {})
    assert result.seconds >= 0.02


def test_a_real_pair_runs_through() -> None:
    figures, _ = run_benchmark("split", "--only", "sim", "--pairs", "1", "--sequences", "8", "--output-tokens", "8")
    assert figures["pairs_sim"] == 1
    assert 0 < figures["slowdown_sim"] == figures["slowdown_sim_upper"]
    assert 0 < figures["tokens_per_second_remote_sim"] <= 8 * 8 / (8 * 0.005), "no more than steps of 5 ms allow"
    assert not [name for name in figures if name.endswith("_cpu")]
