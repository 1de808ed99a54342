"""An engine in a process of its own. The I/O process has a `RemoteEngine` with the interface of an `Engine`.

Requests go to the child and outputs come back over a socket pair, each pickled behind its length. They are the
immutable messages of `gpuworker/engine/ports.py`, so the engine and the servicer are the same in either case.
`python -m bench.lib.remote_engine FD RUNNER ROWS` is the child.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

from cli.suite.embedded import EmbeddedChannel
from common.contracts.clock import SystemClock
from common.contracts.lease import Attach
from common.contracts.types import FinishReason, KvGeometry, PoolIdentity, SequenceId
from common.process import die_with_parent
from common.process.python import module_command
from gpuworker.engine.engine import Engine
from gpuworker.engine.ports import EngineLoad, EngineRequest, OutputSink
from gpuworker.scheduling.batch_plan import StepRunner
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.scheduling.step_costs import StepCosts
from gpuworker.simulated.runner import SimulatedRunner
from gpuworker.simulated.tokens import SimulatedTokens

BLOCK_SIZE, BLOCKS = 16, 4096
_LENGTH = struct.Struct("<I")
IDENTITY = PoolIdentity("bench", "none", BLOCK_SIZE, KvGeometry(1, 1, 1, 1, "float32"))


def local_engine(runner: str, rows: int, sink: OutputSink) -> Engine:
    """Return an engine over a ledger in its process.

    `runner` is "sim:STEP:HELD", seconds, or "cpu": the benchmarks' small model.
    """
    config = AgentConfig(BLOCKS, BLOCK_SIZE, max_num_seqs=rows)
    attach = Attach("w0", bytes(16), 0, 0, IDENTITY, BLOCKS, "", max_num_seqs=rows)
    made = _runner(runner, config)
    return Engine(lambda: LeaseAgent(config), lambda: attach, made, EmbeddedChannel(SystemClock()), sink, SystemClock())


def _runner(name: str, config: AgentConfig) -> StepRunner:
    kind, *seconds = name.split(":")
    if kind == "sim":
        step, held = map(float, seconds)
        return SimulatedRunner(StepCosts(base=step), SimulatedTokens(range(7, 1007)), held)
    from bench.lib.models import cpu_runner

    return cpu_runner(config)[0]


def _send(end: socket.socket, message: object) -> None:
    data = pickle.dumps(message, protocol=5)
    end.sendall(_LENGTH.pack(len(data)) + data)


class RemoteEngine:
    """The part of an engine that a servicer uses, over a child process that has the engine. Lives on the I/O loop."""

    def __init__(self, runner: str, rows: int, sink: OutputSink) -> None:
        self._sink, self._load = sink, EngineLoad()
        self._end, theirs = socket.socketpair()
        argv = module_command("bench.lib.remote_engine", str(theirs.fileno()), runner, str(rows))
        self._process = subprocess.Popen(die_with_parent.command(argv), pass_fds=[theirs.fileno()])
        theirs.close()
        self.attach = Attach("w0", bytes(16), 0, 0, IDENTITY, BLOCKS)

    def start(self) -> None:
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._end)
        while True:
            try:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                outputs, self._load = pickle.loads(await reader.readexactly(length))
            except asyncio.IncompleteReadError:
                return
            if outputs is not None:
                self._sink(outputs)

    def submit(self, request: EngineRequest) -> None:
        self._write(request)

    def cancel(self, sequence: SequenceId, reason: FinishReason) -> None:
        self._write((sequence, reason))

    def _write(self, message: object) -> None:
        data = pickle.dumps(message, protocol=5)
        self._writer.write(_LENGTH.pack(len(data)) + data)

    def load(self) -> EngineLoad:
        """Return the load that came with the last outputs."""
        return self._load

    async def stop(self) -> None:
        self._writer.close()
        await asyncio.to_thread(self._process.wait)
        await self._reader


class _Host:
    """The child's side: an engine, and a thread that reads what the I/O process sends."""

    def __init__(self, end: socket.socket, runner: str, rows: int) -> None:
        self._end = end
        self._engine = local_engine(runner, rows, self._on_outputs)

    def _on_outputs(self, outputs: Any) -> None:
        _send(self._end, (outputs, replace(self._engine.load())))

    def run(self) -> None:
        """Serve until the I/O process closes its end."""
        self._engine.start()
        ready = threading.Event()
        while not self._engine.load().manager_attached:
            ready.wait(0.01)
        _send(self._end, (None, self._engine.load()))
        stream = self._end.makefile("rb")
        while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
            message = pickle.loads(stream.read(*_LENGTH.unpack(head)))
            if isinstance(message, EngineRequest):
                self._engine.submit_request(message)
            else:
                self._engine.cancel_request(*message)
        self._engine.stop()


if __name__ == "__main__":
    _Host(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], int(sys.argv[3])).run()
