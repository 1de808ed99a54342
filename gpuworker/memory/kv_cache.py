"""The paged K/V of one worker: pools of blocks, written by slot, copied by block.

K and V are separate and head-major, `[layer, block, kv_head, block_size, head_dim]`. The content of one head of a block
is contiguous, which suits vector loads, and a block of a layer is one contiguous copy. Head sizes may differ. In an
int8 or fp8 cache each (slot, head) has a scale of its own, in pools `[layer, block, kv_head, block_size]`. Where V is a
prefix of K (`KvGeometry.values_in_keys`), it is a view of K's pool, and K's scales are its own. Layers of another shape
have pools of their own (`gpuworker/memory/layout.py`). Layers with an indexer keep index keys beside K and V, in a pool
`[layer, block, block_size, size]` of a type of its own. Where layers are groups, blocks are pages and layers are lanes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy as copied

import torch

from common.contracts.lease import Copy, TierCopy
from common.contracts.types import KvGeometry
from gpuworker.memory.devices import CACHE_DTYPES, QUANTISED_DTYPES, unwritten
from gpuworker.memory.host_frames import HostFrames
from gpuworker.memory.layout import IndexKey, page_layout, pools_of


class KvCache:
    """The pools. They are zeroed, so that a masked read of a slot that was never written is a number.

    On a CPU the system maps the pages of a pool at their first write, as large pages where it can. Blocks lie
    scattered, and each small page costs a walk through the page table. `key_scales` and `value_scales` [layer, block,
    kv_head, block_size] float32 are None unless the cache is quantised. Where layers differ, `parts` has a cache for
    each shape, in the order of `pools_of`; `keys` and `values` are theirs alone. Where layers are groups, `lanes` is
    the cache of all pages, and `parts` are the same memory, seen with each shape. Without layers there is nothing.
    `frames` are those of host memory, where a worker gives it some.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(
        self,
        geometry: KvGeometry,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        index: IndexKey | None = None,
    ) -> None:
        shape = (geometry.num_layers, num_blocks, geometry.num_kv_heads, block_size)
        dtype = CACHE_DTYPES[geometry.dtype]
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.frames: HostFrames | None = None
        self.parts: tuple[KvCache, ...] = ()
        self.lanes: KvCache | None = None
        self.key_scales: torch.Tensor | None = None
        self.value_scales: torch.Tensor | None = None
        self.index_keys: torch.Tensor | None = None
        if geometry.groups:
            layout = page_layout(geometry)
            self.lanes = lanes = KvCache(layout.lanes, num_blocks, block_size, device)
            self.parts = tuple(lanes._seen_with(shape, shares) for shape, shares in layout.shapes)
            return
        if geometry.shapes or not geometry.num_layers:
            made = (KvCache(pool.geometry, num_blocks, block_size, device, pool.index) for pool in pools_of(geometry))
            self.parts = tuple(made)
            return
        if index is not None:
            rows = (geometry.num_layers, num_blocks, block_size, index.size)
            self.index_keys = _zeroed(rows, CACHE_DTYPES[index.dtype], device)
        self.keys = _zeroed((*shape, geometry.head_dim_k), dtype, device)
        if geometry.dtype in QUANTISED_DTYPES:
            self.key_scales = _zeroed(shape, torch.float32, device)
        if geometry.values_in_keys:
            self.values, self.value_scales = self.keys[..., : geometry.head_dim_v], self.key_scales
            return
        self.values = _zeroed((*shape, geometry.head_dim_v), dtype, device)
        if geometry.dtype in QUANTISED_DTYPES:
            self.value_scales = _zeroed(shape, torch.float32, device)

    @property
    def pools(self) -> list[torch.Tensor]:
        """The tensors that lie in memory of their own: K, V, their scales, index keys; less where V lies in K."""
        if self.lanes is not None:
            return self.lanes.pools
        if self.parts or not self.geometry.num_layers:
            return [pool for part in self.parts for pool in part.pools]
        found = [self.keys, self.key_scales, self.index_keys]
        if not self.geometry.values_in_keys:
            found += [self.values, self.value_scales]
        return [pool for pool in found if pool is not None]

    def _seen_with(self, geometry: KvGeometry, shares: int) -> KvCache:
        """Return the same memory with layers of another shape, of which a block of these holds `shares` blocks.

        Of a layer that lies in several lanes by heads, the shape has those of one.
        """
        if geometry == self.geometry:
            return self
        seen = copied(self)
        seen.geometry, seen.num_blocks = geometry, shares * self.num_blocks
        shape = (geometry.num_layers, seen.num_blocks, geometry.num_kv_heads, self.block_size)
        seen.keys, seen.values = (
            self.keys.view(*shape, geometry.head_dim_k),
            self.values.view(*shape, geometry.head_dim_v),
        )
        return seen

    def copy_blocks(self, copies: Sequence[Copy | TierCopy]) -> None:
        """Copy whole blocks of all layers, in list order: a source may be the destination of an earlier copy."""
        pools = self.pools
        for copy in copies:
            if isinstance(copy, TierCopy):
                assert self.frames is not None, "a worker without host memory is told of no frames"
                self.frames.copy(copy)
                continue
            for pool in pools:
                pool[:, copy.dst].copy_(pool[:, copy.src])


def _zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of zeros; on CPU in pages that are not there yet (`torch.zeros` would write them all)."""
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    return unwritten((math.prod(shape) * dtype.itemsize,)).view(dtype).view(shape)
