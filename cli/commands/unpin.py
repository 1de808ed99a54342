"""`quire unpin NAME`: lets a pinned beginning of prompts be evicted as all others."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console

from cli.client import add_admin_address, admin_channel, run_command, unheard_in_words
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2_grpc as rpc

_PATIENCE_S = 30.0


def main(argv: Sequence[str]) -> int:
    flags = argparse.ArgumentParser("quire unpin", description=__doc__)
    flags.add_argument("name", help="name of the pin; `quire pins` lists them")
    add_admin_address(flags)
    args = flags.parse_args(argv)

    async def body(console: Console) -> None:
        async with admin_channel(args.admin_address, args.state_dir) as channel:
            stub = rpc.KvManagerServiceStub(channel)
            answer = await stub.UnpinPrefix(pb.UnpinPrefixRequest(name=args.name), timeout=_PATIENCE_S)
        lines = [f"unpinned {args.name}", *unheard_in_words(answer.unheard_managers, "it ends the pin")]
        console.print("\n".join(lines), markup=False)

    return run_command(body)
