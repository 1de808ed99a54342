"""The time of a decode step beyond the model's forward, at several batch sizes.

    python -m bench.step_overhead --json

The engine is a worker's, with its I/O loop, over a small model of random weights. Steps are queued natively, as in a
worker, or launched from a Python thread for comparison. Idle is the time from the end of one step to the start of the
next. The rest of a step is input preparation, the attention work list, and sampling.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from bench.lib.checkpoints import SMALL
from bench.lib.harness import parser, report
from bench.lib.models import data_plane
from bench.lib.workers import BenchWorker, random_prompts
from common.contracts.types import SamplingParams
from gpuworker.attention.backends import make_backend
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.token_table import TokenTable
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.plane.assembly import ModelPlane
from gpuworker.runner.launcher import EagerLauncher, LaidOutStep, StepLauncher
from gpuworker.runner.model_runner import ModelRunner, RunnerLimits
from gpuworker.runner.native_executor import NativeExecutor, StepTimes, native_executor
from gpuworker.runner.thread_executor import thread_executor
from gpuworker.sampling.rows import SampledTokens
from gpuworker.scheduling.outcomes import AgentConfig

BLOCK_SIZE, PROMPT_TOKENS, WARM_UP = 16, 64, 8
WAYS = ("queue", "thread")
DRAWS = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True),
}


class TimedLauncher:
    """Launches kernel by kernel, and records the times."""

    def __init__(self, launcher: StepLauncher, model: LlamaCpuModel, spent: list[StepTimes]) -> None:
        self._launcher, self._model, self._spent = launcher, model, spent
        self._ended, self._forward = time.perf_counter(), 0.0

    def launch(self, step: LaidOutStep) -> SampledTokens:
        began = time.perf_counter()
        sampled = self._launcher.launch(step)
        ended, forward = time.perf_counter(), sum((self._model.seconds or {}).values())
        self._spent.append(StepTimes(began - self._ended, ended - began, forward - self._forward))
        self._ended, self._forward = ended, forward
        return sampled


@dataclass(frozen=True, slots=True)
class Overhead:
    """Of one step, in seconds; medians but for the 90th percentile and the CPU time, which is a mean."""

    idle: float
    idle_p90: float
    rest: float
    forward: float
    cpu: float


def _runner(plane: ModelPlane, way: str, limits: RunnerLimits, blocks: int, spent: list[StepTimes]) -> ModelRunner:
    model = plane.model
    assert isinstance(model, LlamaCpuModel), "the native library was not built"
    cache = KvCache(plane.identity.kv_geometry, blocks, BLOCK_SIZE, model.device)
    attention = make_backend("auto", cache)
    if way == "queue":
        runner = ModelRunner(model, cache, attention, limits, native_executor)
        assert isinstance(runner.executor, NativeExecutor)
        runner.executor.spent = spent
        return runner

    def launcher(tokens: TokenTable) -> StepLauncher:
        return TimedLauncher(EagerLauncher(model, attention, tokens), model, spent)

    return ModelRunner(model, cache, attention, limits, thread_executor(launcher))


def measure(plane: ModelPlane, way: str, rows: int, steps: int, sampling: SamplingParams) -> Overhead:
    length, model = PROMPT_TOKENS + steps + WARM_UP, plane.model
    assert isinstance(model, LlamaCpuModel)
    config = AgentConfig(rows * (-(-length // BLOCK_SIZE) + 2), BLOCK_SIZE, 1 << 15, max_num_seqs=rows)
    spent: list[StepTimes] = []
    model.seconds = {}
    limits = RunnerLimits(rows, length, plane.settings.threads or 0)
    with BenchWorker(_runner(plane, way, limits, config.num_blocks, spent), config, None) as worker:
        worker.sampling = sampling
        worker.load(random_prompts(rows, PROMPT_TOKENS, 0), WARM_UP)
        spent.clear()
        before = psutil.Process().cpu_times()
        worker.load(random_prompts(rows, PROMPT_TOKENS, 1), steps)
        after = psutil.Process().cpu_times()
    decodes = spent[2:]  # the first waits for the load, the second may wait for the last prompts
    idle = [each.idle_before for each in decodes]
    return Overhead(
        statistics.median(idle),
        statistics.quantiles(idle, n=10)[-1],
        statistics.median(each.took - each.forward for each in decodes),
        statistics.median(each.forward for each in decodes),
        (after.user + after.system - before.user - before.system) / len(spent),
    )


def figures_of(name: str, found: Overhead) -> Iterator[tuple[str, float, str]]:
    """Yield name, value and meaning of each figure of one batch size."""
    yield f"idle_us_{name}", 1e6 * found.idle, "between two steps, median"
    yield f"idle_p90_us_{name}", 1e6 * found.idle_p90, "between two steps, 90th percentile"
    yield f"rest_us_{name}", 1e6 * found.rest, "in a step beside the forward, median"
    yield f"forward_us_{name}", 1e6 * found.forward, "forward, median"
    yield f"cpu_us_{name}", 1e6 * found.cpu, "CPU time of a step in all threads, mean"


def main() -> None:
    flags: argparse.ArgumentParser = parser(__doc__)
    flags.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256], help="batch sizes")
    flags.add_argument("--steps", type=int, default=300, help="decode steps of each")
    flags.add_argument("--threads", type=int, help="threads of the engine; unset: as many as a worker takes")
    flags.add_argument("--draw", choices=sorted(DRAWS), default="greedy", help="how tokens are drawn")
    flags.add_argument("--only", choices=WAYS, nargs="+", default=list(WAYS), help="some ways to run steps")
    args = flags.parse_args()
    options = {"device": "cpu", "dtype": "float32", "threads": args.threads, "kv_blocks": 64, "max_model_len": 512}
    plane = data_plane(None, SMALL, **options)
    figures: dict[str, float] = {}
    notes: dict[str, str] = {}
    for rows in args.rows:
        for way in args.only:
            found = measure(plane, way, rows, args.steps, DRAWS[args.draw])
            for name, value, meaning in figures_of(f"{rows}_{way}", found):
                figures[name], notes[name] = value, f"{meaning}; {rows} rows, {way}, microseconds"
    report("step_overhead", figures, notes, args.json)


if __name__ == "__main__":
    main()
