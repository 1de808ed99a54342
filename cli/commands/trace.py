"""`quire trace ID`: draws the spans of one request across the services as a tree, with its decisions."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from google.protobuf.json_format import MessageToDict
from rich.console import Console

from cli.client import add_admin_address, add_json, admin_channel, print_json, run_command
from cli.views.trace import render_trace
from quire.decision.v1 import decision_pb2 as pb
from quire.decision.v1 import decision_pb2_grpc as rpc


def request_of(name: str) -> pb.GetTraceRequest:
    """Return the query for a trace id (32 hexadecimal digits) or else a request id."""
    if re.fullmatch(r"[0-9a-f]{32}", name):
        return pb.GetTraceRequest(trace_id=name)
    return pb.GetTraceRequest(request_id=name)


def main(argv: Sequence[str]) -> int:
    flags = argparse.ArgumentParser("quire trace", description=__doc__)
    flags.add_argument("id", help="trace id or request id, as `quire generate` prints it")
    add_admin_address(flags)
    add_json(flags)
    args = flags.parse_args(argv)

    async def body(console: Console) -> None:
        async with admin_channel(args.admin_address, args.state_dir) as channel:
            answer = await rpc.DecisionServiceStub(channel).GetTrace(request_of(args.id), timeout=5.0)
        if args.json:
            print_json(MessageToDict(answer, preserving_proto_field_name=True))
        else:
            console.print(render_trace(answer))

    return run_command(body)
