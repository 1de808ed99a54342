"""A worker put together from its options: the precision asked for is that of cache, identity and ledger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from common.errors import InvalidConfig
from gpuworker.config import GpuWorkerSettings
from gpuworker.memory.byte_plan import bytes_per_block
from gpuworker.plane.assembly import ModelPlane, assemble
from tests.support.checkpoints import checkpoint


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Keep the process's number of threads, which assembling sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def assembled(**options: Any) -> ModelPlane:
    settings = GpuWorkerSettings(model=str(checkpoint("llama")), kv_blocks=64, threads=1, **options)
    plane = assemble(settings)
    plane.runner.close()
    return plane


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_cache_is_of_the_type_that_was_asked_for(dtype: str) -> None:
    plane = assembled(kv_cache_dtype=dtype)
    assert plane.identity.kv_geometry.dtype == dtype
    assert plane.model.dtype == torch.float32
    assert plane.memory.block_bytes == bytes_per_block(plane.identity.kv_geometry, 16)


def test_workers_whose_caches_differ_in_type_share_no_index() -> None:
    ours, theirs = assembled().identity, assembled(kv_cache_dtype="bfloat16").identity
    assert ours.namespace != theirs.namespace
    assert [(each.field, each.flag) for each in ours.differences(theirs)] == [
        ("kv_geometry.dtype", "--dtype or --kv-cache-dtype")
    ]


def test_a_quantization_that_the_model_cannot_have_ends_the_start() -> None:
    with pytest.raises(InvalidConfig, match="--quantization: int4 was asked for"):
        # A model on transformers: Gemma has no native path.
        assemble(GpuWorkerSettings(model=str(checkpoint("gemma2")), quantization="int4", threads=1))
