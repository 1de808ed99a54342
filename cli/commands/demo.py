"""`quire demo`: runs a whole suite for some seconds and shows answers, a prefix cache hit, a tool call and a trace."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

from cli.client import PLAIN, add_json, command_console, failed, path_of, print_json, router_client, run_command
from cli.commands.generate import print_answer
from cli.demo_model import CHECKPOINT, general_prompts
from cli.demo_model.prompts import questions, system_text
from cli.demo_model.tool import CHOICE, look_up, person_in, tool
from cli.suite.stack import Stack, StackOptions
from cli.views.trace import render_trace
from common.checkpoint.gguf.names import served_folder, served_name
from common.contracts.errors import FieldViolation, InvalidConfig, QuireError, Unavailable
from gpuworker.native.levels import levels_here, why_missing
from quire.client import AsyncClient, Completion, Message
from quire.decision.v1 import decision_pb2, decision_pb2_grpc

WORKERS = 2
_SVG_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Demonstration:
    """What is asked of a model: questions alone, then two over one long text. An answer has `max_tokens` at most."""

    model: Path
    name: str
    questions: Sequence[str]
    text: str
    about_text: Sequence[str]
    max_tokens: int
    worker_flags: tuple[str, ...]


def demonstration(model: str | None) -> Demonstration:
    """Return that of the demo model, or of another one. Raises InvalidConfig when there is no such model."""
    if model is None or Path(model).resolve() == CHECKPOINT.resolve():
        about = tuple(question.text for question in questions(2))
        alone, flags = ("Hello!", "Who are you?", "What can you do?"), ("--kv-blocks", "2048", "--dtype", "float32")
        return Demonstration(CHECKPOINT, CHECKPOINT.name, alone, system_text(), about, 32, flags)
    folder = served_folder(Path(model))
    if not (folder / "config.json").is_file():
        what = f"{folder} is neither a checkpoint in Hugging Face format nor a GGUF file"
        raise InvalidConfig(FieldViolation("--model", what))
    alone, text, about = general_prompts.QUESTIONS, general_prompts.SYSTEM_TEXT, general_prompts.ABOUT_TEXT
    return Demonstration(folder, served_name(Path(model)), alone, text, about, 64, ("--kv-blocks", "256"))


def demo_options(state_dir: Path, shown: Demonstration) -> StackOptions:
    """Return a suite on free ports, apart from any other suite."""
    return StackOptions(
        model=shown.model,
        workers=WORKERS,
        port=0,
        grpc_port=0,
        manager_port=0,
        worker_ports=(0,) * WORKERS,
        state_dir=state_dir,
        certs=state_dir / "certs",
        worker_flags=shown.worker_flags,
        router_flags=("--model-name", shown.name),
    )


async def ask(
    client: AsyncClient, console: Console, question: str, system: str = "", max_tokens: int = 32
) -> Completion:
    """Print a question and its streamed answer."""
    console.print(f"  [bold]{question}[/]  ", end="")
    chat = [Message(role="system", content=system)] if system else []
    chat.append(Message(role="user", content=question))
    return await print_answer(client.stream(chat, temperature=0.0, max_tokens=max_tokens, timeout=60.0), console)


async def show_cache(client: AsyncClient, console: Console, shown: Demonstration) -> list[Completion]:
    """Send two questions about one long text, print their cached tokens, and return the answers."""
    system = shown.text
    console.print(f"\n[bold cyan]Two questions over the same text[/] ({len(system.split())} words of facts)")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "prompt tokens", "cached tokens", "time to first token", "worker"):
        table.add_column(name, justify="right" if name and name != "worker" else "left")
    answers: list[Completion] = []
    for which, question in zip(("first", "second"), shown.about_text, strict=True):
        done = await ask(client, console, question, system, shown.max_tokens)
        answers.append(done)
        table.add_row(
            f"  {which}",
            str(done.prompt_tokens),
            str(done.cached_tokens),
            f"{1e3 * done.timings.time_to_first_token:.1f} ms",
            done.worker_id,
        )
    console.print(table)
    return answers


async def show_call(url: str, console: Console, shown: Demonstration) -> dict[str, Any]:
    """Require a call of a tool over HTTP, run the tool, and print the answer with its result; return the call."""
    asked = {"role": "user", "content": shown.about_text[0]}
    console.print("\n[bold cyan]A tool call[/] (required; a grammar holds it to its schema)")
    console.print(f"  [bold]{asked['content']}[/]  ", end="")
    offered = {"tools": [tool(person_in(shown.about_text[0]))], "tool_choice": CHOICE}
    called = await _chat(url, [asked], max_tokens=256, **offered)
    (call,) = called["tool_calls"]
    function: dict[str, Any] = call["function"]
    arguments = json.loads(function["arguments"])
    console.print(f"{function['name']}({json.dumps(arguments)})", markup=False, highlight=False)
    result = look_up(arguments["person"], shown.text)
    console.print(f"  the tool says: {result}", markup=False, style="dim")
    answered = {"role": "tool", "tool_call_id": call["id"], "content": result}
    # The demo model answers what was asked last.
    answer = await _chat(url, [asked, called, answered, asked], max_tokens=shown.max_tokens)
    console.print(f"  the model says: {answer['content'].strip()}", markup=False)
    return function


async def _chat(url: str, messages: Sequence[Any], **fields: Any) -> dict[str, Any]:
    """Return the message that answers a chat."""
    body = {"messages": messages, "temperature": 0, **fields}
    answer = await asyncio.to_thread(_posted, f"{url}/v1/chat/completions", body)
    message: dict[str, Any] = answer["choices"][0]["message"]
    return message


def _posted(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON that answers a JSON body, past any proxy. Raises Unavailable."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60.0) as answer:
            found: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as refused:
        raise Unavailable(f"the router refused a request: {refused.read().decode()}") from refused
    except OSError as error:
        raise Unavailable(f"the router did not answer at {url}: {error}") from error
    return found


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


def made_parts(made: str) -> dict[str, float]:
    """Return the seconds that each step took before the demo, by its name; none for what was there already.

    `made` is when make began, then NAME=STAMP for each step in order: the stamp is the file that the step leaves.
    """
    if not made:
        return {}
    began, *steps = made.split()
    since, parts = float(began), dict[str, float]()
    for name, _, stamp in (step.partition("=") for step in steps):
        ended = Path(stamp).stat().st_mtime if Path(stamp).exists() else 0.0
        if ended > since:
            parts[name], since = ended - since, ended
    return parts


def parts_in_words(parts: Mapping[str, float]) -> str:
    """Return the parts of the time to the first answer, and their sum."""
    each = " + ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())
    return f"To the first answer: {each} = {sum(parts.values()):.1f} s"


async def demo(shown: Demonstration, console: Console) -> dict[str, Any]:
    """Run the demonstration; return its figures."""
    began, parts = time.monotonic(), made_parts(os.environ.get("MADE", ""))
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="quire-demo-") as folder:
        stack = Stack(demo_options(Path(folder), shown), lambda name, line: lines.append(f"{name}: {line}"))
        try:
            with console.status("Starting Redis, the KV manager, two GPU workers and the router ..."):
                await stack.start()
            up = parts["start"] = time.monotonic() - began
            console.print(f"The suite is up after {up:.1f} s: gRPC {stack.address}, {stack.http_url}")
            if missing := why_missing(levels_here()[-1]):
                console.print(f"Answers are slower than they could be: {missing}", style="yellow", markup=False)
            plain = router_client(stack.address, PLAIN)
            async with plain as client, stack.channel(stack.children["router"].program) as channel:
                console.print("\n[bold cyan]A few prompts[/]")
                for question in shown.questions:
                    await ask(client, console, question, max_tokens=shown.max_tokens)
                    parts.setdefault("first answer", time.monotonic() - began - up)
                answers = await show_cache(client, console, shown)
                called = await show_call(stack.http_url, console, shown)
                await show_trace(channel, console, answers[-1].trace_id)
        finally:
            with console.status("Stopping ..."):
                await stack.stop()
    took = time.monotonic() - began
    console.print(f"\nEverything is stopped and removed; {took:.1f} s in all.")
    console.print(parts_in_words(parts), markup=False)
    console.print("Next:  quire serve   (or  make up),  then  quire chat", style="dim")
    answered = [asdict(each) for each in answers]
    return {"up_seconds": up, "seconds": took, "parts": parts, "answers": answered, "call": called}


def svg_of(console: Console) -> str:
    """Return the output of a recording console as an SVG that loads no font from elsewhere."""
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="quire demo"), flags=re.DOTALL)


def _check_writable(path: Path) -> None:
    """Raise InvalidConfig for a file that cannot be written, before anything starts."""
    if not os.access(path.parent, os.W_OK) or path.is_dir():
        what = f"{path} cannot be written; expected a file in a folder that is there"
        raise InvalidConfig(FieldViolation("--svg", what))


def main(argv: Sequence[str]) -> int:
    flags = argparse.ArgumentParser("quire demo", description=__doc__)
    flags.add_argument("--svg", type=path_of, metavar="PATH", help=f"also draw the output, {_SVG_WIDTH} columns wide")
    flags.add_argument("--model", metavar="MODEL", help="a folder, a GGUF file or smollm2; default: the demo model")
    add_json(flags)
    args = flags.parse_args(argv)
    try:
        if args.svg is not None:
            _check_writable(args.svg)
        shown = demonstration(args.model)
    except QuireError as error:
        return failed(error)
    console = command_console(_SVG_WIDTH, record=True) if args.svg else command_console()

    async def body(printed: Console) -> None:
        figures = await demo(shown, Console(quiet=True) if args.json and not args.svg else printed)
        if args.json:
            print_json(figures)

    status = run_command(body, console)
    if status == 0 and args.svg is not None:
        args.svg.write_text(svg_of(console))
    return status
