"""Drives an engine as in a worker, with the manager's ledger inside, on a host that has torch and little more."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cli.suite.embedded import EmbeddedChannel
from common.contracts.clock import SystemClock
from common.contracts.errors import EngineFailure
from common.contracts.hashing import block_digests, block_hash_of, root_digest
from common.contracts.lease import Attach
from common.contracts.types import FinishReason, KvGeometry, PoolIdentity, SamplingParams, SequenceId
from gpuworker.engine.engine import Engine
from gpuworker.engine.ports import EngineOutputs, EngineRequest
from gpuworker.scheduling.batch_plan import StepRunner
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.scheduling.sequence import NewSequence
from gpuworker.scheduling.stopping import StopRule

GREEDY = SamplingParams(temperature=0.0)
_PATIENCE = 600.0


@dataclass(frozen=True, slots=True)
class Stream:
    """The output of one sequence: its tokens, and the time of each (seconds, of one clock)."""

    tokens: list[int]
    times: list[float]


class EngineDriver:
    """An engine over a runner; sequences come all at once. Use it with `with`; it closes the runner."""

    def __init__(self, runner: StepRunner, config: AgentConfig, geometry: KvGeometry) -> None:
        self._config, self._ids = config, itertools.count(1)
        self._streams: dict[SequenceId, Stream] = {}
        self._open: set[SequenceId] = set()
        self._failure, self._done = "", threading.Event()
        attach = Attach(
            "bench",
            time.time_ns().to_bytes(16, "big"),
            session=0,
            epoch_seen=0,
            identity=PoolIdentity("bench", "none", config.block_size, geometry),
            num_blocks=config.num_blocks,
            prefix_caching=config.prefix_caching,
            max_num_seqs=config.max_num_seqs,
        )
        clock = SystemClock()
        self._engine = Engine(
            lambda: LeaseAgent(config), lambda: attach, runner, EmbeddedChannel(clock), self._take, clock
        )
        self._engine.ended.add_done_callback(lambda _: self._done.set())

    def __enter__(self) -> EngineDriver:
        self._engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.stop()

    def run(
        self, prompts: Sequence[Sequence[int]], output_tokens: int, sampling: SamplingParams = GREEDY
    ) -> list[Stream]:
        """Return the outputs of the prompts. Raises EngineFailure when a sequence fails or takes too long."""
        sampling = replace(sampling, max_tokens=output_tokens, ignore_eos=True)
        requests = [self._request(prompt, sampling) for prompt in prompts]
        names = [request.new.sequence for request in requests]
        self._streams = {name: Stream([], []) for name in names}
        self._open = set(names)
        self._done.clear()
        for request in requests:
            self._engine.submit_request(request)
        finished = self._done.wait(_PATIENCE)
        if self._failure or not finished or self._engine.ended.done():
            raise EngineFailure(self._failure or "the engine ended, or took too long")
        return [self._streams[name] for name in names]

    def _take(self, outputs: EngineOutputs) -> None:
        """Record a step's outputs, on the engine's thread."""
        now = time.perf_counter()
        for sequence, tokens in outputs.tokens:
            stream = self._streams[sequence]
            stream.tokens.extend(tokens)
            stream.times.extend([now] * len(tokens))
        for end in outputs.finished:
            if end.reason is FinishReason.ERROR:
                self._failure = end.message
            self._open.discard(end.sequence)
        if outputs.finished and (self._failure or not self._open):
            self._done.set()

    def _request(self, prompt: Sequence[int], sampling: SamplingParams) -> EngineRequest:
        output_tokens = sampling.max_tokens
        root = root_digest("bench", "none", self._config.block_size)
        digests = block_digests(root, prompt, self._config.block_size)
        sequence = SequenceId(next(self._ids))
        new = NewSequence(
            sequence=sequence,
            request_id=str(sequence),
            tokens=tuple(prompt),
            block_hashes=tuple(map(block_hash_of, digests)),
            parent_digest=digests[-1] if digests else root,
            max_len=len(prompt) + output_tokens,
            stop=StopRule(output_tokens),
        )
        return EngineRequest(new, sampling, len(prompt))


def random_prompts(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Return prompts that share nothing; ids from 3 on, since the first may be special."""
    rng = random.Random(seed)
    return [[rng.randrange(3, vocabulary) for _ in range(length)] for _ in range(count)]


def decode_rate(streams: Sequence[Stream], skipped: int) -> float:
    """Return tokens a second while all streams decode: after the first `skipped` tokens of each, until one ends."""
    begin = max(stream.times[skipped - 1] for stream in streams)
    end = min(stream.times[-1] for stream in streams)
    drawn = sum(begin < at <= end for stream in streams for at in stream.times)
    return drawn / (end - begin)
