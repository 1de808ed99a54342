"""A step says how long its copies to host memory and back took, apart from the step itself, on each way to run it."""

from __future__ import annotations

import time
from typing import ClassVar, cast

import pytest
import torch

from common.contracts.lease import TierCopy
from common.contracts.types import BlockId, KvGeometry, SequenceId
from gpuworker.memory.byte_plan import frame_bytes
from gpuworker.memory.host_frames import HostFrames
from gpuworker.memory.kv_cache import KvCache
from gpuworker.native.library import best
from gpuworker.runner.model_runner import ModelRunner
from gpuworker.runner.thread_executor import ThreadExecutor
from gpuworker.scheduling.batch_plan import ScheduledRow, StepPlan, StepResult
from tests.support.checkpoints import checkpoint
from tests.support.gpuworker import runner_harness
from tests.support.gpuworker.runner_harness import GREEDY, queued_on, runner_on, transformers_model

FRAMES = 128
"""As many as the harness makes blocks of 16 slots."""
needs_native = pytest.mark.skipif(best() is None, reason="the native library was not built")


@pytest.fixture(params=["thread", pytest.param("queue", marks=needs_native)])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """Return a runner whose cache has a frame for each block."""
    made = runner_harness._filled_cache

    def with_frames(geometry: KvGeometry, block_size: int, noisy: bool) -> KvCache:
        cache = made(geometry, block_size, noisy)
        cache.frames = HostFrames(cache.pools, frame_bytes(geometry, block_size), FRAMES)
        return cache

    monkeypatch.setattr(runner_harness, "_filled_cache", with_frames)
    folder = checkpoint("llama")
    return runner_on(transformers_model(folder)) if request.param == "thread" else queued_on(folder)


def stepped(runner: ModelRunner, number: int, start: int, copies: tuple[TierCopy, ...]) -> tuple[StepResult, float]:
    """Run a step of one position; return its result and the seconds that passed."""
    began = time.perf_counter()
    plan = StepPlan(number, (ScheduledRow(SequenceId(1), start, 1, (BlockId(0),), True),), copies)
    result = runner.submit_step(plan).result(60.0)
    return result, time.perf_counter() - began


def test_copies_have_seconds_of_their_own(runner: ModelRunner) -> None:
    stores = tuple(TierCopy(BlockId(n), BlockId(n)) for n in range(1, FRAMES))
    loads = tuple(TierCopy(BlockId(n), BlockId(FRAMES - n), load=True) for n in range(1, FRAMES))
    runner.add_sequence(SequenceId(1), [7], GREEDY, 1)
    plain, _ = stepped(runner, 1, 0, ())
    copied, passed = stepped(runner, 2, 1, (*stores, *loads))
    after, _ = stepped(runner, 3, 2, ())
    runner.close()
    assert (plain.copy_seconds, after.copy_seconds) == (0.0, 0.0)
    assert 0.0 < copied.copy_seconds < passed
    assert 0.0 < copied.seconds <= passed - copied.copy_seconds


class Event:
    """An event of CUDA, which notes when it was recorded and what was waited for."""

    told: ClassVar[list[str]] = []

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing, "no time can be read of other events"

    def record(self) -> None:
        self.told.append("record")

    def synchronize(self) -> None:
        self.told.append("wait")

    def elapsed_time(self, end: Event) -> float:
        assert self.told[-1] == "wait", "the time of copies that run yet cannot be read"
        return 250.0  # ms


class Cache:
    def copy_blocks(self, copies: tuple[TierCopy, ...]) -> None:
        Event.told.append(f"{len(copies)} copies")


def test_on_cuda_events_on_the_stream_time_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits when the copies are queued, and the time is read when the step is over."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    executor = object.__new__(ThreadExecutor)
    executor._on_cuda, executor._cache = True, cast("KvCache", Cache())
    seconds = executor._copy((TierCopy(BlockId(1), BlockId(1)),))
    assert Event.told == ["record", "1 copies", "record"]
    assert (seconds(), Event.told[-1]) == (0.25, "wait")
