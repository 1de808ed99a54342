"""What runs the steps of a benchmark's model: a worker's data plane on a checkpoint, put together as a worker does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.checkpoints import MAX_MODEL_LEN, MEDIUM, SMALL, checkpoint
from common.types import KvGeometry
from gpuworker.assembly import DataPlane, assemble
from gpuworker.config import GpuWorkerSettings
from gpuworker.core.batch_plan import StepRunner
from gpuworker.core.outcomes import AgentConfig


def data_plane(model: str | None, shape: Mapping[str, object] = MEDIUM, **options: Any) -> DataPlane:
    """Return what a worker with these options runs steps on; `options` are those of `GpuWorkerSettings`."""
    with checkpoint(model, shape) as (folder, load_format):
        return assemble(GpuWorkerSettings(model=str(folder), load_format=load_format, **options))


def cpu_runner(config: AgentConfig) -> tuple[StepRunner, KvGeometry]:
    """Return a runner of its own model and cache, small, and in float32."""
    plane = data_plane(
        None,
        SMALL,
        device="cpu",
        dtype="float32",
        kv_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
        prefix_caching=config.prefix_caching,
    )
    return plane.runner, plane.identity.kv_geometry
