"""`quire why REQUEST`: says why a request was slow, was refused or missed the cache, and what to do about it.

`--hit-rate` and `--latency` say why these changed, against the span of time before. `--session` lists the requests of
one session.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from google.protobuf.json_format import MessageToDict
from rich.console import Console

from cli.client import add_admin_address, add_json, path_of, print_json, run_command
from cli.views.change import ChangeView
from cli.views.why import SessionTable, WhyTable, WhyView, head_lines
from cli.why.change import DEFAULT_SPAN_S, changes, ends_of
from cli.why.choice import Choice, chosen, seconds_of
from cli.why.gather import Gatherer
from cli.why.ids import id_of
from cli.why.source import add_log, opened
from common.contracts.errors import FieldViolation, InvalidConfig, NotFound
from common.version import quire_version
from router.observe.diagnosis.change_words import head_of as head_of_change
from router.observe.diagnosis.rules import diagnose
from router.observe.diagnosis.session_requests import SessionRequest, requests_of_session
from router.observe.diagnosis.verdict import Diagnosis

# Requests that one screen explains.
_MOST: Final = 20
_EXPORT_WIDTH: Final = 120


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser("quire why", description=__doc__)
    flags.add_argument(
        "id", type=id_of, nargs="?", default="", help="request id or how it begins, or the client's own id"
    )
    flags.add_argument("--last", action="store_true", help="the request that ended last")
    text = "the N requests with the longest time to the first token (default 5)"
    flags.add_argument("--slowest", type=int, nargs="?", const=5, default=0, metavar="N", help=text)
    flags.add_argument("--rejected", action="store_true", help="those that were refused, or ended for want of time")
    flags.add_argument("--preempted", action="store_true", help="those that lost their blocks")
    flags.add_argument("--misses", action="store_true", help="those whose prompt was not all cached")
    flags.add_argument("--since", metavar="TIME", help="those that ended within so much time, such as 30s, 5m or 2h")
    text = "why the hit rate changed in the last TIME of --since (5m), against as much time before"
    flags.add_argument("--hit-rate", action="store_true", help=text)
    flags.add_argument("--latency", action="store_true", help="the same for the time to the first token")
    text = "the requests of a session, by the id that the client sends, in the order in which they came"
    flags.add_argument("--session", default="", metavar="ID", help=text)
    flags.add_argument("--tenant", default="", help="requests of this tenant alone; with keys, --session needs it")
    flags.add_argument(
        "--export", type=path_of, metavar="FILE", help="write one JSON file with all of it, for a ticket"
    )
    add_log(flags)
    add_admin_address(flags)
    add_json(flags)
    return flags


def choice_of(args: argparse.Namespace) -> Choice:
    """Return what the flags choose. Raises InvalidConfig when that is nothing, or a request is named besides."""
    since = seconds_of(args.since) if args.since is not None else None
    choice = Choice(args.last, args.slowest, args.rejected, args.preempted, args.misses, since)
    if args.slowest < 0:
        raise InvalidConfig(FieldViolation("--slowest", f"is {args.slowest}; expected 1 or more"))
    if args.id and choice != Choice():
        raise InvalidConfig(FieldViolation("REQUEST", "is given with flags that choose requests; give one of both"))
    if not args.id and choice == Choice():
        what = "is missing; name a request, or choose with --last, --slowest, --rejected, --preempted or --misses"
        raise InvalidConfig(FieldViolation("REQUEST", what))
    return choice


async def chosen_ids(gatherer: Gatherer, args: argparse.Namespace) -> tuple[list[str], tuple[str, ...]]:
    """Return the ids of the requests to explain, and which records were not looked at for them.

    Raises NotFound when a choice names none.
    """
    choice = choice_of(args)
    if args.id:
        return [args.id], ()
    now_ns = time.time_ns()
    ends = await gatherer.ends(None if choice.since is None else now_ns - int(choice.since * 1e9))
    found = chosen(choice, ends.records, now_ns)
    if not found:
        what = "no request of that kind ended here" if ends.records else "no request has ended here"
        what = f"{what} yet, or their records are gone; the newest are kept ({gatherer.bound})"
        raise NotFound("; missing: ".join((what, *ends.missing)))
    # The newest request of a kind is that one, whatever there is before it.
    return found, () if choice.last and not choice.slowest else ends.missing


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    if args.hit_rate or args.latency:
        return run_command(partial(compare, args))
    if args.session:
        return run_command(partial(list_session, args))

    async def body(console: Console) -> None:
        async with opened(args) as source:
            gatherer = Gatherer(source, args.tenant)
            ids, missing = await chosen_ids(gatherer, args)
            found = [diagnose(await gatherer.history(each)) for each in ids[:_MOST]]
            if args.export is not None:
                write(args.export, [await exported(gatherer, each) for each in found])
        more, runbook = len(ids) - len(found), gatherer.runbook
        if args.json:
            print_json(document_of(found, missing, runbook))
        elif len(found) == 1:
            show(console, WhyView(found[0], runbook), missing)
        else:
            show(console, WhyTable(found, more), missing)

    return run_command(body)


async def compare(args: argparse.Namespace, console: Console) -> None:
    """Say why the hit rate or the latency changed."""
    seconds = span_of(args)
    async with opened(args) as source:
        ends, runbook = await ends_of(source, seconds, args.tenant, time.time_ns()), source.runbook
    found = changes(ends, args.hit_rate, args.latency)
    if args.json:
        whole = [{**asdict(each), "head": head_of_change(each)} for each in found]
        print_json({"seconds": seconds, "changes": whole})
        return
    for each in found:
        console.print(ChangeView(each, seconds, runbook), soft_wrap=not console.is_terminal)


async def list_session(args: argparse.Namespace, console: Console) -> None:
    """Show the requests of a session. Raises InvalidConfig for flags that choose others, and NotFound without any."""
    if args.id or Choice(args.last, args.slowest, args.rejected, args.preempted, args.misses) != Choice():
        what = "chooses all requests of a session; leave out REQUEST and the flags that choose requests"
        raise InvalidConfig(FieldViolation("--session", what))
    since_ns = None if args.since is None else time.time_ns() - int(seconds_of(args.since) * 1e9)
    async with opened(args) as source:
        gatherer = Gatherer(source, args.tenant)
        ends = await gatherer.ends_of_session(args.session, since_ns)
        requests = requests_of_session(ends.records)
        if not requests:
            what = f"no request of session {args.session} ended here, or its records are gone ({gatherer.bound})"
            raise NotFound(f"{what}; where callers have keys, name the tenant too: --tenant NAME")
        shown = [
            replace(each, diagnosis=diagnose(await gatherer.history(each.request_id))) for each in requests[-_MOST:]
        ]
        if args.export is not None:
            write(args.export, [await exported(gatherer, each.diagnosis) for each in shown if each.diagnosis])
    if args.json:
        print_json(session_document(shown, len(requests) - len(shown), ends.missing, gatherer.runbook))
    else:
        show(console, SessionTable(shown, len(requests) - len(shown)), ends.missing)


def session_document(
    requests: Sequence[SessionRequest], earlier: int, missing: Sequence[str], runbook: str
) -> dict[str, Any]:
    """Return a session for --json: figures of each request beside its diagnosis."""
    listed = [
        {
            "request_id": each.request_id,
            "began_unix_nano": each.began_ns,
            "ended_unix_nano": each.ended_ns,
            "think_s": each.think_s,
            "waited_s": each.waited_s,
            "prompt_tokens": 0 if each.outcome is None else each.outcome.prompt_tokens,
            "cached_tokens": 0 if each.outcome is None else each.outcome.cached_tokens,
            "diagnosis": None if each.diagnosis is None else plain(each.diagnosis, runbook),
        }
        for each in requests
    ]
    return {"requests": listed, "earlier": earlier, "missing": list(missing)}


def span_of(args: argparse.Namespace) -> float:
    """Return the seconds of each span. Raises InvalidConfig for flags that choose requests, and for no time."""
    chosen_by = Choice(args.last, args.slowest, args.rejected, args.preempted, args.misses)
    if args.id or args.session or chosen_by != Choice() or args.export is not None:
        what = "is about all requests of a span of time; leave out REQUEST, --export and the flags that choose requests"
        raise InvalidConfig(FieldViolation("--hit-rate" if args.hit_rate else "--latency", what))
    seconds = DEFAULT_SPAN_S if args.since is None else seconds_of(args.since)
    if seconds <= 0.0:
        raise InvalidConfig(FieldViolation("--since", f"is {args.since!r}; expected more than no time"))
    return seconds


def show(console: Console, found: WhyView | WhyTable | SessionTable, missing: Sequence[str]) -> None:
    console.print(found, soft_wrap=isinstance(found, WhyView) and not console.is_terminal)
    for each in missing:
        console.print(f"missing: {each}", style="yellow", soft_wrap=not console.is_terminal)


def document_of(found: Sequence[Diagnosis], missing: Sequence[str], runbook: str) -> dict[str, Any]:
    """Return all of it for --json; `runbook` is where the links lead."""
    return {"requests": [plain(each, runbook) for each in found], "missing": list(missing)}


def plain(found: Diagnosis, runbook: str) -> dict[str, Any]:
    """Return a diagnosis as JSON has it, with the head of its screen."""
    whole = asdict(found)
    for name, verdict in (("verdict", found.verdict), ("prefix", found.prefix)):
        if verdict is not None:
            whole[name]["advice"]["link"] = verdict.advice.link(runbook)
    return {**whole, "head": [line.plain for line in head_lines(found, runbook)]}


async def exported(gatherer: Gatherer, found: Diagnosis) -> dict[str, Any]:
    """Return everything about a request: the diagnosis, its screen, all records, and the spans if there are any."""
    screen = Console(file=io.StringIO(), width=_EXPORT_WIDTH, record=True, emoji=False, highlight=False)
    screen.print(WhyView(found, gatherer.runbook))
    records, _ = await gatherer.records(found.request_id)
    return {
        "diagnosis": plain(found, gatherer.runbook),
        "screen": screen.export_text().splitlines(),
        "records": [MessageToDict(each, preserving_proto_field_name=True) for each in records],
        "trace": await gatherer.trace(found.request_id),
    }


def write(path: Path, requests: Sequence[dict[str, Any]]) -> None:
    """Write the file of an export. Raises InvalidConfig when that is impossible."""
    whole = {"quire": quire_version(), "made": datetime.now(UTC).isoformat(timespec="seconds"), "requests": requests}
    try:
        path.write_text(json.dumps(whole, indent=1) + "\n")
    except OSError as error:
        what = f"{path} cannot be written: {error.strerror}; name a file in a folder that you may write to"
        raise InvalidConfig(FieldViolation("--export", what)) from None
