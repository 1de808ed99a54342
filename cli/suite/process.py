"""One supervised child process: its output is passed on, it restarts with back-off, and it stops by pid."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

from cli.suite.programs import Program
from common.backoff import Backoff
from common.process import die_with_parent
from common.settings.exit_status import PORT_TAKEN_STATUS, REFUSED_STATUS

_BACKOFF = Backoff(first=0.5, longest=30.0)  # seconds between restarts
_STABLE_SECONDS = 30.0
_KEPT_LINES = 20
_LONGEST_LINE = 1 << 20
# What a Redis says whose port another process has; the services end with PORT_TAKEN_STATUS.
_PORT_TAKEN_WORDS = "Address already in use"


class Child:
    """Keeps one program running until `stop`. `say(name, line)` gets every line and event of it.

    `patience` is the time between SIGTERM and SIGKILL in seconds. A program that ends with REFUSED_STATUS, or before
    `ready` is set, would end the same way again: `on_failed` is called, and the program is not restarted.
    """

    def __init__(
        self,
        program: Program,
        say: Callable[[str, str], None],
        patience: float = 10.0,
        on_failed: Callable[[Child], None] = lambda _: None,
    ) -> None:
        self.program = program
        self._say, self._patience, self._on_failed = say, patience, on_failed
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._stopping = False
        self.ready = False
        self.restarts = 0
        self.port_taken = False  # whether it ended because another process has its port
        self.refused = False  # whether it ended because it refuses its options
        self.last_lines: list[str] = []

    @property
    def pid(self) -> int | None:
        """The process id while the program runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        await self._spawn()
        self._keeper = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """Send SIGTERM so that the program drains, kill it if it does not end, and restart it no more."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(self._patience):
                    await process.wait()
            except TimeoutError:
                self._say(self.program.name, f"did not stop within {self._patience:g} s; killing it")
                self.kill()
                await process.wait()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    def kill(self) -> None:
        """Send SIGKILL, and restart the program no more."""
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _spawn(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *die_with_parent.command([*self.program.command, *self.program.flags]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_LONGEST_LINE,
            env=os.environ | self.program.environment,
            start_new_session=True,
        )

    async def _keep(self) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            process = self._process
            assert process is not None
            await self._pass_lines_on(process)
            code = await process.wait()
            if self._stopping:
                return
            self.port_taken = code == PORT_TAKEN_STATUS or any(_PORT_TAKEN_WORDS in line for line in self.last_lines)
            self.refused = code == REFUSED_STATUS
            if self.refused or not self.ready:
                self._say(self.program.name, f"{_ended(code)}; it is not started again")
                self._on_failed(self)
                return
            if time.monotonic() - began > _STABLE_SECONDS:
                failures = 0
            failures += 1
            pause = _BACKOFF.pause(failures)
            self._say(self.program.name, f"{_ended(code)}; starting it again in {pause:.1f} s")
            await asyncio.sleep(pause)
            self.restarts += 1
            await self._spawn()
            if self.program.quiet:  # the other programs print READY themselves
                self._say(self.program.name, f"started again on {self.program.address}")

    async def _pass_lines_on(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for raw in process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self.last_lines = [*self.last_lines[1 - _KEPT_LINES :], line]
            if not self.program.quiet:
                self._say(self.program.name, line)


def _ended(code: int) -> str:
    if code == REFUSED_STATUS:
        return "refused its options"
    if code == PORT_TAKEN_STATUS:
        return "found its port taken"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
