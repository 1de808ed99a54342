"""The weights of a GGUF file, by the index in the folder that stands for it (common/checkpoint/gguf/folder.py).

A row of N numbers is stored in blocks. With d and m in float16 and q in whole numbers, a block of 32 is
* Q8_0: d, then 32 q of 8 bits: weight = q · d;
* Q4_0: d, then 32 q of 4 bits, the first 16 in low halves of bytes: weight = (q - 8) · d;
* Q4_1: d, m, then q as in Q4_0: weight = q · d + m.
These three are read as integers. The gguf package widens the other types.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from common.checkpoint.gguf.folder import LINK, WEIGHTS
from gpuworker.checkpoints.quantised import Found, Packed, QuantisedLinear
from gpuworker.checkpoints.stored_tensors import StoredTensor, StoredTensors

_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCK: Final = 32
_SCALE_BYTES: Final = 2  # of one float16
_BITS: Final = {"Q8_0": 8, "Q4_0": 4, "Q4_1": 4}
_ZERO: Final = -8  # that of numbers of 4 bits once they are centred


def is_gguf(directory: Path) -> bool:
    """Return whether a folder stands for a GGUF file."""
    return (directory / WEIGHTS).is_file()


def find(directory: Path) -> tuple[StoredTensors, Found]:
    """Return the tensors of the file as they are stored, and how to read those that are not plain floats in order."""
    index: dict[str, list[Any]] = json.loads((directory / WEIGHTS).read_text())
    path = (directory / LINK).resolve()
    stored, found = {}, Found()
    for name, (kind, shape, offset, nbytes, heads) in index.items():
        if kind in _FLOATS:
            stored[name] = StoredTensor(path, offset, tuple(shape), _FLOATS[kind])
        else:
            rows = (*shape[:-1], nbytes * shape[-1] // math.prod(shape))
            stored[name] = StoredTensor(path, offset, rows, torch.uint8)
        if kind in _BITS:
            found.weights[name] = partial(_integers, stored[name], name, kind, heads)
        elif heads or kind not in _FLOATS:
            found.weights[name] = partial(WidenedWeight, stored[name], kind, heads)
    return StoredTensors(directory, stored), found


@dataclass(frozen=True, slots=True)
class WidenedWeight:
    """A weight of any other type. With `heads`, the rows of each head are interleaved in the file."""

    stored: StoredTensor
    type: str
    heads: int

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in `dtype`, rounded once; floats stay in their own type."""
        rows = _in_order(self.stored.map(), self.heads)
        if self.type in _FLOATS:
            return rows
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        whole = dequantize(rows.numpy(), GGMLQuantizationType[self.type])
        return torch.from_numpy(whole).to(dtype)


def _integers(stored: StoredTensor, name: str, kind: str, heads: int) -> Packed:
    """Return a weight of blocks of 32 as integers with a scale, and for Q4_1 a minimum, for each block."""
    rows = _in_order(stored.map(), heads)
    blocks = rows.unflatten(-1, (-1, _block_bytes(kind)))  # [N, groups, bytes]
    scales, rest = _halves(blocks), blocks[..., _SCALE_BYTES:]
    zeros = minimums = None
    if kind == "Q4_1":
        minimums, rest = _halves(rest), rest[..., _SCALE_BYTES:]
        zeros = torch.full(scales.shape, _ZERO, dtype=torch.int16)
    values = rest.view(torch.int8) if kind == "Q8_0" else torch.cat([rest & 15, rest >> 4], -1).view(torch.int8) + _ZERO
    layer = name.removesuffix(".weight")
    return QuantisedLinear(layer, _BITS[kind], _BLOCK, values.flatten(1), scales, zeros, minimums=minimums)


def _block_bytes(kind: str) -> int:
    return _BLOCK * _BITS[kind] // 8 + _SCALE_BYTES * (2 if kind == "Q4_1" else 1)


def _halves(blocks: torch.Tensor) -> torch.Tensor:
    """Return the float16 at the start of each block as float32 [N, groups]."""
    return blocks[..., :_SCALE_BYTES].contiguous().view(torch.float16)[..., 0].float()


def _in_order(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows, or elements of a bias, with those of the first half of each head first.

    Row 2i + j of a head in the file is row i of half j.
    """
    if not heads:
        return rows
    ordered: torch.Tensor = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return ordered
