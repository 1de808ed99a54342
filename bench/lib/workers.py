"""Engines for benchmarks: an engine with its I/O loop, over a ledger inside or a KV-manager process, and its load."""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType

import psutil
import uvloop

from cli.benchmark.closed_loop import Record
from cli.benchmark.requests import Request, Workload
from cli.certificates.folder import CertificateFolder
from cli.suite.embedded import EmbeddedChannel
from cli.suite.stack import free_ports
from common.contracts.clock import SystemClock
from common.contracts.errors import EngineFailure
from common.contracts.hashing import block_digests, block_hash_of, root_digest
from common.contracts.lease import Attach, LeaseChannel
from common.contracts.types import FinishReason, KvGeometry, PoolIdentity, SamplingParams, SequenceId, TokenLogprobs
from common.process import die_with_parent
from common.process.python import module_command
from common.rpc.health import wait_until_serving
from common.rpc.roles import Role
from common.rpc.server import Dial, dialer, open_channel
from common.rpc.tls import Identity
from gpuworker.engine.engine import Engine
from gpuworker.engine.lease_client import LeaseClient
from gpuworker.engine.ports import EngineOutputs, EngineRequest
from gpuworker.scheduling.batch_plan import StepRunner
from gpuworker.scheduling.drafting import speculation_of
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.outcomes import AgentConfig, SequenceFinished
from gpuworker.scheduling.sequence import NewSequence
from gpuworker.scheduling.stopping import StopRule
from gpuworker.server.output_buffer import OutputBuffer
from kvmanager.contracts.counts import Totals

_START_SECONDS = 30.0


@contextmanager
def manager_process(block_size: int, certs: CertificateFolder | None = None) -> Iterator[tuple[str, psutil.Process]]:
    """Run a KV manager without Redis, with TLS if there are certificates; yield its address and its process."""
    port, metrics_port = free_ports(2)
    folder = tempfile.TemporaryDirectory(prefix="quire-bench-")
    flags = ["--port", str(port), "--metrics-port", str(metrics_port), "--block-size", str(block_size)]
    flags += ["--state-dir", folder.name]
    flags += [] if certs is None else certs.role(Role.MANAGER).flags()
    command = module_command("kvmanager", *flags, "--log-level", "warning", "--trace-sample-ratio", "0")
    process = subprocess.Popen(die_with_parent.command(command), stdout=subprocess.DEVNULL)
    address = f"127.0.0.1:{port}"
    try:
        asyncio.run(_wait(address, dialer(identity_of(certs, Role.OPERATOR), Role.MANAGER)))
        yield address, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()
        folder.cleanup()


def identity_of(certs: CertificateFolder | None, role: Role) -> Identity | None:
    return None if certs is None else certs.role(role).identity()


async def _wait(address: str, dial: Dial) -> None:
    async with dial(address) as channel:
        await wait_until_serving(channel, _START_SECONDS)


@dataclass(slots=True)
class Resume:
    """When a sequence was preempted, when it was admitted again, and when its next token came. Seconds; 0: not yet."""

    preempted: float
    admitted: float = 0.0
    token: float = 0.0

    @property
    def queued(self) -> float:
        return self.admitted - self.preempted

    @property
    def resumed(self) -> float:
        return self.token - self.admitted


class ResumeWatch:
    """Follows sequences from their preemption to the next token."""

    def __init__(self) -> None:
        self._open: dict[SequenceId, Resume] = {}

    def take(self, outputs: EngineOutputs, now: float) -> list[Resume]:
        """Note the outputs of a turn; return what came to its end in it."""
        ended = list[Resume]()
        for sequence, _ in outputs.tokens:
            if (found := self._open.get(sequence)) is not None and found.admitted:
                found.token = now
                ended.append(self._open.pop(sequence))
        # In this order: a step that ran before the preemption may still give a token.
        self._open.update((sequence, Resume(now)) for sequence in outputs.preempted)
        for admit in outputs.admitted:
            if (found := self._open.get(admit.sequence)) is not None:
                found.admitted = now
        for end in outputs.finished:
            self._open.pop(end.sequence, None)
        return ended


@dataclass
class Run:
    """The result of one load, in seconds. `first_tokens` has times to first tokens, `outputs` the tokens, by sequence.

    `records` has the same in full, by request. `prompt_logprobs` has those of prompts, where they were asked for.
    `resumes` has each preemption after which a token came.
    """

    seconds: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_tokens: list[float] = field(default_factory=list)
    outputs: dict[SequenceId, list[int]] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    resumes: list[Resume] = field(default_factory=list)
    prompt_logprobs: dict[SequenceId, list[TokenLogprobs]] = field(default_factory=dict)


class BenchWorker:
    """An engine as in a worker: its thread, the runner's thread, and an I/O loop that packs outputs for a router.

    `manager` is the address of a KV manager, or None for the ledger in this process. Use it with `with`.
    """

    def __init__(
        self,
        runner: StepRunner,
        config: AgentConfig,
        manager: str | None,
        geometry: KvGeometry | None = None,
        dial: Dial = open_channel,
    ):
        self.config = config
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="io", daemon=True)
        self._client = LeaseClient([manager], self._wake, dial=dial) if manager is not None else None
        self._embedded = EmbeddedChannel(SystemClock())
        channel: LeaseChannel = self._client or self._embedded
        geometry = geometry or KvGeometry(1, 1, 1, 1, "float32", config.window)
        self._identity = PoolIdentity("bench", "none", config.block_size, geometry)
        self._ids = itertools.count(1)
        self._incarnations = itertools.count(time.time_ns())
        self._live: dict[SequenceId, Record] = {}
        self._resumes = ResumeWatch()
        self._workload, self._salt = Workload("", []), ""
        self._run, self._done = Run(), threading.Event()
        self._failure = ""
        self._buffer = OutputBuffer()
        self.sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        """The sampling parameters of all requests."""
        self.stop_token_ids: frozenset[int] = frozenset()
        """Tokens that end a request early."""
        self.engine = Engine(self._agent, self._attach, runner, channel, self._sink, SystemClock())

    @property
    def totals(self) -> Totals:
        """The totals of the ledger in this process."""
        assert self._embedded.ledger is not None, "the worker has a manager of its own"
        return self._embedded.ledger.pool_counts().totals

    @property
    def saves(self) -> bool:
        """Whether blocks are still to be saved to disk."""
        assert self._embedded.ledger is not None, "the worker has a manager of its own"
        transfers = self._embedded.ledger.state.transfers
        return bool(transfers.saves or transfers.to_save or transfers.orders)

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
            host_frames=config.host_frames,
            disk_frames=config.disk_frames,
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
        """Do the work of a worker's I/O loop for a step: pack one message for the router, and record the outputs."""
        now = time.perf_counter()
        for admit in outputs.admitted:
            self._live[admit.sequence].cached_tokens = admit.cached_tokens
        for sequence, scores in outputs.prompt_logprobs.items():
            self._run.prompt_logprobs.setdefault(sequence, []).extend(scores)
        for sequence, tokens in outputs.tokens:
            self._buffer.tokens(outputs.step, sequence, tokens, ())
            self._live[sequence].add(tokens, now)
        self._run.resumes += self._resumes.take(outputs, now)
        for end in outputs.finished:
            self._buffer.finished(end.sequence, end)
            self._end(end)
        if self._buffer:
            self._buffer.take_outputs().SerializeToString()
        if not self._live:
            self._done.set()

    def _end(self, end: SequenceFinished) -> None:
        """Record the end of a sequence; its conversation goes on."""
        record = self._live.pop(end.sequence)
        if end.reason is FinishReason.ERROR:
            self._failure = end.message
            return
        self._run.outputs[end.sequence] = record.tokens
        following = self._workload.follow_up(record.request, record.tokens)
        if following is not None:
            self._submit([following])

    def load(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> Run:
        """Submit greedy sequences all at once and wait for their ends.

        Raises EngineFailure when one of them fails, because the run measures nothing then.
        """
        requests = [Request(str(index), list(prompt), output_tokens) for index, prompt in enumerate(prompts)]
        return self.drive(Workload("load", requests))

    def drive(self, workload: Workload, salt: str = "") -> Run:
        """Run a workload to its end; with a new `salt` no cached block matches. Raises EngineFailure, as `load`."""
        self._workload, self._salt, self._run = workload, salt, Run()
        self._done.clear()
        began = time.perf_counter()
        self._submit(workload.initial)
        self._done.wait()
        run = self._run
        run.seconds = time.perf_counter() - began
        self._rest()
        if self._failure or self.engine.ended.done():
            raise EngineFailure(self._failure or "the engine ended")
        run.tokens = sum(len(record.tokens) for record in run.records.values())
        run.prompt_tokens = sum(len(record.request.prompt) for record in run.records.values())
        run.cached_tokens = sum(record.cached_tokens for record in run.records.values())
        run.first_tokens = [record.first_token for record in run.records.values()]
        run.outputs = {sequence: run.outputs[sequence] for sequence in sorted(run.outputs)}
        return run

    def _rest(self) -> None:
        """Wait for the step that was queued behind the last token: another worker on the same model uses its memory."""
        while self.engine.load().step_age_seconds and not self.engine.ended.done():
            time.sleep(0.001)

    def _submit(self, requests: Sequence[Request]) -> None:
        """Submit requests to the engine; all are recorded before the first of them can end."""
        made = [self._request(request) for request in requests]
        for each, request in zip(made, requests, strict=True):
            record = Record(request, time.perf_counter())
            self._live[each.new.sequence] = self._run.records[request.rid] = record
        for each in made:
            self.engine.submit_request(each)

    def _request(self, request: Request) -> EngineRequest:
        extra = [("salt", self._salt)] if self._salt else []
        root = root_digest("bench", "none", self.config.block_size, extra_keys=extra)
        digests = block_digests(root, request.prompt, self.config.block_size)
        sequence = SequenceId(next(self._ids))
        new = NewSequence(
            sequence=sequence,
            request_id=request.rid,
            tokens=tuple(request.prompt),
            block_hashes=tuple(map(block_hash_of, digests)),
            parent_digest=digests[-1] if digests else root,
            max_len=len(request.prompt) + request.max_new_tokens,
            stop=StopRule(request.max_new_tokens, stop_token_ids=self.stop_token_ids),
            speculation=speculation_of(self.sampling, (), 0),
            score_until=0 if self.sampling.prompt_logprobs is None else len(request.prompt) - 1,
        )
        sampling = replace(self.sampling, max_tokens=request.max_new_tokens)
        return EngineRequest(new, sampling, len(request.prompt))


def random_prompts(count: int, length: int, seed: int, vocabulary: int = 1000) -> list[list[int]]:
    """Return prompts without common prefixes."""
    rng = random.Random(seed)
    return [[rng.randrange(1, vocabulary) for _ in range(length)] for _ in range(count)]
