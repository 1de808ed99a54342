"""A trace on pools of several sizes: without a prefix cache, with the pool alone, with host memory, with fetches too.

All have equal pools. The last two have equal host memory, so that they differ by fetches between workers alone.

A made-up load of shared prefixes is replayed with `--replicate` and without, both with fetches between workers.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from bench.lib.harness import median_interval, progress, report_columns
from bench.lib.trace_capacity import CAPACITY_NOTES, columns_of
from bench.lib.trace_rows import Row, Rows
from cli.plots import plot_problems
from cli.replay.figures import Objective, figures_of
from cli.replay.links import DEFAULT_LINKS, Moves, parse_links
from cli.replay.policies import ROUTERS
from cli.replay.simulation import ReplayOptions, replay
from cli.replay.trace import Arrival, Trace, read_trace
from cli.replay.worker import Timing
from common.contracts.errors import InvalidConfig
from gpuworker.scheduling.step_costs import parse_costs

_BLOCK: Final = 256
"""Slots of a block: of a trace with longer ones, such as Mooncake's of 512, half of each."""
_STEP_TOKENS: Final = 4096
_PREFIXES: Final = 256
"""Those that requests of the made-up load begin with: the n-th one is as frequent as 1/n (Zipf)."""
_SHARED, _OWN, _OUTPUT = 1024, 128, 64
"""Tokens of a prefix, of a request's own behind it, and of its output."""
_PLACES: Final = 16
"""Sequences that run at once at a worker: those beyond wait, and a queue is what makes a prefix hot."""
_SEEDS: Final = 5
COSTS: Final = "base=20ms,decode=50us,prefill=50us"
BESIDE: Final = ("uncached", "none", "host", "moves")
"""What a suite has beside its pools: not even a prefix cache, nothing, host memory, fetches between workers too."""
_RATIOS: Final = (
    ("goodput_ratio", "moves", "none"),
    ("goodput_ratio_peers", "moves", "host"),
    ("goodput_ratio_cache", "none", "uncached"),
)
NOTES: Final = {
    "goodput_ratio": "good requests a second, with host memory and fetches over without either; equal pools",
    "goodput_ratio_peers": "the same over host memory alone: equal pools and equal host memory",
    "goodput_ratio_cache": "with the prefix cache of the pool alone over without any",
    "goodput_uncached": "good requests a second without a prefix cache",
    "goodput_none": "good requests a second: the pool alone",
    "goodput_host": "the same with host memory",
    "goodput_moves": "the same with host memory and fetches between workers",
    "ttft_p50_uncached_s": "virtual seconds to the first token, median: without a prefix cache",
    "ttft_p50_none_s": "virtual seconds to the first token, median: the pool alone",
    "ttft_p50_host_s": "the same with host memory",
    "ttft_p50_moves_s": "the same with fetches too",
    "ttft_p99_uncached_s": "99th percentile: without a prefix cache",
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
    "refused": "requests that were refused, of all these replays",
}


REPLICA_NOTES: Final = {
    "ttft_p50_ratio": "virtual seconds to the first token, median: with --replicate over without; median of seeds",
    "ttft_p99_ratio": "the same, 99th percentile",
    "goodput_ratio": "good requests a second, with over without",
    "ttft_p50_s": "virtual seconds to the first token without it, median",
    "ttft_p99_s": "the same, 99th percentile",
    "hits_with": "share of prompt tokens from the cache, with it",
    "hits_without": "the same without it",
    "waited_with": "share that came from another worker while a request waited, with it",
    "waited_without": "the same without it",
    "replicated": "blocks that came ahead of need, in one replay",
    "replicated_share": "these over all blocks of prompts",
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
    what = (
        "replay with these alone: no prefix cache, the pool alone, host memory, fetches too (default: the last three)"
    )
    words.add_argument("--beside", nargs="+", default=list(BESIDE[1:]), choices=BESIDE, help=what)
    what = "append a row for each replay to FILE, and replay none whose row it has"
    words.add_argument("--rows", type=Path, metavar="FILE", help=what)
    text = "draw the rows, those of --rows too, into a .png or .svg; with --reserved those of all traces"
    words.add_argument("--plot", type=Path, metavar="FILE", help=text)
    what = "replay nothing: count the sequences that fit, in blocks and where each reserves N tokens (powers of two)"
    words.add_argument("--reserved", type=int, nargs="+", metavar="N", help=what)
    words.add_argument("--host-times", type=float, default=2.0, metavar="X", help="host memory in pools (default 2)")
    words.add_argument("--disk-times", type=float, default=0.0, metavar="X", help="disk in pools (default 0)")
    words.add_argument("--costs", default=COSTS, help="costs of a step (default %(default)s)")
    words.add_argument("--links", default=DEFAULT_LINKS, help="how fast blocks move (default %(default)s)")
    words.add_argument("--slo-ttft", type=float, default=2.0, metavar="S", help="a good first token (default 2 s)")
    what = "replay N made-up requests with Zipf's prefixes in place of a trace, with --replicate and without"
    words.add_argument("--zipf", type=int, metavar="N", help=what)
    what = "requests of them a second for each worker (default %(default)s)"
    words.add_argument("--rates", type=float, nargs="+", default=[6.0, 9.0, 12.0], metavar="R", help=what)
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
        "--zipf": args.zipf if args.zipf is not None else 1,
        "--rates": min(args.rates),
        "--reserved": min(args.reserved or [1]),
    }
    wrong = [f"{name} must be above 0" for name, value in numbers.items() if not value > 0]
    if not args.disk_times >= 0:
        wrong.append("--disk-times must not be below 0")
    if any(each & (each - 1) for each in args.reserved or ()):
        wrong.append("--reserved must be powers of two")
    if args.plot is not None:
        wrong += [f"{each.field} {each.description}" for each in plot_problems(args.plot)]
    for name, parse in (("--costs", parse_costs), ("--links", parse_links)):
        wrong += _refusal(name, parse, getattr(args, name[2:]))
    return "; ".join(wrong)


def _refusal(name: str, parse: Callable[[str], object], text: str) -> Iterator[str]:
    try:
        parse(text)
    except ValueError as error:
        yield f"{name}: {error}"


def zipf_load(requests: int, rate: float, seed: int) -> Trace:
    """Return Poisson arrivals of requests that begin with shared prefixes, and go on with tokens of their own."""
    rng, at, found = random.Random(f"zipf/{seed}"), 0.0, list[Arrival]()
    weights = [1.0 / (place + 1) for place in range(_PREFIXES)]
    blocks = _SHARED // _BLOCK
    for _ in range(requests):
        at += rng.expovariate(rate)
        (which,) = rng.choices(range(_PREFIXES), weights)
        found.append(Arrival(at, _SHARED + _OWN, _OUTPUT, tuple(range(which * blocks, (which + 1) * blocks))))
    return Trace(tuple(found), _BLOCK)


def replicas(args: argparse.Namespace) -> int:
    """Replay the made-up load with and without `--replicate`, and print a column for each size and rate."""
    columns = {
        f"{pool}_{workers}w_{rate:g}": replica_column(args, pool, workers, rate)
        for workers in args.trace_workers
        for pool in args.pools
        for rate in args.rates
    }
    report_columns("replay", columns, REPLICA_NOTES, args.json)
    return 0


def replica_column(args: argparse.Namespace, pool: int, workers: int, rate: float) -> dict[str, float]:
    """Return ratios of replays that differ by `--replicate` alone: of equal arrivals, seed by seed."""
    moves = Moves(round(args.host_times * pool), peers=True, rates=parse_links(args.links))
    options, objective = replace(_options(args, pool, workers), moves=moves), Objective(args.slo_ttft, args.slo_itl)
    options = replace(options, max_num_seqs=_PLACES, max_queued=args.zipf)
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    copied = list[int]()
    for seed in range(_SEEDS):
        progress(f"pool {pool}, {workers} workers, {rate:g} a second: seed {seed}")
        load = zipf_load(args.zipf, rate * workers, seed)
        for replicate, runs in found.items():
            manager = replace(options.manager, replicate=replicate)
            made = replay(load, replace(options, manager=manager, seed=seed))
            runs.append(figures_of(made, objective))
            copied += [made.replicated] if replicate else []
    figures = dict[str, float]()
    for name, key in (("ttft_p50_ratio", "ttft_p50_s"), ("ttft_p99_ratio", "ttft_p99_s"), ("goodput_ratio", "goodput")):
        ratios = [one[key] / other[key] for one, other in zip(found[True], found[False], strict=True) if other[key]]
        ratio, lower, upper = median_interval(ratios) if ratios else (math.inf,) * 3
        figures |= {name: ratio, f"{name}_lower": lower, f"{name}_upper": upper}
    figures |= {name: statistics.median(each[name] for each in found[False]) for name in ("ttft_p50_s", "ttft_p99_s")}
    for name, key in (("hits", "hit_share"), ("waited", "hit_peer_share")):
        figures[f"{name}_with"] = statistics.median(each[key] for each in found[True])
        figures[f"{name}_without"] = statistics.median(each[key] for each in found[False])
    figures["replicated"] = statistics.median(copied)
    return figures | {"replicated_share": figures["replicated"] * _BLOCK / (args.zipf * (_SHARED + _OWN))}


def main(args: argparse.Namespace) -> int:
    """Replay a trace and print a column for each pool. Raises InvalidConfig for a file that is no trace."""
    trace, rows = read_trace(args.trace, args.first), Rows(args.rows)
    if args.reserved:
        capacity = columns_of(trace, args.trace.name, args.reserved, [pool * _BLOCK for pool in args.pools], rows)
        report_columns("replay", capacity, CAPACITY_NOTES, args.json)
        return _drawn(args, rows)
    trace = replace(trace, arrivals=tuple([replace(each, at=each.at / args.load) for each in trace.arrivals]))
    columns: dict[str, dict[str, float]] = {}
    alone = len(args.trace_workers) == len(args.routing) == 1
    for workers in args.trace_workers:
        for routing in args.routing:
            for pool in args.pools:
                name = str(pool) if alone else f"{pool}_{workers}w_{routing}"
                columns[name] = column(rows_of(trace, args, rows, (pool, workers, routing)))
    report_columns("replay", columns, NOTES, args.json)
    return _drawn(args, rows)


def _drawn(args: argparse.Namespace, rows: Rows) -> int:
    if args.plot is not None:
        from bench.lib import trace_plots  # matplotlib is large, and not always there

        trace_plots.write(args.trace.name, rows.all, args.plot)
    return 0


def rows_of(
    trace: Trace, args: argparse.Namespace, rows: Rows, where: tuple[int, int, str]
) -> dict[str, dict[str, float]]:
    """Return the figures of one pool by what the suite has beside it; replay what no known row has."""
    pool, workers, routing = where
    found = dict[str, dict[str, float]]()
    for name in args.beside:
        row: Row = {
            "trace": args.trace.name, "requests": len(trace.arrivals), "load": args.load, "pool": pool,
            "workers": workers, "routing": routing, "beside": name, "costs": args.costs, "links": args.links,
            "host_times": args.host_times, "disk_times": args.disk_times,
            "slo_ttft": args.slo_ttft, "slo_itl": args.slo_itl,
        }  # fmt: skip
        progress(f"pool {pool}, {workers} workers, {routing}: {name}")
        found[name] = rows.figures(row, partial(_replayed, trace, args, where, name))
    return found


def _replayed(trace: Trace, args: argparse.Namespace, where: tuple[int, int, str], beside: str) -> dict[str, float]:
    pool, workers, routing = where
    host, disk = round(args.host_times * pool), round(args.disk_times * pool)
    moves = Moves(host, disk, peers=beside == "moves", rates=parse_links(args.links))
    options = replace(
        _options(args, pool, workers),
        max_queued=len(trace.arrivals),
        router=ROUTERS[routing],
        prefix_caching=beside != "uncached",
        moves=moves if beside in ("host", "moves") else None,
    )
    return figures_of(replay(trace, options), Objective(args.slo_ttft, args.slo_itl))


def column(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the figures of one pool, and the ratios of goodput, by what its suites have beside it."""
    goodput = {name: each["goodput"] for name, each in found.items()}
    figures = dict[str, float]()
    for name, over, under in _RATIOS:
        if over in goodput and under in goodput:
            figures[name] = goodput[over] / goodput[under] if goodput[under] else math.inf
    figures |= {f"goodput_{name}": value for name, value in goodput.items()}
    for share in ("p50", "p99"):
        figures |= {f"ttft_{share}_{name}_s": each[f"ttft_{share}_s"] for name, each in found.items()}
    figures |= {f"hits_{name}": each["hit_share"] for name, each in found.items()}
    if "moves" in found:
        places = ("pool", "host", "disk", "peer")
        figures |= {f"hits_moves_{place}": found["moves"][f"hit_{place}_share"] for place in places}
    return figures | {"refused": sum(each["refused"] for each in found.values())}


def _options(args: argparse.Namespace, pool: int, workers: int) -> ReplayOptions:
    timing = Timing(parse_costs(args.costs))
    return ReplayOptions(workers, 1, pool, _BLOCK, max_num_batched_tokens=_STEP_TOKENS, timing=timing)


def run(args: argparse.Namespace, fail: Callable[[str], None]) -> int:
    """Check the flags, and replay the trace or the made-up load. `fail` ends the program with a line."""
    if problem := problem_of(args):
        fail(problem)
    try:
        return main(args) if args.zipf is None else replicas(args)
    except InvalidConfig as error:
        fail(str(error))
    return 2
