"""The whole suite for benchmarks: Redis, manager, worker and router as processes of their own, and a client of the API.

The suite starts as `quire serve` starts it, options and all. The client is the process of the benchmark, and calls
the router alone. Requests are token ids, greedy, and run to their length, as those of the peers.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import psutil
from prometheus_client.parser import text_string_to_metric_families

from cli.benchmark.closed_loop import Record
from cli.benchmark.requests import Request, Workload
from cli.suite.preflight import suite_options
from cli.suite.programs import Program, StackOptions, worker_ids
from cli.suite.stack import Say, Stack
from common.process.metrics import metrics_port
from quire.api.proxy import PROXY_OPTION
from quire.gpuworker.v1 import gpuworker_pb2 as worker_pb
from quire.gpuworker.v1 import gpuworker_pb2_grpc
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc
from quire.types.v1 import types_pb2 as types

REQUEST_SECONDS = 600.0
READY_SECONDS = 300.0
WORKER_SECONDS = 30.0
FIRST_WORKER = worker_ids(StackOptions(Path()))[0]
MIB = 1 << 20


class ServedSuite:
    """A running suite and a client of its router. `start_seconds` is from the first process to the last one's ready."""

    def __init__(self, stack: Stack, channel: grpc.aio.Channel, start_seconds: float) -> None:
        self.start_seconds = start_seconds
        self._stack = stack
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)

    async def run(
        self, workload: Workload, salt: str = "", traceparent: Callable[[], str] | None = None
    ) -> tuple[float, dict[str, Record]]:
        """Run a workload to its end; return the seconds, and each request. A new `salt` means a cold prefix cache.

        Each request carries what `traceparent` returns, if it is given.
        """
        stream = partial(self._stream, salt, workload, traceparent)
        records: dict[str, Record] = {}
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:

            def submit(request: Request) -> None:
                record = records[request.rid] = Record(request, time.perf_counter())
                group.create_task(stream(record, submit))

            for request in workload.initial:
                submit(request)
        last = max(record.times[-1] for record in records.values())
        return last - began, records

    async def _stream(
        self,
        salt: str,
        workload: Workload,
        traceparent: Callable[[], str] | None,
        record: Record,
        submit: Callable[[Request], None],
    ) -> None:
        metadata = None if traceparent is None else (("traceparent", traceparent()),)
        call = self._stub.Generate(_greedy(record.request, salt), timeout=REQUEST_SECONDS, metadata=metadata)
        async for event in call:
            if event.HasField("tokens"):
                if record.add(event.tokens.token_ids, time.perf_counter()):
                    following = workload.follow_up(record.request, record.tokens)
                    if following is not None:
                        submit(following)
            elif event.HasField("admitted"):
                record.cached_tokens, record.trace_id = event.admitted.cached_tokens, event.admitted.trace_id
            elif event.HasField("finished"):
                record.cached_tokens = event.finished.usage.cached_tokens

    async def worker(self) -> worker_pb.GetWorkerResponse:
        """Return the first worker's description of itself: its capacity and its plan of bytes."""
        async with self._stack.channel(self.worker_program) as channel:
            stub = gpuworker_pb2_grpc.GpuWorkerServiceStub(channel)
            return await stub.GetWorker(worker_pb.GetWorkerRequest(), timeout=WORKER_SECONDS)

    async def engine_steps(self) -> float:
        """Return how many steps the first worker has completed, from its /metrics."""
        host, _, port = self.worker_program.address.rpartition(":")
        text = await asyncio.to_thread(_read, f"http://{host}:{metrics_port(None, int(port))}/metrics")
        families = (family for family in text_string_to_metric_families(text) if family.name == "quire:engine_steps")
        return next(family.samples[0].value for family in families)

    @property
    def http_url(self) -> str:
        return self._stack.http_url

    @property
    def worker_program(self) -> Program:
        return self._stack.children[FIRST_WORKER].program

    def peak_rss(self) -> dict[str, float]:
        """Return the highest resident memory that each process of the suite ever had, in MiB."""
        pids = {name: child.pid for name, child in self._stack.children.items()}
        return {name: peak_rss_mib(pid) for name, pid in pids.items() if pid is not None}

    def cpu_seconds(self) -> float:
        """Return the processor time of all processes so far, without this one's."""
        return sum(self.cpu_by_service().values())

    def cpu_by_service(self) -> dict[str, float]:
        """Return the processor seconds of the processes of each service so far; those of Redis are under ""."""
        found: dict[str, float] = {}
        for child in self._stack.children.values():
            if child.pid:
                service = child.program.service
                found[service] = found.get(service, 0.0) + processor_seconds(child.pid)
        return found


@asynccontextmanager
async def served_suite(
    options: Sequence[str], say: Say = lambda _name, _line: None, ready_seconds: float = READY_SECONDS
) -> AsyncIterator[ServedSuite]:
    """Run a suite on free ports, in plain text unless the options say otherwise; `options` are flags of `quire serve`.

    It has a Redis and keys of its own, whatever the environment says: it must not meet a suite that serves. `say` gets
    the lines of its processes.
    Raises InvalidConfig for bad ones, Unavailable, with the last lines of a process, when it does not start.
    """
    names = ("--grpc-port", "--port", "--admin-port", "--admin-http-port", "--manager-port", "--worker-port")
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        flags = [word for name in names for word in (name, "0")]
        stack_options = suite_options(["--insecure", *options, *flags, "--state-dir", str(Path(folder))], os.environ)
        stack_options = replace(stack_options, redis_url=None, tenants=None, ready_seconds=ready_seconds)
        began = time.perf_counter()
        async with (
            Stack(stack_options, say) as stack,
            grpc.aio.insecure_channel(stack.address, [(PROXY_OPTION, 0)]) as channel,
        ):
            yield ServedSuite(stack, channel, time.perf_counter() - began)


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process so far: to the nanosecond on Linux, elsewhere in ticks of 10 ms."""
    if sys.platform == "linux":
        # The clock of a process, numbered as by clock_getcpuclockid(3): its id inverted, and 2 for all threads.
        with suppress(OSError):
            return time.clock_gettime(~pid << 3 | 2)
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def peak_rss_mib(pid: int) -> float:
    """Return the highest resident memory of a process so far, in MiB; where the system keeps no peak, the present."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return float(psutil.Process(pid).memory_info().rss) / MIB
    return peak / 1024


def _read(url: str) -> str:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=WORKER_SECONDS) as answer:
        return str(answer.read().decode())


def _greedy(request: Request, salt: str) -> pb.GenerateRequest:
    sampling = types.SamplingParams(temperature=0.0, max_tokens=request.max_new_tokens, ignore_eos=True)
    prompt = pb.Prompt(token_ids=pb.TokenIds(ids=request.prompt))
    return pb.GenerateRequest(prompt=prompt, sampling=sampling, cache=pb.CacheOptions(salt=salt))
