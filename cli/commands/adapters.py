"""`quire adapters`: lists the LoRA adapters of each worker; loads one from below --lora-dir, or unloads one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from google.protobuf.json_format import MessageToDict
from rich.console import Console

from cli.client import add_admin_address, add_json, admin_channel, print_json, run_command
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc

_LOAD_S, _PATIENCE_S = 600.0, 30.0
_SHOWN_DIGITS = 12


def in_words(answer: pb.ListAdaptersResponse) -> str:
    """Return one line for each adapter, and one for each worker that knows it; then what tenants have of their own."""
    lines = []
    for adapter in answer.adapters:
        lines.append(f"{adapter.name}, of tenant {adapter.tenant}" if adapter.tenant else adapter.name)
        for each in adapter.workers:
            if each.error:
                lines.append(f"  {each.worker_id}: not loaded: {each.error}")
                continue
            where = "in memory" if each.in_memory else "read when a request names it"
            content = f"content {each.fingerprint[:_SHOWN_DIGITS]}"
            lines.append(f"  {each.worker_id}: rank {each.rank}, {each.num_bytes >> 10} KiB, {where}, {content}")
    return "\n".join([*lines, *_tenant_lines(answer)]) or "no adapter is loaded"


def _tenant_lines(answer: pb.ListAdaptersResponse) -> list[str]:
    """Return what each tenant's own adapters take in the memory of each worker, and what they may take."""
    taken, most = dict[tuple[str, str], int](), dict[str, int]()
    for adapter in answer.adapters:
        for each in adapter.workers if adapter.tenant else ():
            place = adapter.tenant, each.worker_id
            taken[place] = taken.get(place, 0) + (each.num_bytes if each.in_memory else 0)
            most[adapter.tenant] = adapter.tenant_max_bytes
    return [
        f"tenant {tenant}: {num_bytes >> 10} KiB in memory of {worker}"
        + (f", at most {most[tenant] >> 10}" if most[tenant] else "")
        for (tenant, worker), num_bytes in sorted(taken.items())
    ]


def main(argv: Sequence[str]) -> int:
    flags = argparse.ArgumentParser("quire adapters", description=__doc__)
    add_admin_address(flags)
    add_json(flags)
    change = flags.add_mutually_exclusive_group()
    change.add_argument("--load", metavar="NAME=DIR", help="load the adapter in a folder below the workers' --lora-dir")
    change.add_argument("--unload", metavar="NAME", help="forget an adapter; requests that run on it end as usual")
    args = flags.parse_args(argv)
    if args.load is not None and not args.load.partition("=")[2]:
        flags.error(f"--load: {args.load!r} is not NAME=DIR, such as sql=team/sql")

    async def body(console: Console) -> None:
        async with admin_channel(args.admin_address, args.state_dir) as channel:
            stub = rpc.InferenceServiceStub(channel)
            if args.load is not None:
                name, _, path = args.load.partition("=")
                loaded = await stub.LoadAdapter(pb.LoadAdapterRequest(name=name, path=path), timeout=_LOAD_S)
                answer = pb.ListAdaptersResponse(adapters=[loaded.adapter])
            else:
                if args.unload is not None:
                    await stub.UnloadAdapter(pb.UnloadAdapterRequest(name=args.unload), timeout=_PATIENCE_S)
                answer = await stub.ListAdapters(pb.ListAdaptersRequest(), timeout=_PATIENCE_S)
        if args.json:
            whole = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            print_json(whole)
        else:
            console.print(in_words(answer), markup=False)

    return run_command(body)
