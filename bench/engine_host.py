"""Where the engine runs best: in a thread beside the I/O loop, as today, or in a process of its own.

    python -m bench.engine_host --json

The servicer is a worker's, on a real gRPC server, with the same engine behind it either way. A client process keeps
--sequences streams and requests the worker's status every 5 ms; the round trip shows how long the I/O loop is blocked.
Runs of both go in interleaved pairs of alternating order. Steps are simulated (5 ms, with the GIL held for a part) or
those of the benchmarks' small model on the CPU. CPU time is the sum over the worker's processes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import uvloop
from opentelemetry.trace import NoOpTracer

from bench.lib.harness import median_interval, parser, progress, report
from bench.lib.remote_engine import BLOCK_SIZE, IDENTITY, RemoteEngine, local_engine
from bench.lib.workers import random_prompts
from common.contracts.hashing import block_digests, block_hash_of, little_endian_int32, root_digest
from common.process import die_with_parent
from common.process.python import module_command
from common.rpc.server import RpcServer, open_channel
from common.wire.packing import pack_hashes, unpack_u32
from gpuworker.server.servicer import GpuWorkerServicer, Serving
from gpuworker.server.submit_check import SubmitLimits
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.gpuworker.v1 import gpuworker_pb2_grpc as rpc
from quire.types.v1 import types_pb2 as types

PROMPT_TOKENS, ECHO_SECONDS = 64, 0.005
KINDS = {
    "sim_200us": ("sim:0.005:0.0002", "5 ms steps, GIL held for 0.2 ms"),
    "sim_2ms": ("sim:0.005:0.002", "5 ms steps, GIL held for 2 ms"),
    "cpu": ("cpu", "small model on the CPU"),
}
HOSTS = ("thread", "process")


@dataclass(frozen=True, slots=True)
class Sample:
    """One run: tokens a second, steps a second, seconds of echo at two percentiles, CPU seconds a token."""

    tokens_per_second: float
    steps_per_second: float
    echo_median: float
    echo_p99: float
    gap_p99: float
    cpu_per_token: float = 0.0


# ------------------------------------------------------------ the worker


async def serve(host: str, runner: str, rows: int) -> None:
    """Serve until standard input is closed; the port is the first line of output."""
    servicer = GpuWorkerServicer(NoOpTracer())
    engine: Any = (local_engine if host == "thread" else RemoteEngine)(runner, rows, servicer.deliver)
    engine.start()
    while not engine.load().manager_attached:  # noqa: ASYNC110 - it changes elsewhere
        await asyncio.sleep(0.01)
    limits = SubmitLimits(2048, 2048, IDENTITY)
    servicer.serve(Serving(engine, lambda: pb.WorkerInfo(worker_id="w0"), limits, pb.MemoryPlan()))
    server = RpcServer(["quire.gpuworker.v1.GpuWorkerService"])
    rpc.add_GpuWorkerServiceServicer_to_server(servicer, server.server)
    print(await server.start("127.0.0.1", 0), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0.5)
    await (asyncio.to_thread(engine.stop) if host == "thread" else engine.stop())


# ------------------------------------------------------------ the client


def _submit(handle: int, prompt: list[int], count: int) -> pb.StreamRequest:
    root = root_digest(IDENTITY.model_fingerprint, IDENTITY.tokenizer_fingerprint, BLOCK_SIZE)
    digests = block_digests(root, prompt, BLOCK_SIZE)
    message = pb.Submit(
        handle=handle,
        prompt_token_ids=little_endian_int32(prompt),
        block_hashes=pack_hashes(map(block_hash_of, digests)),
        parent_digest=digests[-1] if digests else root,
        sampling=types.SamplingParams(temperature=0.0, top_p=1.0, repetition_penalty=1.0, max_tokens=count),
    )
    return pb.StreamRequest(submit=message)


async def _echo(stub: rpc.GpuWorkerServiceStub, times: list[float]) -> None:
    due = time.perf_counter()
    while True:
        began = time.perf_counter()
        await stub.GetWorker(pb.GetWorkerRequest())
        times.append(time.perf_counter() - began)
        due = max(due + ECHO_SECONDS, time.perf_counter())
        await asyncio.sleep(due - time.perf_counter())


async def _stream(call: Any, seed: int, rows: int, count: int) -> tuple[int, list[float]]:
    """Run `rows` sequences at once; return their tokens and the times between messages with tokens, in seconds."""
    for handle, prompt in enumerate(random_prompts(rows, PROMPT_TOKENS, seed), start=1 + seed * rows):
        await call.write(_submit(handle, prompt, count))
    tokens, left, last, gaps = 0, rows, 0.0, []
    while left:
        message = await call.read()
        if message.HasField("outputs"):
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
            tokens += sum(unpack_u32(message.outputs.counts))
            left -= len(message.outputs.finished)
    return tokens, gaps[1:]


async def drive(address: str, rows: int, count: int, seed: int) -> Sample:
    """Load a worker once to warm it, then once to measure."""
    async with open_channel(address) as channel:
        stub = rpc.GpuWorkerServiceStub(channel)
        call = stub.Stream()
        await call.write(pb.StreamRequest(hello=pb.Hello(router_id="bench")))
        await _stream(call, 2 * seed, rows, 8)
        steps = (await stub.GetWorker(pb.GetWorkerRequest())).load.steps
        echoes: list[float] = []
        echo = asyncio.create_task(_echo(stub, echoes))
        began = time.perf_counter()
        tokens, gaps = await _stream(call, 2 * seed + 1, rows, count)
        seconds = time.perf_counter() - began
        echo.cancel()
        with suppress(asyncio.CancelledError):
            await echo
        steps = (await stub.GetWorker(pb.GetWorkerRequest())).load.steps - steps
        call.cancel()
    at = statistics.quantiles(echoes, n=100)
    return Sample(tokens / seconds, steps / seconds, at[49], at[98], statistics.quantiles(gaps, n=100)[98])


# ------------------------------------------------------------ both, in turn


class _Worker:
    """A worker process and its children."""

    def __init__(self, host: str, runner: str, rows: int) -> None:
        argv = module_command("bench.engine_host", "--serve", host, "--runner", runner)
        self._process = subprocess.Popen(
            die_with_parent.command([*argv, "--sequences", str(rows)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = f"127.0.0.1:{self._process.stdout.readline().strip()}"

    def cpu_seconds(self) -> float:
        """CPU time so far of the process and its children."""
        own = psutil.Process(self._process.pid)
        times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
        return float(sum(each.user + each.system for each in times))

    def run(self, rows: int, count: int, seed: int) -> Sample:
        flags = ["--sequences", str(rows), "--output-tokens", str(count), "--seed", str(seed)]
        argv = module_command("bench.engine_host", "--drive", self.address, *flags)
        before = self.cpu_seconds()
        done = subprocess.run(die_with_parent.command(argv), stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout)
        # The count includes the warm-up's tokens: 8 of each sequence.
        found["cpu_per_token"] = (self.cpu_seconds() - before) / (rows * (count + 8))
        return Sample(**found)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(runner: str, rows: int, count: int, pairs: int, what: str) -> Iterator[dict[str, Sample]]:
    """Yield pairs of runs, the engine in a thread and in a process; both workers live throughout."""
    workers = {host: _Worker(host, runner, rows) for host in HOSTS}
    try:
        for index in range(pairs):
            order = HOSTS if index % 2 else HOSTS[::-1]
            pair = {host: workers[host].run(rows, count, index) for host in order}
            progress(f"{what}: pair {index + 1} of {pairs}", end=index + 1 == pairs)
            yield pair
    finally:
        for worker in workers.values():
            worker.close()


def figures_of(kind: str, what: str, pairs: list[dict[str, Sample]]) -> Iterator[tuple[str, float, str]]:
    """Yield name, value and meaning of each figure of one kind of step."""
    ratios = [pair["process"].tokens_per_second / pair["thread"].tokens_per_second for pair in pairs]
    for name, value in zip(("", "_lower", "_upper"), median_interval(ratios), strict=True):
        yield f"process_over_thread_{kind}{name}", value, f"tokens a second, process over thread; {what}"
    for host in HOSTS:
        for part, scale, unit in (
            ("tokens_per_second", 1.0, "tokens a second"),
            ("steps_per_second", 1.0, "steps a second"),
            ("echo_median", 1e3, "round trip of a status call, median, ms"),
            ("echo_p99", 1e3, "round trip of a status call, 99th percentile, ms"),
            ("gap_p99", 1e3, "time between messages with tokens, 99th percentile, ms"),
            ("cpu_per_token", 1e6, "CPU of a token in all of the worker's processes, us"),
        ):
            value = statistics.median(getattr(pair[host], part) for pair in pairs) * scale
            yield f"{part}_{kind}_{host}", value, unit


def main() -> None:
    flags: argparse.ArgumentParser = parser(__doc__)
    flags.add_argument("--pairs", type=int, default=6, help="interleaved pairs of each kind of step")
    flags.add_argument("--sequences", type=int, default=64, help="sequences at once")
    flags.add_argument("--output-tokens", type=int, default=400, help="output tokens of each")
    flags.add_argument("--only", choices=sorted(KINDS), nargs="+", default=list(KINDS), help="some kinds of step")
    flags.add_argument("--serve", choices=HOSTS, help=argparse.SUPPRESS)
    flags.add_argument("--runner", help=argparse.SUPPRESS)
    flags.add_argument("--drive", help=argparse.SUPPRESS)
    flags.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.serve:
        return uvloop.run(serve(args.serve, args.runner, args.sequences))
    if args.drive:
        found = uvloop.run(drive(args.drive, args.sequences, args.output_tokens, args.seed))
        return print(json.dumps({key: value for key, value in asdict(found).items() if key != "cpu_per_token"}))
    figures: dict[str, float] = {}
    notes: dict[str, str] = {}
    for kind in args.only:
        runner, what = KINDS[kind]
        pairs = list(measure(runner, args.sequences, args.output_tokens, args.pairs, kind))
        for name, value, meaning in itertools.chain(figures_of(kind, what, pairs)):
            figures[name], notes[name] = value, meaning
    return report("engine_host", figures, notes, args.json)


if __name__ == "__main__":
    main()
