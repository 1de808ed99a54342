"""The router as a process over fake workers, which a test controls; and raw HTTP to it."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from cli.demo_model import CHECKPOINT
from common.checkpoint.fingerprint import model_fingerprint, tokenizer_fingerprint
from common.process.python import module_command
from tests.support.router.fake_worker import IDENTITY, PATIENCE_S, FakeWorker, running


@dataclass
class RouterUnderAttack:
    """A router, its one worker, and what the router has written to its standard error."""

    process: asyncio.subprocess.Process
    worker: FakeWorker
    grpc: str
    http_port: int
    log: list[str]

    @property
    def rss_mib(self) -> float:
        """Resident memory of the router now."""
        return float(psutil.Process(self.process.pid).memory_info().rss) / 2**20

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the router so far, without its children's."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    @property
    def tracebacks(self) -> list[str]:
        return [line for line in self.log if "Traceback" in line]


@asynccontextmanager
async def router_under_attack(
    worker: FakeWorker, *flags: str, checkpoint: Path = CHECKPOINT
) -> AsyncIterator[RouterUnderAttack]:
    """Run a router over one worker until the end of the block; it is killed then."""
    worker.identity = replace(
        IDENTITY,
        model_fingerprint=model_fingerprint(checkpoint),
        tokenizer_fingerprint=tokenizer_fingerprint(checkpoint),
    )
    common = ("--model", str(checkpoint), "--block-size", "4", "--port", "0", "--grpc-port", "0")
    async with running(worker):
        process = await asyncio.create_subprocess_exec(
            *module_command("router", *common, "--worker", worker.address, "--log-format", "text", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(("protos", "."))},
        )
        log: list[str] = []
        reader = asyncio.create_task(_read(process.stderr, log))
        heart = asyncio.create_task(_beat(worker))
        try:
            assert process.stdout is not None
            async with asyncio.timeout(PATIENCE_S):
                ready = (await process.stdout.readline()).decode()
            found = re.match(r"READY (\S+:\d+), HTTP on \S+?:(\d+)", ready)
            assert found is not None, (ready, log)
            yield RouterUnderAttack(process, worker, found[1], int(found[2]), log)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            heart.cancel()
            await asyncio.gather(reader, heart, return_exceptions=True)


async def _read(stream: asyncio.StreamReader | None, log: list[str]) -> None:
    assert stream is not None
    async for line in stream:
        log.append(line.decode(errors="replace"))  # noqa: PERF401 - a test reads it meanwhile


async def _beat(worker: FakeWorker) -> None:
    """Keep the router from taking the worker for a hung one."""
    while True:
        if worker.streams:
            worker.heartbeat()
        await asyncio.sleep(0.5)


@asynccontextmanager
async def raw_connection(
    port: int, local: str = "127.0.0.1"
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection from a local address; it is aborted at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(local, 0))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def whole_answer(reader: asyncio.StreamReader) -> bytes:
    """Return what comes until the other side closes, "" after a reset."""
    found = b""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while part := await reader.read(65536):
                found += part
    except ConnectionResetError:
        pass
    return found


def post(path: str, body: bytes, *headers: str) -> bytes:
    """Return a whole request with a JSON body."""
    lines = (f"POST {path} HTTP/1.1", "Host: router", "Content-Type: application/json", *headers)
    return "\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body
