"""Drives a real engine from a test: an embedded ledger or any other channel, requests in, finished outputs back."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from cli.suite.embedded import EmbeddedChannel
from common.contracts.clock import Clock, SystemClock
from common.contracts.hashing import (
    MIN_PARTIAL_BLOCK,
    all_partial_hashes,
    block_digests,
    block_hash_of,
    little_endian_int32,
    root_digest,
)
from common.contracts.lease import Attach, LeaseChannel
from common.contracts.types import (
    BlockHash,
    FinishReason,
    KvGeometry,
    PoolIdentity,
    SamplingParams,
    SequenceId,
    TokenLogprobs,
    Usage,
)
from gpuworker.engine.engine import Engine
from gpuworker.engine.ports import EngineOutputs, EngineRequest, OutputSink
from gpuworker.scheduling.batch_plan import StepRunner
from gpuworker.scheduling.drafting import speculation_of
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.scheduling.sequence import NewSequence
from gpuworker.scheduling.stopping import StopRule

GREEDY = SamplingParams(temperature=0.0)
PATIENCE = 120.0


@dataclass
class Result:
    """One sequence as a client sees it."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None
    usage: Usage = field(default_factory=Usage)
    stop_token: int | None = None
    message: str = ""
    embedding: bytes = b""
    cached_tokens: int = -1
    preemptions: int = 0


class EngineDriver:
    """An engine over a runner; `with` starts and stops it."""

    def __init__(
        self,
        runner: StepRunner,
        config: AgentConfig,
        channel: LeaseChannel | None = None,
        identity: PoolIdentity | None = None,
        sink: OutputSink | None = None,
        clock: Clock | None = None,
    ) -> None:
        geometry = KvGeometry(1, 1, 1, 1, "float32", config.window, groups=config.groups)
        self.identity = identity or PoolIdentity("model", "tokenizer", config.block_size, geometry)
        self.config = config
        self.channel = channel or EmbeddedChannel(SystemClock())
        self.runner = runner
        self._root = root_digest("model", "tokenizer", config.block_size)
        self._outputs: queue.Queue[EngineOutputs] = queue.Queue()
        self._ids = itertools.count(1)
        self.results: dict[SequenceId, Result] = {}
        self._incarnations = itertools.count(1)
        sink, clock = sink or self._outputs.put, clock or SystemClock()
        self.engine = Engine(lambda: LeaseAgent(config), self._attach, runner, self.channel, sink, clock)

    def _attach(self) -> Attach:
        config = self.config
        incarnation = next(self._incarnations).to_bytes(16, "big")
        return Attach(
            "worker-0",
            incarnation,
            0,
            0,
            self.identity,
            config.num_blocks,
            "",
            config.prefix_caching,
            config.max_num_seqs,
            host_frames=config.host_frames,
            disk_frames=config.disk_frames,
        )

    def __enter__(self) -> EngineDriver:
        self.engine.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.stop()

    def submit(
        self,
        prompt: Sequence[int],
        count: int,
        sampling: SamplingParams = GREEDY,
        *,
        priority: int = 0,
        fork_of: SequenceId | None = None,
        eos: Iterable[int] = (),
        output_before: int = 0,
        prediction: Sequence[int] = (),
        adapter: object | None = None,
    ) -> SequenceId:
        """Submit a sequence of at most `count` output tokens; the last `output_before` of its prompt are output too."""
        sequence = SequenceId(next(self._ids))
        size = self.config.block_size
        digests, hashes = block_digests(self._root, prompt, size), self.hashes(prompt)
        packed = little_endian_int32(prompt)
        new = NewSequence(
            sequence=sequence,
            request_id=f"r{sequence}",
            tokens=tuple(prompt),
            block_hashes=hashes,
            partial_hashes=all_partial_hashes(self._root, hashes, packed, size) if size >= MIN_PARTIAL_BLOCK else (),
            parent_digest=digests[-1] if digests else self._root,
            max_len=len(prompt) + count,
            stop=StopRule(count, sampling.min_tokens, frozenset(eos), frozenset(sampling.stop_token_ids)),
            priority=priority,
            fork_of=fork_of,
            speculation=speculation_of(sampling, tuple(prediction), output_before),
        )
        self.results[sequence] = Result()
        self.engine.submit_request(EngineRequest(new, sampling, len(prompt) - output_before, adapter=adapter))
        return sequence

    def hashes(self, tokens: Sequence[int]) -> tuple[BlockHash, ...]:
        """Return the hashes of the full blocks of these tokens."""
        return tuple(map(block_hash_of, block_digests(self._root, tokens, self.config.block_size)))

    def take(self) -> EngineOutputs:
        """Wait for the next outputs and enter them into the results."""
        outputs = self._outputs.get(timeout=PATIENCE)
        for admit in outputs.admitted:
            if self.results[admit.sequence].cached_tokens < 0:
                self.results[admit.sequence].cached_tokens = admit.cached_tokens
        for sequence, tokens in outputs.tokens:
            self.results[sequence].tokens.extend(tokens)
        for sequence, logprobs in outputs.logprobs.items():
            self.results[sequence].logprobs.extend(logprobs)
        for sequence in outputs.preempted:
            self.results[sequence].preemptions += 1
        for end in outputs.finished:
            result = self.results[end.sequence]
            result.reason, result.usage, result.stop_token = end.reason, end.usage, end.stop_token
            result.message, result.embedding = end.message, end.embedding
        return outputs

    def finish(self) -> list[Result]:
        """Wait until every sequence has ended; return the results in order of submission."""
        while any(result.reason is None for result in self.results.values()):
            self.take()
        return list(self.results.values())

    def run(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Run greedy sequences together and return their tokens."""
        started = [self.submit(prompt, count) for prompt in prompts]
        self.finish()
        return [self.results[sequence].tokens for sequence in started]

    def assert_all_free(self) -> None:
        """Wait until the ledger has no block table, lease or queue; fail with its counts if that never comes."""
        assert isinstance(self.channel, EmbeddedChannel)
        assert self.channel.ledger is not None
        ledger, deadline = self.channel.ledger, time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            pool = ledger.pool_counts()  # not at one instant: the engine's thread may change it meanwhile
            all_free = pool.free + pool.cached == self.config.num_blocks
            if all_free and pool.in_use == pool.leased == pool.running == pool.waiting == 0:
                return
            self.engine.wake()
        raise AssertionError(f"not everything was released: {ledger.pool_counts()}")
