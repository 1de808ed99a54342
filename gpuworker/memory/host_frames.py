"""Frames of host memory: a copy of a block each, beside the pools of a worker's K/V.

An image is a block's bytes pool by pool, and in each by layer. Pools of wider numbers come first, so all are aligned:

    image | K of layer 0, 1, ... | V of layer 0, 1, ... | scales or index keys of narrower types |

A CUDA device copies to and from page-locked memory on the stream of the steps, so that a step sees what was ordered
before it, and nothing waits. On a CPU the copies may be described as addresses, for code outside of Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from common.contracts.lease import Copy, TierCopy
from gpuworker.memory.devices import unwritten


class HostFrames:
    """Images of the blocks of a cache. Used by the thread that runs steps."""

    def __init__(self, pools: Sequence[torch.Tensor], image_bytes: int, num_frames: int) -> None:
        """Take the pools of a cache, [layers, blocks, ...]; an image has `image_bytes`, as `frame_bytes` counts them.

        Raises RuntimeError, OSError or MemoryError when the memory cannot be had.
        """
        self._pools, self.image_bytes = pools, image_bytes
        pinned = bool(pools) and pools[0].device.type == "cuda"
        shape = (num_frames, self.image_bytes)
        self.images = torch.empty(shape, dtype=torch.uint8, pin_memory=True) if pinned else unwritten(shape)
        self._parts = list(self._views())

    def _views(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Yield each pool [layers, blocks, ...], its part of the images [frames, layers, ...], and where it begins."""
        at = 0
        for pool in sorted(self._pools, key=lambda each: -each.itemsize):
            size, shape = _bytes_of(pool), (pool.shape[0], *pool.shape[2:])
            part = self.images[:, at : at + size].view(pool.dtype).unflatten(1, shape)
            yield pool, part, at
            at += size

    def copy(self, copy: TierCopy) -> None:
        """Copy a block into a frame, or a frame into a block; on CUDA it is queued."""
        for pool, images, _ in self._parts:
            block, image = pool[:, copy.block], images[copy.frame]
            if copy.load:
                block.copy_(image, non_blocking=True)
            else:
                image.copy_(block, non_blocking=True)

    # ------------------------------------------------------------ addresses

    def rounds(self, copies: Sequence[Copy | TierCopy]) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the copies as addresses to write and to read, and bytes: [n, 3].

        Those of one array may be made in any order, and before those of the next one. On a CPU alone.
        """
        some, read, written = list[Copy | TierCopy](), set[tuple[bool, int]](), set[tuple[bool, int]]()
        for each in copies:
            source, target = _ends(each)
            if source in written or target in written or target in read:
                yield self._moves(some)
                some, read, written = [], set(), set()
            some.append(each)
            read.add(source)
            written.add(target)
        if some:
            yield self._moves(some)

    def _moves(self, copies: Sequence[Copy | TierCopy]) -> npt.NDArray[np.int64]:
        ends = np.array([_ends(each) for each in copies], dtype=np.int64)  # [copies, 2, 2]
        sources, targets = ends[:, 0], ends[:, 1]
        found = []
        for pool, _, at in self._parts:
            size = _bytes_of(pool) // pool.shape[0]
            moves = np.empty((len(copies), pool.shape[0], 3), dtype=np.int64)
            moves[..., 0], moves[..., 1] = self._places(pool, at, targets), self._places(pool, at, sources)
            moves[..., 2] = size
            found.append(moves.reshape(-1, 3))
        return np.concatenate(found)

    def _places(self, pool: torch.Tensor, at: int, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return where each layer begins at each end, [n, layers]; an end is whether it is a frame, and its number."""
        layers, size = pool.shape[0], _bytes_of(pool) // pool.shape[0]
        is_frame, number = ends[:, 0].astype(bool), ends[:, 1]
        first = np.where(
            is_frame, self.images.data_ptr() + at + number * self.image_bytes, pool.data_ptr() + number * size
        )
        apart = np.where(is_frame, size, pool.stride(0) * pool.itemsize)
        return first[:, None] + apart[:, None] * np.arange(layers, dtype=np.int64)


def _bytes_of(pool: torch.Tensor) -> int:
    """Return the bytes of a block in a pool [layers, blocks, ...]."""
    return pool.shape[0] * math.prod(pool.shape[2:]) * pool.itemsize


def _ends(copy: Copy | TierCopy) -> tuple[tuple[bool, int], tuple[bool, int]]:
    """Return where a copy reads and where it writes: whether that is a frame, and its number."""
    if isinstance(copy, Copy):
        return (False, copy.src), (False, copy.dst)
    ends = (True, int(copy.frame)), (False, int(copy.block))
    return ends if copy.load else ends[::-1]
