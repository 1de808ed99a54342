"""Engines for benchmarks: an engine with its I/O loop, over a ledger inside or a KV-manager process, and its load."""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

import grpc
import psutil
import uvloop

from cli.embedded import EmbeddedChannel
from cli.stack import free_ports
from common import die_with_parent
from common.clock import SystemClock
from common.errors import EngineFailure
from common.hashing import chain, chain_root, key_of
from common.lease import Attach, LeaseChannel
from common.rpc.health import wait_until_serving
from common.types import FinishReason, KvGeometry, PoolIdentity, SamplingParams, SequenceId
from gpuworker.core.batch_plan import StepRunner
from gpuworker.core.lease_agent import LeaseAgent
from gpuworker.core.outcomes import AgentConfig
from gpuworker.core.sequence import NewSequence
from gpuworker.core.stopping import StopRule
from gpuworker.engine import Engine
from gpuworker.lease_client import LeaseClient
from gpuworker.output_buffer import OutputBuffer
from gpuworker.ports import EngineOutputs, EngineRequest

_START_SECONDS = 30.0


@contextmanager
def manager_process(block_size: int) -> Iterator[tuple[str, psutil.Process]]:
    """Run a KV manager without Redis; yield its address and its process."""
    port, metrics_port = free_ports(2)
    folder = tempfile.TemporaryDirectory(prefix="quire-bench-")
    flags = ["--port", str(port), "--metrics-port", str(metrics_port), "--block-size", str(block_size)]
    flags += ["--state-dir", folder.name]
    command = [sys.executable, "-m", "kvmanager.main", *flags, "--log-level", "warning", "--trace-sample-ratio", "0"]
    process = subprocess.Popen(die_with_parent.command(command), stdout=subprocess.DEVNULL)
    address = f"127.0.0.1:{port}"
    try:
        asyncio.run(_wait(address))
        yield address, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()
        folder.cleanup()


async def _wait(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        await wait_until_serving(channel, _START_SECONDS)


@dataclass
class Run:
    """What one load took. Seconds; `first_tokens` has each sequence's time to its first token, `outputs` its tokens."""

    seconds: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_tokens: list[float] = field(default_factory=list)
    outputs: dict[SequenceId, list[int]] = field(default_factory=dict)


class BenchWorker:
    """An engine as a worker has it: its thread, the runner's thread, and an I/O loop that packs outputs for a router.

    `manager` is the address of a KV manager, or None for the ledger in this process. Use it with `with`.
    """

    def __init__(
        self, runner: StepRunner, config: AgentConfig, manager: str | None, geometry: KvGeometry | None = None
    ):
        self.config = config
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="io", daemon=True)
        self._client = LeaseClient(manager, self._wake) if manager is not None else None
        channel: LeaseChannel = self._client or EmbeddedChannel(SystemClock())
        geometry = geometry or KvGeometry(1, 1, 1, 1, "float32", config.window)
        self._identity = PoolIdentity("bench", "none", config.block_size, geometry)
        self._root = chain_root("bench", "none", config.block_size)
        self._ids = itertools.count(1)
        self._incarnations = itertools.count(time.time_ns())
        self._began: dict[SequenceId, float] = {}
        self._run, self._left, self._done = Run(), 0, threading.Event()
        self._failure = ""
        self._buffer = OutputBuffer()
        self.engine = Engine(self._agent, self._attach, runner, channel, self._sink, SystemClock())

    def _wake(self) -> None:
        self.engine.wake()

    def _agent(self) -> LeaseAgent:
        return LeaseAgent(self.config)

    def _attach(self) -> Attach:
        config, incarnation = self.config, next(self._incarnations).to_bytes(16, "big")
        return Attach(
            f"bench-{incarnation.hex()}",
            incarnation,
            session=0,
            epoch_seen=0,
            identity=self._identity,
            num_blocks=config.num_blocks,
            prefix_caching=config.prefix_caching,
            max_num_seqs=config.max_num_seqs,
        )

    def __enter__(self) -> BenchWorker:
        self._thread.start()
        if self._client is not None:
            asyncio.run_coroutine_threadsafe(self._client.start(), self._loop).result()
        self.engine.ended.add_done_callback(lambda _: self._done.set())
        self.engine.start()
        deadline = time.monotonic() + _START_SECONDS
        while not self.engine.load().manager_attached:
            if time.monotonic() > deadline:
                raise TimeoutError("the engine did not get a session with the KV manager")
            time.sleep(0.005)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.stop()
        if self._client is not None:
            asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _sink(self, outputs: EngineOutputs) -> None:
        self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: EngineOutputs) -> None:
        """Do what a worker's I/O loop does with a step: pack one message for the router; and keep the books."""
        now = time.perf_counter()
        for admit in outputs.admitted:
            self._run.cached_tokens += admit.cached_tokens
        for sequence, tokens in outputs.tokens:
            self._buffer.tokens(outputs.step, sequence, tokens, ())
            self._run.tokens += len(tokens)
            self._run.outputs[sequence].extend(tokens)
            began = self._began.pop(sequence, None)
            if began is not None:
                self._run.first_tokens.append(now - began)
        for end in outputs.finished:
            self._buffer.finished(end.sequence, end)
            if end.reason is FinishReason.ERROR:
                self._failure = end.message
        if self._buffer:
            self._buffer.take().SerializeToString()
        self._left -= len(outputs.finished)
        if not self._left:
            self._done.set()

    def load(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> Run:
        """Submit greedy sequences all at once and wait for their ends.

        Raises EngineFailure when one of them fails: there is nothing to measure then.
        """
        self._run, self._left = Run(prompt_tokens=sum(map(len, prompts))), len(prompts)
        self._done.clear()
        requests = [self._request(prompt, output_tokens) for prompt in prompts]
        began = time.perf_counter()
        for request in requests:
            self._run.outputs[request.new.sequence] = []
            self._began[request.new.sequence] = time.perf_counter()
            self.engine.submit(request)
        self._done.wait()
        self._run.seconds = time.perf_counter() - began
        if self._failure or self.engine.ended.done():
            raise EngineFailure(self._failure or "the engine ended")
        return self._run

    def _request(self, prompt: Sequence[int], output_tokens: int) -> EngineRequest:
        links = chain(self._root, prompt, self.config.block_size)
        sequence = SequenceId(next(self._ids))
        new = NewSequence(
            sequence=sequence,
            request_id=str(sequence),
            tokens=tuple(prompt),
            chain=tuple(map(key_of, links)),
            chain_tail=links[-1] if links else self._root,
            max_len=len(prompt) + output_tokens,
            stop=StopRule(output_tokens),
        )
        return EngineRequest(new, SamplingParams(temperature=0.0, max_tokens=output_tokens), len(prompt))


def random_prompts(count: int, length: int, seed: int, vocabulary: int = 1000) -> list[list[int]]:
    """Return prompts that share nothing."""
    rng = random.Random(seed)
    return [[rng.randrange(1, vocabulary) for _ in range(length)] for _ in range(count)]
