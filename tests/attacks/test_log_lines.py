"""Attacks on the log: messages that cannot be decoded, ids with line breaks, a password that should not be there."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio
import redis

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from common.contracts.limits import MALFORMED_LINE_SECONDS
from common.process.local_redis import LocalRedis
from common.process.python import module_command
from quire.inference.v1 import inference_pb2
from quire.kvmanager.v1 import kvmanager_pb2
from quire.types.v1 import types_pb2
from tests.support.lost_status import is_lost
from tests.support.suite import PATIENCE, Suite, greedy, running_suite

pytestmark = pytest.mark.asyncio(loop_scope="module")

PASSWORD = "correct-horse-battery"
FORGED = "worker worker-9 connected  address=10.6.6.6:50053"
# A field whose length is larger than what follows.
GARBAGE = b"\x0a\xff\x01garbage"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    """A suite on a Redis with a password; its processes write lines for people."""
    with LocalRedis() as server:
        with redis.Redis(port=server.port) as client:
            client.config_set("requirepass", PASSWORD)
        options = StackOptions(
            model=CHECKPOINT,
            worker_flags=("--simulate", "base=1ms", "--kv-blocks", "256"),
            redis_url=f"redis://:{PASSWORD}@127.0.0.1:{server.port}/0",
        )
        async with running_suite(tmp_path_factory.mktemp("lines"), options) as running:
            yield running


def address_of(suite: Suite, name: str) -> str:
    options = suite.stack.options
    ports = {"router": options.grpc_port, "kvmanager": options.manager_port, "worker-0": options.worker_ports[0]}
    return f"127.0.0.1:{ports[name]}"


async def sent(channel: Any, kind: str, method: str, body: bytes) -> grpc.StatusCode:
    """Send raw bytes as the message of a call; return its status."""
    call = getattr(channel, kind)(method)(iter([body]) if kind.startswith("stream") else body, timeout=PATIENCE)
    try:
        if kind.endswith("stream"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return await sent(channel, kind, method, body) if is_lost(error) else error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("name", "kind", "method"),
    [
        ("router", "unary_stream", "/quire.inference.v1.InferenceService/Generate"),
        ("router", "unary_unary", "/quire.inference.v1.InferenceService/Tokenize"),
        ("router", "stream_stream", "/inference.GRPCInferenceService/ModelStreamInfer"),
        ("router", "unary_unary", "/grpc.health.v1.Health/Check"),
        ("kvmanager", "stream_stream", "/quire.kvmanager.v1.KvManagerService/Session"),
        ("kvmanager", "unary_unary", "/quire.kvmanager.v1.KvManagerService/GetPool"),
        ("worker-0", "stream_stream", "/quire.gpuworker.v1.GpuWorkerService/Stream"),
    ],
)
async def test_garbage_is_an_invalid_argument_and_few_lines(suite: Suite, name: str, kind: str, method: str) -> None:
    before, began = len(suite.lines), time.monotonic()
    innocent = asyncio.create_task(suite.generate(greedy([1, 2, 3], 64)))
    async with grpc.aio.insecure_channel(address_of(suite, name)) as channel:
        codes = {await sent(channel, kind, method, GARBAGE) for _ in range(20)}
    outcome = await innocent
    assert codes == {grpc.StatusCode.INVALID_ARGUMENT}
    assert len(outcome.tokens) == 64
    said = [line for line in suite.lines[before:] if line.startswith(f"{name}:")]
    assert not [line for line in said if "Traceback" in line]
    took = time.monotonic() - began
    assert sum("cannot be decoded" in line for line in said) <= 2 + took / MALFORMED_LINE_SECONDS


async def test_an_id_with_a_line_break_writes_no_line_of_its_own(suite: Suite) -> None:
    attach = kvmanager_pb2.Attach(
        worker_id=f"w\n{FORGED}",
        incarnation=b"i" * 16,
        identity=types_pb2.PoolIdentity(block_size=16),
        num_blocks=64,
        max_num_seqs=4,
        address="127.0.0.1:1",
    )
    request = kvmanager_pb2.SessionRequest(session=1, seq=1, attach=attach)
    call = suite.manager.Session(iter([request]), timeout=PATIENCE)
    with pytest.raises(grpc.aio.AioRpcError, match="a worker id of 1 to 128"):
        async for _ in call:
            pass
    assert len((await suite.generate(greedy([1, 2, 3], 4))).tokens) == 4
    assert not [line for line in suite.lines if line.startswith(f"kvmanager: {FORGED}")]


async def test_the_password_of_redis_is_in_no_command_and_no_line(suite: Suite) -> None:
    assert (await suite.inference.GetStatus(inference_pb2.GetStatusRequest(), timeout=PATIENCE)).redis_connected
    for child in suite.stack.children.values():
        assert PASSWORD not in " ".join(psutil.Process(child.pid).cmdline())
    assert not [line for line in suite.lines if PASSWORD in line]


async def test_an_error_about_the_url_does_not_quote_the_password(tmp_path: Path) -> None:
    environ = {**os.environ, "REDIS_URL": f"http://user:{PASSWORD}@127.0.0.1"}
    command = module_command("router", "--model", str(CHECKPOINT), "--state-dir", str(tmp_path))
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, env=environ, timeout=PATIENCE, check=False
    )
    assert done.returncode == 2
    assert "REDIS_URL: is 'http://***@127.0.0.1'; expected redis://" in done.stderr
    assert PASSWORD not in done.stderr
