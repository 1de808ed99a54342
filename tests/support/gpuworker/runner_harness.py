"""Drives a StepRunner by hand: sequences on scattered blocks, plans that mix prefills in odd chunks with decodes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common.contracts.lease import unread_blocks
from common.contracts.types import TRIMMED, BlockId, KvGeometry, KvGroup, SamplingParams, SequenceId
from gpuworker.attention.backends import make_backend
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.layout import attending_groups
from gpuworker.models.checkpoint_test import with_checkpoints
from gpuworker.models.choose import open_native
from gpuworker.models.hf.loader import ModelSource, load_model
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.self_test import self_test
from gpuworker.runner.model_runner import ModelRunner, RunnerLimits
from gpuworker.runner.native_executor import native_executor
from gpuworker.runner.thread_executor import thread_executor
from gpuworker.scheduling.batch_plan import ScheduledRow, StepPlan, StepResult
from gpuworker.scheduling.drafting import MAX_STEP_DRAFTS

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
SLOTS = 2048


def transformers_model(directory: Path) -> TransformersModel:
    """Return a model that computes in float32."""
    return load_model(ModelSource(str(directory), dtype="float32"), CPU)


def runner_on(
    model: TransformersModel,
    block_size: int = 16,
    max_model_len: int = 256,
    eos: tuple[int, ...] = (),
    grouped: bool = False,
) -> ModelRunner:
    """Return a runner with one thread and eight batch indices on a cache of 2048 slots.

    With `grouped` layers may be groups: the cache then has as many pages as it would have blocks, full of noise.
    """
    geometry = self_test(model, lambda cache: make_backend("auto", cache), block_size=block_size if grouped else 0)
    if grouped:
        geometry = with_checkpoints(model, lambda cache: make_backend("auto", cache), geometry, block_size)
    cache = _filled_cache(geometry, block_size, grouped)
    limits = RunnerLimits(8, max_model_len, threads=1)
    if model.states is not None:
        model.states.reserve(limits.max_num_seqs, MAX_STEP_DRAFTS)
    return ModelRunner(model, cache, make_backend("auto", cache), limits, thread_executor(), eos)


def queued_on(
    directory: Path,
    block_size: int = 16,
    max_model_len: int = 256,
    eos: tuple[int, ...] = (),
    grouped: bool = False,
    kv_cache_dtype: str = "auto",
) -> ModelRunner:
    """Return such a runner of a model on the native path, its steps queued natively."""
    opened = open_native(
        ModelSource(str(directory), dtype="float32", kv_cache_dtype=kv_cache_dtype),
        CPU,
        "native",
        lambda cache: make_backend("auto", cache),
        block_size if grouped else 0,
        checkpoints=grouped,
    )
    assert opened is not None
    model, geometry = opened
    cache = _filled_cache(geometry, block_size, grouped)
    limits = RunnerLimits(8, max_model_len, threads=1)
    if model.states is not None:
        model.states.reserve(limits.max_num_seqs)
    return ModelRunner(model, cache, make_backend("auto", cache), limits, native_executor, eos)


def _filled_cache(geometry: KvGeometry, block_size: int, noisy: bool) -> KvCache:
    cache = KvCache(geometry, SLOTS // block_size, block_size, CPU)
    for pool in cache.pools if noisy else ():
        pool.view(torch.uint8).copy_((8 * torch.randn(pool.shape)).to(pool.dtype).view(torch.uint8))
    return cache


@dataclass
class Stream:
    """One sequence as the driver sees it."""

    sequence: SequenceId
    prompt: Sequence[int]
    count: int
    chunk: int
    blocks: tuple[BlockId, ...]
    scheduled: int = 0
    output: list[int] = field(default_factory=list)
    tables: tuple[tuple[BlockId, ...], ...] = ()

    @property
    def last_position(self) -> int:
        """The last position that is ever computed: that of the last token but one."""
        return len(self.prompt) + self.count - 2

    def next_row(self) -> ScheduledRow | None:
        """Return the next chunk of the prompt or the next decode; None once all is scheduled."""
        if self.scheduled > self.last_position:
            return None
        length = min(self.chunk, len(self.prompt) - self.scheduled) if self.scheduled < len(self.prompt) else 1
        start, self.scheduled = self.scheduled, self.scheduled + length
        return ScheduledRow(self.sequence, start, length, self.blocks, samples=self.scheduled >= len(self.prompt))


class Pages:
    """Gives streams the pages of groups of layers step by step, and takes those that nobody reads any more."""

    def __init__(self, groups: Sequence[KvGroup], block_size: int, free: list[BlockId]) -> None:
        self.groups, self._block_size, self._free = attending_groups(groups), block_size, free

    def tables(self, stream: Stream, row: ScheduledRow) -> tuple[tuple[BlockId, ...], ...]:
        """Return the tables of a row; pages that left are the first to be taken again."""
        known = stream.tables or ((),) * len(self.groups)
        stream.tables = tuple(self._table(*pair, row) for pair in zip(self.groups, known, strict=True))
        return stream.tables

    def _table(self, group: KvGroup, table: tuple[BlockId, ...], row: ScheduledRow) -> tuple[BlockId, ...]:
        gone, before = group.pages * unread_blocks(group, row.start, self._block_size), table.count(TRIMMED)
        if gone > before:
            self._free += table[before:gone]
            table = (TRIMMED,) * gone + table[gone:]
        needed = group.pages * -(-(row.start + row.length) // self._block_size) - len(table)
        return table + tuple(self._free.pop() for _ in range(needed)) if needed > 0 else table


class Driver:
    """Runs streams through a runner, with one step in flight while the next is planned."""

    def __init__(
        self, runner: ModelRunner, block_size: int = 16, seed: int = 0, groups: Sequence[KvGroup] = ()
    ) -> None:
        self.runner = runner
        self._block_size = block_size
        self._free = [BlockId(block) for block in range(SLOTS // block_size)]
        random.Random(seed).shuffle(self._free)
        self.pages = Pages(groups, block_size, self._free) if groups else None
        self._streams: dict[SequenceId, Stream] = {}
        self._step = 0

    def add(
        self,
        prompt: Sequence[int],
        count: int,
        chunk: int = 1 << 20,
        sampling: SamplingParams = GREEDY,
        adapter: object | None = None,
    ) -> Stream:
        """Start a stream of `count` tokens after the prompt, prefilled `chunk` tokens a step."""
        needed = 0 if self.pages else -(-(len(prompt) + count) // self._block_size)
        blocks = tuple(self._free[:needed])
        del self._free[:needed]
        assert len(blocks) == needed
        stream = Stream(SequenceId(len(self._streams) + 1), prompt, count, chunk, blocks)
        self._streams[stream.sequence] = stream
        self.runner.add_sequence(stream.sequence, prompt, sampling, len(prompt), adapter)
        return stream

    def step(self) -> Future[StepResult] | None:
        """Submit one step over all streams; None when nothing is left to schedule."""
        rows = [row for stream in self._streams.values() if (row := stream.next_row())]
        if not rows:
            return None
        rows.sort(key=lambda row: row.length > 1)
        if self.pages:
            rows = [row._replace(tables=self.pages.tables(self._streams[row.sequence], row)) for row in rows]
        self._step += 1
        return self.runner.submit_step(StepPlan(self._step, tuple(rows)))

    def run(self) -> None:
        """Step until all streams have all their tokens."""
        flying: list[Future[StepResult]] = []
        while (future := self.step()) is not None or flying:
            if future is not None:
                flying.append(future)
            if len(flying) == 2 or future is None:
                self.take(flying.pop(0).result(timeout=60))

    def take(self, result: StepResult) -> None:
        """Append the sampled tokens of a step."""
        for sequence, tokens in result.sampled.items():
            self._streams[sequence].output.extend(tokens)
