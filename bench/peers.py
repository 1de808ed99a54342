"""Quire and other engines on the same token ids, run by run in turns.

    python -m bench.peers --peers DIR --json --plan W4:1 W1:0.5 W2:0.25 W3:0.5 --repeat 3
    python -m bench.peers --peers DIR --model smollm2    (after `make smollm2 quality-text`)

Quire runs as a whole suite of processes: client, router, worker and KV manager over gRPC. Drivers call the peers in
process (bench/comparison/peer_process.py). For each type and mode all engines are loaded, then take turns; waiting
engines are stopped. Prompts are random tokens; those of `smollm2`, a real model, are passages of a real text
(bench/comparison/peer_models.py). With prefix caching every run begins with a cold cache. Quire gets a salt, vLLM a
reset, and the others get other ids of the same lengths. Result lines go to --out. `bench.comparison.plots` draws them,
and `python -m bench.comparison.table FILE...` prints the tables again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Protocol

import uvloop

from bench.comparison.peer_models import MADE, prepare
from bench.comparison.peer_process import PEERS, TEXT, PeerOptions, PeerProcess, missing
from bench.comparison.ratios import OURS
from bench.comparison.table import print_report
from bench.lib.flags import add_engine_flags
from bench.lib.harness import parser, progress
from bench.lib.workloads import Draw, make, passages_of, random_tokens, warm_up
from bench.serve import add_suite_flags, bench_options
from cli.benchmark.closed_loop import agreement, figures
from cli.benchmark.served import ServedSuite, served_suite
from common.contracts.errors import QuireError, Unavailable

RESULTS: Final = Path(__file__).parent / "results"
_SHARING: Final = ("W2", "W3")
"""Workloads whose requests share prefixes: prefix caching gains nothing on the others."""


@dataclass(frozen=True, slots=True)
class Item:
    """A workload and the share of its requests to run."""

    workload: str
    scale: float

    def __str__(self) -> str:
        return f"{self.workload}:{self.scale:g}"

    @staticmethod
    def of(text: str) -> Item:
        """Return the item that WORKLOAD:SCALE names."""
        workload, _, scale = text.partition(":")
        return Item(workload, float(scale or 1.0))


@dataclass(frozen=True, slots=True)
class Mode:
    """The data type and the prefix caching of all runs."""

    dtype: str
    prefix_caching: bool

    @property
    def fields(self) -> dict[str, str]:
        return {"dtype": self.dtype, "prefix_caching": "on" if self.prefix_caching else "off"}


class Engine(Protocol):
    """An engine of the comparison."""

    name: str
    start_seconds: float

    async def run(self, workload: str, scale: float) -> dict[str, Any]:
        """Run a share of a workload from a cold cache; return its figures."""
        ...

    def first_outputs(self) -> dict[str, list[int]]:
        """Return the tokens of its first run, by request."""
        ...


class Ours:
    """Implements `Engine` over a running suite."""

    name = OURS

    def __init__(self, suite: ServedSuite, draw: Draw) -> None:
        self._suite, self._draw = suite, draw
        self._runs = 0
        self._first: dict[str, list[int]] = {}
        self.start_seconds = suite.start_seconds

    async def warm_up(self) -> None:
        """Run the warm-up that peers' drivers run before READY; it counts as part of the start."""
        began = time.perf_counter()
        await self._suite.run(warm_up(draw=self._draw))
        self.start_seconds += time.perf_counter() - began

    async def run(self, workload: str, scale: float) -> dict[str, Any]:
        self._runs += 1
        seconds, records = await self._suite.run(make(workload, 0, scale, self._draw), salt=f"run-{self._runs}")
        if self._runs == 1:
            self._first = {rid: record.tokens for rid, record in records.items()}
        memory = self._suite.peak_rss()
        found = {"workload": workload, "scale": scale, **figures(seconds, records.values())}
        return found | {"peak_rss_mib": sum(memory.values()), "rss_mib": memory}

    def first_outputs(self) -> dict[str, list[int]]:
        return self._first


# ------------------------------------------------------------ one mode


@asynccontextmanager
async def loaded(args: argparse.Namespace, mode: Mode, scratch: Path) -> AsyncIterator[list[Engine]]:
    """Load every engine of a mode, one after the other, so that each start is its own; end them all at the end."""
    options = PeerOptions(args.peers, scratch, args.model, mode.dtype, mode.prefix_caching)
    engines: list[Engine] = []
    async with AsyncExitStack() as stack:
        for name in args.engines:
            if PEERS[name].caches or not mode.prefix_caching:
                try:
                    engines.append(await stack.enter_async_context(PeerProcess(name, options)))
                except Unavailable as failure:
                    print(f"{name} is left out: {failure}", file=sys.stderr)
                else:
                    progress(f"{name} loaded in {engines[-1].start_seconds:.1f} s", end=True)
        model = args.peers / args.model
        flags = bench_options(str(model), "auto", args, mode.dtype, mode.prefix_caching)
        ours = Ours(await stack.enter_async_context(served_suite(flags)), tokens_for(model))
        await ours.warm_up()
        progress(f"ours loaded in {ours.start_seconds:.1f} s", end=True)
        yield [ours, *engines]


def tokens_for(model: Path) -> Draw:
    """Return what prompts are made of: the text of a checkpoint, else random tokens."""
    text = model / TEXT
    return passages_of(json.loads(text.read_text())) if text.is_file() else random_tokens


def turns(
    engines: Sequence[Engine], items: Sequence[Item], repeat: int, once: Sequence[str] = ()
) -> Iterator[tuple[int, Item, Engine]]:
    """Yield (engine, item) pairs: all engines next to each other on an item, beginning with another one each time.

    The engines in `once` run the first repetition alone.
    """
    for rep in range(repeat):
        present = [engine for engine in engines if rep == 0 or engine.name not in once]
        for place, item in enumerate(items):
            first = (rep + place) % len(present)
            for engine in (*present[first:], *present[:first]):
                yield rep, item, engine


def items_of(plan: Sequence[Item], mode: Mode) -> list[Item]:
    return [item for item in plan if not mode.prefix_caching or item.workload in _SHARING]


async def compare(args: argparse.Namespace, mode: Mode, take: Callable[[dict[str, Any]], None]) -> None:
    """Pass on a result line for each run of a mode. The first run of each engine compares tokens, and is not timed."""
    items = items_of(args.plan, mode)
    if not items:
        return
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as scratch:
        async with loaded(args, mode, Path(scratch)) as engines:
            agreements = await _agreements(engines, args.agree)
            for rep, item, engine in turns(engines, items, args.repeat, args.once):
                found = await _run(engine, item) if engine.name in agreements else None
                if found is None:
                    agreements.pop(engine.name, None)
                    continue
                line = found | mode.fields | {"engine": engine.name, "rep": rep, "start_s": engine.start_seconds}
                take(line | {"agreement": agreements[engine.name], "agreed_on": str(args.agree)})


async def _run(engine: Engine, item: Item) -> dict[str, Any] | None:
    """Return the figures of a run; None, with a line on stderr, where a peer failed: the others go on without it."""
    try:
        return await engine.run(item.workload, item.scale)
    except Unavailable as failure:
        if engine.name == OURS:
            raise
        print(f"{engine.name} is left out from here on: {failure}", file=sys.stderr)
        return None


async def _agreements(engines: Sequence[Engine], item: Item) -> dict[str, float]:
    """Return the share of tokens that each engine has in common with Quire on one workload, where it can run."""
    outputs = {engine.name: engine.first_outputs() for engine in engines if await _run(engine, item) is not None}
    return {name: agreement(outputs[OURS], found) for name, found in outputs.items()}


async def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run everything; write each result line as it comes."""
    lines: list[dict[str, Any]] = []
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)  # so that no engine keeps running
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w") as out:

        def take(line: dict[str, Any]) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()
            lines.append(line)
            setting = f"{line['workload']} x{line['scale']:g} {line['dtype']}, caching {line['prefix_caching']}"
            progress(f"{setting}: {line['engine']} {line['output_tok_s']:.0f} tokens/s", end=True)

        for mode in (Mode(dtype, caching == "on") for dtype in args.dtype for caching in args.caching):
            await compare(args, mode, take)
    return lines


def _parser() -> argparse.ArgumentParser:
    flags = parser(__doc__)
    flags.add_argument("--peers", type=Path, required=True, help="folder of the peers: environments, drivers, model")
    flags.add_argument("--model", default="model", help=f"folder below that of the peers; made: {', '.join(MADE)}")
    plan = [Item("W4", 1.0), Item("W1", 0.5), Item("W2", 0.25), Item("W3", 0.5)]
    flags.add_argument("--plan", nargs="+", type=Item.of, default=plan, metavar="W:SCALE")
    flags.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    flags.add_argument("--caching", nargs="+", default=["off", "on"], choices=["off", "on"])
    flags.add_argument("--engines", nargs="+", default=list(PEERS), choices=list(PEERS), metavar="PEER")
    flags.add_argument("--repeat", type=int, default=3, help="runs of each engine on each item")
    flags.add_argument("--once", nargs="+", default=[], metavar="PEER", help="those that run one repetition alone")
    flags.add_argument("--agree", type=Item.of, default=Item("W3", 0.125), help="what tokens are compared on")
    stamp = f"{datetime.now().astimezone():%Y%m%d-%H%M%S}"
    flags.add_argument("--out", type=Path, default=RESULTS / f"peers-{stamp}.jsonl", help="file of the result lines")
    add_engine_flags(flags)
    add_suite_flags(flags)
    return flags


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, from the command line where `words` is None; the checkpoint is there, and all engines are.

    Exits with the reason where they are not.
    """
    flags = _parser()
    args = flags.parse_args(words)
    args.peers = args.peers.expanduser().resolve()
    made = [str(args.peers / args.model / "config.json")] if args.model in MADE else []
    if lacking := [each for each in missing(args.peers, args.engines, args.model) if each not in made]:
        flags.error("--peers lacks " + ", ".join(lacking))
    try:
        prepare(args.peers, args.model, "openvino" in args.engines)
    except (QuireError, OSError) as failure:
        flags.error(f"--model {args.model} cannot be made: {failure}")
    return args


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run everything; a stop from outside ends the process with the place of what was measured."""
    try:
        return uvloop.run(run(args))
    except asyncio.CancelledError:
        raise SystemExit(f"stopped; what was measured is in {args.out}") from None


def main() -> None:
    args = read_arguments()
    lines = measure(args)
    print_report(lines, [args.out], args.json)


if __name__ == "__main__":
    main()
