"""A worker put together from its options: the precision asked for is that of cache, identity and ledger."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3nTextConfig

from cli.demo_model import CHECKPOINT
from common.checkpoint.fingerprint import tokenizer_fingerprint
from common.contracts.errors import InvalidConfig
from common.contracts.lease import TierCopy
from common.contracts.transfers import Medium, Place, Transfer
from common.contracts.types import BlockHash, BlockId, FrameId
from gpuworker.config import GpuWorkerSettings
from gpuworker.memory.byte_plan import bytes_per_block
from gpuworker.memory.host_frames import HostFrames
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


def on_disk(root: Path, **options: Any) -> ModelPlane:
    return assembled(disk_cache=root, **({"host_memory": 1 << 20, "disk_cache_size": 4 << 20} | options))


def test_a_worker_that_restarts_finds_what_it_has_on_disk_and_loads_it_as_it_was(tmp_path: Path) -> None:
    first = on_disk(tmp_path, worker_id="w0", kv_cache_dtype="int8")
    assert first.disk is not None
    frames = first.disk.num_frames
    assert first.disk.image_bytes == first.memory.frame_bytes
    assert (first.disk_frames, first.agent_config().disk_frames) == (frames, frames)
    assert first.attach("w0", "a:1").disk_frames == frames > 4
    (line,) = [line for line in first.start_lines() if "disk" in line]
    assert line.endswith(f" MiB  {frames} more blocks in {tmp_path / 'w0'}")
    assert isinstance(first.images, HostFrames)
    for pool in first.images._pools:
        numbers = np.random.default_rng(1).integers(0, 100, pool.view(torch.uint8).shape, np.uint8)
        pool.view(torch.uint8).copy_(torch.from_numpy(numbers))
    block, frame = Place(Medium.BLOCK, FrameId(5)), Place(Medium.DISK, FrameId(2))
    hashes = BlockHash(b"h" * 16), BlockHash(b"p" * 16)
    first.disk.write(Transfer(1, *hashes, 3, block, frame), first.images.take(block))
    first.disk.close()

    second = on_disk(tmp_path, worker_id="w0", kv_cache_dtype="int8")
    assert second.disk is not None
    assert isinstance(second.images, HostFrames)
    (claim,) = second.disk.claims().contents
    assert (claim.block, claim.hash, claim.parent_hash, claim.depth) == (2, *hashes, 3)
    image = second.disk.read(Transfer(1, *hashes, 3, frame, Place(Medium.HOST, FrameId(0))))
    second.images.land(FrameId(0), image)
    second.images.copy(TierCopy(BlockId(7), BlockId(0), load=True))
    for ours, theirs in zip(first.images._pools, second.images._pools, strict=True):
        assert ours[:, 5].view(torch.uint8).count_nonzero()
        assert torch.equal(ours[:, 5].view(torch.uint8), theirs[:, 7].view(torch.uint8))
    second.disk.close()


def test_a_worker_of_other_weights_or_types_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = on_disk(tmp_path, worker_id="w0")
    assert first.disk is not None
    places = Place(Medium.BLOCK, FrameId(5)), Place(Medium.DISK, FrameId(2))
    move = Transfer(1, BlockHash(b"h" * 16), BlockHash(b"p" * 16), 3, *places)
    first.disk.write(move, bytes(first.disk.image_bytes))
    first.disk.close()
    other = on_disk(tmp_path, worker_id="w0", dtype="bfloat16", kv_cache_dtype="float32")
    assert other.disk is not None
    assert other.disk.claims().contents == ()
    assert "is emptied, its blocks are of another format: dtype was float32 and is bfloat16" in caplog.text
    other.disk.close()


def test_without_the_option_there_is_no_disk() -> None:
    plane = assembled(host_memory=1 << 20)
    assert (plane.disk, plane.disk_frames, plane.agent_config().disk_frames) == (None, 0, 0)
    assert not any("disk" in line for line in plane.start_lines())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"disk_cache_size": 70_000}, r"--disk-cache-size: is 68.4 KiB, and one block takes .* KiB; ask for more"),
        ({"pooling": "mean"}, "--disk-cache: keeps cached blocks, and a vector of pooling mean.* needs every token"),
    ],
)
def test_a_disk_cache_that_keeps_nothing_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        on_disk(tmp_path, **options)
