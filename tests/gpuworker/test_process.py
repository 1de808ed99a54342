"""The worker as a real process, over a ledger of its own: READY, SIGTERM idle and while it loads, a dead engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.process import die_with_parent
from tests.support.checkpoints import checkpoint

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
# What each process does before it becomes a worker.
AS_IT_IS = ""
LOADS_FOR_EVER = (
    "import time, gpuworker.main as m; m.assemble = lambda _: (print('loading', flush=True), time.sleep(600))"
)
ATTACH_FAILS = "e.EmbeddedChannel.attach = lambda *_: {}['a bug']"

pytestmark = pytest.mark.timeout(120)


@asynccontextmanager
async def worker(before: str) -> AsyncIterator[Process]:
    """Start a worker in a process of its own; it is killed at the end if it still runs."""
    flags = ("--port", "0", "--metrics-port", "0", "--model", str(checkpoint("llama")), "--kv-blocks", "16")
    program = f"import sys, cli.suite.embedded as e\n{before}\nsys.exit(e.main())"
    process = await asyncio.create_subprocess_exec(
        *die_with_parent.command([sys.executable, "-c", program, *flags, "--max-model-len", "64"]),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "OMP_NUM_THREADS": "1"},
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def until(process: Process, word: str) -> list[str]:
    """Return the lines up to the first that begins with a word."""
    assert process.stdout is not None
    lines: list[str] = []
    async with asyncio.timeout(PATIENCE):
        while line := (await process.stdout.readline()).decode():
            lines.append(line)
            if line.startswith(word):
                return lines
    raise AssertionError(f"it never said {word}: {lines}")


async def ended(process: Process) -> tuple[int, str]:
    """Return its exit status and what it said on stderr."""
    async with asyncio.timeout(PATIENCE):
        _, said = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


async def test_it_says_where_the_memory_goes_and_that_it_is_ready_and_stops_when_told() -> None:
    async with worker(AS_IT_IS) as process:
        lines = await until(process, "READY")
        assert any("KV cache" in line and "16 blocks of 16 slots" in line for line in lines)
        process.send_signal(signal.SIGTERM)
        status, log = await ended(process)
        assert (status, {json.loads(line)["level"] for line in log.splitlines()} - {"info"}) == (0, set())


async def test_while_it_loads_there_is_nothing_to_wait_for() -> None:
    async with worker(LOADS_FOR_EVER) as process:
        await until(process, "loading")
        process.send_signal(signal.SIGTERM)
        assert await ended(process) == (128 + signal.SIGTERM, "")


async def test_a_worker_whose_engine_ended_ends_and_says_why() -> None:
    async with worker(ATTACH_FAILS) as process:
        status, said = await ended(process)
        assert status == 1
        assert "quire-gpuworker: the engine ended early: KeyError('a bug')" in said
