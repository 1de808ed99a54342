"""`quire status`: the router's queue, and the pool, load and measured rates of each worker."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from cli.client import add_address, router_client, run_command
from quire.client import Status


def table_of(status: Status) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("worker", "address", "state", "manager"):
        table.add_column(name)
    for name in ("running", "waiting", "blocks", "free or cached", "prefill tokens/s", "decode step"):
        table.add_column(name, justify="right")
    table.add_column("note")
    for worker in status.workers:
        rates = worker.prefill_tokens_per_second, worker.decode_step_seconds
        table.add_row(
            worker.worker_id or "?",
            worker.address,
            worker.state,
            "attached" if worker.manager_attached else "detached",
            str(worker.running_sequences),
            str(worker.waiting_sequences),
            str(worker.num_blocks),
            str(worker.unheld_blocks),
            f"{rates[0]:.0f}" if rates[0] else "-",
            f"{1e3 * rates[1]:.1f} ms" if rates[1] else "-",
            worker.reason,
        )
    return table


def main(argv: Sequence[str]) -> int:
    flags = argparse.ArgumentParser("quire status", description=__doc__)
    add_address(flags)
    args = flags.parse_args(argv)

    async def body(console: Console) -> None:
        async with router_client(args.address) as client:
            model, status = await client.model(timeout=5.0), await client.status(timeout=5.0)
        redis = "connected" if status.redis_connected else "not connected"
        draining = ", draining" if status.draining else ""
        console.print(
            f"Quire {status.version}: {model.name}, context {model.max_model_len}, "
            f"block size {model.identity.block_size}; Redis {redis}{draining}"
        )
        console.print(f"{status.queued_requests} requests queued, {status.running_requests} running")
        console.print(table_of(status))

    return run_command(body)
