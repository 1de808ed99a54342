"""`quire decisions`: lists what routers and KV manager decided, newest last; --follow goes on as they decide."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final, TypeAlias

import grpc
from rich.console import Console

from cli.client import add_admin_address, add_json, admin_channel, print_json, run_command
from cli.views.cutting import cut_line
from cli.views.decision_lines import decision_line, lost_line
from cli.why.choice import seconds_of
from cli.why.ids import full_id, id_of
from cli.why.pages import Listed, Lister
from cli.why.source import LogSource, Source, add_log, opened
from cli.why.watch import Watched, Watcher
from common.contracts.errors import FieldViolation, InvalidConfig
from common.contracts.types import DecisionKind
from common.wire.decision_json import plain
from quire.decision.v1 import decision_pb2 as pb

_MANAGER, _ROUTER = "manager", "router"
_DEFAULT: Final = 50
_Arrival: TypeAlias = "tuple[str, Watched | grpc.aio.AioRpcError]"


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser("quire decisions", description=__doc__)
    flags.add_argument(
        "--request", type=id_of, default="", metavar="ID", help="those of the request whose id begins so"
    )
    flags.add_argument("--kind", default="", choices=[each.value for each in DecisionKind], help="of this kind")
    flags.add_argument("--worker", default="", metavar="ID", help="about this worker")
    flags.add_argument("--tenant", default="", help="of this tenant; routers alone know tenants")
    flags.add_argument("--since", metavar="TIME", help="of so much time, such as 30s, 5m or 2h")
    flags.add_argument("--until", metavar="TIME", help="made so much time ago at the latest, such as 1d")
    flags.add_argument("--service", choices=[_ROUTER, _MANAGER], help="of this service alone")
    flags.add_argument("--limit", type=int, default=_DEFAULT, metavar="N", help="the newest N (default %(default)s)")
    flags.add_argument("--follow", action="store_true", help="go on with each new one, until Ctrl-C")
    add_log(flags)
    add_admin_address(flags)
    add_json(flags)
    return flags


def services_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Return which services are asked. Raises InvalidConfig for flags that exclude each other."""
    if args.limit < 0 or (not args.limit and not args.follow):
        raise InvalidConfig(FieldViolation("--limit", f"is {args.limit}; expected 1 or more (0 with --follow)"))
    if args.follow and (args.log or args.until is not None):
        flag, what = ("--log", "has no new records") if args.log else ("--until", "ends before the next record")
        raise InvalidConfig(FieldViolation(flag, f"{what}; expected it without --follow"))
    if args.tenant and args.service == _MANAGER:
        raise InvalidConfig(FieldViolation("--tenant", "is for records of routers: those of the manager have none"))
    if args.service:
        return (args.service,)
    return (_ROUTER,) if args.tenant else (_ROUTER, _MANAGER)


def filters_of(args: argparse.Namespace) -> pb.ListDecisionsRequest:
    return pb.ListDecisionsRequest(
        request_id=args.request,
        kind=args.kind,
        worker=args.worker,
        tenant=args.tenant,
        since_unix_nano=_ago("--since", args.since),
        until_unix_nano=_ago("--until", args.until),
    )


async def name_request(lister: Lister, args: argparse.Namespace) -> None:
    """Replace the beginning of a request's id by the whole of it."""
    if args.request:
        args.request = await full_id(lister, args.request, args.tenant)


def _ago(flag: str, span: str | None) -> int:
    """Return the time of so long ago in nanoseconds; 0 for none."""
    return 0 if span is None else max(1, time.time_ns() - int(seconds_of(span, flag) * 1e9))


async def listed(lister: Lister, args: argparse.Namespace) -> Listed:
    """Return the newest records of all services that are asked, newest last."""
    filters = filters_of(args)
    found = Listed()
    for service in services_of(args):
        records = await lister.newest(filters, service == _MANAGER, args.limit)
        found.add(service, records, filters.since_unix_nano)
    return found.newest(args.limit)


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)

    async def body(console: Console) -> None:
        services = services_of(args)
        if not args.follow:
            async with opened(args) as source:
                await name_request(Lister(source), args)
                found = await listed(Lister(source), args)
                show(console, replace(found, missing=(*found.missing, *_unread(source))), args)
            return
        async with admin_channel(args.admin_address, args.state_dir) as channel:
            await name_request(Lister(channel), args)
            watchers: dict[str, Watcher] = {}
            # They begin before the listing, so that no record falls between the two. Without the manager the command
            # goes on with the routers.
            for service in services:
                watchers[service] = await Watcher.begun(
                    channel, filters_of(args), service == _MANAGER, may_wait=bool(watchers)
                )
            found = await listed(Lister(channel), args) if args.limit else Listed()
            show(console, found, args)
            await follow(console, watchers, found, args.json)

    return run_command(body)


def _unread(source: Source) -> Iterator[str]:
    return (f"records of {each}" for each in source.missing())


def show(console: Console, found: Listed, args: argparse.Namespace) -> None:
    if args.json and not args.follow:
        records = [{"service": service, **plain(record)} for service, record in found.records]
        print_json({"decisions": records, "missing": list(found.missing)})
        return
    for service, record in found.records:
        print_record(console, record, service, args.json, dated=bool(args.log))
    if not args.json:
        for each in found.missing:
            console.print(f"missing: {each}", style="yellow", soft_wrap=not console.is_terminal)
        if not found.records and not args.follow:
            bound = LogSource.bound if args.log else "--decision-ring"
            console.print(f"no decision here matches; the newest are kept ({bound})")


async def follow(console: Console, watchers: dict[str, Watcher], found: Listed, as_json: bool) -> None:
    """Print records as they come, each once, until the command is interrupted."""
    arrivals: asyncio.Queue[_Arrival] = asyncio.Queue(maxsize=1)
    seen = {record.decision_id for _, record in found.records}
    tasks = [asyncio.create_task(_pump(name, each, arrivals)) for name, each in watchers.items()]
    try:
        while True:
            service, news = await arrivals.get()
            if isinstance(news, grpc.aio.AioRpcError):
                raise news
            if isinstance(news, str):
                _print_notice(console, news, service, as_json)
                continue
            if news.lost_because:
                _print_lost(console, news, service, as_json)
            for record in news.decisions:
                if record.decision_id not in seen:
                    print_record(console, record, service, as_json)
            sys.stdout.flush()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(service: str, watcher: Watcher, arrivals: asyncio.Queue[_Arrival]) -> None:
    try:
        async with aclosing(watcher.responses()) as responses:
            async for response in responses:
                await arrivals.put((service, response))
    except grpc.aio.AioRpcError as error:
        await arrivals.put((service, error))


def print_record(console: Console, record: pb.DecisionRecord, service: str, as_json: bool, dated: bool = False) -> None:
    if as_json:
        sys.stdout.write(json.dumps({"service": service, **plain(record)}) + "\n")
        return
    line = decision_line(record, service, dated)
    if console.is_terminal:
        cut_line(line, console.width)
    console.print(line, soft_wrap=True)


def _print_notice(console: Console, words: str, service: str, as_json: bool) -> None:
    if as_json:
        print_json({"service": service, "notice": words})
    else:
        console.print(f"{service}: {words}", style="yellow", soft_wrap=True)


def _print_lost(console: Console, response: pb.WatchDecisionsResponse, service: str, as_json: bool) -> None:
    if as_json:
        source = response.position.source
        print_json({"service": service, "source": source, "lost": response.lost, "because": response.lost_because})
    else:
        console.print(lost_line(response, service), soft_wrap=True)
