"""The weights of a GGUF file, by the index in the folder that stands for it (common/checkpoint/gguf/folder.py).

The types of gguf_blocks.py are read as integers; the others are floats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch

from common.checkpoint.gguf.folder import LINK, WEIGHTS, read_places
from gpuworker.checkpoints.gguf_blocks import TYPES
from gpuworker.checkpoints.quantised import Found, Packed, QuantisedLinear
from gpuworker.checkpoints.stored_tensors import StoredTensor, StoredTensors

_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_AT_ONCE: Final = 8 << 20  # weights that are read at a time: what is in between stays small beside the integers


def is_gguf(directory: Path) -> bool:
    """Return whether a folder stands for a GGUF file."""
    return (directory / WEIGHTS).is_file()


def find(directory: Path) -> tuple[StoredTensors, Found]:
    """Return the tensors of the file as they are stored, and how to read those that are not plain floats in order."""
    path = (directory / LINK).resolve()
    stored, found = {}, Found()
    for name, plain in read_places(directory).items():
        place, heads, above = plain.stored, plain.heads, plain.above
        if place.type in TYPES:
            rows = (*place.shape[:-1], place.nbytes * place.shape[-1] // math.prod(place.shape))
            stored[name] = StoredTensor(path, place.offset, rows, torch.uint8)
            found.weights[name] = partial(_integers, stored[name], name, place.type, heads)
        else:
            stored[name] = StoredTensor(path, place.offset, place.shape, _FLOATS[place.type])
            if heads or above:
                found.weights[name] = partial(ChangedFloats, stored[name], heads, above)
    return StoredTensors(directory, stored), found


@dataclass(frozen=True, slots=True)
class ChangedFloats:
    """Floats that a file has in another form: the rows of each of `heads` interleaved, or so much larger."""

    stored: StoredTensor
    heads: int
    above: int

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """Return them in the type that the file has."""
        rows = _in_order(self.stored.map(), self.heads)
        return rows - self.above if self.above else rows


def _integers(stored: StoredTensor, name: str, kind: str, heads: int) -> Packed:
    """Return a weight as integers with a scale, and in some types a minimum, for each group."""
    rows, form = _in_order(stored.map(), heads), TYPES[kind]
    blocks = rows.unflatten(-1, (-1, form.nbytes))  # [N, blocks of a row, bytes]
    n, inputs = len(blocks), blocks.shape[1] * form.weights
    values = torch.empty(n, inputs, dtype=torch.int8)
    scales = torch.empty(n, inputs // form.group)
    minimums = torch.empty_like(scales) if form.shifted else None
    for begin in range(0, n, at_once := max(1, _AT_ONCE // inputs)):
        these = slice(begin, begin + at_once)
        found = form.read(blocks[these])
        values[these], scales[these] = found.values.flatten(1), found.scales.flatten(1)
        if minimums is not None and found.minimums is not None:
            minimums[these] = found.minimums.flatten(1)
    zeros = torch.full(scales.shape, form.zero, dtype=torch.int16) if form.zero else None
    layer = name.removesuffix(".weight")
    return QuantisedLinear(layer, form.bits, form.group, values, scales, zeros, minimums=minimums)


def _in_order(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows, or elements of a bias, with those of the first half of each head first.

    Row 2i + j of a head in the file is row i of half j.
    """
    if not heads:
        return rows
    ordered: torch.Tensor = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return ordered
