"""One supervised child process: its lines passed on, restarted with back-off, stopped by pid."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from common import die_with_parent

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.5, 30.0
_STABLE_SECONDS = 30.0
_KILL_AFTER = 10.0


@dataclass(frozen=True, slots=True)
class Program:
    """What to run: a name for people, the module with its flags, and where its health is asked for."""

    name: str
    module: str
    flags: tuple[str, ...]
    address: str
    environment: dict[str, str] = field(default_factory=dict)


class Child:
    """Keeps one program running until told to stop. `say(name, line)` gets every line and event of it."""

    def __init__(self, program: Program, say: Callable[[str, str], None]) -> None:
        self.program = program
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._stopping = False
        self.restarts = 0
        self.last_lines: list[str] = []

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Start the program and keep it running from now on."""
        await self._spawn()
        self._keeper = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """Ask it to drain (SIGTERM), kill it if it does not end, and stop restarting it."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), _KILL_AFTER)
            except TimeoutError:
                self._say(self.program.name, f"did not stop within {_KILL_AFTER:.0f} s; killing it")
                process.kill()
                await process.wait()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def _spawn(self) -> None:
        command = die_with_parent.command([sys.executable, "-m", self.program.module, *self.program.flags])
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | self.program.environment,
            start_new_session=True,
        )

    async def _keep(self) -> None:
        backoff = _FIRST_BACKOFF
        while True:
            began = time.monotonic()
            process = self._process
            assert process is not None
            await self._pass_lines_on(process)
            code = await process.wait()
            if self._stopping:
                return
            if time.monotonic() - began > _STABLE_SECONDS:
                backoff = _FIRST_BACKOFF
            self._say(self.program.name, f"{_ended(code)}; starting it again in {backoff:.1f} s")
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _LONGEST_BACKOFF)
            self.restarts += 1
            await self._spawn()

    async def _pass_lines_on(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for raw in process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self.last_lines = [*self.last_lines[-19:], line]
            self._say(self.program.name, line)


def _ended(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
