"""A worker as a real process, over a ledger of its own (`cli/suite/embedded.py`), on a tiny checkpoint."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from common.process import die_with_parent
from tests.support.checkpoints import checkpoint

ROOT = Path(__file__).parents[3]
PATIENCE = 120.0


@asynccontextmanager
async def worker_process(before: str = "", *flags: str) -> AsyncIterator[Process]:
    """Start a worker that runs `before` first; it is killed at the end if it still runs."""
    ports = ("--port", "0", "--metrics-port", "0")
    common = (*ports, "--model", str(checkpoint("llama")), "--kv-blocks", "16", "--max-model-len", "64")
    program = f"import sys, cli.suite.embedded as e\n{before}\nsys.exit(e.main())"
    process = await asyncio.create_subprocess_exec(
        *die_with_parent.command([sys.executable, "-c", program, *common, *flags]),
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
