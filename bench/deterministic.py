"""The cost of `--deterministic`: the same engine with and without it, on the peers' workloads.

    python -m bench.deterministic --dtype bfloat16 --workload W1 W4 --scale 0.25 --json

Runs go in interleaved pairs of alternating order. Each pair gives one ratio of throughputs, with over without (1.00: no
cost). Both engines run in this process, each on its own copy of the weights.
"""

from __future__ import annotations

import argparse
import itertools
from contextlib import ExitStack

from bench.lib.flags import add_engine_flags, add_model_flags, add_workload_flags, worker_options
from bench.lib.harness import median_interval, parser, progress, report
from bench.lib.models import data_plane
from bench.lib.workers import BenchWorker
from bench.lib.workloads import make, warm_up
from gpuworker.plane.assembly import ModelPlane


def _worker(plane: ModelPlane) -> BenchWorker:
    return BenchWorker(plane.runner, plane.agent_config(), None, plane.identity.kv_geometry)


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Return, for each workload, the ratios of its pairs."""
    options = worker_options(args) | {"dtype": args.dtype, "prefix_caching": args.prefix_caching == "on"}
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        planes = {promised: data_plane(args.model, deterministic=promised, **options) for promised in (True, False)}
        workers = {promised: stack.enter_context(_worker(plane)) for promised, plane in planes.items()}
        for worker in workers.values():
            worker.drive(warm_up())
        for name, repeat in itertools.product(args.workload, range(args.repeat)):
            workload, rate = make(name, args.seed, args.scale), {}
            for promised in (True, False) if repeat % 2 else (False, True):
                run = workers[promised].drive(workload, salt=f"{name}-{repeat}")
                rate[promised] = run.tokens / run.seconds
            found.setdefault(name, []).append(rate[True] / rate[False])
            progress(f"{name}, pair {repeat + 1}: {found[name][-1]:.3f}", end=True)
    return found


def main() -> None:
    flags: argparse.ArgumentParser = parser(__doc__)
    add_model_flags(flags)
    add_engine_flags(flags)
    add_workload_flags(flags)
    flags.set_defaults(repeat=5, scale=0.25)
    args = flags.parse_args()
    figures: dict[str, float] = {}
    notes: dict[str, str] = {}
    for name, ratios in measure(args).items():
        median, lower, upper = median_interval(ratios)
        for suffix, value in (("", median), ("_lower", lower), ("_upper", upper)):
            figures[f"with_over_without_{name}{suffix}"] = value
        notes[f"with_over_without_{name}"] = f"tokens a second of {name}, with over without; median of {len(ratios)}"
    report("deterministic", figures, notes, args.json)


if __name__ == "__main__":
    main()
