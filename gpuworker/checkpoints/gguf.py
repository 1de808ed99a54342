"""The weights of a GGUF file, by the index in the folder that stands for it (common/checkpoint/gguf/folder.py).

The types of `TYPES` are read as integers; the others are floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch

from common.checkpoint.gguf.folder import LINK, WEIGHTS, read_places
from gpuworker.checkpoints.quantised import Found, Packed, QuantisedLinear
from gpuworker.checkpoints.stored_tensors import StoredTensor, StoredTensors

_HALF: Final = 2  # bytes of a float16
_SCALES: Final = 12  # bytes with the 6 bits of eight scales and eight minimums, or of sixteen scales
_ZERO: Final = -8  # that of unsigned numbers of 4 bits once they are centred


# The blocks of GGUF's types as integers. With d and m in float16 and q in whole numbers, a block of 32 weights is
# * Q8_0: d, then q of 8 bits: weight = q · d;
# * Q4_0: d, then q of 4 bits, the first 16 in low halves of bytes: weight = (q - 8) · d;
# * Q4_1: d, m, then q as in Q4_0: weight = q · d + m;
# * Q5_0, Q5_1: as Q4_0 and Q4_1 with the fifth bit of each q in front, and 16 in place of 8.
# A block of 256 has groups. Each has a whole number s for its scale, and in some types one for its minimum, t:
# * Q4_K, Q5_K: eight groups of 32: weight = q · (d · s) - m · t, with s and t of 6 bits;
# * Q6_K: sixteen groups of 16, weight = (q - 32) · (d · s), with s of 8 bits;
# * Q3_K: the same with (q - 4), of 3 bits, and (s - 32), of 6;
# * Q2_K: sixteen groups of 16 as those of Q4_K, with s and t of 4 bits.
@dataclass(frozen=True, slots=True)
class Blocks:
    """The numbers of rows of blocks: values of each weight, and for each group what is scaled and what is added."""

    values: torch.Tensor  # int8 [..., weights]
    scales: torch.Tensor  # float32 [..., groups]
    minimums: torch.Tensor | None = None  # float32 [..., groups]; None: all 0


@dataclass(frozen=True, slots=True)
class BlockType:
    """How a type stores a block, and how its values are kept: in so many bits, and around which zero."""

    nbytes: int
    weights: int
    group: int  # weights
    bits: int
    read: Callable[[torch.Tensor], Blocks]  # uint8 [..., nbytes]
    zero: int = 0
    shifted: bool = False  # whether groups have minimums


def _eight(blocks: torch.Tensor) -> Blocks:
    return Blocks(blocks[..., _HALF:].view(torch.int8), _halves(blocks, 0))


def _four(blocks: torch.Tensor) -> Blocks:
    return Blocks(_nibbles(blocks[..., _HALF:]) + _ZERO, _halves(blocks, 0))


def _four_and_minimum(blocks: torch.Tensor) -> Blocks:
    return Blocks(_nibbles(blocks[..., 2 * _HALF :]) + _ZERO, _halves(blocks, 0), _halves(blocks, _HALF))


def _five(blocks: torch.Tensor) -> Blocks:
    return Blocks(_five_bits(blocks[..., _HALF:]) - 16, _halves(blocks, 0))


def _five_and_minimum(blocks: torch.Tensor) -> Blocks:
    return Blocks(_five_bits(blocks[..., 2 * _HALF :]), _halves(blocks, 0), _halves(blocks, _HALF))


def _two_k(blocks: torch.Tensor) -> Blocks:
    steps = blocks[..., :16]
    scales, minimums = (_halves(blocks, at) * part.float() for at, part in ((80, steps & 15), (82, steps >> 4)))
    return Blocks(_parts(blocks[..., 16:80], 2, 32), scales, -minimums)


def _three_k(blocks: torch.Tensor) -> Blocks:
    above = (_parts(blocks[..., :32], 1, 32) ^ 1) << 2  # a bit that is set means 0
    low, high = blocks[..., 96:104], blocks[..., 104:108]
    steps = torch.cat([low & 15, low >> 4], -1).view(torch.int8) | _parts(high, 2, 4) << 4
    return Blocks(_parts(blocks[..., 32:96], 2, 32) - above, _halves(blocks, 108) * (steps - 32).float())


def _four_k(blocks: torch.Tensor) -> Blocks:
    return Blocks(_parts(blocks[..., 16:], 4, 32) + _ZERO, *_scales_and_minimums(blocks))


def _five_k(blocks: torch.Tensor) -> Blocks:
    above = _parts(blocks[..., 16:48], 1, 32) << 4
    return Blocks(_parts(blocks[..., 48:], 4, 32) | above, *_scales_and_minimums(blocks))


def _six_k(blocks: torch.Tensor) -> Blocks:
    above = _parts(blocks[..., 128:192], 2, 32) << 4
    scales = _halves(blocks, 208) * blocks[..., 192:208].view(torch.int8).float()
    return Blocks((_parts(blocks[..., :128], 4, 64) | above) - 32, scales)


def _scales_and_minimums(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return those of the eight groups of Q4_K and Q5_K.

    Of twelve bytes, four have the scales of the first groups and four their minimums, in 6 bits each. The last four
    have low bits of the other scales and minimums. The two bits above stand over those of the first groups.
    """
    first, minimum, rest = blocks[..., 2 * _HALF : 2 * _HALF + _SCALES].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, rest & 15 | first >> 2 & 48], -1).float()
    minimums = torch.cat([minimum & 63, rest >> 4 | minimum >> 2 & 48], -1).float()
    return _halves(blocks, 0) * scales, -(_halves(blocks, _HALF) * minimums)


def _five_bits(blocks: torch.Tensor) -> torch.Tensor:
    """Return 32 numbers of which four bytes have the fifth bits, from the lowest one on, and 16 bytes the others."""
    bits = blocks[..., :4, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return _nibbles(blocks[..., 4:]) | bits.flatten(-2).view(torch.int8) << 4


def _nibbles(octets: torch.Tensor) -> torch.Tensor:
    return torch.cat([octets & 15, octets >> 4], -1).view(torch.int8)


def _parts(octets: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """Return int8: of each run of bytes all lowest bits, so many of each, then those above, up to the highest ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    parts: torch.Tensor = octets.unflatten(-1, (-1, 1, run)) >> shifts & (1 << bits) - 1
    return parts.flatten(-3).view(torch.int8)


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 at a byte of each block, as float32 [..., 1]."""
    return blocks[..., at : at + _HALF].contiguous().view(torch.float16).float()


TYPES: Final = {
    "Q8_0": BlockType(34, 32, 32, 8, _eight),
    "Q4_0": BlockType(18, 32, 32, 4, _four),
    "Q4_1": BlockType(20, 32, 32, 4, _four_and_minimum, _ZERO, shifted=True),
    "Q5_0": BlockType(22, 32, 32, 8, _five),
    "Q5_1": BlockType(24, 32, 32, 8, _five_and_minimum, shifted=True),
    "Q2_K": BlockType(84, 256, 16, 4, _two_k, shifted=True),
    "Q3_K": BlockType(110, 256, 16, 4, _three_k),
    "Q4_K": BlockType(144, 256, 32, 4, _four_k, _ZERO, shifted=True),
    "Q5_K": BlockType(176, 256, 32, 8, _five_k, shifted=True),
    "Q6_K": BlockType(210, 256, 16, 8, _six_k),
}
"""The types that are read as integers, by their names."""


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
