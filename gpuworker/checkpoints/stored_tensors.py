"""The tensors of a checkpoint in place: safetensors files, mapped into memory tensor by tensor.

Each tensor has a mapping of its own, which ends with the tensor. So while a checkpoint is converted, only the tensor in
work is in memory. A tensor that is kept unchanged costs no copy, and its pages belong to the page cache. (The
safetensors library maps and unmaps a file as a whole.)
"""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from common.checkpoint.bounded_json import shown
from common.checkpoint.files import INDEX, weight_files
from common.checkpoint.safetensors_header import Entry, read_header
from common.contracts.errors import FieldViolation, InvalidConfig

_log = logging.getLogger(__name__)

_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of one tensor: a file, the offset of its first byte, its type and its shape in the file.

    A `transposed` one is mapped with its last two axes exchanged.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    transposed: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def map(self) -> torch.Tensor:
        """Return the tensor on pages of the file; nothing is read before it is touched, and writes stay private."""
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype)
        before = self.offset % mmap.ALLOCATIONGRANULARITY
        with self.path.open("rb") as file:
            pages = mmap.mmap(file.fileno(), before + self.nbytes, access=mmap.ACCESS_COPY, offset=self.offset - before)
        flat = torch.frombuffer(pages, dtype=torch.uint8, offset=before, count=self.nbytes)
        if self.offset % self.dtype.itemsize:
            flat = flat.clone()  # written by a program that does not align: few are, and a copy is aligned
        stored = flat.view(self.dtype).view(self.shape)
        return stored.mT if self.transposed else stored


class StoredTensors:
    """All tensors of a checkpoint folder by name, in the order of their names; of one file or of several."""

    def __init__(self, directory: Path, found: Mapping[str, StoredTensor] | None = None) -> None:
        """Read the headers of the folder's safetensors; `found` has the tensors of a file in another format."""
        self.directory = directory
        self._found = _read_folder(directory) if found is None else dict(found)

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def __getitem__(self, name: str) -> StoredTensor:
        """Return the place of a tensor. Raises KeyError."""
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._found))

    def __len__(self) -> int:
        return len(self._found)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._found.values())


def _read_folder(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder, each of the file that its index names. Raises InvalidConfig when one is missing.

    A tensor that its file does not hold is read from another one that does, as transformers reads it.
    """
    try:
        files = weight_files(directory)
    except InvalidConfig as error:
        what = f"cannot load {directory}: {error.violations[0].description}"
        raise InvalidConfig(FieldViolation("--model", what)) from None
    if files.unread:
        _log.warning("%s: %s", directory, files.unread)
    headers = {path: _read_header(path) for path in files.paths}
    found: dict[str, StoredTensor] = {}
    for tensors in headers.values():
        found |= tensors
    misplaced = 0
    for name, path in files.places.items():
        if (placed := headers[path].get(name)) is not None:
            found[name] = placed
        else:
            misplaced += name in found
    if misplaced:
        _log.warning(
            "%s: %s names the wrong file of %d tensors; they are read where they are", directory, INDEX, misplaced
        )
    return found


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file. Raises InvalidConfig for a file that violates the format."""
    try:
        size = path.stat().st_size
        return {name: _stored(path, name, entry, size) for name, entry in read_header(path).items()}
    except ValueError as error:
        raise InvalidConfig(FieldViolation("--model", f"cannot read {path}: {error}")) from None
    except OSError as error:
        raise InvalidConfig(FieldViolation("--model", f"cannot read {path}: {error.strerror}")) from None


def _stored(path: Path, name: str, entry: Entry, size: int) -> StoredTensor:
    if entry.dtype not in _DTYPES:
        raise ValueError(f"tensor {shown(name)} has the type {shown(entry.dtype)}; known are {', '.join(_DTYPES)}")
    if entry.end > size:
        raise ValueError(f"tensor {shown(name)} ends at {entry.end}, and the file at {size}; finish the download")
    return StoredTensor(path, entry.begin, entry.shape, _DTYPES[entry.dtype])
