"""Frames of host memory: a copy of a block each, or of a page, beside the pools of a worker's K/V.

An image is a block's bytes pool by pool, and in each by layer. Pools of wider numbers come first, so all are aligned:

    image | K of layer 0, 1, ... | V of layer 0, 1, ... | scales or index keys of narrower types |

A CUDA device copies to and from page-locked memory on the stream of the steps, so that a step sees what was ordered
before it, and nothing waits. On a CPU the copies may be described as addresses, for code outside of Python.

Images also leave the process and come back, to and from files for one: `take` and `land`. What is taken out of a block
equals, byte by byte, what is taken out of the frame that the block was copied into.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from common.contracts.lease import Copy, TierCopy
from common.contracts.transfers import Medium, Place
from common.contracts.types import FrameId
from gpuworker.memory.devices import unwritten
from gpuworker.memory.warming import warm_memory
from gpuworker.scheduling.images import Image


class HostFrames:
    """Images of the blocks of a cache. The thread that runs steps copies; the engine's thread takes and lands.

    Implements `Images`.
    """

    def __init__(self, pools: Sequence[torch.Tensor], image_bytes: int, num_frames: int) -> None:
        """Take the pools of a cache, [layers, blocks, ...]; an image has `image_bytes`, as `frame_bytes` counts them.

        Raises RuntimeError, OSError or MemoryError when the memory cannot be had.
        """
        self._pools, self.image_bytes = pools, image_bytes
        self._pinned = bool(pools) and pools[0].device.type == "cuda"
        self.images = self._allocated(num_frames)
        self._parts = list(self._views(self.images))
        # On a CPU each pool as bytes, [layers, blocks, bytes], and where it begins in an image.
        self._plain = [] if self._pinned else [(_plain(pool), at) for pool, _, at in self._parts]
        self._staged: tuple[torch.Tensor, torch.cuda.Stream] | None = None
        self.of_states: set[FrameId] = set()
        """Frames that hold states, whose bytes need not be numbers; whoever lays out copies follows them too."""

    def warm(self) -> None:
        """Let the system give the memory of all frames beside the steps, not at the first copy into each."""
        if not self._pinned:
            warm_memory(self.images)

    def _allocated(self, num_frames: int) -> torch.Tensor:
        """Return room for images; what lies behind the last pool of each is zero."""
        shape = (num_frames, self.image_bytes)
        if not self._pinned:
            return unwritten(shape)
        made = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        made[:, sum(map(_bytes_of, self._pools)) :] = 0
        return made

    def _views(self, images: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Yield each pool [layers, blocks, ...], its part of the images [frames, layers, ...], and where it begins."""
        at = 0
        for pool in sorted(self._pools, key=lambda each: -each.itemsize):
            size, shape = _bytes_of(pool), (pool.shape[0], *pool.shape[2:])
            part = images[:, at : at + size].view(pool.dtype).unflatten(1, shape)
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

    # ------------------------------------------------------------ images that leave the process

    def take(self, place: Place) -> Image:
        """Implement `Images`.

        On CUDA a block is copied on a stream of its own, and this waits for that copy alone: the step that wrote the
        block is over, and the host has seen its result. It was never run there.
        """
        if place.medium is Medium.HOST:
            return bytes(self.images[place.index].numpy())
        if self._pinned:
            return self._take_from_device(place.index)
        image = bytearray(self.image_bytes)
        for plain, at in self._plain:
            runs = plain[:, place.index]
            # numpy's copies need no other thread; torch's would take those of a step that runs.
            np.frombuffer(image, np.uint8, runs.size, at).reshape(runs.shape)[:] = runs
        return image

    def _take_from_device(self, block: FrameId) -> Image:
        if self._staged is None:
            self._staged = self._allocated(1), torch.cuda.Stream(self._pools[0].device)
        staged, stream = self._staged
        with torch.cuda.stream(stream):
            for pool, image, _ in self._views(staged):
                image[0].copy_(pool[:, block], non_blocking=True)
        stream.synchronize()
        return bytes(staged[0].numpy())

    def land(self, frame: FrameId, image: Image, of_states: bool = False) -> None:
        """Implement `Images`. On CUDA a copy that is launched after this reads the image: it is the host's memory."""
        if of_states:
            self.of_states.add(frame)
        elif self.of_states:
            self.of_states.discard(frame)
        self.images[frame].numpy()[:] = np.frombuffer(image, np.uint8)

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


def _plain(pool: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return a pool of a CPU as bytes, [layers, blocks, bytes]."""
    return pool.flatten(2).view(torch.uint8).numpy()


def _ends(copy: Copy | TierCopy) -> tuple[tuple[bool, int], tuple[bool, int]]:
    """Return where a copy reads and where it writes: whether that is a frame, and its number."""
    if isinstance(copy, Copy):
        return (False, copy.src), (False, copy.dst)
    ends = (True, int(copy.frame)), (False, int(copy.block))
    return ends if copy.load else ends[::-1]
