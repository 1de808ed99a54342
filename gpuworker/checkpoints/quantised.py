"""What a quantised checkpoint stores for one weight, apart from how a format packs it: integers or fp8, and scales.

weight = (value - zero) · scale + minimum, where runs of inputs ("groups") of an output share zero, scale and minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch

from common.contracts.errors import Unsupported

Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Rows are dequantised this many numbers at a time: the float32 in between stays small beside the result.
_AT_ONCE: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class QuantisedLinear:
    """The weight of a linear layer with N outputs and K inputs, as integers of 2, 4 or 8 bits around zero.

    `name` is that of the layer. `group_of` [K] is the group of each input where inputs were reordered by activation
    (act-order); without it input k is in group k // group_size.
    """

    name: str
    bits: int
    group_size: int
    values: torch.Tensor  # int8 [N, K], -2^(bits-1) ... 2^(bits-1) - 1
    scales: torch.Tensor  # float32 [N, groups]
    zeros: torch.Tensor | None = None  # int16 [N, groups] on the scale of `values`; None: all 0
    group_of: torch.Tensor | None = None  # int64 [K]
    minimums: torch.Tensor | None = None  # float32 [N, groups]; None: all 0

    def __post_init__(self) -> None:
        """Raise Unsupported where the group of an input is unknown."""
        inputs, groups = self.values.shape[1], self.scales.shape[1]
        if self.group_of is None and inputs != groups * self.group_size:
            raise refuse(f"{self.name}: groups", groups, f"{inputs} inputs cannot be shared out evenly among them")

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight [N, K] in `dtype`, rounded once from float32."""
        out = torch.empty(self.values.shape, dtype=dtype)
        for rows in _row_slices(self.values):
            exact = self.values[rows].float()
            if self.zeros is not None:
                exact = self._by_group(torch.Tensor.sub_, exact, self.zeros[rows].float())
            exact = self._by_group(torch.Tensor.mul_, exact, self.scales[rows])
            if self.minimums is not None:
                exact = self._by_group(torch.Tensor.add_, exact, self.minimums[rows])
            out[rows] = exact
        return out

    def _by_group(self, apply: Operation, exact: torch.Tensor, of_group: torch.Tensor) -> torch.Tensor:
        """Return [R, K] of which each number met that of its group, [R, groups]; the memory is that of `exact`."""
        if self.group_of is None:  # a broadcast is several times as fast as a gather
            return apply(exact.unflatten(1, (-1, self.group_size)), of_group[..., None]).flatten(1)
        return apply(exact, of_group[:, self.group_of])


@dataclass(frozen=True, slots=True)
class ScaledFloats:
    """A weight [N, K] of small floats; each block of `scales`, [N / block rows, K / block columns], has one scale."""

    name: str
    values: torch.Tensor  # float8 [N, K]
    scales: torch.Tensor  # float32 [row blocks, column blocks]
    block: tuple[int, int]  # rows and columns that share a scale

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight [N, K] in `dtype`, rounded once from float32."""
        out = torch.empty(self.values.shape, dtype=dtype)
        row, column = (torch.arange(size) // each for size, each in zip(self.values.shape, self.block, strict=True))
        for rows in _row_slices(self.values):
            out[rows] = self.values[rows].float() * self.scales[row[rows]][:, column]
        return out


class Packed(Protocol):
    """A weight as its format stores it."""

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor: ...


@dataclass(slots=True)
class Found:
    """The result of a format reader: how to read each packed weight, and the tensors that are parts of one."""

    weights: dict[str, Callable[[], Packed]] = field(default_factory=dict)  # by the plain name, "….weight"
    parts: set[str] = field(default_factory=set)


def refuse(path: str, value: object, why: str) -> Unsupported:
    """Return the error that refuses a checkpoint: the field of its config.json, the value, and the reason."""
    return Unsupported(f"this checkpoint cannot be loaded: {path} is {value!r}; {why}")


def setting(config: Mapping[str, Any], key: str, default: object = None) -> Any:
    """Return a field of the quantisation's configuration; null counts as absent."""
    found = config.get(key)
    return default if found is None else found


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return uint8 [R, C · 32 / bits]: the numbers that int32 words [R, C] hold, lowest bits first."""
    octets = words.contiguous().view(torch.uint8)
    mask, shifts = (1 << bits) - 1, range(0, 8, bits)
    return torch.stack([octets >> shift & mask for shift in shifts], dim=-1).flatten(1)


def centred(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return int8: unsigned numbers less 2^(bits-1), as `QuantisedLinear.values` has them."""
    return numbers.bitwise_xor(0x80).view(torch.int8) if bits == 8 else numbers.view(torch.int8) - (1 << bits - 1)


def scaled_floats(layer: str, values: torch.Tensor, scales: torch.Tensor, block: Sequence[int] | None) -> ScaledFloats:
    """Return an fp8 weight [N, K] with scales: one number, or [N] or [N, 1], or one for each block."""
    outputs, inputs = values.shape
    if scales.numel() == 1:
        return ScaledFloats(layer, values, scales.float().reshape(1, 1), (outputs, inputs))
    if len(scales) == outputs and scales.numel() == outputs:
        return ScaledFloats(layer, values, scales.float().view(outputs, 1), (1, inputs))
    rows, columns = block or (1, 1)
    if tuple(scales.shape) != (-(-outputs // rows), -(-inputs // columns)):
        why = f"expected one number, {outputs}, or one for each block of {outputs} x {inputs}; a block is {block}"
        raise refuse(f"{layer}: scales of the weight", tuple(scales.shape), why)
    return ScaledFloats(layer, values, scales.float(), (rows, columns))


def zeros_or_none(zeros: torch.Tensor) -> torch.Tensor | None:
    """Return zero points as int16, contiguous; None when all are 0."""
    return zeros.to(torch.int16).contiguous() if bool(zeros.any()) else None


def groups_or_none(group_of: torch.Tensor | None, inputs: int, group_size: int) -> torch.Tensor | None:
    """Return the group of each input; None where it is that of inputs in order."""
    if group_of is None or not group_of.numel():
        return None
    in_order = torch.arange(inputs) // group_size
    found = group_of.long()
    return None if torch.equal(found, in_order) else found


def _row_slices(values: torch.Tensor) -> list[slice]:
    at_once = max(1, _AT_ONCE // max(1, values.shape[1]))
    return [slice(begin, begin + at_once) for begin in range(0, len(values), at_once)]
