"""Replays of arrivals: how fast they are, whether equal ones decide equally, and how near a fitted one comes.

    python -m bench.replay --json
    python -m bench.replay --trace conversation_trace.jsonl.gz --pools 500 1000 --json
    python -m bench.replay --trace conversation_trace.jsonl.gz --beside none uncached --rows rows --plot replays.svg
    python -m bench.replay --trace azure_conv.csv.gz --reserved 2048 4096 --pools 1024 --plot capacity.svg
    python -m bench.replay --zipf 2000 --trace-workers 2 --pools 250 500 --json         what --replicate changes

The speed is that of one core, on made-up requests of 64 + 64 tokens for 8 workers. For the error, requests reach a
suite while `quire record` runs, and the replay of its log is compared with the log. The suite's one worker runs the
demo model; with --simulate COSTS it runs no model.

With --trace nothing is recorded and no speed is measured. The trace is replayed on pools of several sizes, with host
memory and fetches between workers and without: what they change of latencies, of hits and of goodput. Its steps, links
and objectives are those of the flags, so the figures are of these and of no machine. --beside chooses what is compared,
a prefix cache included. With --reserved nothing is replayed: it counts how many sequences of the trace's lengths fit
into equal memory, in blocks and in regions of the greatest length. --plot draws what --rows has kept.

With --zipf the same is done with made-up requests whose prefixes are as frequent as Zipf's law says: what `--replicate`
of the KV manager changes where workers fetch from each other anyway.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.lib import trace_moves
from bench.lib.harness import parser, report
from cli.commands.replay import recorded_options
from cli.demo_model import CHECKPOINT
from cli.replay.fit import Fit, fit
from cli.replay.simulation import ReplayOptions, replay
from cli.replay.trace import Arrival, Trace, read_trace
from cli.suite.preflight import suite_options
from cli.suite.stack import Stack, free_ports
from common.process.python import module_command
from common.rpc.server import open_channel
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc
from quire.types.v1 import types_pb2 as types

PROMPT, OUTPUT, WORKERS = 64, 64, 8
_NOTES = {
    "identical_runs": "1: two replays of one trace decided equally, and another seed did not",
    "requests_per_s": "requests replayed a second, near saturation",
    "times_real_time": "virtual seconds a second, at {slow:g} requests a second",
    "ttft_error_p50": "replayed over recorded seconds to the first token, median",
    "ttft_error_p90": "the same, 90th percentile",
    "itl_error_p50": "replayed over recorded seconds from token to token, median",
    "recorded": "sequences in the log",
}


def made_up(requests: int, rate: float, seed: int = 0) -> Trace:
    """Return Poisson arrivals of requests without a common prefix."""
    rng, at, arrivals = random.Random(seed), 0.0, []
    for _ in range(requests):
        at += rng.expovariate(rate)
        arrivals.append(Arrival(at, PROMPT, OUTPUT))
    return Trace(tuple(arrivals), 16)


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one replay, on the CPU time of this process."""

    requests_per_s: float
    times_real_time: float
    digest: str


def speed(trace: Trace, seed: int = 0) -> Speed:
    began = time.process_time()
    found = replay(trace, ReplayOptions(workers=WORKERS, seed=seed))
    took = time.process_time() - began
    return Speed(len(trace.arrivals) / took, found.seconds / took, found.digest)


# ---------------------------------------------------------------- a recorded suite


def request(rng: random.Random) -> pb.GenerateRequest:
    prompt = rng.choices(range(100, 400), k=rng.choice((32, 128, 384)))
    sampling = types.SamplingParams(temperature=0.0, max_tokens=rng.choice((16, 48)), ignore_eos=True)
    return pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=prompt)), sampling=sampling)


async def recorded(args: argparse.Namespace, folder: Path) -> Trace:
    """Run a suite, send it requests at random times, and return the log of them."""
    names = ("--grpc-port", "--port", "--manager-port", "--worker-port")
    flags = [word for name, port in zip(names, free_ports(4), strict=True) for word in (name, str(port))]
    flags += ["--model", str(CHECKPOINT), "--state-dir", str(folder), "--log-level", "warning"]
    flags += ["--simulate", args.simulate] if args.simulate else []
    log = folder / "log"
    async with Stack(suite_options(flags, os.environ), lambda _name, _line: None) as stack:
        where = ["--admin-address", stack.admin_address, "--state-dir", str(folder)]
        command = module_command("cli.main", "record", str(log), "--requests", str(args.requests), *where)
        async with open_channel(stack.address) as channel:
            await _send(inference_pb2_grpc.InferenceServiceStub(channel), command, args)
    return read_trace(log)


async def _send(
    stub: inference_pb2_grpc.InferenceServiceStub, command: Sequence[str], args: argparse.Namespace
) -> None:
    rng = random.Random(0)
    await asyncio.gather(*(_read(stub, request(rng)) for _ in range(8)))
    recording = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert recording.stdout is not None
    await recording.stdout.readline()
    async with asyncio.TaskGroup() as streams:
        for _ in range(args.requests):
            streams.create_task(_read(stub, request(rng)))
            await asyncio.sleep(rng.expovariate(args.rate))
    await recording.communicate()


async def _read(stub: inference_pb2_grpc.InferenceServiceStub, asked: pb.GenerateRequest) -> None:
    async for _ in stub.Generate(asked):
        pass


def compared(args: argparse.Namespace) -> tuple[Trace, Fit]:
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        trace = asyncio.run(recorded(args, Path(folder)))
    return trace, fit(trace, recorded_options(trace), replay)


def flags() -> argparse.ArgumentParser:
    found = parser(__doc__)
    found.add_argument("--replayed", type=int, default=4000, help="made-up requests of the measurement of speed")
    found.add_argument("--fast", type=float, default=800.0, help="their rate near saturation, a second")
    found.add_argument("--slow", type=float, default=10.0, help="their rate where virtual seconds are counted")
    found.add_argument("--requests", type=int, default=300, help="recorded requests")
    found.add_argument("--rate", type=float, default=15.0, help="recorded requests a second")
    found.add_argument("--simulate", metavar="COSTS", help="record a worker without a model")
    trace_moves.add_flags(found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    words = flags()
    args = words.parse_args(argv)
    if args.trace is not None or args.zipf is not None:
        return trace_moves.run(args, words.error)
    fast, again = speed(made_up(args.replayed, args.fast)), speed(made_up(args.replayed, args.fast))
    other = speed(made_up(args.replayed, args.fast), seed=1)
    slow = speed(made_up(max(1, args.replayed // 10), args.slow))
    trace, found = compared(args)
    figures = {
        "identical_runs": float(fast.digest == again.digest != other.digest),
        "requests_per_s": max(fast.requests_per_s, again.requests_per_s),
        "times_real_time": slow.times_real_time,
        "ttft_error_p50": abs(found.errors["ttft_p50_s"]),
        "ttft_error_p90": abs(found.errors["ttft_p90_s"]),
        "itl_error_p50": abs(found.errors["itl_p50_s"]),
        "recorded": float(len(trace.arrivals)),
    }
    report("replay", figures, {name: note.format(slow=args.slow) for name, note in _NOTES.items()}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
