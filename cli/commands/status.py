"""`quire status`: the router's queue, which KV manager leads, and pool, load and measured rates of each worker.

With `--watch`: blocks, hit rate with reasons, queues and slow requests on one screen, drawn again every few seconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

import grpc
from rich.console import Console

from cli.client import add_admin_address, add_json, admin_channel, print_json, run_command
from cli.views.status import Ledgers, StatusView
from cli.watch.screen import Screen, print_frame
from cli.watch.snapshot import pools_of, stalled, taken
from common.contracts.errors import FieldViolation, InvalidConfig
from quire.client import Model, Status
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from router.observe.pool_words import disk_words, held_words, host_words

_EVERY_S: Final = 2.0


def main(argv: Sequence[str]) -> int:
    flags = argparse.ArgumentParser("quire status", description=__doc__)
    flags.add_argument("--watch", action="store_true", help="draw the suite on one screen again and again; q quits")
    flags.add_argument(
        "--every", type=float, default=_EVERY_S, metavar="SECONDS", help="with --watch: between looks (%(default)g)"
    )
    add_admin_address(flags)
    add_json(flags)
    args = flags.parse_args(argv)

    async def body(console: Console) -> None:
        if not args.every > 0:
            raise InvalidConfig(FieldViolation("--every", f"is {args.every:g}; expected more than 0"))
        async with admin_channel(args.admin_address, args.state_dir) as channel:
            if args.watch:
                await _watch(channel, console, args)
            else:
                await _show(channel, console, args.json)

    return run_command(body)


async def _show(channel: grpc.aio.Channel, console: Console, as_json: bool) -> None:
    stub = rpc.InferenceServiceStub(channel)
    model = Model.from_proto(await stub.GetModel(pb.GetModelRequest(), timeout=5.0))
    status = Status.from_proto(await stub.GetStatus(pb.GetStatusRequest(), timeout=5.0))
    pools, manager_problem = await pools_of(channel)
    held = (words(pools.values()) for words in (held_words, host_words, disk_words))
    ledgers = Ledgers(stalled(pools), manager_problem, *held)
    if as_json:
        print_json({"model": asdict(model), **asdict(status), "ledgers": asdict(ledgers)})
    else:
        console.print(StatusView(model, status, ledgers))


async def _watch(channel: grpc.aio.Channel, console: Console, args: argparse.Namespace) -> None:
    """Draw until `q`; one screen where the output or the input is not a terminal."""
    first = await taken(channel)
    if args.json:
        print_json(asdict(first))
    elif not (console.is_terminal and sys.stdin.isatty()):
        print_frame(console, first)
    else:
        await Screen(channel, args.admin_address, console, first).run(args.every)
