"""The paged K/V of one worker: two pools of blocks, written by slot, copied by block.

K and V are separate and head-major, `[layer, block, kv_head, block_size, head_dim]`: what one head of a block holds is
one contiguous run, which suits vector loads, and a block of a layer is one contiguous copy. Head sizes may differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.lease import Copy
from common.types import KvGeometry
from gpuworker.devices import DTYPES


def bytes_per_block(geometry: KvGeometry, block_size: int) -> int:
    """Return what one block takes in all layers, K and V together, in bytes."""
    per_slot = geometry.num_kv_heads * (geometry.head_dim_k + geometry.head_dim_v)
    return geometry.num_layers * block_size * per_slot * DTYPES[geometry.dtype].itemsize


class KvCache:
    """The two pools. Zeroed, so that a masked read of a slot that was never written is a number.

    On CPU the system hands out the pages of a pool as they are first written.
    """

    def __init__(self, geometry: KvGeometry, num_blocks: int, block_size: int, device: torch.device) -> None:
        shape = (geometry.num_layers, num_blocks, geometry.num_kv_heads, block_size)
        dtype = DTYPES[geometry.dtype]
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.keys = torch.zeros((*shape, geometry.head_dim_k), dtype=dtype, device=device)
        self.values = torch.zeros((*shape, geometry.head_dim_v), dtype=dtype, device=device)

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy whole blocks of all layers, in list order: a source may be the destination of an earlier copy."""
        for copy in copies:
            for pool in (self.keys, self.values):
                pool[:, copy.dst].copy_(pool[:, copy.src])
