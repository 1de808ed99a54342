"""Copies the states of a sequence into pages of the KV cache and back, byte by byte.

Pages are those of groups of layers (`gpuworker/memory/layout.py`). A checkpoint fills K of each lane of its first page,
then of the next one; when K of all pages is full, it goes on in V. Where V is a prefix of K, K is all that there is:

    pages 7, 3 of two lanes    K: 7.0, 7.1, 3.0, 3.1    V: 7.0, 7.1, 3.0, rest of the bytes in 3.1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from gpuworker.memory.devices import sent
from gpuworker.memory.kv_cache import KvCache

_WORD = torch.int64


class StateStore:
    """Writes and reads checkpoints in the pages of a cache. Used by the thread that runs steps; it never waits.

    States are their bytes, [n] uint8, contiguous; they are whole words of 8 bytes. Every method raises ValueError for a
    page that the cache does not have.
    """

    def __init__(self, cache: KvCache) -> None:
        lanes = cache.lanes
        assert lanes is not None, "checkpoints lie in the pages of groups of layers"
        self._lanes, self._num_pages = lanes.keys.shape[:2]
        pools = [lanes.keys] if lanes.geometry.values_in_keys else [lanes.keys, lanes.values]
        rows = [pool.view(self._lanes * self._num_pages, -1).view(torch.uint8) for pool in pools]
        is_words = all(each.shape[1] % _WORD.itemsize == 0 for each in rows)
        self._pools = [each.view(_WORD) if is_words else each for each in rows]

    def save(self, state: torch.Tensor, pages: Sequence[int]) -> None:
        """Write a state into pages. Raises ValueError where they are too few."""
        for pool, rows, part in self._pieces(state, pages):
            if pool.device.type == "cpu":
                pool.numpy()[rows.numpy()] = part.numpy()  # several times as fast as torch's index_copy_
            else:
                pool.index_copy_(0, rows, part)

    def places(self, size: int, pages: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return where the bytes of a state of `size` bytes lie in memory, in their order: [n, 2] addresses and counts.

        For code that copies outside of Python, on a CPU. Raises ValueError where the pages are too few.
        """
        state = torch.empty(size, dtype=torch.uint8, device="meta")
        found = []
        for pool, rows, part in self._pieces(state, pages):
            at = pool.data_ptr() + rows.numpy() * (pool.stride(0) * pool.itemsize)
            found.append(np.stack((at, np.full(len(at), part.shape[1] * part.itemsize)), axis=1))
        return np.concatenate(found)

    def bytes_of(self, pages: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return all memory of pages in the same form."""
        return self.places(self._room(pages), pages)

    def clear(self, pages: Sequence[int]) -> None:
        """Write zeros into pages that may have held states: as numbers of K and V these bytes need not be finite."""
        rows = self._rows(pages, self._pools[0].device)
        for pool in self._pools:
            if pool.device.type == "cpu":
                pool.numpy()[rows.numpy()] = 0
            else:
                pool.index_fill_(0, rows, 0)

    def load(self, pages: Sequence[int], state: torch.Tensor) -> None:
        """Read what `save` has written into the pages into a state. Raises ValueError where they are too few."""
        for pool, rows, part in self._pieces(state, pages):
            torch.index_select(pool, 0, rows, out=part)

    def _pieces(
        self, state: torch.Tensor, pages: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield a pool [lanes * pages, w], which of its rows hold the next part of a state [r], and this, [r, w]."""
        room = self._room(pages)
        if len(state) > room:
            raise ValueError(f"a state of {len(state)} bytes does not fit into {len(pages)} pages: {room} bytes")
        state = state.view(self._pools[0].dtype)
        rows = self._rows(pages, self._pools[0].device)
        done = 0
        for pool in self._pools:
            width = pool.shape[1]
            whole, rest = divmod(min(len(state) - done, len(rows) * width), width)
            for pool_part, some in ((pool, rows[:whole]), (pool[:, :rest], rows[whole : whole + 1])):
                if size := len(some) * pool_part.shape[1]:
                    yield pool_part, some, state[done : done + size].view(len(some), -1)
                    done += size

    def _room(self, pages: Sequence[int]) -> int:
        return len(pages) * self._lanes * sum(pool[0].nbytes for pool in self._pools)

    def _rows(self, pages: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return which rows of a pool the lanes of these pages are, page by page."""
        if outside := [page for page in pages if not 0 <= page < self._num_pages]:
            raise ValueError(f"pages {outside} of a checkpoint are not among the {self._num_pages} of the cache")
        first = np.arange(self._lanes, dtype=np.int64) * self._num_pages
        return sent(torch.from_numpy((np.array(pages, dtype=np.int64)[:, None] + first).ravel()), device)
