"""`quire demo`: runs a whole suite for some seconds and shows answers, a prefix cache hit and a trace."""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from rich.console import Console
from rich.table import Table

from cli.client import command_console, router_channel, router_client, run_command
from cli.commands.generate import print_answer
from cli.demo_model import CHECKPOINT
from cli.demo_model.prompts import questions, system_text
from cli.suite.stack import Stack, StackOptions, free_ports
from cli.views.trace import render_trace
from quire.client import AsyncClient, Completion, Message
from quire.decision.v1 import decision_pb2, decision_pb2_grpc

WORKERS = 2
_SVG_WIDTH = 100


def demo_options(state_dir: Path) -> StackOptions:
    """Return a suite on free ports, apart from any other suite."""
    port, http_port, manager_port, *rest = free_ports(3 + WORKERS)
    return StackOptions(
        model=CHECKPOINT,
        workers=WORKERS,
        port=port,
        http_port=http_port,
        manager_port=manager_port,
        worker_ports=tuple(rest),
        state_dir=state_dir,
        worker_flags=("--kv-blocks", "2048", "--dtype", "float32"),
    )


async def ask(client: AsyncClient, console: Console, question: str, system: str = "") -> Completion:
    """Print a question and its streamed answer."""
    console.print(f"  [bold]{question}[/]  ", end="")
    chat = [Message(role="system", content=system)] if system else []
    chat.append(Message(role="user", content=question))
    return await print_answer(client.stream(chat, temperature=0.0, max_tokens=32, timeout=60.0), console)


async def show_cache(client: AsyncClient, console: Console) -> str:
    """Send two questions about one long text, print their cached tokens, and return the second trace id."""
    system = system_text()
    console.print(f"\n[bold cyan]Two questions over the same text[/] ({len(system.split())} words of facts)")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "prompt tokens", "cached tokens", "time to first token", "worker"):
        table.add_column(name, justify="right" if name and name != "worker" else "left")
    trace_id = ""
    for which, question in zip(("first", "second"), questions(2), strict=True):
        done = await ask(client, console, question.text, system)
        trace_id = done.trace_id
        table.add_row(
            f"  {which}",
            str(done.prompt_tokens),
            str(done.cached_tokens),
            f"{1e3 * done.timings.time_to_first_token:.1f} ms",
            done.worker_id,
        )
    console.print(table)
    return trace_id


async def show_trace(channel: grpc.aio.Channel, console: Console, trace_id: str) -> None:
    """Print the trace of a request once it is whole: every service has delivered spans, and the worker its last."""
    console.print("\n[bold cyan]Where the second request's time went[/]")
    stub = decision_pb2_grpc.DecisionServiceStub(channel)
    request = decision_pb2.GetTraceRequest(trace_id=trace_id)
    answer = decision_pb2.GetTraceResponse()
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        answer = await stub.GetTrace(request, timeout=5.0)
        services = {span.service.removeprefix("quire-") for span in answer.spans}
        if services >= {"router", "gpuworker", "kvmanager"} and any(span.name == "decode" for span in answer.spans):
            break
        await asyncio.sleep(0.1)
    console.print(render_trace(answer))


async def demo(console: Console) -> None:
    began = time.monotonic()
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="quire-demo-") as folder:
        stack = Stack(demo_options(Path(folder)), lambda name, line: lines.append(f"{name}: {line}"))
        try:
            with console.status("Starting Redis, the KV manager, two GPU workers and the router ..."):
                await stack.start()
            up = time.monotonic() - began
            console.print(f"The suite is up after {up:.1f} s: gRPC {stack.address}, {stack.http_url}")
            async with router_client(stack.address) as client, router_channel(stack.address) as channel:
                console.print("\n[bold cyan]A few prompts[/]")
                for question in ("Hello!", "Who are you?", "What can you do?"):
                    await ask(client, console, question)
                trace_id = await show_cache(client, console)
                await show_trace(channel, console, trace_id)
        finally:
            with console.status("Stopping ..."):
                await stack.stop()
    console.print(f"\nEverything is stopped and removed; {time.monotonic() - began:.1f} s in all.")
    console.print("Next:  make up   (or  quire up --model DIR),  then  quire generate 'Hello!'", style="dim")


def svg_of(console: Console) -> str:
    """Return the output of a recording console as an SVG that loads no font from elsewhere."""
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="quire demo"), flags=re.DOTALL)


def main(argv: Sequence[str]) -> int:
    flags = argparse.ArgumentParser("quire demo", description=__doc__)
    flags.add_argument("--svg", type=Path, metavar="PATH", help=f"also draw the output, {_SVG_WIDTH} columns wide")
    args = flags.parse_args(argv)
    if args.svg is None:
        return run_command(demo)
    console = command_console(_SVG_WIDTH, record=True)
    status = run_command(demo, console)
    if status == 0:
        args.svg.write_text(svg_of(console))
    return status
