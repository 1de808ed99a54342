"""`quire pins`: lists the pinned beginnings of prompts, and how much of each every worker has."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from google.protobuf.json_format import MessageToDict
from rich.console import Console

from cli.client import add_admin_address, add_json, admin_channel, print_json, run_command
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2_grpc as rpc

_PATIENCE_S = 30.0


def in_words(answer: pb.ListPinsResponse, now: float) -> str:
    silent = [f"no answer from group {name}" for name in answer.silent_groups]
    if not answer.pins:
        return "\n".join(["nothing is pinned", *silent])
    lines = silent
    for each in answer.pins:
        end = f"for {max(0.0, each.expires - now):.0f} s more" if each.HasField("expires") else "without an end"
        owner = f", tenant {each.tenant}" if each.tenant else ""
        lines.append(f"{each.name}: {each.num_blocks} blocks of {each.num_tokens} tokens, {end}{owner}")
        for worker in each.workers:
            left_out = f"; not pinned there: {worker.left_out}" if worker.left_out else ""
            lines.append(f"  {worker.worker_id}: {worker.blocks_there} there{left_out}")
        lines += [f"  not kept by {_group(group)}: pin it again" for group in each.missing_groups]
        lines += [
            f"  {_group(group)} keeps something else of this name: pin it again" for group in each.differing_groups
        ]
    if not answer.durable:
        lines.append("there is no Redis: these pins end with the KV manager")
    return "\n".join(lines)


def _group(name: str) -> str:
    return f"group {name}" if name else "the managers without a group"


def main(argv: Sequence[str]) -> int:
    flags = argparse.ArgumentParser("quire pins", description=__doc__)
    add_admin_address(flags)
    add_json(flags)
    args = flags.parse_args(argv)

    async def body(console: Console) -> None:
        async with admin_channel(args.admin_address, args.state_dir) as channel:
            stub = rpc.KvManagerServiceStub(channel)
            answer = await stub.ListPins(pb.ListPinsRequest(), timeout=_PATIENCE_S)
        if args.json:
            whole = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            print_json(whole)
        else:
            console.print(in_words(answer, time.time()), markup=False)

    return run_command(body)
