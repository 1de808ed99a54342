"""Runs the steps of a benchmark's model: a worker's data plane on a checkpoint, built as in a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bench.lib.checkpoints import MAX_MODEL_LEN, MEDIUM, SMALL, checkpoint
from bench.lib.workers import BenchWorker
from common.contracts.clock import SystemClock
from common.contracts.types import KvGeometry
from gpuworker.attention.backends import BackendOptions, make_backend
from gpuworker.config import GpuWorkerSettings
from gpuworker.engine.transfers import Transfers
from gpuworker.memory.byte_plan import frame_bytes
from gpuworker.memory.disk_frames import DiskFrames
from gpuworker.memory.disk_mover import DiskMover
from gpuworker.memory.host_frames import HostFrames
from gpuworker.memory.kv_cache import KvCache
from gpuworker.plane.assembly import ModelPlane, assemble, executor_for
from gpuworker.runner.model_runner import ModelRunner, RunnerLimits
from gpuworker.scheduling.batch_plan import StepRunner
from gpuworker.scheduling.outcomes import AgentConfig


def data_plane(model: str | None, shape: Mapping[str, object] = MEDIUM, **options: Any) -> ModelPlane:
    """Return the data plane of a worker with these options; `options` are those of `GpuWorkerSettings`."""
    with checkpoint(model, shape) as (folder, load_format):
        return assemble(GpuWorkerSettings(model=str(folder), load_format=load_format, **options))


def cpu_runner(
    config: AgentConfig, shape: Mapping[str, object] = SMALL, dtype: str = "float32"
) -> tuple[StepRunner, KvGeometry]:
    plane = data_plane(
        None,
        shape,
        device="cpu",
        dtype=dtype,
        kv_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
        prefix_caching=config.prefix_caching,
    )
    return plane.runner, plane.identity.kv_geometry


def plane_worker(plane: ModelPlane, block_size: int, disk: DiskFrames | None = None, **changes: Any) -> BenchWorker:
    """Return an engine on the model of a data plane, not yet started, with a cache of its own.

    `changes` are those to its `AgentConfig`, of which the engine makes its lease agent at once. With `host_frames`
    there are frames of host memory, too, and behind them those of a `disk`, which the engine closes.
    """
    geometry, device = plane.identity.kv_geometry, plane.model.device
    slots = plane.memory.num_blocks * plane.memory.block_size
    num_blocks = changes.pop("num_blocks", slots // block_size)
    cache = KvCache(geometry, num_blocks, block_size, device)
    if frames := changes.get("host_frames"):
        cache.frames = HostFrames(cache.pools, frame_bytes(geometry, block_size), frames)
    limits = RunnerLimits(plane.max_num_seqs, plane.memory.max_model_len, plane.settings.threads or 0)
    attention = make_backend("auto", cache, options=BackendOptions(deterministic=plane.settings.deterministic))
    runner = ModelRunner(plane.model, cache, attention, limits, executor_for(plane.model))
    config = replace(plane.agent_config(), num_blocks=num_blocks, block_size=block_size, **changes)
    if disk is None:
        return BenchWorker(runner, config, None, geometry)
    assert cache.frames is not None, "blocks come back from disk by way of host memory"
    worker = BenchWorker(runner, replace(config, disk_frames=disk.num_frames), None, geometry)
    mover, size = DiskMover(disk, worker.engine.wake), frame_bytes(geometry, block_size)
    transfers = Transfers(cache.frames, size, SystemClock(), mover, reset=disk.reset, groups=config.groups)
    worker.engine.transfer_by(transfers, disk.claims(), disk.reset)
    return worker
