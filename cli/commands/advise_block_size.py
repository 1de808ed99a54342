"""`quire advise-block-size LOG`: the cost of each block size for the requests of a log, and which size to choose.

LOG has one JSON object a line with prompt_tokens and output_tokens, and optionally cached_tokens: the router's log at
--log-level debug --log-format json, or stored responses of the API. "-" reads standard input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, TypeVar

from rich.console import Console
from rich.table import Table

from cli.block_size.accounting import BLOCK_SIZES
from cli.block_size.advice import BlockSizeCost, costs, recommend
from cli.block_size.request_log import LoggedRequest, read_log
from cli.client import add_json, path_of, print_json, run_command
from common.contracts.errors import FieldViolation, InvalidRequest

T = TypeVar("T")
_SPEED_PREFIX: Final = "tok_s_block"


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser("quire advise-block-size", description=__doc__)
    flags.add_argument("log", help="file of one JSON object a line; - is standard input")
    flags.add_argument("--logged-block-size", type=int, default=16, help="block size under which the log was written")
    flags.add_argument("--max-loss", type=float, default=0.05, help="most that waste and missed hits may add up to")
    flags.add_argument("--sample", type=int, default=1000, help="requests to count with; more are thinned out evenly")
    flags.add_argument("--speeds", type=path_of, help="output of  python -m bench.phases --json  on this machine")
    flags.add_argument("--workload", default="general", help="whose speeds to take from it: short, general or long")
    add_json(flags)
    return flags


def read_requests(path: str) -> list[LoggedRequest]:
    """Return the requests of a log file. Raises InvalidRequest when the file is missing or malformed."""
    try:
        if path == "-":
            return read_log(sys.stdin)
        with open(path) as file:
            return read_log(file)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            FieldViolation("log", f"{path or 'an empty name'} cannot be read: {_why(error)}")
        ) from None


def _why(error: OSError | UnicodeDecodeError) -> str:
    return "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error.strerror)


def read_speeds(path: Path, workload: str) -> dict[int, float]:
    """Return output tokens a second by block size, from the output of `bench.phases --json`. Raises InvalidRequest."""
    try:
        figures: Mapping[str, float] = json.loads(path.read_text().splitlines()[-1])["figures"]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(FieldViolation("--speeds", f"{path} cannot be read: {_why(error)}")) from None
    except (ValueError, LookupError, TypeError, RecursionError):
        what = f"{path} does not end with the JSON line of bench.phases; name a file with its output"
        raise InvalidRequest(FieldViolation("--speeds", what)) from None
    found = {size: figures.get(f"{_SPEED_PREFIX}{size}_{workload}") for size in BLOCK_SIZES}
    measured = {size: speed for size, speed in found.items() if speed}
    if not measured:
        raise InvalidRequest(FieldViolation("--workload", f"{path} has no speeds of {workload!r}"))
    return measured


def thinned(items: Sequence[T], most: int) -> list[T]:
    """Return at most this many items, evenly spaced from first to last."""
    if len(items) <= most:
        return list(items)
    return [items[index * len(items) // most] for index in range(most)]


def table_of(rows: Sequence[BlockSizeCost], chosen: BlockSizeCost) -> Table:
    """Return the table of all sizes, with the chosen one marked."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("block size", "waste", "runway", "hits", "missed", "blocks / 1k tokens", "speed"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [f"{row.block_size}", _percent(row.waste), _percent(row.runway), _percent(row.hits)]
        cells += [_percent(row.missed), f"{row.blocks:.1f}", _percent(row.speed)]
        table.add_row(*cells, style="bold green" if row is chosen else None)
    return table


def reason(rows: Sequence[BlockSizeCost], chosen: BlockSizeCost, max_loss: float) -> str:
    fewer = rows[0].blocks / chosen.blocks
    lost = f"waste {_percent(chosen.waste)}, missed hits {_percent(chosen.missed)}"
    work = (
        f"and makes {chosen.blocks:.1f} blocks for 1000 tokens, {fewer:.1f} times fewer than {rows[0].block_size} does"
    )
    words = [f"it loses {_percent(chosen.lost)} ({lost}) {work}"]
    if chosen.lost > max_loss:
        words.append(f"no size stays within --max-loss {_percent(max_loss)}")
    elif larger := [row for row in rows if row.block_size > chosen.block_size]:
        words.append(f"blocks of {larger[0].block_size} would lose {_percent(larger[0].lost)}")
    if chosen.speed is not None:
        words.append(f"measured speed {_percent(chosen.speed)} of the fastest size")
    return "; ".join(words)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _check(args: argparse.Namespace) -> None:
    """Raise InvalidRequest for numbers out of range."""
    wrong = [
        FieldViolation(flag, f"is {value}; expected 1 or more")
        for flag, value in (("--logged-block-size", args.logged_block_size), ("--sample", args.sample))
        if value < 1
    ]
    if not args.max_loss >= 0:
        wrong.append(FieldViolation("--max-loss", f"is {args.max_loss:g}; expected 0 or more"))
    if wrong:
        raise InvalidRequest(*wrong)


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)

    async def body(console: Console) -> None:
        _check(args)
        everything = read_requests(args.log)
        requests = thinned(everything, args.sample)
        speeds = read_speeds(args.speeds, args.workload) if args.speeds else None
        rows = costs(requests, args.logged_block_size, speeds)
        chosen = recommend(rows, args.max_loss)
        if args.json:
            print_json(
                {"requests": len(everything), "sizes": [asdict(row) for row in rows], "chosen": chosen.block_size}
            )
            return
        prompt, output = (
            sum(getattr(each, part) for each in requests) / len(requests) for part in ("prompt", "output")
        )
        console.print(
            f"{len(everything)} requests, {len(requests)} counted: {prompt:.0f} prompt and {output:.0f} output tokens"
            " on average"
        )
        console.print(table_of(rows, chosen))
        if rows[0].hits is None:
            console.print("the log has no cached tokens: a hit would miss (block size - 1) / 2 tokens on average")
        console.print(f"take --block-size {chosen.block_size}: {reason(rows, chosen, args.max_loss)}", soft_wrap=True)

    return run_command(body)
