"""Low-rank products of LoRA adapters in plain torch: for any device, and as the reference of `triton_adapters`.

A step has rows of several adapters and of the base. An adapter adds B · (A · x) to the outputs of its rows
(arXiv 2106.09685); rows of the base, and what lies beside a linear that an adapter changes, keep their bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

NUM_PARTS = 3
"""The most linears that are one product: q, k and v."""
ROW_TILE = 16
"""Rows of one adapter that a kernel takes at once, as matrix units do at least."""


@dataclass(frozen=True, slots=True)
class LowRankPart:
    """What an adapter adds to one of the linears of a product: A [rank, inputs], and B [outputs, rank] with the scale.

    Both are contiguous, on one device and of one type.
    """

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DeviceAdapter:
    """An adapter on a device: its parts for each product of the model, up to NUM_PARTS; None where it changes nothing.

    addresses [products, NUM_PARTS, 2] int64, on the device: where A and B of each part lie; 0: nowhere.
    """

    rank: int
    products: tuple[tuple[LowRankPart | None, ...], ...]
    addresses: torch.Tensor

    @property
    def num_bytes(self) -> int:
        parts = (part for product in self.products for part in product if part is not None)
        return sum(part.a.nbytes + part.b.nbytes for part in parts) + self.addresses.nbytes

    @staticmethod
    def of(rank: int, products: Sequence[Sequence[LowRankPart | None]], device: torch.device) -> DeviceAdapter:
        addresses = np.zeros((len(products), NUM_PARTS, 2), dtype=np.int64)
        for number, product in enumerate(products):
            for place, part in enumerate(product):
                if part is not None:
                    addresses[number, place] = part.a.data_ptr(), part.b.data_ptr()
        return DeviceAdapter(rank, tuple(map(tuple, products)), torch.from_numpy(addresses).to(device))


@dataclass(frozen=True, slots=True, eq=False)
class AdapterRows:
    """The rows of a step that have adapters, gathered by adapter; on the device, but for the two last.

    rows [N] int32: those of the first adapter, then those of the second one, each in their order. tiles [tiles, 3]
    int32: up to ROW_TILE rows of one adapter, as its number, the first one's place in `rows`, and how many.
    tables [adapters] int64: the addresses of their addresses; ranks [adapters] int32. counts: the rows of each.
    """

    rows: torch.Tensor
    tiles: torch.Tensor
    tables: torch.Tensor
    ranks: torch.Tensor
    adapters: tuple[DeviceAdapter, ...]
    counts: tuple[int, ...]


def add_low_rank(out: torch.Tensor, x: torch.Tensor, product: int, sizes: Sequence[int], rows: AdapterRows) -> None:
    """Add what adapters do to a product, in place: out [T, sum of sizes], of x [T, inputs].

    `product` is its number, `sizes` are the outputs of its linears. Sums are float32.
    """
    start = 0
    for adapter, count in zip(rows.adapters, rows.counts, strict=True):
        taken, start = rows.rows[start : start + count].long(), start + count
        inputs, first = x[taken].float(), 0
        for part, size in zip(adapter.products[product], sizes, strict=False):
            if part is not None:
                added = (inputs @ part.a.float().T) @ part.b.float().T
                columns = out[:, first : first + size]
                columns[taken] = (columns[taken].float() + added).to(out.dtype)
            first += size
