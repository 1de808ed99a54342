"""The header of a safetensors file, checked as the format has it before anything is made of it.

A file is: 8 bytes, the length of the header, little-endian; the header, JSON, name → dtype, shape, [begin, end) of the
data; then the data. Format: the README of the safetensors project.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from common.checkpoint.bounded_json import parse, shown
from common.untrusted.json_shape import Shape

_LARGEST: Final = 100 << 20
_MOST: Final = Shape(values=4_000_000, members=2_000_000, containers=1_500_000, depth=8)
_MOST_DIMENSIONS: Final = 16
# Bits of a number.
_BITS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


class CutShort(ValueError):
    """The file ends in its header; `expected` is the size that it has at least."""

    def __init__(self, why: str, expected: int) -> None:
        super().__init__(why)
        self.expected = expected


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: its type and shape, and the bytes of the file that hold it, [begin, end)."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, Entry]:
    """Return the tensors of a file by name; the file may end before their data do.

    Raises ValueError, with the reason, for a header that violates the format, and OSError.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= _LARGEST:
            raise ValueError("its header cannot be read")
        if length > size - 8:
            raise CutShort(f"it has {size} bytes, and its header ends at {8 + length}", 8 + length)
        raw = file.read(length)
    try:
        header = parse(raw, _MOST, unique=True)
    except ValueError as error:
        why = str(error) if str(error).startswith("it ") else "it is not JSON"
        raise ValueError(f"its header cannot be read: {why}") from None
    if not isinstance(header, dict):
        raise ValueError(f"its header is {shown(header)}; expected an object of tensors by name")
    header.pop("__metadata__", None)
    found = {name: _entry(shown(name), entry, 8 + length) for name, entry in header.items()}
    _refuse_shared_bytes(found)
    return found


def _entry(name: str, entry: Any, begin: int) -> Entry:
    if not isinstance(entry, dict):
        raise ValueError(f"tensor {name} is {shown(entry)}; expected an object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry.get("dtype"), _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    if not isinstance(dtype, str):
        raise ValueError(f"tensor {name} has dtype {shown(dtype)}; expected a name such as BF16")
    if shape is None:
        what = "expected a list of whole numbers, none below 0"
        raise ValueError(f"tensor {name} has shape {shown(entry.get('shape'))}; {what}")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        what = "expected the offsets of its first byte and of its end"
        raise ValueError(f"tensor {name} has data_offsets {shown(entry.get('data_offsets'))}; {what}")
    nbytes = -(-math.prod(shape) * _BITS[dtype] // 8) if dtype in _BITS else offsets[1] - offsets[0]
    if offsets[1] - offsets[0] != nbytes:
        what = f"a tensor of shape {shown(shape)} in {dtype} has {shown(nbytes)} bytes"
        raise ValueError(f"tensor {name} has data_offsets {shown(offsets)}; {what}")
    return Entry(dtype, tuple(shape), begin + offsets[0], begin + offsets[1])


def _counts(numbers: Any) -> list[int] | None:
    """Return a list of whole numbers from 0 on; None for anything else."""
    if not isinstance(numbers, list) or len(numbers) > _MOST_DIMENSIONS:
        return None
    return numbers if all(type(each) is int and 0 <= each < 1 << 63 for each in numbers) else None


def _refuse_shared_bytes(found: Mapping[str, Entry]) -> None:
    """Raise ValueError where tensors overlap: a small file would become a model of any size."""
    placed = sorted((each.begin, each.end, name) for name, each in found.items() if each.begin < each.end)
    for (_, end, name), (begin, _, other) in pairwise(placed):
        if begin < end:
            raise ValueError(f"tensors {shown(name)} and {shown(other)} share bytes of the file")
