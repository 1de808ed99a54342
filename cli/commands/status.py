"""`quire status`: the router's queue, which KV manager leads, and pool, load and measured rates of each worker."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from cli.client import add_admin_address, add_json, admin_channel, print_json, run_command
from cli.top.snapshot import pools_of, stalled
from cli.views.status import Ledgers, StatusView
from quire.client import Model, Status
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc


def main(argv: Sequence[str]) -> int:
    flags = argparse.ArgumentParser("quire status", description=__doc__)
    add_admin_address(flags)
    add_json(flags)
    args = flags.parse_args(argv)

    async def body(console: Console) -> None:
        async with admin_channel(args.admin_address, args.state_dir) as channel:
            stub = rpc.InferenceServiceStub(channel)
            model = Model.from_proto(await stub.GetModel(pb.GetModelRequest(), timeout=5.0))
            status = Status.from_proto(await stub.GetStatus(pb.GetStatusRequest(), timeout=5.0))
            pools, manager_problem = await pools_of(channel)
        ledgers = Ledgers(stalled(pools), manager_problem)
        if args.json:
            print_json({"model": asdict(model), **asdict(status), "ledgers": asdict(ledgers)})
        else:
            console.print(StatusView(model, status, ledgers))

    return run_command(body)
