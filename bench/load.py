"""The suite under open-loop load: client processes send requests whether or not the suite keeps up.

    python -m bench.load --rates 50 100 --json              simulated workers: the capacity of one router
    python -m bench.load --saturation --added --routers 1 2
    python -m bench.load --streams 4096 --kill              every token of every stream checked, a worker killed
    python -m bench.load --real --rates 5 10 20 --cv 3      the real engine on the CPU, in bursts
    python -m bench.load --all --json --plot                all figures, in less than six minutes

Arrivals are a Poisson process, or with --cv above 1 bursts of that coefficient of variation
(`bench/open_loop/client.py`). Latencies count from when a request was due; a run whose clients fell behind is marked
invalid. Simulated workers run no model: a step takes the time of --simulate, and every token is checked. Clients,
routers, manager and workers share the machine's cores unless --pin is given. A router's CPU time per token gives its
capacity on a core of its own. Requests are not traced unless --trace-sample-ratio is given. With --all or --plot rows
are kept in bench/results/load.jsonl; --plot draws them (`bench/open_loop/plot.py`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import uvloop

from bench.lib.checkpoints import checkpoint
from bench.lib.harness import parser, report, report_columns
from bench.open_loop import modes as load_modes
from bench.open_loop.figures import NOTES, Slo
from bench.open_loop.modes import Row, Shape
from bench.open_loop.suite import LoadSuite, load_suite
from bench.serve import suite_flags
from common.contracts.errors import QuireError
from gpuworker.plane.checkpoint_facts import CheckpointFacts

DEMO: Final = Path("cli/demo_model/checkpoint")
RESULTS: Final = Path("bench/results/load.jsonl")
_STREAM_COSTS: Final = "base=400ms"
_STREAM_TOKENS: Final = 45
_FRACTIONS: Final = (0.35, 0.7)
_BURSTS: Final = 3.0


class Load:
    """One run of the benchmark: its flags, and the rows and figures so far."""

    def __init__(self, args: argparse.Namespace, model: Path, load_format: str) -> None:
        self.args, self._model, self._load_format = args, model, load_format
        self.rows: list[dict[str, float | str]] = []
        self.columns: dict[str, Row] = {}
        self.figures: dict[str, float] = {"load_average_before": os.getloadavg()[0]}
        self.failed: list[str] = []

    # ------------------------------------------------------------ suites and shapes

    def shape(self, output_tokens: int | None = None, real: bool = False) -> Shape:
        args = self.args
        return Shape(
            prompt_tokens=args.prompt_tokens,
            output_tokens=output_tokens or args.output_tokens,
            model=self._model,
            vocabulary=CheckpointFacts(self._model).vocab_size,
            simulated=not real,
            api=args.api,
            warm=args.warm,
            seconds=args.seconds,
            seed=args.seed,
            slo=Slo(args.slo_ttft_ms / 1e3, args.slo_itl_ms / 1e3),
        )

    @asynccontextmanager
    async def suite(
        self, routers: int = 1, real: bool = False, special: Mapping[str, object] | None = None
    ) -> AsyncIterator[LoadSuite]:
        """Run a suite, real or simulated; `special` are options of `quire serve` in place of the usual ones."""
        args = self.args
        options: dict[str, object] = {
            "model": self._model,
            "load_format": self._load_format,
            "trace_sample_ratio": args.trace_sample_ratio,
            "max_num_seqs": 64 if real else 1024,
            "kv_blocks": 4096 if real else 65536,
            "insecure": not args.tls,
        }
        if not real:
            options["simulate"] = args.simulate
        options |= special or {}
        workers = int(str(options.pop("workers", args.workers)))
        limits = ("--max-queued-requests", "16384", "--grpc-calls-per-connection", "16384")
        async with load_suite(suite_flags(options), args.clients, limits, workers, routers) as suite:
            suite.pin(_cores(args.pin))
            yield suite

    # ------------------------------------------------------------ what is measured

    async def at_rates(self, rates: list[float], real: bool, routers: int = 1) -> None:
        engine = "real" if real else "simulated"
        async with self.suite(routers, real) as suite:
            for cv, rate in itertools.product(self.args.cv, rates):
                row = await load_modes.at_rate(suite, self.shape(real=real), rate, cv)
                self._keeper(routers, engine)(row)
                name = f"{engine}_{rate:.0f}rps" + (f"_cv{cv:g}" if cv > 1.0 else "")
                self.columns[name + (f"_{routers}routers" if routers > 1 else "")] = row

    def _keeper(self, routers: int, engine: str = "simulated") -> Callable[[Row], None]:
        """Return a function that keeps a row for the picture and the file, and prints it."""

        def keep(row: Row) -> None:
            self.rows.append({"engine": engine, "routers": routers, **row})
            self._say(row)

        return keep

    def _say(self, row: Row) -> None:
        print(load_modes.words(row), flush=True)

    async def saturate(self, routers: int, added: bool) -> None:
        """Find the highest load of the routers, in tokens and in requests; then what one adds to TTFT at half of it."""
        ending = "" if routers == 1 else f"_{routers}"
        probes = self.args.probes if routers == 1 else self.args.probes - 1
        async with self.suite(routers) as suite:
            shape = self.shape()
            rows = await load_modes.find_saturation(suite, shape, probes, self._keeper(routers))
            top = load_modes.highest_carried(rows)
            rate = top["rate"] if top else rows[-1]["rate"]
            if added:
                found = await load_modes.added_ttft(suite, replace(shape, seconds=2 * shape.seconds), rate / 2)
                self.figures |= {f"{name}{ending}": value for name, value in found.items()}
            for fraction in _FRACTIONS if self.args.all else ():
                rows.append(await load_modes.at_rate(suite, shape, fraction * rate))
                self._keeper(routers)(rows[-1])
            self._note_saturation(f"router_tokens_per_s{ending}", "tokens_s", rows)
            if self.args.all and routers == 1:
                self.columns["bursts"] = await load_modes.at_rate(suite, shape, 0.5 * rate, _BURSTS)
                self._keeper(routers)(self.columns["bursts"])
            short = replace(self.shape(1), warm=1.0, streams=128)
            rows = await load_modes.find_saturation(suite, short, probes, self._say)
            self._note_saturation(f"router_requests_per_s{ending}", "requests_s", rows)

    def _note_saturation(self, name: str, figure: str, rows: Sequence[Row]) -> None:
        top = load_modes.highest_carried(rows)
        self.figures[name] = top[figure] if top else 0.0
        if top:
            for role in ("router", "kvmanager", "worker"):
                self.figures[f"{name}_{role}_us_per_token"] = top[f"{role}_us_per_token"]
                self.figures[f"{name}_{role}_cores"] = top[f"{role}_cores"]
            self.figures[f"{name}_on_a_core"] = top[figure] / max(1e-9, top["router_cores"])
            self.figures[f"{name}_ttft_p99_ms"] = top["ttft_p99_ms"]

    async def added(self, rates: list[float], routers: int) -> None:
        """Measure what a router adds to TTFT at given rates."""
        async with self.suite(routers) as suite:
            for rate in rates:
                self.columns[f"added_{rate:.0f}rps"] = await load_modes.added_ttft(suite, self.shape(), rate)

    async def open_streams(self, count: int, kill: bool) -> None:
        """Hold many streams open at once."""
        shape = replace(self.shape(_STREAM_TOKENS), streams=count, prompt_tokens=32)
        special = {"workers": 2, "simulate": _STREAM_COSTS, "max_num_seqs": count, "max_num_batched_tokens": 4 * count}
        async with self.suite(special=special) as suite:
            self.figures |= await load_modes.many_streams(suite, shape, self.args.opening, 3.0 if kill else None)

    async def everything(self) -> None:
        for routers in self.args.routers:
            await self._part(f"{routers} routers", self.saturate(routers, added=routers == 1))
        await self._part("streams", self.open_streams(4096, kill=True))
        await self._part("the real engine", self.at_rates([10.0, 20.0, 40.0], real=True))

    async def _part(self, name: str, part: Coroutine[Any, Any, None]) -> None:
        """Measure a part of the figures; when it fails, the others are still measured."""
        try:
            await part
        except QuireError as error:
            self.failed.append(name)
            print(f"{name} could not be measured: {error}", flush=True)


async def run(load: Load) -> None:
    args = load.args
    if args.all:
        return await load.everything()
    for routers in args.routers:
        if args.added and args.rates:
            await load.added(args.rates, routers)
        elif args.saturation or args.added:
            await load.saturate(routers, args.added)
        if args.rates and not args.added:
            await load.at_rates(args.rates, args.real, routers)
    if args.streams:
        await load.open_streams(args.streams, args.kill)
    return None


def _cores(text: str) -> Mapping[str, list[int]]:
    """Return the cores of each role in text such as `router=0,clients=2-3`."""
    found: dict[str, list[int]] = {}
    for part in filter(None, text.split(",")):
        role, _, span = part.partition("=")
        first, _, last = span.partition("-")
        found[role] = list(range(int(first), int(last or first) + 1))
    return found


def flags() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument("--all", action="store_true", help="every figure, one after the other")
    made.add_argument("--rates", type=float, nargs="+", default=[], help="requests a second, each a run")
    made.add_argument("--saturation", action="store_true", help="find the highest rate that is carried")
    made.add_argument(
        "--added", action="store_true", help="and what the router adds to TTFT at half of it, or at --rates"
    )
    made.add_argument("--streams", type=int, default=0, help="open as many streams at once")
    made.add_argument("--kill", action="store_true", help="kill a worker while they are open")
    made.add_argument("--real", action="store_true", help="the real engine on the CPU instead of simulated steps")
    made.add_argument("--routers", type=int, nargs="+", default=[1], help="router processes on one port, each a suite")
    made.add_argument("--workers", type=int, default=1)
    made.add_argument("--clients", type=int, default=2, help="processes that make the load")
    made.add_argument("--api", choices=["grpc", "http"], default="grpc")
    made.add_argument(
        "--cv", type=float, nargs="+", default=[1.0], help="coefficient of variation of the gaps; 1: Poisson"
    )
    made.add_argument("--model", type=Path, help="folder of a checkpoint; unset: the demo model")
    made.add_argument("--random", action="store_true", help="a random model of 128 million parameters instead")
    made.add_argument("--simulate", default="base=8ms,decode=4us,prefill=2us", help="what a simulated step costs")
    made.add_argument("--prompt-tokens", type=int, default=64)
    made.add_argument("--output-tokens", type=int, default=200)
    made.add_argument("--seconds", type=float, default=4.0, help="length of a run's window")
    made.add_argument("--warm", type=float, default=2.0, help="seconds of load before it")
    made.add_argument("--probes", type=int, default=4, help="rates that are tried for a saturation")
    made.add_argument("--opening", type=float, default=600.0, help="streams opened a second")
    made.add_argument("--slo-ttft-ms", type=float, default=200.0)
    made.add_argument("--slo-itl-ms", type=float, default=100.0)
    made.add_argument("--tls", action="store_true", help="TLS between the services, as `quire serve` has it")
    made.add_argument("--trace-sample-ratio", type=float, default=0.0, help="share of the requests that are traced")
    made.add_argument("--pin", default="", help="cores of each role: router=0,worker=1,clients=2-3")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--results", type=Path, help="file for the rows that were measured")
    made.add_argument("--plot", action="store_true", help="draw the rows beside their file")
    return made


def _keep(rows: list[dict[str, float | str]], args: argparse.Namespace) -> None:
    """Write the rows to a file, and draw them, where the flags ask for it."""
    path: Path = args.results or RESULTS
    if not rows or not (args.results or args.all or args.plot):
        return
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if args.plot:
        from bench.open_loop.plot import write

        print(write(path))


def main() -> int:
    """Run the benchmark; return the exit status: 1 where a part of it could not be measured."""
    args = flags().parse_args()
    if args.all and args.routers == [1]:
        args.routers = [1, 2, 3]
    with checkpoint(None if args.random else str(args.model or DEMO)) as (model, load_format):
        load = Load(args, model, load_format)
        uvloop.run(run(load))
    _keep(load.rows, args)
    if load.columns:
        report_columns("load", load.columns, NOTES, args.json, load.figures)
    else:
        report("load", load.figures, NOTES, args.json)
    return 1 if load.failed else 0


if __name__ == "__main__":
    sys.exit(main())
