"""`quire replay LOG`: replays recorded arrivals on simulated workers, as the suite was and as it could be.

LOG is a log of `quire record`, or a public trace in the form of Mooncake (JSON lines) or of Azure (CSV). The real cores
of router, KV manager and worker decide; steps take the time of a cost model, which is fitted to the log. Equal logs and
options give equal decisions.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from cli.client import add_json, command_console, failed, path_of, print_json
from cli.plots import plot_problems
from cli.replay.figures import Interval, figures_of, over_seeds, recorded_figures
from cli.replay.fit import FIT_REQUESTS, Fit, fit
from cli.replay.links import DEFAULT_LINKS, LinkRates, Moves, parse_links
from cli.replay.policies import POLICIES, ROUTERS, with_policies
from cli.replay.screen import drawn
from cli.replay.simulation import ReplayOptions, replay
from cli.replay.trace import MOST_REQUESTS, Trace, lines_of, mooncake_lines, read_trace
from cli.replay.worker import Timing
from common.contracts.errors import FieldViolation, InvalidConfig, QuireError
from common.contracts.limits import MAX_BLOCK_PAGES, MAX_KV_GROUPS
from common.contracts.types import KvGroup, KvGroupKind
from gpuworker.scheduling.step_costs import DEFAULT_COSTS, StepCosts, parse_costs

_BLOCK_SIZES: Final = (4, 8, 16, 32, 64, 128, 256)
_SIZES: Final = {
    "workers": 1024,
    "routers": 64,
    "num_blocks": 1 << 20,
    "max_num_seqs": 4096,
    "max_num_batched_tokens": 1 << 16,
}
_MOST_WINDOW: Final = 1 << 24
# A time without requests that is told: so many seconds, and such a part of the trace.
_LONG_GAP_S: Final = 60.0
_LONG_GAP: Final = 0.05
_REFUSALS: Final = {
    "InvalidRequest": "as they are longer than a worker's pool or context",
    "Overloaded": "as the router's queue was full",
}
_MOST_SEEDS: Final = 1000
# Columns of their own.
_MOST_POLICIES: Final = 8


def parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    flags = argparse.ArgumentParser("quire replay", description=__doc__, formatter_class=form)
    text = "log of `quire record`, or a trace in the form of Mooncake or Azure; .gz is unpacked"
    given = flags.add_mutually_exclusive_group(required=True)
    given.add_argument("log", type=path_of, nargs="?", metavar="LOG", help=text)
    given.add_argument("--trace", type=path_of, metavar="FILE", help="the same, as the benchmarks take it")
    flags.add_argument("--first", type=int, metavar="N", help="replay its first N requests alone")
    change = flags.add_argument_group("what changes")
    change.add_argument("--workers", type=int, metavar="N", help="workers")
    change.add_argument("--routers", type=int, metavar="N", help="routers, which take the requests in turn")
    change.add_argument("--blocks", type=int, metavar="N", dest="num_blocks", help="blocks of each worker's pool")
    change.add_argument("--block-size", type=int, metavar="N", choices=_BLOCK_SIZES, help="slots in a block")
    change.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences that run at once at a worker")
    text = "tokens of a step at most"
    change.add_argument("--max-num-batched-tokens", type=int, metavar="N", help=text)
    change.add_argument("--no-prefix-caching", action="store_true", help="share no blocks")
    change.add_argument("--router", choices=sorted(ROUTERS), help="how a worker is chosen")
    change.add_argument("--runway", choices=("auto", "max"), help="how far ahead blocks are leased")
    text = "blocks of host memory beside each worker's pool: what leaves the pool is stored there"
    change.add_argument("--host-blocks", type=int, metavar="N", default=0, help=text)
    text = "blocks of a disk cache beside those; needs --host-blocks"
    change.add_argument("--disk-blocks", type=int, metavar="N", default=0, help=text)
    text = "let workers fetch blocks from each other; needs --host-blocks"
    change.add_argument("--peers", action="store_true", help=text)
    text = f"how fast blocks move, and how large they are (default {DEFAULT_LINKS})"
    change.add_argument("--links", metavar="LINKS", default=DEFAULT_LINKS, help=text)
    change.add_argument("--load", type=float, metavar="X", default=1.0, help="let requests arrive X times as fast")
    text = "replay with a policy, in a column of its own; repeatable, joined by + for several at once: "
    change.add_argument("--policy", metavar="NAME", action="append", default=[], help=text + ", ".join(POLICIES))
    how = flags.add_argument_group("how it is replayed")
    text = f"costs of a step, such as {DEFAULT_COSTS}; unset: fitted to the log, and these where it has no times"
    how.add_argument("--costs", metavar="COSTS", help=text)
    how.add_argument("--seeds", type=int, metavar="N", default=3, help="replays with different tie-breaks (default 3)")
    flags.add_argument(
        "--export", type=path_of, metavar="FILE", help="write the arrivals into a file, and replay nothing"
    )
    text = "form of --export (default %(default)s)"
    flags.add_argument("--form", choices=("quire", "mooncake"), default="mooncake", help=text)
    flags.add_argument("--plot", type=path_of, metavar="FILE", help="also draw the figures, into a .png or .svg")
    add_json(flags)
    return flags


def recorded_options(trace: Trace) -> ReplayOptions:
    """Return the suite of a log, with defaults for what it does not say. Raises InvalidConfig."""
    size = trace.block_size if trace.block_size in _BLOCK_SIZES else ReplayOptions().block_size
    known = {name: trace.suite[name] for name in _SIZES if name in trace.suite}
    for name, value in known.items():
        _check(f"the log's {name}", value, _SIZES[name])
    if "window" in trace.suite:
        known["window"] = trace.suite["window"]
        _check("the log's window", known["window"], _MOST_WINDOW)
    if "groups" in trace.suite:
        known["groups"] = _groups_of(trace.suite["groups"])
    return replace(ReplayOptions(), block_size=size, **known)


def _groups_of(parts: object) -> tuple[KvGroup, ...]:
    """Return the groups of layers of a log: the first one is full, and each other one has a span."""
    if not isinstance(parts, list) or not 2 <= len(parts) <= MAX_KV_GROUPS:
        raise InvalidConfig(FieldViolation("the log's groups", f"must be a list of 2 to {MAX_KV_GROUPS}"))
    groups = []
    for place, each in enumerate(parts):
        name = f"the log's groups[{place}]"
        wanted = ("chunk", "window") if place else ("full",)
        if not isinstance(each, dict) or each.get("kind") not in wanted:
            raise InvalidConfig(FieldViolation(name, f"must be an object of kind {' or '.join(wanted)}"))
        _check(f"{name}.pages", each.get("pages"), MAX_BLOCK_PAGES)
        if place:
            _check(f"{name}.span", each.get("span"), _MOST_WINDOW)
        groups.append(KvGroup(KvGroupKind(each["kind"]), each["span"] if place else 0, each["pages"], ()))
    return tuple(groups)


def changed_options(options: ReplayOptions, args: argparse.Namespace) -> ReplayOptions:
    """Return the options with what the flags change. Raises InvalidConfig."""
    given = {name: getattr(args, name) for name in (*_SIZES, "block_size") if getattr(args, name) is not None}
    for name in given.keys() & _SIZES.keys():
        _check("--" + name.replace("num_blocks", "blocks").replace("_", "-"), given[name], _SIZES[name])
    if args.no_prefix_caching:
        given["prefix_caching"] = False
    if args.router:
        given["router"] = ROUTERS[args.router]
    if args.runway:
        given["manager"] = replace(options.manager, runway=args.runway)
    if args.host_blocks:
        if options.window:
            what = "is for host memory, which keeps nothing of models whose every layer has a window, as this log's has"
            raise InvalidConfig(FieldViolation("--host-blocks", f"{what}; leave it out"))
        given["moves"] = Moves(args.host_blocks, args.disk_blocks, args.peers, _links(args.links))
    return replace(options, **given)


def _links(text: str) -> LinkRates:
    try:
        return parse_links(text)
    except ValueError as error:
        raise InvalidConfig(FieldViolation("--links", str(error))) from None


def is_foreign(trace: Trace) -> bool:
    """Return whether a trace says nothing of a suite: none can stand beside the one that the flags describe."""
    return not trace.suite and not any(each.measured for each in trace.arrivals)


def faster(trace: Trace, load: float) -> Trace:
    """Return the same arrivals at another rate."""
    arrivals = tuple(replace(each, at=each.at / load, measured=None) for each in trace.arrivals)
    return replace(trace, arrivals=arrivals)


def _check_all(args: argparse.Namespace) -> None:
    """Raise InvalidConfig for a flag that is wrong, before anything is read or replayed."""
    if not 0 < args.load < 1e6:
        raise InvalidConfig(FieldViolation("--load", f"is {args.load:g}; expected a number above 0"))
    if args.first is not None:
        _check("--first", args.first, MOST_REQUESTS)
    _check("--seeds", args.seeds, _MOST_SEEDS)
    if len(args.policy) > _MOST_POLICIES:
        raise InvalidConfig(FieldViolation("--policy", f"is given {len(args.policy)} times; {_MOST_POLICIES} at most"))
    for name in ("host_blocks", "disk_blocks"):
        if not 0 <= getattr(args, name) <= _SIZES["num_blocks"]:
            what = f"is {getattr(args, name)}; expected 0 to {_SIZES['num_blocks']}"
            raise InvalidConfig(FieldViolation("--" + name.replace("_", "-"), what))
    for name, given in (("--disk-blocks", args.disk_blocks), ("--peers", args.peers)):
        if given and not args.host_blocks:
            what = "needs --host-blocks: what comes from disk or from other workers lands in host memory"
            raise InvalidConfig(FieldViolation(name, what))
    _links(args.links)
    for names in args.policy:
        with_policies(ReplayOptions(), names)
    if args.plot and (problems := [*plot_problems(args.plot)]):
        raise InvalidConfig(*problems)


def _check(name: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InvalidConfig(FieldViolation(name, f"is {value!r}; expected 1 to {most}"))


@dataclass(frozen=True, slots=True)
class Answer:
    """The columns of the table, what was fitted, and the speed of the replays."""

    columns: Mapping[str, Mapping[str, Interval]]
    fitted: Fit | None
    timing: Timing
    digest: str
    decisions: Mapping[str, int]
    refused: Mapping[str, Mapping[str, int]]
    replayed: int
    seconds: float
    virtual_seconds: float


def answer(trace: Trace, args: argparse.Namespace, say: Callable[[str], None] = lambda line: None) -> Answer:
    """Replay a trace as it was and as the flags change it. Raises InvalidConfig."""
    options = recorded_options(trace)
    fitted = None
    if args.costs is not None:
        options = replace(options, timing=replace(options.timing, costs=_costs(args.costs)))
    elif recorded_figures(replace(trace, arrivals=trace.arrivals[:FIT_REQUESTS])):
        say("fitting the cost of a step to the log")
        fitted = fit(trace, options, replay)
        options = replace(options, timing=fitted.timing)
    changed = changed_options(options, args)
    columns: dict[str, Mapping[str, Interval]] = {}
    if recorded := recorded_figures(trace):
        columns["recorded"] = {name: Interval(value, value, value) for name, value in recorded.items()}
    began, requests, virtual = time.perf_counter(), 0, 0.0
    digest, decisions, refused = "", dict[str, int](), dict[str, Mapping[str, int]]()
    arriving = faster(trace, args.load)
    tried = {"replayed": (trace, options)}
    if is_foreign(trace):
        tried = {"replayed": (arriving, changed)}
    elif changed != options or args.load != 1.0:
        tried["changed"] = (arriving, changed)
    tried |= {names: (arriving, with_policies(changed, names)) for names in args.policy}
    for name, (arrivals, suite) in tried.items():
        found = []
        for seed in range(args.seeds):
            say(f"{name}: seed {seed + 1} of {args.seeds}")
            run = replay(arrivals, replace(suite, seed=seed))
            requests, virtual = requests + len(run.requests), virtual + run.seconds
            if seed == 0:
                digest, decisions = run.digest, dict(run.decisions)
                refused[name] = Counter(each.refused for each in run.requests if each.refused)
            found.append(figures_of(run))
        columns[name] = over_seeds(found)
    took = time.perf_counter() - began
    return Answer(columns, fitted, options.timing, digest, decisions, refused, requests, took, virtual)


def _costs(text: str) -> Any:
    try:
        return parse_costs(text)
    except ValueError as error:
        raise InvalidConfig(FieldViolation("--costs", str(error))) from None


def show(console: Console, trace: Trace, found: Answer) -> None:
    console.print(f"{len(trace.arrivals):,} requests in {trace.seconds:,.1f} s", highlight=False)
    for line in remarks_of(trace):
        console.print(line, highlight=False)
    console.print(drawn(found.columns))
    for name, kinds in found.refused.items():
        for kind, count in kinds.items():
            console.print(f"{name}: {count:,} refused, {_REFUSALS.get(kind, kind)}.", highlight=False)
    step = _words_of(found.timing.costs)
    if found.fitted is not None:
        off = ", ".join(
            f"{name.removesuffix('_s').replace('_', ' ')} {100 * error:+.0f} %"
            for name, error in found.fitted.errors.items()
        )
        console.print(f"\nA step: {step}, fitted to the log. Replayed over recorded: {off}.", highlight=False)
    else:
        console.print(f"\nA step: {step}, not measured.", highlight=False)
    rate, real = found.replayed / found.seconds, found.virtual_seconds / found.seconds
    console.print(f"{rate:,.0f} requests replayed a second, {real:,.1f} times real time.", highlight=False)


def remarks_of(trace: Trace) -> Iterator[str]:
    """Yield what a reader of the figures must know of the trace."""
    if trace.late_lines:
        yield f"Lines with an earlier time than the one above: {trace.late_lines:,}. The order is that of the times."
    if not any(each.blocks for each in trace.arrivals):
        yield "It names no contents, so no request shares a prefix with another one."
    gap, begins = trace.longest_gap
    if gap >= _LONG_GAP_S and gap > _LONG_GAP * trace.seconds:
        yield f"No request comes for {gap:,.0f} s, from {begins:,.0f} s on; figures a second count that time."


def _words_of(costs: StepCosts) -> str:
    return f"{1000 * costs.base:.2f} ms + {1e6 * costs.decode:.1f} us a row + {1e6 * costs.prefill:.1f} us a token"


def plot(trace: Trace, found: Answer, args: argparse.Namespace) -> None:
    """Draw the columns. Raises InvalidConfig where the file cannot be written."""
    from cli.replay.plot import write  # matplotlib is large, and not always there

    seeds = f"{args.seeds} seed{'s' if args.seeds > 1 else ''}"
    words = f"{len(trace.arrivals):,} requests in {trace.seconds:,.0f} s, {seeds}"
    said = f"{words}. A step: {_words_of(found.timing.costs)}"
    try:
        write(found.columns, said, args.plot)
    except OSError as error:
        raise InvalidConfig(FieldViolation("--plot", f"{args.plot} cannot be written: {error.strerror}")) from None


def as_json(trace: Trace, found: Answer) -> dict[str, Any]:
    """Return the answer as one document."""
    return {
        "requests": len(trace.arrivals),
        "seconds": trace.seconds,
        "remarks": [*remarks_of(trace)],
        "refused": {name: dict(kinds) for name, kinds in found.refused.items()},
        "columns": {
            name: {key: asdict(each) for key, each in line.items() if not math.isnan(each.mean)}
            for name, line in found.columns.items()
        },
        "timing": asdict(found.timing),
        "errors": dict(found.fitted.errors) if found.fitted else None,
        "decisions": dict(found.decisions),
        "digest": found.digest,
        "requests_per_s": found.replayed / found.seconds,
        "times_real_time": found.virtual_seconds / found.seconds,
    }


def export(trace: Trace, path: Path, form: str) -> None:
    """Write the arrivals. Raises InvalidConfig where the file cannot be made."""
    lines = lines_of(trace) if form == "quire" else mooncake_lines(trace)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise InvalidConfig(FieldViolation("--export", f"{path} cannot be made: {error.strerror}")) from None


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    console = command_console()
    try:
        _check_all(args)
        trace = read_trace(args.trace or args.log, args.first)
        if args.export:
            export(trace, args.export, args.form)
            return 0
        if args.json:
            found = answer(trace, args)
            print_json(as_json(trace, found))
        else:
            with console.status("reading") as status:
                found = answer(trace, args, status.update)
            show(console, trace, found)
        if args.plot:
            plot(trace, found, args)
    except QuireError as error:
        return failed(error)
    except KeyboardInterrupt:
        return 130
    return 0
