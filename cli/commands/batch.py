"""`quire batch in.jsonl out.jsonl`: answers a file of requests in OpenAI's batch form.

The same command goes on where an earlier one ended, however that ended. QUIRE_API_KEY has the key, QUIRE_CA the CA.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cli.batch.runner import Counts, Runner, Target
from cli.client import add_http_address, add_json, failed, http_target, path_of, print_json
from common.batch.lines import checked_ids, items
from common.batch.results import Result, ResultFile
from common.contracts.errors import FieldViolation, InvalidRequest, QuireError
from common.settings.config import exit_status

_MOST_AT_ONCE: Final = 1024


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser("quire batch", description=__doc__)
    flags.add_argument("input", type=path_of, help="JSONL file: custom_id, method, url and body on each line")
    flags.add_argument(
        "output", type=path_of, help="JSONL file of the answers; those that it has are not asked for again"
    )
    flags.add_argument("--concurrency", type=int, default=32, help="requests at once (default %(default)s)")
    flags.add_argument("--attempts", type=int, default=10, help="tries of each while the server is busy or away")
    flags.add_argument("--timeout", type=float, default=600.0, help="seconds for each answer (default %(default)g)")
    add_json(flags)
    add_http_address(flags)
    return flags


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    try:
        return asyncio.run(_batch(args))
    except InvalidRequest as error:
        for each in error.violations:
            print(f"quire: {each.field}: {each.description}", file=sys.stderr)
        print("quire: nothing was sent", file=sys.stderr)
        return exit_status(error)
    except QuireError as error:
        return failed(error)
    except KeyboardInterrupt:
        print("quire: the same command goes on from here", file=sys.stderr)
        return 130


async def _batch(args: argparse.Namespace) -> int:
    began = time.monotonic()
    target = _target(args)
    _check_files(args)
    with _opened(args.input) as source:
        wanted = checked_ids(source)
    with ResultFile(args.output) as output:
        earlier = {custom_id: output.done[custom_id] for custom_id in wanted if custom_id in output.done}
        counts = await _run(target, args.input, output, len(wanted), len(earlier))
    summary = {
        "requests": len(wanted),
        "done_before": len(earlier),
        "refused_before": sum(not ok for ok in earlier.values()),
        **asdict(counts),
        "seconds": round(time.monotonic() - began, 3),
    }
    if args.json:
        print_json(summary)
    else:
        print(_in_words(counts, len(wanted), len(earlier)), file=sys.stderr)
    return int(bool(counts.refused or counts.failed or summary["refused_before"]))


async def _run(target: Target, path: Path, output: ResultFile, wanted: int, done: int) -> Counts:
    """Send what is left to do, and show how far that is."""
    console = Console(stderr=True, highlight=False, emoji=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("requests", total=wanted, completed=done)

        def ended(result: Result) -> None:
            output.write(result)
            progress.advance(task)

        runner = Runner(target, ended)
        if done < wanted:
            with _opened(path) as source:
                await runner.run(item for item in items(source) if item.custom_id not in output.done)
        return runner.counts


def _target(args: argparse.Namespace) -> Target:
    """Raises InvalidRequest for numbers out of range."""
    wrong = []
    if not 1 <= args.concurrency <= _MOST_AT_ONCE:
        wrong.append(FieldViolation("--concurrency", f"is {args.concurrency}; expected 1 to {_MOST_AT_ONCE}"))
    if args.attempts < 1:
        wrong.append(FieldViolation("--attempts", f"is {args.attempts}; expected 1 or more"))
    if not args.timeout > 0:
        wrong.append(FieldViolation("--timeout", f"is {args.timeout:g}; expected seconds above 0"))
    if wrong:
        raise InvalidRequest(*wrong)
    url, key, ca = http_target(args.http_address)
    return Target(url, key, ca, args.concurrency, args.attempts, args.timeout)


def _check_files(args: argparse.Namespace) -> None:
    if args.output.exists() and args.input.exists() and args.output.samefile(args.input):
        raise InvalidRequest(FieldViolation("the output", f"{args.output} is the input; expected another file"))


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise InvalidRequest(FieldViolation("the input", f"{path} cannot be read: {error.strerror}")) from None


def _in_words(counts: Counts, wanted: int, done: int) -> str:
    ended = counts.succeeded + counts.refused
    lines = [f"{done + ended} of {wanted} requests have an answer; {done} had one before"]
    if counts.refused:
        lines.append(f"{counts.refused} were refused: their lines have the status and the reason")
    if counts.failed:
        lines.append(f"{counts.failed} got no answer: the same command tries them again")
    return "\n".join(lines)
