"""One worker of two ranks with a thread each, beside one rank with two threads: the same cores, the same random model.

    python -m bench.tensor_parallel --json
    python -m bench.tensor_parallel --hosts --json

With `--hosts` the ranks are on this machine, too, as if it were two hosts that loopback connects, and take turns with
ranks that share memory: `hosts2_over_tp2` is what the way between hosts costs, without that of a network.

The engines are a worker's, with its I/O loop, and take turns. Rank 0 is in this process, as in a worker. `ratio` is the
median of the ratios of the pairs. A load of decodes has short prompts, a load of prompts has one token of output each.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bench.lib.checkpoints import MEDIUM, SMALL, checkpoint
from bench.lib.harness import parser, report
from bench.lib.models import data_plane
from bench.lib.workers import BenchWorker, random_prompts
from common.process.python import module_command
from gpuworker.config import GpuWorkerSettings
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.plane.assembly import ModelPlane, assemble

PROMPT_TOKENS, LONG_TOKENS, LONG_PROMPTS, WARM_UP = 32, 256, 4, 4


@contextmanager
def opened(
    shape: Mapping[str, object], ranks: int, cores: int, dtype: str, tokens: int, hosts: int = 1
) -> Iterator[ModelPlane]:
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": dtype,
        "threads": cores // ranks,
        "tensor_parallel_size": ranks,
        "kv_memory": 256 << 20,
        "max_model_len": max(tokens + PROMPT_TOKENS, LONG_TOKENS) + 16,
        "max_num_batched_tokens": 512,
        "prefix_caching": False,
    }
    if hosts == 1:
        yield data_plane(None, shape, **options)  # the engine over it closes its runner
        return
    with checkpoint(None, shape) as (folder, load_format), _place(hosts) as others:
        options |= {"model": str(folder), "load_format": load_format}
        flags = [_flag(name, value) for name, value in options.items()]
        for host in range(1, hosts):
            command = module_command("gpuworker", *flags)
            others.append(subprocess.Popen(command, env=os.environ | {"RANK": str(host)}))
        yield assemble(GpuWorkerSettings(**options))


def _flag(name: str, value: object) -> str:
    word = name.replace("_", "-")
    return f"--{'' if value else 'no-'}{word}" if isinstance(value, bool) else f"--{word}={value}"


@contextmanager
def _place(hosts: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Be the first of so many hosts on loopback; what is put on the list ends with this."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": str(hosts), "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    others: list[subprocess.Popen[bytes]] = []
    os.environ |= place
    try:
        yield others
    finally:
        for name in place:
            del os.environ[name]
        for other in others:
            other.kill()
            other.wait()


def tokens_a_second(worker: BenchWorker, rows: int, length: int, count: int, seed: int) -> float:
    """Return the tokens that all steps computed, of prompts and output, over the seconds of a load."""
    began = time.perf_counter()
    worker.load(random_prompts(rows, length, seed), count)
    return rows * (length + count - 1) / (time.perf_counter() - began)


def main() -> None:
    flags: argparse.ArgumentParser = parser(__doc__)
    flags.add_argument("--ranks", type=int, default=2)
    flags.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="sequences of the loads of decodes")
    flags.add_argument("--tokens", type=int, default=48, help="tokens of output of each")
    flags.add_argument("--pairs", type=int, default=5, help="turns of both engines with each load")
    flags.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    flags.add_argument("--small", action="store_true", help="a small model, for tests")
    flags.add_argument("--hosts", action="store_true", help="each rank a host, beside ranks that share memory")
    args = flags.parse_args()
    shape, ranks = SMALL if args.small else MEDIUM, args.ranks
    base, size = (f"tp{ranks}", f"hosts{ranks}") if args.hosts else ("tp1", f"tp{ranks}")
    loads = {f"decode{rows}": (rows, PROMPT_TOKENS, args.tokens) for rows in args.rows}
    loads["prompts"] = (LONG_PROMPTS, LONG_TOKENS, 1)
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in loads}
    with (
        opened(shape, ranks if args.hosts else 1, ranks, args.dtype, args.tokens) as one,
        opened(shape, ranks, ranks, args.dtype, args.tokens, ranks if args.hosts else 1) as several,
    ):
        assert isinstance(one.model, LlamaCpuModel)
        assert isinstance(several.model, LlamaCpuModel)
        assert several.ranks is not None
        own = max(several.model.weight_bytes, *several.ranks.weight_bytes.values())
        share, times = own / one.model.weight_bytes, several.ranks.links.times
        with (
            BenchWorker(one.runner, one.agent_config(), None) as single,
            BenchWorker(several.runner, several.agent_config(), None) as divided,
        ):
            for worker in (single, divided):
                worker.load(random_prompts(WARM_UP, PROMPT_TOKENS, 0), WARM_UP)
            for pair in range(args.pairs):
                for name, (rows, length, count) in loads.items():
                    found = [tokens_a_second(each, rows, length, count, pair + 1) for each in (single, divided)]
                    speeds[name].append((found[0], found[1]))
    figures, notes = dict[str, float](), dict[str, str]()
    for name, pairs in speeds.items():
        ratios = [divided / single for single, divided in pairs]
        figures[f"{size}_over_{base}_{name}"] = statistics.median(ratios)
        notes[f"{size}_over_{base}_{name}"] = f"{min(ratios):.2f} to {max(ratios):.2f}"
        best = [max(pair[which] for pair in pairs) for which in (0, 1)]
        figures[f"{size}_over_{base}_best_{name}"] = best[1] / best[0]
        notes[f"{size}_over_{base}_best_{name}"] = "of the fastest runs of both: least disturbed by other load"
        for which, label in ((0, base), (1, size)):
            figures[f"{label}_tokens_per_s_{name}"] = statistics.median(pair[which] for pair in pairs)
    every = [divided / single for pairs in speeds.values() for single, divided in pairs]
    figures[f"{size}_over_{base}_same_cores"] = statistics.median(every)
    notes[f"{size}_over_{base}_same_cores"] = "median of all pairs"
    if not args.hosts:
        figures["rank_weight_share"] = share
        notes["rank_weight_share"] = "the largest rank's bytes of weights over those of the whole model"
    figures["plan_us"] = 1e6 * times.seconds / times.plans
    notes["plan_us"] = f"processor time of the engine's thread, a step; {times.plans} plans"
    report("tensor_parallel", figures, notes, args.json)


if __name__ == "__main__":
    main()
