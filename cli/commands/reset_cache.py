"""`quire reset-cache`: drops the cached blocks that no request uses, on all workers and in the index."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console

from cli.client import add_admin_address, add_json, admin_channel, print_json, run_command, unheard_in_words
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2_grpc as rpc

# The manager waits for its workers and for Redis, up to 15 s.
_PATIENCE_S = 60.0


def main(argv: Sequence[str]) -> int:
    flags = argparse.ArgumentParser("quire reset-cache", description=__doc__)
    add_admin_address(flags)
    add_json(flags)
    args = flags.parse_args(argv)

    async def body(console: Console) -> None:
        async with admin_channel(args.admin_address, args.state_dir) as channel:
            stub = rpc.KvManagerServiceStub(channel)
            answer = await stub.ResetPrefixCache(pb.ResetPrefixCacheRequest(), timeout=_PATIENCE_S)
        if args.json:
            print_json(as_json(answer))
        else:
            console.print(in_words(answer))

    return run_command(body)


def as_json(answer: pb.ResetPrefixCacheResponse) -> dict[str, object]:
    """Return the answer as the admin plane's HTTP port has it."""
    workers = [
        {
            "worker_id": each.worker_id,
            "dropped_blocks": each.dropped_blocks,
            "blocks_in_use": each.blocks_in_use,
            "confirmed": each.confirmed,
        }
        for each in answer.workers
    ]
    return {
        "dropped_blocks": answer.dropped_blocks,
        "workers": workers,
        "index_current": answer.index_current,
        "unheard_managers": list(answer.unheard_managers),
    }


def in_words(answer: pb.ResetPrefixCacheResponse) -> str:
    lines = [f"dropped {answer.dropped_blocks} cached blocks"]
    for each in answer.workers:
        late = "" if each.confirmed else "; not confirmed yet: its blocks are dropped when it attaches again"
        in_use = f"{each.blocks_in_use} in use stay"
        lines.append(f"  {each.worker_id}: {each.dropped_blocks} dropped, {in_use}{late}")
    if not answer.workers:
        lines.append("  no worker is attached; those that attach later begin without cached blocks")
    if not answer.index_current:
        lines.append("  the index in Redis still has the blocks; it forgets them once Redis can be reached")
    lines += unheard_in_words(answer.unheard_managers, "its cache is reset")
    return "\n".join(lines)
