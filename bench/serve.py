"""The whole suite under the four workloads: a client process, the router, a worker and the KV manager, over gRPC.

    python -m bench.serve --workload W1 W3 --scale 0.5 --dtype bfloat16

It prints throughput and latency at the client, the start time of the suite, and the highest resident memory of each
process. Requests are not traced unless --trace-sample-ratio is given.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

import uvloop

from bench.lib.checkpoints import checkpoint
from bench.lib.flags import add_engine_flags, add_model_flags, add_workload_flags, worker_options
from bench.lib.harness import parser, progress, report_columns
from bench.lib.workloads import make, warm_up
from cli.benchmark.closed_loop import NOTES, figures, medians
from cli.benchmark.served import ServedSuite, peak_rss_mib, served_suite
from gpuworker.native.levels import NAMES


def suite_flags(options: Mapping[str, object]) -> list[str]:
    """Return flags of `quire serve` for options by name; True and False are given as switches, None not at all."""
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return words


def bench_options(model: str, load_format: str, args: argparse.Namespace, dtype: str, caching: bool) -> list[str]:
    """Return the flags of a suite for a comparison; all other options are the defaults of `quire serve`."""
    alone = {"model": model, "load_format": load_format, "dtype": dtype, "prefix_caching": caching}
    of_suite = {"cpu_level": args.level, "trace_sample_ratio": args.trace_sample_ratio}
    return suite_flags({**alone, **worker_options(args), **of_suite})


def add_suite_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("--level", choices=NAMES, help="vector instructions of our kernels; unset: the best ones here")
    flags.add_argument("--trace-sample-ratio", type=float, default=0.0, help="share of the requests that are traced")


Measured = tuple[dict[str, dict[str, float]], dict[str, float]]


async def measure(suite: ServedSuite, args: argparse.Namespace) -> Measured:
    """Return each workload's figures, medians over its repeats; and those of the suite as a whole."""
    found = {}
    await suite.run(warm_up())
    for name in args.workload:
        runs = []
        for repeat in range(args.repeat):
            seconds, records = await suite.run(make(name, args.seed, args.scale), salt=f"{name}-{repeat}")
            runs.append(figures(seconds, records.values()))
            progress(f"{name}, run {repeat + 1}: {runs[-1]['output_tok_s']:.0f} tokens/s", end=True)
        found[name] = medians(runs)
    memory = {**suite.peak_rss(), "client": peak_rss_mib(os.getpid())}
    return found, {"start_s": suite.start_seconds} | {f"rss_{name}": value for name, value in memory.items()}


async def run(args: argparse.Namespace) -> Measured:
    """Start a suite, measure it, stop it."""
    with checkpoint(args.model) as (folder, load_format):
        options = bench_options(str(folder), load_format, args, args.dtype, args.prefix_caching == "on")
        async with served_suite(options) as suite:
            return await measure(suite, args)


def main() -> None:
    flags = parser(__doc__)
    add_model_flags(flags)
    add_engine_flags(flags)
    add_workload_flags(flags)
    add_suite_flags(flags)
    args = flags.parse_args()
    args.scale = args.scale or 1.0
    found, of_suite = uvloop.run(run(args))
    notes = {name: f"highest resident memory of {name[4:]}, MiB" for name in of_suite if name.startswith("rss_")}
    notes["start_s"] = "seconds until every process of the suite was ready"
    report_columns("serve", found, NOTES | notes, args.json, of_suite)


if __name__ == "__main__":
    main()
