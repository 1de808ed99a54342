"""Speed and waste of each block size on short, general and long requests, by one model on separate caches.

The sizes take turns on every workload, so that other load on the machine affects all of them alike.
"""

from __future__ import annotations

import random
import statistics
from contextlib import ExitStack

from bench.lib.harness import progress
from bench.lib.models import plane_worker
from bench.lib.workers import BenchWorker
from bench.lib.workloads import make, warm_up
from cli.benchmark.requests import Request, Workload
from cli.block_size.accounting import BLOCK_SIZES, count_waste
from gpuworker.plane.assembly import ModelPlane

KINDS = ("short", "general", "long")
_SHORT, _LONG = 64, 8


def requests(kind: str, seed: int, scale: float) -> Workload:
    """Return prompts and outputs of 16 to 64 tokens; those of W1; or 1024 to 1792 and 64 to 128 tokens."""
    if kind == "general":
        return make("W1", seed, scale)
    prompts, outputs, count = ((16, 64), (16, 64), _SHORT) if kind == "short" else ((1024, 1792), (64, 128), _LONG)
    rng = random.Random(f"{kind}/{seed}")
    made = []
    for index in range(max(1, int(scale * count))):
        prompt = [rng.randrange(3, 32000) for _ in range(rng.randint(*prompts))]
        made.append(Request(f"r{index:03d}", prompt, rng.randint(*outputs)))
    return Workload(kind, made)


def measure(plane: ModelPlane, scale: float, repeat: int) -> dict[str, dict[str, float]]:
    """Return, for each kind of requests, output tokens a second and waste by block size."""
    with ExitStack() as stack:
        workers = {size: stack.enter_context(plane_worker(plane, size)) for size in BLOCK_SIZES}
        for worker in workers.values():
            worker.drive(warm_up())
        return {kind: _kind(workers, kind, scale, repeat) for kind in KINDS}


def _kind(workers: dict[int, BenchWorker], kind: str, scale: float, repeat: int) -> dict[str, float]:
    speeds: dict[int, list[float]] = {size: [] for size in workers}
    for turn in range(repeat):
        workload = requests(kind, turn, scale)
        for size, worker in workers.items():
            run = worker.drive(workload, salt=f"{kind}-{turn}")
            speeds[size].append(run.tokens / run.seconds)
        progress(f"{kind}: turn {turn + 1} of {repeat}", end=turn + 1 == repeat)
    lengths = [(len(each.prompt), each.max_new_tokens) for each in requests(kind, 0, 1.0).initial]
    found = {f"tok_s_block{size}": statistics.median(speeds[size]) for size in workers}
    return found | {f"waste_block{size}": count_waste(size, lengths).share for size in workers}


NOTES = {f"tok_s_block{size}": f"output tokens a second with blocks of {size}" for size in BLOCK_SIZES} | {
    f"waste_block{size}": "slots in rows without a token over slots with one" for size in BLOCK_SIZES
}
