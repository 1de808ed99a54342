"""`quire prefetch`: brings the beginning of prompts into one worker's host memory before it is asked for them.

The full blocks come from that worker's disk or from another worker that has them. Nothing is computed, and no request
waits for it. `quire decisions --kind prefetch` shows when they have come.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from google.protobuf.json_format import MessageToDict
from rich.console import Console

from cli.client import add_admin_address, add_json, admin_channel, print_json, run_command
from cli.commands.pin import add_prompt, cache_of, named_by_flags, prompt_of
from common.contracts.errors import InvalidRequest
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc

_PATIENCE_S: Final = 30.0


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser("quire prefetch", description=__doc__)
    add_prompt(flags)
    flags.add_argument("--worker", required=True, metavar="ID", help="the worker that is to have it (`quire status`)")
    add_admin_address(flags)
    add_json(flags)
    return flags


def question_of(args: argparse.Namespace) -> pb.PrefetchRequest:
    """Return what the flags ask. Raises InvalidRequest."""
    return pb.PrefetchRequest(prompt=prompt_of(args), tenant=args.tenant, cache=cache_of(args), worker_id=args.worker)


def in_words(answer: pb.PrefetchResponse, worker: str) -> str:
    counts = f"{answer.blocks_there} of {answer.num_blocks} blocks are there, {answer.blocks_coming} are to come"
    return f"{answer.outcome} by {worker}: {counts}" + (f"; {answer.reason}" if answer.reason else "")


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)

    async def body(console: Console) -> None:
        try:
            question = question_of(args)
            async with admin_channel(args.admin_address, args.state_dir) as channel:
                answer = await rpc.InferenceServiceStub(channel).Prefetch(question, timeout=_PATIENCE_S)
        except InvalidRequest as refused:
            raise named_by_flags(refused) from refused
        if args.json:
            whole = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            print_json(whole)
        else:
            console.print(in_words(answer, args.worker), markup=False)

    return run_command(body)
