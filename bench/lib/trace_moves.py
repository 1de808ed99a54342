"""A trace on pools of several sizes: with nothing that moves, with host memory, and with fetches between workers too.

All three have equal pools. The last two have equal host memory, so that they differ by fetches between workers alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from bench.lib.harness import progress, report_columns
from cli.replay.figures import Objective, figures_of
from cli.replay.links import DEFAULT_LINKS, Moves, parse_links
from cli.replay.policies import ROUTERS
from cli.replay.simulation import ReplayOptions, replay
from cli.replay.trace import Trace, read_trace
from cli.replay.worker import Timing
from common.contracts.errors import InvalidConfig
from gpuworker.scheduling.step_costs import parse_costs

_BLOCK: Final = 256
"""Slots of a block: of a trace with longer ones, such as Mooncake's of 512, half of each."""
_STEP_TOKENS: Final = 4096
COSTS: Final = "base=20ms,decode=50us,prefill=50us"
NOTES: Final = {
    "goodput_ratio": "good requests a second, with host memory and fetches over without either; equal pools",
    "goodput_ratio_peers": "the same over host memory alone: equal pools and equal host memory",
    "goodput_none": "good requests a second: the pool alone",
    "goodput_host": "the same with host memory",
    "goodput_moves": "the same with host memory and fetches between workers",
    "ttft_p50_none_s": "virtual seconds to the first token, median: the pool alone",
    "ttft_p50_host_s": "the same with host memory",
    "ttft_p50_moves_s": "the same with fetches too",
    "ttft_p99_none_s": "99th percentile: the pool alone",
    "ttft_p99_host_s": "the same with host memory",
    "ttft_p99_moves_s": "the same with fetches too",
    "hits_none": "share of prompt tokens from the cache: the pool alone",
    "hits_host": "the same with host memory",
    "hits_moves": "the same with fetches too; by where they were:",
    "hits_moves_pool": "in the pool",
    "hits_moves_host": "in host memory",
    "hits_moves_disk": "on disk",
    "hits_moves_peer": "at another worker",
    "refused": "requests that were refused, of all three replays",
}


def add_flags(flags: argparse.ArgumentParser) -> None:
    words = flags.add_argument_group("a trace (replays it alone, with and without moves of blocks)")
    words.add_argument("--trace", type=Path, metavar="FILE", help="log of `quire record`, or a trace of Mooncake")
    words.add_argument("--first", type=int, metavar="N", help="replay its first N requests alone")
    words.add_argument("--load", type=float, default=1.0, metavar="X", help="let them arrive X times as fast")
    text = f"blocks of {_BLOCK} tokens in each worker's pool"
    words.add_argument("--pools", type=int, nargs="+", default=[500, 1000, 2000], metavar="N", help=text)
    words.add_argument("--trace-workers", type=int, nargs="+", default=[4], metavar="N", help="numbers of workers")
    words.add_argument("--routing", nargs="+", default=["cost"], choices=sorted(ROUTERS), help="how one is chosen")
    words.add_argument("--host-times", type=float, default=2.0, metavar="X", help="host memory in pools (default 2)")
    words.add_argument("--disk-times", type=float, default=0.0, metavar="X", help="disk in pools (default 0)")
    words.add_argument("--costs", default=COSTS, help="costs of a step (default %(default)s)")
    words.add_argument("--links", default=DEFAULT_LINKS, help="how fast blocks move (default %(default)s)")
    words.add_argument("--slo-ttft", type=float, default=2.0, metavar="S", help="a good first token (default 2 s)")
    words.add_argument("--slo-itl", type=float, default=0.1, metavar="S", help="a good mean of others (default 0.1 s)")


def problem_of(args: argparse.Namespace) -> str:
    """Return what is wrong with the flags of a trace; "": nothing."""
    numbers = {
        "--first": args.first if args.first is not None else 1,
        "--pools": min(args.pools),
        "--trace-workers": min(args.trace_workers),
        "--load": args.load,
        "--host-times": args.host_times,
        "--slo-ttft": args.slo_ttft,
        "--slo-itl": args.slo_itl,
    }
    wrong = [f"{name} must be above 0" for name, value in numbers.items() if not value > 0]
    if not args.disk_times >= 0:
        wrong.append("--disk-times must not be below 0")
    for name, parse in (("--costs", parse_costs), ("--links", parse_links)):
        wrong += _refusal(name, parse, getattr(args, name[2:]))
    return "; ".join(wrong)


def _refusal(name: str, parse: Callable[[str], object], text: str) -> Iterator[str]:
    try:
        parse(text)
    except ValueError as error:
        yield f"{name}: {error}"


def main(args: argparse.Namespace) -> int:
    """Replay a trace and print a column for each pool. Raises InvalidConfig for a file that is no trace."""
    trace = read_trace(args.trace)
    arrivals = tuple([replace(each, at=each.at / args.load) for each in trace.arrivals[: args.first]])
    trace = replace(trace, arrivals=arrivals)
    columns: dict[str, dict[str, float]] = {}
    alone = len(args.trace_workers) == len(args.routing) == 1
    for workers in args.trace_workers:
        for routing in args.routing:
            for pool in args.pools:
                name = str(pool) if alone else f"{pool}_{workers}w_{routing}"
                columns[name] = column(trace, args, pool, workers, routing)
    report_columns("replay", columns, NOTES, args.json)
    return 0


def column(trace: Trace, args: argparse.Namespace, pool: int, workers: int, routing: str) -> dict[str, float]:
    """Return the figures of one pool: with what moves, and without."""
    options = ReplayOptions(
        workers,
        num_blocks=pool,
        block_size=_BLOCK,
        max_num_batched_tokens=_STEP_TOKENS,
        max_queued=len(trace.arrivals),
        timing=Timing(parse_costs(args.costs)),
        router=ROUTERS[routing],
    )
    rates, host, disk = parse_links(args.links), round(args.host_times * pool), round(args.disk_times * pool)
    found, refused = dict[str, dict[str, float]](), 0.0
    for name, moves in (
        ("none", None),
        ("host", Moves(host, disk, rates=rates)),
        ("moves", Moves(host, disk, peers=True, rates=rates)),
    ):
        progress(f"pool {pool}, {workers} workers, {routing}: {name}")
        found[name] = figures_of(replay(trace, replace(options, moves=moves)), Objective(args.slo_ttft, args.slo_itl))
        refused += found[name]["refused"]
    goodput = {name: each["goodput"] for name, each in found.items()}
    figures = {
        "goodput_ratio": goodput["moves"] / goodput["none"] if goodput["none"] else float("inf"),
        "goodput_ratio_peers": goodput["moves"] / goodput["host"] if goodput["host"] else float("inf"),
    }
    figures |= {f"goodput_{name}": value for name, value in goodput.items()}
    for share in ("p50", "p99"):
        figures |= {f"ttft_{share}_{name}_s": each[f"ttft_{share}_s"] for name, each in found.items()}
    figures |= {f"hits_{name}": each["hit_share"] for name, each in found.items()}
    places = ("pool", "host", "disk", "peer")
    figures |= {f"hits_moves_{place}": found["moves"][f"hit_{place}_share"] for place in places}
    return figures | {"refused": refused}


def run(args: argparse.Namespace, fail: Callable[[str], None]) -> int:
    """Check the flags, and replay the trace. `fail` ends the program with a line."""
    if problem := problem_of(args):
        fail(problem)
    try:
        return main(args)
    except InvalidConfig as error:
        fail(str(error))
    return 2
