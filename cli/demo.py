"""`quire demo`: the whole suite for some seconds: answers, a cache hit in numbers, a trace, and a clean end."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from rich.console import Console
from rich.table import Table

from cli.client import router_channel, run_command
from cli.generate import stream_answer
from cli.stack import Stack, StackOptions, free_ports
from cli.trace_view import render_trace
from gpuworker.demo_model import CHECKPOINT
from gpuworker.demo_model.prompts import questions, system_text
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2 as types

WORKERS = 2


def demo_options(state_dir: Path) -> StackOptions:
    """Return a suite on free ports that disturbs no other."""
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


def chat(question: str, system: str = "") -> pb.GenerateRequest:
    """Return a greedy chat request."""
    messages = [pb.ChatMessage(role="user", content=question)]
    if system:
        messages.insert(0, pb.ChatMessage(role="system", content=system))
    prompt = pb.Prompt(chat=pb.Chat(messages=messages))
    return pb.GenerateRequest(prompt=prompt, sampling=types.SamplingParams(temperature=0.0, max_tokens=32))


async def ask(
    channel: grpc.aio.Channel, console: Console, question: str, system: str = ""
) -> tuple[pb.Admitted, pb.Finished]:
    """Print a question and its streamed answer."""
    console.print(f"  [bold]{question}[/]  ", end="")
    return await stream_answer(channel, chat(question, system), console, timeout=60.0)


async def show_cache(channel: grpc.aio.Channel, console: Console) -> pb.Admitted:
    """Ask twice over one long text; print what the second request found in the cache."""
    system = system_text()
    console.print(f"\n[bold cyan]Two questions over the same text[/] ({len(system.split())} words of facts)")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "prompt tokens", "cached tokens", "time to first token", "worker"):
        table.add_column(name, justify="right" if name and name != "worker" else "left")
    admitted = pb.Admitted()
    for which, question in zip(("first", "second"), questions(2), strict=True):
        admitted, finished = await ask(channel, console, question.text, system)
        table.add_row(
            f"  {which}",
            str(admitted.prompt_tokens),
            str(admitted.cached_tokens),
            f"{1e3 * finished.timings.time_to_first_token:.1f} ms",
            admitted.worker_id,
        )
    console.print(table)
    return admitted


async def show_trace(channel: grpc.aio.Channel, console: Console, admitted: pb.Admitted) -> None:
    """Print the trace of a request, once every service has delivered its spans."""
    console.print("\n[bold cyan]Where the second request's time went[/]")
    stub = decision_pb2_grpc.DecisionServiceStub(channel)
    request = decision_pb2.GetTraceRequest(trace_id=admitted.trace_id)
    answer = decision_pb2.GetTraceResponse()
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        answer = await stub.GetTrace(request, timeout=5.0)
        if {"router", "gpuworker", "kvmanager"} <= {span.service.removeprefix("quire-") for span in answer.spans}:
            break
        await asyncio.sleep(0.1)
    console.print(render_trace(answer))


async def demo(console: Console) -> None:
    """Run the demonstration."""
    began = time.monotonic()
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="quire-demo-") as folder:
        stack = Stack(demo_options(Path(folder)), lambda name, line: lines.append(f"{name}: {line}"))
        try:
            with console.status("Starting Redis, the KV manager, two GPU workers and the router ..."):
                await stack.start()
            up = time.monotonic() - began
            console.print(f"The suite is up after {up:.1f} s: gRPC {stack.address}, {stack.http_url}")
            async with router_channel(stack.address) as channel:
                console.print("\n[bold cyan]A few prompts[/]")
                for question in ("Hello!", "Who are you?", "What can you do?"):
                    await ask(channel, console, question)
                admitted = await show_cache(channel, console)
                await show_trace(channel, console, admitted)
        finally:
            with console.status("Stopping ..."):
                await stack.stop()
    console.print(f"\nEverything is stopped and removed; {time.monotonic() - began:.1f} s in all.")
    console.print("Next:  make up   (or  quire up --model DIR),  then  quire generate 'Hello!'", style="dim")


def main(argv: Sequence[str]) -> int:
    """Run `quire demo`; it takes no options."""
    if argv:
        print(f"usage: quire demo\n\n{__doc__}")
        return 0 if argv[0] in ("-h", "--help") else 2
    return run_command(demo)
