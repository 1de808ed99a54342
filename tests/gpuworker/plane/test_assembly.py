"""A worker put together from its options: the precision asked for is that of cache, identity and ledger."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3nTextConfig

from cli.demo_model import CHECKPOINT
from common.checkpoint.fingerprint import tokenizer_fingerprint
from common.contracts.errors import InvalidConfig
from gpuworker.config import GpuWorkerSettings
from gpuworker.memory.byte_plan import bytes_per_block
from gpuworker.models.hf.tiny import tiny_config
from gpuworker.plane.assembly import ModelPlane, allocated_cache, assemble
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


def test_workers_that_pool_otherwise_share_no_pool_and_a_mean_takes_no_hits() -> None:
    generates, last, mean = assembled(), assembled(pooling="last"), assembled(pooling="mean")
    assert [each.identity.pooling for each in (generates, last, mean)] == [
        "none",
        "last, normalised",
        "mean, normalised",
    ]
    assert len({each.identity.namespace for each in (generates, last, mean)}) == 3
    assert [each.agent_config().prefix_caching for each in (generates, last, mean)] == [True, True, False]
    assert mean.memory.activations > last.memory.activations


def test_a_cache_that_the_system_does_not_give_is_refused_in_words() -> None:
    plane = assembled()
    huge = replace(plane.identity.kv_geometry, head_dim_k=1 << 20, head_dim_v=1 << 20)
    memory = replace(plane.memory, num_blocks=1 << 30, block_bytes=bytes_per_block(huge, 16))
    words = (
        r"--kv-memory: 786432\.0 TiB for the KV cache cannot be had on cpu: .*Cannot allocate memory.*; ask for less"
    )
    with pytest.raises(InvalidConfig, match=words):
        allocated_cache(huge, memory, torch.device("cpu"))


def test_another_tokenizer_is_another_pool_and_that_of_constraints() -> None:
    plane = assembled(tokenizer=CHECKPOINT)
    assert plane.identity.tokenizer_fingerprint == tokenizer_fingerprint(CHECKPOINT)
    assert plane.identity.tokenizer_fingerprint != assembled().identity.tokenizer_fingerprint


def test_a_model_whose_layers_have_sizes_of_their_own_is_served(tmp_path: Path) -> None:
    """gemma3n has a list of sizes where others have a number."""
    config = tiny_config(Gemma3nTextConfig())
    assert len(set(config.intermediate_size)) == 1, "sizes may differ"
    config.intermediate_size = [96, 64, *config.intermediate_size[2:]]
    config.save_pretrained(tmp_path)
    plane = assemble(GpuWorkerSettings(model=str(tmp_path), load_format="dummy", kv_blocks=64, threads=1))
    plane.runner.close()
    assert plane.memory.activations > 0


def test_a_quantization_that_the_model_cannot_have_ends_the_start() -> None:
    with pytest.raises(InvalidConfig, match="--quantization: int4 was asked for"):
        # A model on transformers: Gemma has no native path.
        assemble(GpuWorkerSettings(model=str(checkpoint("gemma2")), quantization="int4", threads=1))
