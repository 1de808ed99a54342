"""The probes of the Kubernetes manifests, on a running suite and on a worker without its manager."""

from __future__ import annotations

import asyncio
import os
import urllib.error
import urllib.request
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.demo_model import CHECKPOINT
from cli.suite.stack import free_ports
from common.process import die_with_parent
from common.process.python import module_command
from common.rpc.health import LIVE
from tests.support.kvmanager.manager_child import manager_process
from tests.support.suite import Suite
from tests.support.waiting import until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def answer(address: str, service: str) -> int:
    """Return the status of a probe, once the process listens."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        return int((await stub.Check(request, timeout=60.0, wait_for_ready=True)).status)


@pytest.mark.asyncio(loop_scope="session")
async def test_every_service_is_ready_and_alive(suite: Suite) -> None:
    for name in ("router", "kvmanager", "worker-0"):
        address = suite.stack.children[name].program.address
        assert [await answer(address, service) for service in ("", LIVE)] == [SERVING, SERVING], name


async def test_a_worker_that_waits_for_its_manager_is_alive_and_not_ready() -> None:
    port, absent = free_ports(2)
    flags = ("--port", str(port), "--metrics-port", "0", "--manager", f"127.0.0.1:{absent}", "--kv-blocks", "16")
    command = module_command("gpuworker", "--model", str(CHECKPOINT), "--simulate", "base=1ms", *flags)
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    worker = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT, env=environ)
    try:
        assert worker.stdout is not None
        async with asyncio.timeout(60.0):  # loaded, and looking for its manager
            while b"no session with KV manager" not in (line := await worker.stdout.readline()):
                assert line, "the worker ended"
        address = f"127.0.0.1:{port}"
        assert [await answer(address, service) for service in ("", LIVE)] == [NOT_SERVING, SERVING]
    finally:
        worker.kill()
        await worker.wait()


@asynccontextmanager
async def running_worker(manager: int, patience: str) -> AsyncIterator[tuple[str, int]]:
    """Run a simulated worker until the end of the block; yield its address and the port of /health."""
    port, metrics = free_ports(2)
    ports = ("--port", str(port), "--metrics-port", str(metrics), "--advertise", f"127.0.0.1:{port}")
    managed = ("--manager", f"127.0.0.1:{manager}", "--manager-patience", patience, "--kv-blocks", "16")
    command = module_command("gpuworker", "--model", str(CHECKPOINT), "--simulate", "base=1ms", *ports, *managed)
    argv, environ = die_with_parent.command(command), os.environ | {"OMP_NUM_THREADS": "1"}
    worker = await asyncio.create_subprocess_exec(*argv, stdout=DEVNULL, stderr=DEVNULL, env=environ)
    try:
        yield f"127.0.0.1:{port}", metrics
    finally:
        worker.kill()
        await worker.wait()


def page(port: int, path: str) -> tuple[int, str]:
    """Return status and body of a page at the port for probes."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60.0) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def is_detached(metrics: int) -> bool:
    return "quire:manager_attached 0.0" in (await asyncio.to_thread(page, metrics, "/metrics"))[1]


async def until_health_is(address: str, wanted: int) -> None:
    async with asyncio.timeout(120.0), grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest()
        async for response in health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True):
            if response.status == wanted:
                return


async def test_a_worker_whose_manager_stays_away_is_not_ready_until_one_is_back(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    async with running_worker(port, "1") as (address, metrics):
        async with manager_process(tmp_path, port=port) as manager:
            await until_health_is(address, SERVING)
            await manager.stopped()
            await until_health_is(address, NOT_SERVING)
        assert await answer(address, LIVE) == SERVING
        status, body = await asyncio.to_thread(page, metrics, "/health")
        assert (status, "had no KV manager for 1 s (--manager-patience)" in body) == (503, True)
        async with manager_process(tmp_path, port=port):
            await until_health_is(address, SERVING)
            assert (await asyncio.to_thread(page, metrics, "/health"))[0] == 200


async def test_a_worker_is_ready_while_its_manager_is_away_for_less_than_the_patience(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    async with running_worker(port, "3600") as (address, metrics):
        async with manager_process(tmp_path, port=port) as manager:
            await until_health_is(address, SERVING)
            await manager.stopped()
            await until(lambda: is_detached(metrics), every=0.05, seconds=120.0)
        assert await answer(address, "") == SERVING
        assert (await asyncio.to_thread(page, metrics, "/health"))[0] == 200
