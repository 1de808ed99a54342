"""Background tasks of a worker that end by a defect: health shows it, and they are begun again."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.demo_model import CHECKPOINT
from cli.suite.stack import free_ports
from common.process import die_with_parent
from common.rpc.server import open_channel
from tests.support import waiting
from tests.support.gpuworker.worker_process import PATIENCE, ROOT, until
from tests.support.kvmanager.manager_child import manager_process

# While a file is there, the lease client ends each time that it has lost its manager.
PROGRAM = """
import functools, pathlib, sys
import gpuworker.main as m
from common.backoff import Backoff
from common.process.supervised import Restarts, Supervisor

quick = Restarts(Backoff(first=0.01, longest=0.05), sound_after=0.2)
m.Supervisor = functools.partial(Supervisor, restarts=quick)
sound = m.LeaseClient._next_delay

def faulty(self, longest):
    if pathlib.Path(sys.argv[-1]).exists():
        raise ZeroDivisionError("a bug")
    return sound(self, longest)

m.LeaseClient._next_delay = faulty
sys.exit(m.main(sys.argv[1:-1]))
"""


@asynccontextmanager
async def simulated_worker(bug: Path, *flags: str) -> AsyncIterator[Process]:
    argv = [sys.executable, "-c", PROGRAM, "--model", str(CHECKPOINT), "--simulate", "base=1ms", *flags, str(bug)]
    process = await asyncio.create_subprocess_exec(
        *die_with_parent.command(argv),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"},
        stdout=PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def serving(channel: aio.Channel, wanted: bool) -> None:
    """Wait until gRPC's health says so."""
    stub, status = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckResponse
    async with asyncio.timeout(PATIENCE):
        async for answer in stub.Watch(health_pb2.HealthCheckRequest()):
            if answer.status == (status.SERVING if wanted else status.NOT_SERVING):
                return


async def test_a_lease_client_that_ends_is_seen_and_begun_again(tmp_path: Path) -> None:
    bug = tmp_path / "bug"
    manager_port, metrics_port = free_ports(2)
    manager = ("--port", str(manager_port))
    flags = ("--port", "0", "--metrics-port", str(metrics_port), "--manager", f"127.0.0.1:{manager_port}")
    async with simulated_worker(bug, *flags, "--state-dir", str(tmp_path)) as process:
        async with manager_process(tmp_path, *manager):
            address = (await until(process, "READY"))[-1].split()[1]
            bug.touch()
        async with open_channel(address) as channel, httpx.AsyncClient(timeout=PATIENCE) as http:
            await serving(channel, wanted=False)
            # It counts as sound while an attempt to connect takes longer than 0.2 s, so the answer may change.
            await answered(http, metrics_port, 503)
            bug.unlink()
            async with manager_process(tmp_path, *manager):
                await serving(channel, wanted=True)
                await answered(http, metrics_port, 200)


async def answered(http: httpx.AsyncClient, port: int, status: int) -> None:
    """Wait until HTTP's health says so."""
    await waiting.until(
        lambda: http.get(f"http://127.0.0.1:{port}/health"),
        lambda answer: answer.status_code == status,
        every=0.02,
        seconds=PATIENCE,
    )
