"""A KV manager in a process of its own, which a test starts, kills and starts again on the same state."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.process import die_with_parent
from common.process.python import module_command

_ROOT = Path(__file__).parents[3]
_PATIENCE_S = 120.0


@dataclass
class ManagerChild:
    """A running manager; `ready` is its first line."""

    process: asyncio.subprocess.Process
    ready: str

    @property
    def address(self) -> str:
        return self.ready.split()[1]

    @property
    def rss_mib(self) -> float:
        return float(psutil.Process(self.process.pid).memory_info().rss) / 2**20

    async def ended(self) -> tuple[int, str]:
        """Wait for its end; return exit status and what it said on stderr."""
        async with asyncio.timeout(_PATIENCE_S):
            _, said = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, said.decode()

    async def stopped(self) -> str:
        """Kill it; return what it said on stderr."""
        self.process.kill()
        return (await self.ended())[1]


@asynccontextmanager
async def manager_process(state_dir: Path, *flags: str, port: int = 0) -> AsyncIterator[ManagerChild]:
    """Run a manager, on a free port for 0, until the end of the block."""
    argv = module_command("kvmanager", "--port", str(port), "--metrics-port", "0")
    argv += ["--state-dir", str(state_dir), *flags]
    process = await asyncio.create_subprocess_exec(
        *die_with_parent.command(argv),
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": f"{_ROOT}:{_ROOT / 'protos'}", "OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=1 << 26,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_PATIENCE_S):
            ready = (await process.stdout.readline()).decode()
        yield ManagerChild(process, ready)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
