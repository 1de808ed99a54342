"""The flags that several benchmarks share, and the options of a worker that follow from them."""

from __future__ import annotations

import argparse
from typing import Any

from bench.lib.checkpoints import MAX_MODEL_LEN
from bench.lib.workloads import MAKERS


def add_engine_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("--block-size", type=int, default=16)
    flags.add_argument("--threads", type=int, help="threads of our engine; unset: as many as a worker takes")


def add_model_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("--model", help="folder of a checkpoint; unset: a random one of 128 million parameters")
    flags.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    flags.add_argument("--prefix-caching", default="on", choices=["on", "off"])


def add_workload_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("--workload", nargs="+", default=sorted(MAKERS), choices=sorted(MAKERS), metavar="W")
    flags.add_argument("--scale", type=float, help="share of each workload's requests to run (default 1)")
    flags.add_argument("--repeat", type=int, default=1, help="runs of each workload, each from a cold cache")
    flags.add_argument("--seed", type=int, default=0)


def worker_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a worker for a comparison: the sizes are those of the peers' drivers."""
    return {
        "threads": args.threads,
        "block_size": args.block_size,
        "kv_memory": "1GiB",
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "max_model_len": MAX_MODEL_LEN,
    }
