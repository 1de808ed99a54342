"""Frames of host memory: bytes go there and come back, in any type of cache, by torch and as addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.contracts.lease import Copy, TierCopy
from common.contracts.transfers import Medium, Place
from common.contracts.types import BlockId, FrameId, KvGeometry
from gpuworker.memory.byte_plan import bytes_per_block, frame_bytes
from gpuworker.memory.host_frames import HostFrames
from gpuworker.memory.kv_cache import KvCache

GEOMETRY = KvGeometry(2, 3, 8, 4, "float32")
KINDS = {
    "float32": GEOMETRY,
    "bfloat16": replace(GEOMETRY, dtype="bfloat16"),
    "float16": replace(GEOMETRY, dtype="float16"),
    "int8": replace(GEOMETRY, dtype="int8"),
    "fp8": replace(GEOMETRY, dtype="fp8"),
    "latents": KvGeometry(2, 1, 9, 5, "int8", values_in_keys=True),
    "indexed": KvGeometry(2, 1, 9, 5, "int8", shapes="a=1x9/5,6:bfloat16 b=1x9+5 ab"),
    "shapes": KvGeometry(3, 1, 8, 8, "float32", shapes="a=1x8+8 b=2x4+6 aba"),
}


def store(block: int, frame: int) -> TierCopy:
    return TierCopy(BlockId(block), BlockId(frame))


def load(frame: int, block: int) -> TierCopy:
    return TierCopy(BlockId(block), BlockId(frame), load=True)


def cache_of(kind: str, block_size: int = 4, blocks: int = 5) -> KvCache:
    """Return a cache of random bytes, with frames."""
    made = KvCache(KINDS[kind], blocks, block_size, torch.device("cpu"))
    rng = np.random.default_rng(1)
    for pool in made.pools:
        pool.view(torch.uint8).copy_(torch.from_numpy(rng.integers(0, 256, pool.view(torch.uint8).shape, np.uint8)))
    made.frames = HostFrames(made.pools, frame_bytes(KINDS[kind], block_size), 3)
    return made


def content(cache: KvCache, block: int) -> bytes:
    return b"".join(pool[:, block].contiguous().view(torch.uint8).numpy().tobytes() for pool in cache.pools)


def by_torch(cache: KvCache, copies: Sequence[Copy | TierCopy]) -> None:
    cache.copy_blocks(copies)


def by_address(cache: KvCache, copies: Sequence[Copy | TierCopy]) -> None:
    """Make the copies of each round in the opposite order: no order is promised within one."""
    assert cache.frames is not None
    for moves in cache.frames.rounds(copies):
        for to, begin, count in moves[::-1].tolist():
            ctypes.memmove(to, begin, count)


@pytest.mark.parametrize("copy", [by_torch, by_address])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [1, 4])
def test_a_block_comes_back_as_it_went(copy: object, kind: str, block_size: int) -> None:
    cache = cache_of(kind, block_size)
    first, second, third = content(cache, 0), content(cache, 1), content(cache, 2)
    made = [store(0, 2), store(1, 0), load(2, 1), load(0, 3), Copy(BlockId(1), BlockId(0), 0), store(2, 2), load(2, 4)]
    copy(cache, made)  # type: ignore[operator]
    assert [content(cache, block) for block in range(5)] == [first, first, third, second, third]


def block(number: int) -> Place:
    return Place(Medium.BLOCK, FrameId(number))


def frame(number: int) -> Place:
    return Place(Medium.HOST, FrameId(number))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [1, 4])
def test_the_image_of_a_block_is_that_of_the_frame_which_it_is_copied_to(kind: str, block_size: int) -> None:
    cache = cache_of(kind, block_size)
    frames = cache.frames
    assert frames is not None
    cache.copy_blocks([store(3, 1), store(4, 2)])
    images = [bytes(frames.take(block(number))) for number in (3, 4)]
    assert images == [bytes(frames.take(frame(number))) for number in (1, 2)]
    assert images[0] != images[1]
    assert {len(each) for each in images} == {frame_bytes(KINDS[kind], block_size)}
    taken = {byte for image in images for byte in image[bytes_per_block(KINDS[kind], block_size) :]}
    assert taken <= {0}, "behind the last pool there is nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_lands_in_another_cache_as_it_was_taken(kind: str) -> None:
    ours, theirs = cache_of(kind), cache_of(kind)
    assert ours.frames is not None
    assert theirs.frames is not None
    before = [content(theirs, number) for number in range(5)]
    theirs.frames.land(FrameId(2), ours.frames.take(block(3)))
    assert [content(theirs, number) for number in range(5)] == before
    theirs.copy_blocks([load(2, 0)])
    assert content(theirs, 0) == content(ours, 3) != before[0]
    assert [content(theirs, number) for number in range(1, 5)] == before[1:]
    theirs.frames.land(FrameId(0), bytes(ours.frames.take(block(4))))
    assert theirs.frames.take(frame(2)) == ours.frames.take(block(3)), "other frames stay"


def test_frames_in_which_states_have_landed_are_known_until_k_and_v_land_there() -> None:
    frames = cache_of("float32").frames
    assert frames is not None
    image = frames.take(block(3))
    frames.land(FrameId(2), image, of_states=True)
    frames.land(FrameId(1), image, of_states=True)
    frames.land(FrameId(2), image)
    assert frames.of_states == {FrameId(1)}


def test_an_image_is_a_copy() -> None:
    cache = cache_of("bfloat16")
    frames = cache.frames
    assert frames is not None
    cache.copy_blocks([store(0, 0)])
    taken = frames.take(block(0)), frames.take(frame(0))
    cache.copy_blocks([Copy(BlockId(1), BlockId(0), 0), store(1, 0)])
    assert taken[0] == taken[1] != frames.take(block(0)) == frames.take(frame(0))


def test_rounds_hold_what_may_be_copied_in_any_order() -> None:
    cache = cache_of("float32")
    assert cache.frames is not None
    free = [store(0, 0), store(1, 1), load(2, 3)]
    assert len(list(cache.frames.rounds(free))) == 1
    assert len(list(cache.frames.rounds([*free, load(0, 1)]))) == 2, "a block that was read is written"
    assert len(list(cache.frames.rounds([store(0, 0), load(0, 1), store(1, 1)]))) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_takes_the_bytes_of_a_block_in_whole_lines(kind: str) -> None:
    geometry = KINDS[kind]
    size = bytes_per_block(geometry, 4)
    assert size <= frame_bytes(geometry, 4) == cache_of(kind).frames.image_bytes < size + 64  # type: ignore[union-attr]
    assert frame_bytes(geometry, 4) % 64 == 0
