"""The probes of the Kubernetes manifests, on a running suite and on a worker without its manager."""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import PIPE, STDOUT

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.demo_model import CHECKPOINT
from cli.suite.stack import free_ports
from common.process.python import module_command
from common.rpc.health import LIVE
from tests.support.suite import Suite

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
    command = module_command("gpuworker.main", "--model", str(CHECKPOINT), "--simulate", "base=1ms", *flags)
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
