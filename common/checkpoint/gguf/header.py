"""The header of a GGUF file: its metadata, and the type, shape and place of each tensor.

A file is, little-endian: "GGUF", version, number of tensors, number of metadata entries; the entries, each a key, a
type and a value; the tensors, each a name, its sizes (the fastest first), a type and an offset; padding; the data.
Format: docs/gguf.md of the ggml project. The reader of the gguf package takes seconds for a vocabulary, because it
makes several arrays for each string; this one takes a tenth of a second.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from common.checkpoint.bounded_json import shown
from common.contracts.errors import FieldViolation, InvalidConfig

MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_LFS: Final = b"version https://git-lfs"
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS: Final = 4
_ALIGNMENT: Final = 32
# A header is read into memory as a whole: several times as much as vocabularies of a million tokens take.
_MOST_BYTES: Final = 128 << 20
_MOST_VALUES: Final = 8 << 20
_MOST_TENSORS: Final = 1 << 20
_MOST_LEVELS: Final = 4
_LARGEST_TABLE: Final = 1 << 20  # bytes of a tensor whose numbers are read


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type of tensors: numbers are stored in blocks of `numbers` along a row, of `nbytes` each."""

    name: str
    numbers: int
    nbytes: int

    def bytes_of(self, shape: Sequence[int]) -> int | None:
        """Return the bytes of a tensor; None for a shape that cannot be stored so, or that has no numbers."""
        if not shape or min(shape) < 1 or shape[-1] % self.numbers or (len(shape) == 1 and self.numbers > 1):
            return None
        return math.prod(shape) // self.numbers * self.nbytes


# The types that can be loaded, by their number in a file.
TYPES: Final[Mapping[int, TensorType]] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}
_OTHER_TYPES: Final = {
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    9: "Q8_1",
    15: "Q8_K",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """The place of a tensor in a file. `shape` has the rows first, `type` is a name of `TYPES`."""

    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def refuse(self, why: str) -> InvalidConfig:
        """Return the error that refuses the file."""
        return refused(self.path, why)

    def floats(self, name: str) -> tuple[float, ...]:
        """Return the numbers of a small F32 tensor."""
        tensor = self.tensors[name]
        if tensor.type != "F32":
            raise self.refuse(f"{name} is stored as {tensor.type}; expected F32")
        if tensor.nbytes > _LARGEST_TABLE:
            raise self.refuse(f"{name} has {tensor.nbytes // 4} numbers; expected at most {_LARGEST_TABLE // 4}")
        with self.path.open("rb") as file:
            file.seek(tensor.offset)
            return struct.unpack(f"<{tensor.nbytes // 4}f", file.read(tensor.nbytes))


def refused(path: Path, why: str) -> InvalidConfig:
    """Return the error that refuses a GGUF file."""
    return InvalidConfig(FieldViolation("--model", f"{path}: {why}"))


def read_header(path: Path) -> Header:
    """Return the header of a file. Raises InvalidConfig when it is not a GGUF file, is broken, or has unknown types."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
            return _read(path, pages)
    except (struct.error, EOFError, UnicodeDecodeError, ValueError, OverflowError, KeyError) as error:
        why = f"the file is broken or was cut short ({error}); download or convert it again"
        raise refused(path, why) from None
    except OSError as error:
        raise refused(path, f"cannot be read: {error.strerror}") from None


class _Cursor:
    """Reads values from the start of a file to the end of its header."""

    def __init__(self, pages: mmap.mmap) -> None:
        self.pages, self.at, self.size, self.values = pages, 0, len(pages), 0

    def take(self, nbytes: int) -> int:
        """Return the offset of the next bytes, and move behind them."""
        if nbytes > self.size - self.at:
            raise EOFError(f"{nbytes} bytes are expected at {self.at}, and the file has {self.size}")
        if self.at + nbytes > _MOST_BYTES:
            raise ValueError(f"its header has more than {_MOST_BYTES} bytes")
        self.at += nbytes
        return self.at - nbytes

    def scalar(self, form: str) -> Any:
        return struct.unpack_from(f"<{form}", self.pages, self.take(struct.calcsize(f"<{form}")))[0]

    def text(self) -> str:
        length = self.scalar("Q")
        begin = self.take(length)
        return self.pages[begin : begin + length].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        return self._array() if kind == _ARRAY else self.scalar(_form(kind))

    def _array(self, level: int = 1) -> list[Any]:
        kind, length = self.scalar("I"), self.scalar("Q")
        self.values += length
        if self.values > _MOST_VALUES:
            raise ValueError(f"its arrays have {self.values} values; expected at most {_MOST_VALUES}")
        if kind == _STRING:
            return [self.text() for _ in range(length)]
        if kind == _ARRAY:
            if level == _MOST_LEVELS:
                raise ValueError(f"arrays are nested in each other; expected at most {_MOST_LEVELS} levels")
            return [self._array(level + 1) for _ in range(length)]
        form = _form(kind)
        begin = self.take(length * struct.calcsize(f"<{form}"))
        return list(struct.unpack_from(f"<{length}{form}", self.pages, begin))


def _form(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"values of type {kind} are not known")
    return _SCALARS[kind]


def _read(path: Path, pages: mmap.mmap) -> Header:
    cursor = _Cursor(pages)
    if pages[: len(MAGIC)] != MAGIC:
        pointer = "a Git LFS pointer, not the file itself: run `git lfs pull`"
        raise refused(path, pointer if pages[: len(_LFS)] == _LFS else "no GGUF file: it does not begin with GGUF")
    cursor.take(len(MAGIC))
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        known = " and ".join(map(str, _VERSIONS))
        raise refused(
            path, f"GGUF of version {version}; only versions {known}, little-endian, are read: convert it again"
        )
    count, entries = cursor.scalar("Q"), cursor.scalar("Q")
    for what, number in (("tensors", count), ("entries of metadata", entries)):
        if number > _MOST_TENSORS:
            raise ValueError(f"it has {number} {what}; expected at most {_MOST_TENSORS}")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"it has the entry {shown(key)} twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    found = [_entry(cursor) for _ in range(count)]
    begin = -(-cursor.at // _alignment(metadata)) * _alignment(metadata)
    tensors: dict[str, Tensor] = {}
    for each in found:
        if each[0] in tensors:
            raise ValueError(f"it has the tensor {shown(each[0])} twice")
        tensors[each[0]] = _tensor(path, each, begin, len(pages))
    _refuse_shared_bytes(tensors)
    return Header(path, metadata, tensors)


def _alignment(metadata: Mapping[str, Any]) -> int:
    found = metadata.get("general.alignment", _ALIGNMENT)
    if type(found) is not int or found < 1 or found & (found - 1):
        raise ValueError(f"general.alignment is {shown(found)}; expected a power of two")
    return found


def _refuse_shared_bytes(tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError where tensors overlap: a small file would become a model of any size."""
    placed = sorted((each.offset, each.offset + each.nbytes, name) for name, each in tensors.items())
    for (_, end, name), (begin, _, other) in pairwise(placed):
        if begin < end:
            raise ValueError(f"tensors {shown(name)} and {shown(other)} share bytes of the file")


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Return name, shape, type and offset of the next tensor."""
    name, dimensions = cursor.text(), cursor.scalar("I")
    if dimensions > _MOST_DIMENSIONS:
        raise ValueError(f"{shown(name)} has {dimensions} dimensions; expected at most {_MOST_DIMENSIONS}")
    shape = tuple([cursor.scalar("Q") for _ in range(dimensions)])[::-1]
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _tensor(path: Path, entry: tuple[str, tuple[int, ...], int, int], begin: int, size: int) -> Tensor:
    name, shape, kind, offset = entry
    if kind not in TYPES:
        known = ", ".join(each.name for each in TYPES.values())
        stored = _OTHER_TYPES.get(kind, f"type {kind}")
        raise refused(path, f"tensor {shown(name)} is stored as {stored}, which is not read; take a file of {known}")
    form = TYPES[kind]
    if (nbytes := form.bytes_of(shape)) is None:
        raise ValueError(f"{shown(name)} of shape {shape} cannot be stored as {form.name}")
    if begin + offset + nbytes > size:
        raise EOFError(f"{shown(name)} ends at {begin + offset + nbytes}, and the file at {size}")
    return Tensor(form.name, shape, begin + offset, nbytes)
