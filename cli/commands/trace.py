"""`quire trace ID`: draws the spans of one request across the services as a tree, with its decisions."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Final

import grpc
from google.protobuf.json_format import MessageToDict
from rich.console import Console

from cli.client import add_admin_address, add_json, admin_channel, print_json, run_command
from cli.views.trace import render_trace
from cli.why.ids import id_of, request_that_begins, without_prefix
from cli.why.pages import Lister
from quire.decision.v1 import decision_pb2 as pb
from quire.decision.v1 import decision_pb2_grpc as rpc

_PATIENCE_S: Final = 5.0


def request_of(name: str) -> pb.GetTraceRequest:
    """Return the query for a trace id (32 hexadecimal digits) or else a request id."""
    if re.fullmatch(r"[0-9a-f]{32}", name):
        return pb.GetTraceRequest(trace_id=name)
    return pb.GetTraceRequest(request_id=name)


async def trace_of(channel: grpc.aio.Channel, name: str) -> pb.GetTraceResponse:
    """Return the spans of a request that is named by an id, or by the first characters of its own."""
    stub = rpc.DecisionServiceStub(channel)
    try:
        return await stub.GetTrace(request_of(name), timeout=_PATIENCE_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise
        if not (known := await request_that_begins(Lister(channel), without_prefix(name))):
            raise
    return await stub.GetTrace(request_of(known), timeout=_PATIENCE_S)


def main(argv: Sequence[str]) -> int:
    flags = argparse.ArgumentParser("quire trace", description=__doc__)
    flags.add_argument(
        "id", type=id_of, help="trace id or request id, as `quire generate` prints it, or how a request's id begins"
    )
    add_admin_address(flags)
    add_json(flags)
    args = flags.parse_args(argv)

    async def body(console: Console) -> None:
        async with admin_channel(args.admin_address, args.state_dir) as channel:
            answer = await trace_of(channel, args.id)
        if args.json:
            print_json(MessageToDict(answer, preserving_proto_field_name=True))
        else:
            console.print(render_trace(answer))

    return run_command(body)
