"""Two workers that compute prompts and two that decode, against four that do both: what running chats notice.

    python -m bench.disaggregation --json
    python -m bench.disaggregation --repeat 2 --prompts-a-second 2.5 --remote-prefill always
    python -m bench.disaggregation --shape small --streams 4 --prompts-a-second 0.5 --prompts 12

Each suite has four simulated workers: steps sleep for what they cost, so the machine computes no model. With `--shape`
they are real ones with a thread each, on random weights in bfloat16; they share the machine's cores. Chats begin
every few seconds in so many streams, and their inter-token latency is measured. Meanwhile long prompts arrive at random
times, whatever became of those before (an open loop); nobody has sent them before. Prompts and times are the same for
both suites, which run in turns, and every other time in the other order. All tokens count for the throughput: prompts
and outputs of all requests, over the seconds until the last one has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.lib.checkpoints import MEDIUM, SMALL, checkpoint
from bench.lib.harness import parser, report
from cli.demo_model import CHECKPOINT
from cli.suite.preflight import suite_options
from cli.suite.stack import Stack, free_ports
from common.rpc.server import open_channel
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc
from quire.types.v1 import types_pb2 as types

WORKERS: Final = 4
SHAPES: Final = {"small": SMALL, "128m": MEDIUM}
_BLOCK: Final = 16
_VOCAB: Final = range(100, 400)
NOTES: Final = {
    "itl_p99_mixed_s": "inter-token latency of chats, 99th percentile, where four workers do both",
    "itl_p99_split_s": "the same where two compute prompts and two decode",
    "itl_p99_ratio": "split over mixed; at most 0.5 was asked for",
    "itl_p50_mixed_s": "their median where four workers do both",
    "itl_p50_split_s": "the same where two compute prompts and two decode",
    "ttft_mixed_s": "median seconds to the first token of a long prompt, four that do both",
    "ttft_split_s": "the same, two and two",
    "ttft_chat_mixed_s": "median seconds to the first token of a chat, four that do both",
    "ttft_chat_split_s": "the same, two and two",
    "throughput_ratio": "tokens a second, split over mixed; within 0.9 to 1.1 was asked for",
    "fetched": "share of the long prompts whose blocks came from another worker, two and two",
    "failed": "requests that failed, of all runs",
}


@dataclass(frozen=True, slots=True)
class Load:
    """Chats in `streams`, one every `chat_every` seconds; and long prompts at so many a second."""

    streams: int
    chats: int
    chat_tokens: int
    chat_every: float
    prompt_tokens: int
    prompts: int
    prompts_a_second: float

    def request(self, draw: random.Random, prompt: int, output: int) -> pb.GenerateRequest:
        sampling = types.SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        return pb.GenerateRequest(
            prompt=pb.Prompt(token_ids=pb.TokenIds(ids=draw.choices(_VOCAB, k=prompt))), sampling=sampling
        )


@dataclass(slots=True)
class Seen:
    """What the clients of one suite saw, in seconds; `fetched` of the `long` prompts had cached blocks."""

    gaps: list[float] = field(default_factory=list)
    chat_ttfts: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    fetched: int = 0
    failed: int = 0

    def add(self, other: Seen) -> None:
        self.gaps += other.gaps
        self.chat_ttfts += other.chat_ttfts
        self.ttfts += other.ttfts
        self.tokens, self.seconds = self.tokens + other.tokens, self.seconds + other.seconds
        self.fetched, self.failed = self.fetched + other.fetched, self.failed + other.failed


@dataclass(frozen=True, slots=True)
class Stream:
    """One answer: the seconds to its first token, the gaps between its events, its tokens, and the cached ones."""

    ttft: float
    gaps: Sequence[float]
    tokens: int
    cached: int


async def read(stub: inference_pb2_grpc.InferenceServiceStub, asked: pb.GenerateRequest) -> Stream:
    began, times, usage = time.perf_counter(), list[float](), types.Usage()
    async for event in stub.Generate(asked):
        if event.HasField("tokens"):
            times.append(time.perf_counter())
        elif event.HasField("finished"):
            usage = event.finished.usage
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return Stream(times[0] - began, gaps, usage.prompt_tokens + usage.output_tokens, usage.cached_tokens)


async def drive(stub: inference_pb2_grpc.InferenceServiceStub, load: Load, seed: int) -> Seen:
    """Run the load once."""
    draw, seen, began = random.Random(seed), Seen(), time.perf_counter()

    async def chat(requests: Sequence[pb.GenerateRequest]) -> None:
        for number, asked in enumerate(requests):
            await asyncio.sleep(max(0.0, number * load.chat_every - (time.perf_counter() - began)))
            answer = await read(stub, asked)
            seen.gaps += answer.gaps
            seen.chat_ttfts.append(answer.ttft)
            seen.tokens += answer.tokens

    async def long(asked: pb.GenerateRequest, after: float) -> None:
        await asyncio.sleep(after)
        answer = await read(stub, asked)
        seen.ttfts.append(answer.ttft)
        seen.tokens += answer.tokens
        seen.fetched += answer.cached >= load.prompt_tokens - 2 * _BLOCK

    chats = [[load.request(draw, 32, load.chat_tokens) for _ in range(load.chats)] for _ in range(load.streams)]
    prompts, at = [load.request(draw, load.prompt_tokens, 16) for _ in range(load.prompts)], 1.0
    tasks = [asyncio.ensure_future(chat(each)) for each in chats]
    for each in prompts:
        tasks.append(asyncio.ensure_future(long(each, at)))
        at += draw.expovariate(load.prompts_a_second)
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    seen.failed = sum(isinstance(each, BaseException) for each in ends)
    seen.seconds = time.perf_counter() - began
    return seen


async def run(args: argparse.Namespace, load: Load, split: bool, seed: int) -> Seen:
    """Run the load on a fresh suite, after a shorter one by which its workers learn their rates."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder, _model_flags(args) as model:
        names = ("--grpc-port", "--port", "--manager-port")
        flags = [word for name, port in zip(names, free_ports(3), strict=True) for word in (name, str(port))]
        flags += ["--worker-port", "0", "--workers", str(WORKERS), "--block-size", str(_BLOCK), *model]
        flags += ["--state-dir", str(Path(folder)), "--log-level", "error"]
        flags += ["--host-memory", "256MiB", "--data-port", "0"]
        flags += ["--remote-prefill", args.remote_prefill, *(["--prefill-workers", "2"] if split else [])]
        async with (
            Stack(suite_options(flags, os.environ), lambda _name, _line: None) as stack,
            open_channel(stack.address) as channel,
        ):
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            await drive(stub, Load(load.streams, 1, 32, 0.0, load.prompt_tokens, 8, load.prompts_a_second), seed + 1000)
            return await drive(stub, load, seed)


@contextmanager
def _model_flags(args: argparse.Namespace) -> Iterator[list[str]]:
    """Yield the flags of the model, and of the memory for its blocks."""
    if args.shape is None:
        yield ["--model", str(CHECKPOINT), "--simulate", args.simulate, "--kv-blocks", "8192"]
        return
    with checkpoint(None, SHAPES[args.shape]) as (folder, load_format):
        alone = ["--dtype", "bfloat16", "--threads", "1", "--kv-blocks", "1024"]
        yield ["--model", str(folder), "--load-format", load_format, *alone]


def compared(mixed: Seen, split: Seen, prompts: int) -> dict[str, float]:
    """Return the figures of both suites."""
    found = dict[str, float]()
    for name, seen in (("mixed", mixed), ("split", split)):
        cuts = statistics.quantiles(seen.gaps, n=100)
        found |= {f"itl_p50_{name}_s": cuts[49], f"itl_p99_{name}_s": cuts[98]}
        found |= {f"ttft_{name}_s": statistics.median(seen.ttfts)}
        found |= {f"ttft_chat_{name}_s": statistics.median(seen.chat_ttfts)}
    found["itl_p99_ratio"] = found["itl_p99_split_s"] / found["itl_p99_mixed_s"]
    found["throughput_ratio"] = (split.tokens / split.seconds) / (mixed.tokens / mixed.seconds)
    found["fetched"] = split.fetched / prompts
    found["failed"] = float(mixed.failed + split.failed)
    return {name: found[name] for name in NOTES}


async def measure(args: argparse.Namespace) -> Mapping[str, float]:
    load = Load(args.streams, args.chats, 96, args.chat_every, args.prompt_tokens, args.prompts, args.prompts_a_second)
    both = {False: Seen(), True: Seen()}
    for turn in range(args.repeat):
        for split in (False, True) if turn % 2 == 0 else (True, False):
            both[split].add(await run(args, load, split, turn))
    return compared(both[False], both[True], args.prompts * args.repeat)


def flags() -> argparse.ArgumentParser:
    found = parser(__doc__)
    found.add_argument("--repeat", type=int, default=2, help="runs of each suite")
    found.add_argument("--streams", type=int, default=16, help="chats at once")
    found.add_argument("--chats", type=int, default=6, help="chats of each stream, one after the other")
    found.add_argument("--chat-every", type=float, default=3.5, help="seconds from one chat of a stream to the next")
    found.add_argument("--prompts", type=int, default=30, help="long prompts")
    found.add_argument("--prompt-tokens", type=int, default=2000, help="tokens of each")
    found.add_argument("--prompts-a-second", type=float, default=2.5, help="at which they arrive")
    found.add_argument("--simulate", default="base=20ms,decode=100us,prefill=150us", help="what steps cost")
    what = "real workers of a small model, or of one of 128 M parameters, in place of simulated ones"
    found.add_argument("--shape", choices=SHAPES, help=what)
    found.add_argument("--remote-prefill", default="auto", choices=("auto", "always", "off"))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = flags().parse_args(argv)
    figures = asyncio.run(measure(args))
    report("disaggregation", figures, NOTES, args.json)
    return 1 if figures["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
