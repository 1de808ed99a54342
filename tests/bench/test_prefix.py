"""The worth of prefix caching: figures from made-up runs, the workloads themselves, and the fixed names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import pytest

from bench import prefix
from bench.lib.workers import BenchWorker, Run
from common.contracts.types import SequenceId
from gpuworker.scheduling.batch_plan import StepRunner
from gpuworker.scheduling.outcomes import AgentConfig


class MadeUpWorker:
    """Takes twice as long without a cache; keeps the prompts that it was given."""

    def __init__(self, runner: object, config: AgentConfig, manager: str | None, geometry: object) -> None:
        self.caching = config.prefix_caching
        self.loads: list[list[list[int]]] = []

    def __enter__(self) -> MadeUpWorker:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def load(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> Run:
        self.loads.append([list(prompt) for prompt in prompts])
        total = sum(map(len, prompts))
        return Run(
            seconds=1.0 if self.caching else 2.0,
            tokens=len(prompts) * output_tokens,
            prompt_tokens=total,
            cached_tokens=total // 2 if self.caching else 0,
            first_tokens=[0.1 if self.caching else 0.4] * len(prompts),
            outputs={SequenceId(index): [5] * output_tokens for index in range(len(prompts))},
        )


def made_up(caching: bool) -> tuple[MadeUpWorker, BenchWorker]:
    """Return a worker, as itself and as what the workloads take."""
    worker = MadeUpWorker(None, AgentConfig(16, 16, prefix_caching=caching), None, None)
    return worker, cast("BenchWorker", worker)


def test_the_ratios_are_with_over_without() -> None:
    found = prefix.compare(made_up(caching=True)[1], made_up(caching=False)[1], prefix.shared, 3)
    assert [found[f"speedup_shared{end}"] for end in ("", "_lower", "_upper")] == [2.0, 2.0, 2.0]
    assert found["ttft_ratio_shared"] == pytest.approx(0.25)
    assert found["cached_fraction_shared"] == 0.5


def test_the_first_runs_only_warm_up() -> None:
    worker, on = made_up(caching=True)
    prefix.compare(on, made_up(caching=False)[1], prefix.shared, 2)
    assert len(worker.loads) == 3


def test_requests_share_the_system_prompt_and_nothing_else() -> None:
    worker, on = made_up(caching=True)
    prefix.shared(on, seed=1)
    (prompts,) = worker.loads
    assert len(prompts) == prefix.REQUESTS
    assert len({tuple(prompt[:768]) for prompt in prompts}) == 1
    assert len({tuple(prompt[768:]) for prompt in prompts}) == prefix.REQUESTS


def test_each_turn_sends_the_whole_history_again() -> None:
    worker, on = made_up(caching=True)
    prefix.multiturn(on, seed=1)
    assert len(worker.loads) == prefix.TURNS
    for before, after in zip(worker.loads, worker.loads[1:], strict=False):
        for earlier, later in zip(before, after, strict=True):
            assert later[: len(earlier)] == earlier
            assert later[len(earlier) :][: prefix.TURN_OUTPUT] == [5] * prefix.TURN_OUTPUT
            assert len(later) == len(earlier) + prefix.TURN_OUTPUT + prefix.USER_TOKENS


def test_runs_with_different_seeds_share_nothing() -> None:
    worker, on = made_up(caching=True)
    prefix.shared(on, seed=1)
    prefix.shared(on, seed=2)
    assert worker.loads[0][0][:16] != worker.loads[1][0][:16]


def test_the_figures_have_their_fixed_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def no_process(block_size: int) -> Iterator[tuple[str, None]]:
        yield "127.0.0.1:1", None

    def no_runner(config: AgentConfig) -> tuple[StepRunner | None, None]:
        return None, None

    monkeypatch.setattr(prefix, "manager_process", no_process)
    monkeypatch.setattr(prefix, "cpu_runner", no_runner)
    monkeypatch.setattr(prefix, "BenchWorker", MadeUpWorker)
    monkeypatch.setattr("sys.argv", ["bench.prefix", "--json", "--runs", "2"])
    prefix.main()
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["bench"] == "prefix"
    assert (said["figures"]["speedup_shared"], said["figures"]["speedup_multiturn"]) == (2.0, 2.0)
    assert said["figures"]["ttft_ratio_shared"] == said["figures"]["ttft_ratio_multiturn"] == 0.25
