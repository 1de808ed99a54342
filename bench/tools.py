"""Required tool calls on a whole suite: what they cost over free text, and whether each fits its schema.

    python -m bench.tools --json

Each request offers one random tool and requires a call, over HTTP, at temperature 1, with at most --tokens tokens.
Every schema is new to the suite: the router examines it and the worker compiles it. `parsed_and_valid` is of the calls
that ended, `ended_share` of all that were asked for. Then rounds compare throughput: the calls of some tools that the
suite knows by now, and free text of as many tokens for each, in turn. `throughput_ratio` is the median over the rounds.
The demo model writes no JSON by itself; --free-text adds texts without a bound, which it does not end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import httpx
import jsonschema
import uvloop

from bench.lib.harness import median_interval, parser, progress, report
from bench.lib.tool_schemas import Schema, ToolMaker
from cli.benchmark.served import REQUEST_SECONDS, served_suite
from cli.demo_model import CHECKPOINT

_QUESTION: Final = [{"role": "user", "content": "Tell me a story about Anna."}]
_ENDED: Final = ("tool_calls", "stop")
NOTES: Final = {
    "throughput_ratio": "tokens/s of required calls of known tools, of those of free text: median of the rounds",
    "throughput_ratio_low": "lower end of its 95 % interval",
    "throughput_ratio_high": "upper end of its 95 % interval",
    "parsed_and_valid": "share of the calls that ended whose arguments are JSON and match their schema",
    "ended_share": "share of the answers that ended before max_tokens",
    "calls": "requests with a tool of their own",
    "refused": "of these, refused because a schema cannot be enforced",
    "call_tokens": "output tokens of a call that ended, median",
    "new_tools_tok_s": "output tokens/s of calls whose tools are new",
    "known_tools_tok_s": "output tokens/s of calls whose tools are known, median of the rounds",
    "free_tok_s": "output tokens/s of free text, median of the rounds",
}


@dataclass(frozen=True, slots=True)
class Call:
    """What became of one request. `fault` says what is wrong with a call that ended."""

    tool: Schema
    tokens: int = 0
    ended: bool = False
    refused: bool = False
    fault: str = ""


class Asker:
    """Asks a suite over HTTP, some requests at once."""

    def __init__(self, client: httpx.AsyncClient, at_once: int, tokens: int) -> None:
        self._client, self._turns, self._tokens = client, asyncio.Semaphore(at_once), tokens

    async def call(self, tool: Schema, seed: int) -> Call:
        """Require a call of a tool."""
        fields = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0}
        answer = await self._ask(seed=seed, max_tokens=self._tokens, **fields)
        if answer.status_code != httpx.codes.OK:
            return Call(tool, refused=True, fault=answer.text)
        body = answer.json()
        choice, tokens = body["choices"][0], body["usage"]["completion_tokens"]
        if choice["finish_reason"] not in _ENDED:
            return Call(tool, tokens)
        return Call(tool, tokens, ended=True, fault=fault_of(tool, choice["message"]))

    async def free(self, tokens: int, seed: int) -> None:
        """Ask for free text of so many tokens."""
        answer = await self._ask(seed=seed, max_tokens=tokens, ignore_eos=True, temperature=1.0)
        answer.raise_for_status()

    async def _ask(self, **fields: Any) -> httpx.Response:
        async with self._turns:
            return await self._client.post("/v1/chat/completions", json={"messages": _QUESTION, **fields})


def fault_of(tool: Schema, message: dict[str, Any]) -> str:
    """Return what is wrong with the one call that a message must have; "" for nothing."""
    calls = message.get("tool_calls") or []
    if [call["function"]["name"] for call in calls] != [tool["function"]["name"]] or message["content"]:
        return f"expected one call and no text: {message}"
    try:
        arguments = json.loads(calls[0]["function"]["arguments"])
        schema = tool["function"]["parameters"]
        dialect = jsonschema.Draft202012Validator
        dialect(schema, format_checker=dialect.FORMAT_CHECKER).validate(arguments)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error)
    return ""


@asynccontextmanager
async def asker(args: argparse.Namespace) -> AsyncIterator[Asker]:
    """Run a suite with a client of its HTTP port."""
    words = ["--model", args.model, "--dtype", args.dtype, "--trace-sample-ratio", "0"]
    words += ["--threads", str(args.threads)] if args.threads else []
    async with (
        served_suite(words) as suite,
        httpx.AsyncClient(base_url=suite.http_url, timeout=REQUEST_SECONDS, trust_env=False) as client,
    ):
        yield Asker(client, args.at_once, args.tokens)


async def new_tools(asking: Asker, args: argparse.Namespace) -> tuple[list[Call], float]:
    """Return the calls of random tools, and the seconds that they took."""
    made = [ToolMaker(args.seed + number, args.free_text).tool() for number in range(args.calls)]
    began = time.perf_counter()
    tasks = [asyncio.ensure_future(asking.call(tool, seed)) for seed, tool in enumerate(made)]
    for number, done in enumerate(asyncio.as_completed(tasks), start=1):
        await done
        progress(f"{number} of {args.calls} calls")
    return [task.result() for task in tasks], time.perf_counter() - began


async def compared(asking: Asker, tools: Sequence[Schema], rounds: int) -> list[tuple[float, float]]:
    """Return tokens/s of the calls of some tools, and of free text of the same lengths, for each round."""
    found = []
    for number in range(-1, rounds):  # the first round is a warm-up
        began = time.perf_counter()
        calls = await asyncio.gather(*[asking.call(tool, seed) for seed, tool in enumerate(tools)])
        called = time.perf_counter()
        await asyncio.gather(*[asking.free(max(1, call.tokens), seed) for seed, call in enumerate(calls)])
        tokens = sum(call.tokens for call in calls)
        if number >= 0:
            found.append((tokens / (called - began), tokens / (time.perf_counter() - called)))
        progress(f"round {number + 1} of {rounds}")
    return found


def figures(calls: Sequence[Call], seconds: float, rounds: Sequence[tuple[float, float]]) -> dict[str, float]:
    ended = [call for call in calls if call.ended]
    middle, low, high = median_interval([known / free for known, free in rounds])
    return {
        "throughput_ratio": middle,
        "throughput_ratio_low": low,
        "throughput_ratio_high": high,
        "parsed_and_valid": _share(not call.fault for call in ended),
        "ended_share": _share(call.ended for call in calls),
        "calls": len(calls),
        "refused": sum(call.refused for call in calls),
        "call_tokens": statistics.median(call.tokens for call in ended) if ended else 0,
        "new_tools_tok_s": sum(call.tokens for call in calls) / seconds,
        "known_tools_tok_s": statistics.median(known for known, _ in rounds),
        "free_tok_s": statistics.median(free for _, free in rounds),
    }


def _share(flags: Iterable[bool]) -> float:
    listed = list(flags)
    return sum(listed) / len(listed) if listed else 0.0


async def measure(args: argparse.Namespace) -> tuple[dict[str, float], list[Call]]:
    async with asker(args) as asking:
        calls, seconds = await new_tools(asking, args)
        usual = [call.tool for call in calls if call.ended][: args.at_once]
        rounds = await compared(asking, usual or [calls[0].tool], args.rounds)
    return figures(calls, seconds, rounds), calls


def print_faults(calls: Iterable[Call], shown: int) -> None:
    """Print some of the calls that are not as they should be, with their tools."""
    odd = [call for call in calls if call.fault or not call.ended]
    for call in odd[:shown]:
        what = call.fault or f"not ended after {call.tokens} tokens"
        print(f"{what}\n  {json.dumps(call.tool, ensure_ascii=False)}")


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--model", default=str(CHECKPOINT), help="folder of a checkpoint; default: the demo model")
    flags.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    flags.add_argument("--threads", type=int, help="threads of the worker; unset: as many as a worker takes")
    flags.add_argument("--calls", type=int, default=1000, help="tools, each new")
    flags.add_argument("--tokens", type=int, default=1000, help="output tokens of a call at most")
    flags.add_argument("--at-once", type=int, default=16, help="requests at once, and tools of a round")
    flags.add_argument("--rounds", type=int, default=9, help="rounds that compare throughput")
    flags.add_argument("--free-text", type=float, default=0.0, help="share of the texts that have no bound")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--show", type=int, default=0, help="print so many of the calls that failed or did not end")
    args = flags.parse_args()
    found, calls = uvloop.run(measure(args))
    print_faults(calls, args.show)
    report("tools", found, NOTES, args.json)


if __name__ == "__main__":
    main()
