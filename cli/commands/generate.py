"""`quire generate "..."`: streams an answer to the terminal, then prints token counts and times on one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from cli.client import add_address, add_json, print_json, router_client, run_command
from common.contracts.errors import DeadlineExceeded, FieldViolation, InvalidRequest
from quire.client import AsyncClient, AsyncStream, Completion, InterruptedByDeadline, Message, Options, Prompt

# Fields of a request that have a flag, by the flag's name.
_FLAGS = ("max_tokens", "temperature", "seed", "json_schema", "regex", "grammar")


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser("quire generate", description=__doc__)
    flags.add_argument("prompt", help="the text; - reads it from standard input")
    flags.add_argument("--system", help="a system message in front of it")
    flags.add_argument("--raw", action="store_true", help="complete the text as it is, without the chat template")
    flags.add_argument("--max-tokens", type=int, help="output tokens at most")
    flags.add_argument("--temperature", type=float, help="0 is greedy")
    flags.add_argument("--seed", type=int, help="the same seed gives the same tokens")
    only = flags.add_mutually_exclusive_group()
    only.add_argument("--json-schema", type=text_of, help="answer with a document of this JSON schema (or @FILE) only")
    only.add_argument("--regex", type=text_of, help="answer with what matches this regular expression (or @FILE) only")
    only.add_argument("--grammar", type=text_of, help="answer with what this grammar (Lark, or @FILE) derives only")
    flags.add_argument("--timeout", type=float, help="deadline of the request in seconds")
    how = flags.add_mutually_exclusive_group()
    how.add_argument("--quiet", action="store_true", help="print the answer alone")
    add_json(how)
    add_address(flags)
    return flags


def text_of(word: str) -> str:
    """Return a flag's text: its own, or that of a file. Raises ArgumentTypeError when the file cannot be read."""
    try:
        return Path(word[1:]).read_text() if word.startswith("@") else word
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{error.filename} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise argparse.ArgumentTypeError(f"{word[1:]} cannot be read: it is not UTF-8") from None


def prompt_of(args: argparse.Namespace) -> Prompt:
    """Raises InvalidRequest for a standard input that is not text."""
    try:
        text = sys.stdin.read() if args.prompt == "-" else args.prompt
    except UnicodeDecodeError:
        raise InvalidRequest(FieldViolation("PROMPT", "of standard input is not UTF-8; expected text")) from None
    if args.raw:
        return str(text)
    system = [Message(role="system", content=args.system)] if args.system else []
    return [*system, Message(role="user", content=text)]


async def print_answer(stream: AsyncStream, console: Console) -> Completion:
    """Print the text of an answer as it arrives, without leading space; return the whole answer."""
    begun = False
    async with stream:
        try:
            async for chunk in stream:
                text = chunk.text if begun else chunk.text.lstrip()
                begun = begun or bool(text)
                console.print(text, end="", markup=False, soft_wrap=True)
        finally:
            if begun:
                console.print()
    return stream.completion


async def answer(client: AsyncClient, args: argparse.Namespace, console: Console) -> Completion:
    """Send the request and print the answer. Raises DeadlineExceeded with the token count when --timeout passes."""
    options: Options = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "seed": args.seed,
        "json_schema": args.json_schema,
        "regex": args.regex,
        "grammar": args.grammar,
        "timeout": args.timeout,
    }
    try:
        return await print_answer(client.stream(prompt_of(args), **options), console)
    except InterruptedByDeadline as late:
        tokens, trace = len(late.partial.token_ids), late.partial.trace_id
        what = f"gave up after --timeout {args.timeout:g} s with {tokens} output tokens; quire trace {trace}"
        raise DeadlineExceeded(what) from late
    except InvalidRequest as refused:
        raise named_by_flags(refused) from refused
    except DeadlineExceeded as late:  # a refusal before the first token keeps the router's message
        raise DeadlineExceeded(f"not begun within --timeout {args.timeout:g} s: {late}") from late


def named_by_flags(error: InvalidRequest) -> InvalidRequest:
    """Return a refusal whose fields have the names that they have on the command line."""
    return InvalidRequest(*(replace(each, field=_on_the_command_line(each.field)) for each in error.violations))


def _on_the_command_line(field: str) -> str:
    key = field.removeprefix("sampling.")
    if key in _FLAGS:
        return f"--{key.replace('_', '-')}"
    return "the prompt" if field.partition(".")[0] == "prompt" else field


def summary(done: Completion) -> str:
    """Return one line: tokens, cache, times, worker, and how to see more."""
    timings, usage = done.timings, done.usage
    return (
        f"{done.prompt_tokens} prompt tokens, {usage.cached_tokens} cached; {usage.output_tokens} output tokens "
        f"({done.finish_reason}); first token {1e3 * timings.time_to_first_token:.1f} ms, "
        f"then {1e3 * timings.time_per_output_token:.1f} ms each; {done.worker_id}; quire trace {done.trace_id}"
    )


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)

    async def body(console: Console) -> None:
        if args.timeout is not None and not args.timeout > 0:
            raise InvalidRequest(FieldViolation("--timeout", f"is {args.timeout:g}; expected seconds above 0"))
        async with router_client(args.address) as client:
            done = await answer(client, args, Console(quiet=True) if args.json else console)
        if args.json:
            print_json(asdict(done))
        elif not args.quiet:
            console.print(summary(done), style="dim", soft_wrap=not console.is_terminal)

    return run_command(body)
