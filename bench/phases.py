"""The engine against the limits of the machine: in prefill, in decode, in attention, and by block size.

    python -m bench.phases --dtype float32 bfloat16 --json
    python -m bench.phases --only blocks --scale 1 --repeat 3        for quire advise-block-size --speeds

Operations and bytes follow from the model's shape (bench/lib/model_costs.py). The rates of matrix products and of
reading are measured in the same run, on the same threads. Times are of whole steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bench.comparison.ratios import SHORT
from bench.lib import block_sizes, paged_attention, stalls
from bench.lib.flags import add_engine_flags, worker_options
from bench.lib.harness import parser, progress, report_columns
from bench.lib.model_costs import ModelCosts
from bench.lib.models import data_plane
from bench.lib.rates import matmul_rate, read_rate
from bench.lib.workers import BenchWorker
from bench.lib.workloads import warm_up
from cli.benchmark.closed_loop import step_seconds
from cli.benchmark.requests import equal_requests
from gpuworker.memory.devices import default_threads
from gpuworker.plane.assembly import ModelPlane

PREFILL_PROMPTS, PREFILL_TOKENS = 8, 1024
DECODE_BATCHES, DECODE_PROMPT, DECODE_OUTPUT = (1, 8, 32), 512, 48


@dataclass(slots=True)
class Peaks:
    """The best rates seen so far: FLOP/s of matrix products, bytes a second of reading.

    They are measured again between measurements: a rate that another program disturbed would flatter the engine.
    """

    dtype: torch.dtype
    threads: int
    flops: float = 0.0
    read: float = 0.0

    def take(self) -> None:
        """Measure both rates once more."""
        self.flops = max(self.flops, matmul_rate(self.dtype, self.threads))
        self.read = max(self.read, read_rate(self.threads))


def prefill_seconds(worker: BenchWorker, repeat: int) -> float:
    """Return the time of the prefills, each of which samples one token."""
    return min(
        worker.drive(equal_requests(PREFILL_PROMPTS, PREFILL_TOKENS, 1, 100 + turn)).seconds for turn in range(repeat)
    )


def decode_seconds(worker: BenchWorker, batch: int, repeat: int) -> float:
    """Return the time of a step in which so many sequences decode."""
    workloads = (equal_requests(batch, DECODE_PROMPT, DECODE_OUTPUT, 200 + turn) for turn in range(repeat))
    return min(step_seconds(tuple(worker.drive(workload).records.values())) for workload in workloads)


def fractions(costs: ModelCosts, peaks: Peaks, prefill: float, decodes: Mapping[int, float]) -> dict[str, float]:
    """Return speeds, and their fractions of the peak rates; `decodes` has seconds of a step by batch."""
    found = {
        "peak_gflop_s": peaks.flops / 1e9,
        "read_gb_s": peaks.read / 1e9,
        "prefill_tok_s": PREFILL_PROMPTS * PREFILL_TOKENS / prefill,
        "prefill_flop_fraction": PREFILL_PROMPTS * costs.flops(0, PREFILL_TOKENS) / prefill / peaks.flops,
    }
    context = DECODE_PROMPT + DECODE_OUTPUT / 2
    for batch, seconds in decodes.items():
        found |= {
            f"decode{batch}_step_ms": 1e3 * seconds,
            f"decode{batch}_read_fraction": costs.decode_bytes(batch, context) / seconds / peaks.read,
            f"decode{batch}_flop_fraction": costs.decode_flops(batch, context) / seconds / peaks.flops,
        }
    return found


def of_phases(plane: ModelPlane, threads: int, repeat: int) -> dict[str, float]:
    """Return the figures of prefill and decode of a loaded model."""
    number = float(plane.model.dtype.itemsize)
    peaks = Peaks(plane.model.dtype, threads)
    peaks.take()
    with BenchWorker(plane.runner, plane.agent_config(), None, plane.identity.kv_geometry) as worker:
        worker.drive(warm_up())
        prefill = prefill_seconds(worker, repeat)
        peaks.take()
        gaps = stalls.measure(worker, repeat)
        decodes = {batch: decode_seconds(worker, batch, repeat) for batch in DECODE_BATCHES}
    peaks.take()
    return fractions(ModelCosts.of(plane.model.config, number, number), peaks, prefill, decodes) | gaps


NOTES = {
    "peak_gflop_s": "matrix products of this machine, measured, GFLOP/s",
    "read_gb_s": "reading of memory, measured, GB/s",
    "prefill_tok_s": f"prompt tokens a second, {PREFILL_PROMPTS} prompts of {PREFILL_TOKENS}",
    "prefill_flop_fraction": "operations of these over the peak rate",
    **{f"decode{batch}_step_ms": f"a step of {batch} decodes at about {DECODE_PROMPT}, ms" for batch in DECODE_BATCHES},
    **{
        f"decode{batch}_read_fraction": "weights and K/V that it reads, over the rate of reading"
        for batch in DECODE_BATCHES
    },
    **{f"decode{batch}_flop_fraction": "its operations over the peak rate" for batch in DECODE_BATCHES},
}


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return columns of figures: one for each type, and one for each kind of requests by block size."""
    threads = args.threads or default_threads()
    columns: dict[str, dict[str, float]] = {}
    options = worker_options(args) | {"prefix_caching": False}
    for dtype in args.dtype:
        column = columns[SHORT[dtype]] = {}
        if "attention" in args.only:
            column |= paged_attention.measure(dtype, args.block_size, threads)
            progress(f"attention in {dtype}", end=True)
        if "phases" in args.only:
            column |= of_phases(data_plane(args.model, dtype=dtype, **options), threads, args.repeat)
            progress(f"phases in {dtype}", end=True)
    if "blocks" in args.only:
        plane = data_plane(args.model, dtype=args.dtype[-1], **options)
        columns |= block_sizes.measure(plane, args.scale, args.repeat)
        plane.runner.close()
    return {name: column for name, column in columns.items() if column}


def main() -> None:
    flags = parser(__doc__)
    parts = ["phases", "attention", "blocks"]
    flags.add_argument("--model", help="folder of a checkpoint; unset: a random one of 128 million parameters")
    flags.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    flags.add_argument("--only", nargs="+", default=parts, choices=parts, help="parts to measure")
    flags.add_argument("--scale", type=float, default=0.5, help="share of the requests of each kind, for blocks")
    flags.add_argument("--repeat", type=int, default=3, help="runs of everything")
    add_engine_flags(flags)
    args = flags.parse_args()
    torch.manual_seed(0)
    report_columns("phases", measure(args), NOTES | stalls.NOTES | paged_attention.NOTES | block_sizes.NOTES, args.json)


if __name__ == "__main__":
    main()
