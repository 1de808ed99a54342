"""The engine alone: the four workloads on one engine in this process, over a ledger inside; no gRPC, no Redis.

    python -m bench.engine --workload W1 --scale 0.5 --dtype bfloat16
    python -m bench.engine --check                     both paths must give equal tokens

It measures throughput, time to first token and inter-token latency. It also shows where an engine's time goes: the
model's forward, the rest of a step (laying out, sampling, reading back), and between steps. Without --model a random
one of 128 million parameters is made.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

from bench.lib.flags import add_engine_flags, add_model_flags, add_workload_flags, worker_options
from bench.lib.harness import parser, progress, report_columns
from bench.lib.models import data_plane
from bench.lib.workers import BenchWorker, Run
from bench.lib.workloads import make, warm_up
from cli.benchmark.closed_loop import NOTES, agreement, figures, medians
from common.contracts.types import SamplingParams, SequenceId
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.native.llama import PHASES
from gpuworker.plane.assembly import ModelPlane
from gpuworker.scheduling.batch_plan import StepPlan, StepResult, StepRunner

CHECK_SCALE = 0.1
"""The share of each workload that --check runs, unless --scale is given."""


class TimedRunner:
    """Implements `StepRunner` over another one, and adds up the seconds of its steps and of their parts.

    A native model times its phases itself: its forwards run without Python. For another model `forward` is timed as a
    whole.
    """

    def __init__(self, runner: StepRunner, model: Any) -> None:
        self._runner, self._native = runner, model if isinstance(model, LlamaCpuModel) else None
        self.steps, self.in_steps, self._in_forward = 0, 0.0, 0.0
        forward: Callable[..., Any] = model.forward

        def timed(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = forward(*args, **named)
            self._in_forward += time.perf_counter() - began
            return result

        if self._native is None:
            model.forward = timed
        self.reset()

    @property
    def phases(self) -> dict[str, float]:
        """Seconds in each phase of the model's forward, where the model separates them."""
        return {"forward": self._in_forward} if self._native is None else dict(self._native.seconds or {})

    def reset(self) -> None:
        """Start all sums at zero. No step may be running."""
        self.steps, self.in_steps, self._in_forward = 0, 0.0, 0.0
        if self._native is not None:
            self._native.seconds = {}

    def add_sequence(
        self,
        sequence: SequenceId,
        tokens: Sequence[int],
        sampling: SamplingParams,
        prompt_tokens: int,
        adapter: object | None = None,
    ) -> None:
        self._runner.add_sequence(sequence, tokens, sampling, prompt_tokens, adapter)

    def remove(self, sequence: SequenceId) -> None:
        self._runner.remove(sequence)

    def submit_step(self, plan: StepPlan) -> Future[StepResult]:
        done = self._runner.submit_step(plan)
        done.add_done_callback(self._count)
        return done

    def close(self) -> None:
        self._runner.close()

    def _count(self, done: Future[StepResult]) -> None:
        if done.exception() is None:
            self.steps += 1
            self.in_steps += done.result().seconds


def engine(plane: ModelPlane) -> tuple[BenchWorker, TimedRunner]:
    """Return an engine on a data plane, not yet started, and the timer of its steps."""
    runner = TimedRunner(plane.runner, plane.model)
    return BenchWorker(runner, plane.agent_config(), None, plane.identity.kv_geometry), runner


def shares(run: Run, runner: TimedRunner) -> dict[str, float]:
    """Return the parts of a run's time. On a GPU a forward is only launched, so its part says little."""
    phases = runner.phases
    return {
        "steps": runner.steps,
        **{f"share_{name}": seconds / run.seconds for name, seconds in phases.items()},
        "share_rest_of_step": (runner.in_steps - sum(phases.values())) / run.seconds,
        "share_between_steps": 1 - runner.in_steps / run.seconds,
    }


SHARE_NOTES = {
    "steps": "steps run",
    "share_forward": "share of the time in the model's forward",
    **{f"share_{name}": f"share of the time in the forward's {name.replace('_', ' and ')}" for name in PHASES},
    "share_rest_of_step": "in the rest of a step: arrays, sampling, reading back",
    "share_between_steps": "between steps",
}


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return each workload's figures, medians over its repeats."""
    found = {}
    worker, runner = engine(_plane(args, "transformers" if args.transformers else "auto"))
    with worker:
        worker.drive(warm_up())
        for name in args.workload:
            runs = []
            for repeat in range(args.repeat):
                runner.reset()
                run = worker.drive(make(name, args.seed, args.scale), salt=f"{name}-{repeat}")
                runs.append(figures(run.seconds, run.records.values()) | shares(run, runner))
                progress(f"{name}, run {repeat + 1}: {runs[-1]['output_tok_s']:.0f} tokens/s", end=True)
            found[name] = medians(runs)
    return found


def check(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return, for each workload, the share of tokens on which the native and the transformers path agree in float32."""
    found = {}
    args.dtype = "float32"
    with ExitStack() as stack:
        native, transformers = (
            stack.enter_context(engine(_plane(args, path))[0]) for path in ("native", "transformers")
        )
        for name in args.workload:
            workload = make(name, args.seed, args.scale)
            expected, got = (
                {rid: record.tokens for rid, record in worker.drive(workload, salt=name).records.items()}
                for worker in (transformers, native)
            )
            found[name] = {"agreement": agreement(expected, got), "tokens": sum(map(len, expected.values()))}
            progress(f"{name}: {found[name]['agreement']:.4f} of the tokens agree", end=True)
    return found


CHECK_NOTES = {
    "agreement": "share of equal tokens, native against transformers path, float32",
    "tokens": "tokens compared",
}


def _plane(args: argparse.Namespace, model_impl: str) -> ModelPlane:
    caching = args.prefix_caching == "on"
    options = worker_options(args) | {"dtype": args.dtype, "prefix_caching": caching, "model_impl": model_impl}
    return data_plane(args.model, **options)


def main() -> None:
    flags = parser(__doc__)
    add_model_flags(flags)
    add_engine_flags(flags)
    add_workload_flags(flags)
    flags.add_argument("--transformers", action="store_true", help="the transformers path, which serves any model")
    flags.add_argument(
        "--check", action="store_true", help="compare tokens of the native and the transformers path instead"
    )
    args = flags.parse_args()
    args.scale = args.scale or (CHECK_SCALE if args.check else 1.0)
    found = check(args) if args.check else measure(args)
    report_columns("engine", found, NOTES | SHARE_NOTES | CHECK_NOTES, args.json)
    if args.check and min(each["agreement"] for each in found.values()) < 1.0:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
