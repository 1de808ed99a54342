"""Linear layers on CPUs by the native library (gpuworker/native/quire_linear.h): packing of weights, and y = x · Wᵀ.

A weight is packed once, as float32, bfloat16, float16 or integers with scales, into memory of this object. A result
depends on the row and the weight alone: neither other rows nor the number of threads change a bit of it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Final

import torch

from gpuworker.native import library as native
from gpuworker.native.library import NativeUnavailable

_HUGE_PAGE: Final = 2 << 20
_CHUNK: Final = 32 << 20
_ALIGNMENT: Final = 64
_LARGEST_GROUP, _GRAIN = 1024, 16  # a group has at most so many inputs, and a multiple of so many
_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_int32, _int64, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class Kind(IntEnum):
    """quire_linear_kind: how a weight is stored, and the type of the activations that it takes."""

    F32 = 0
    BF16 = 1
    I8_F32 = 2
    I8_BF16 = 3
    I4_F32 = 4
    I4_BF16 = 5
    W8A8 = 6
    F16 = 7

    @property
    def whole(self) -> bool:
        """Whether weights are integers with scales."""
        return self not in (Kind.F32, Kind.BF16, Kind.F16)


class Store(IntEnum):
    """quire_store: how a result is stored."""

    F32 = 0
    BF16 = 1
    ADD_F32 = 2
    SILU_F32 = 3
    SILU_BF16 = 4
    GELU_F32 = 5
    GELU_BF16 = 6

    @property
    def dtype(self) -> torch.dtype:
        """The type of the output."""
        return torch.bfloat16 if self in (Store.BF16, Store.SILU_BF16, Store.GELU_BF16) else torch.float32

    @property
    def gated(self) -> bool:
        """Whether it is silu(gate) · up of a paired weight, or gelu(gate) · up, half as wide."""
        return self >= Store.SILU_F32


class LinearStruct(ctypes.Structure):
    """quire_linear."""

    _fields_ = (
        *((name, _int32) for name in ("kind", "group", "has_zeros", "has_bias", "paired", "reserved")),
        ("n", _int64),
        ("k", _int64),
        ("memory", _pointer),
    )


class SourceStruct(ctypes.Structure):
    """quire_source."""

    _fields_ = (
        *((name, _pointer) for name in ("data", "scales", "shifts", "bias")),
        ("rows", _int64),
        ("row_stride", _int64),
        ("type", _int32),
        ("reserved", _int32),
    )


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """(values - zeros) · scales + minimums: integers of 8 bits, or of 4 ([-8, 7]); groups are equal runs along K."""

    values: torch.Tensor  # int8 [N, K]
    scales: torch.Tensor  # float32 [N, groups]
    zeros: torch.Tensor | None = None  # [N, groups] on the scale of `values`
    minimums: torch.Tensor | None = None  # float32 [N, groups]

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return self.values.shape


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one source: float32, bfloat16, float16 or integers, with a bias or without."""

    weight: torch.Tensor | IntegerWeight  # [N, K], dense along K
    bias: torch.Tensor | None = None  # [N]


class Memory:
    """Anonymous memory on huge pages where the system has them, so that long reads miss no translations. Zeroed."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        size = max(1, -(-nbytes // _HUGE_PAGE)) * _HUGE_PAGE
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a shared map has no huge pages
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


class Arena:
    """Memory given out in pieces, which fill huge pages together. The rest of a mapping is never touched."""

    def __init__(self, chunk: int = _CHUNK) -> None:
        """Map `chunk` bytes at a time, or more for a larger piece."""
        self.nbytes = 0  # given out
        self._chunk, self._chunks, self._left = chunk, list[Memory](), 0

    def take(self, nbytes: int) -> int:
        """Return the address of zeroed bytes, aligned to 64; they last as long as the arena."""
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if size > self._left:
            self._left = max(size, self._chunk)
            self._chunks.append(Memory(self._left))
        last = self._chunks[-1]
        at = last.address + last.nbytes - self._left
        self._left, self.nbytes = self._left - size, self.nbytes + size
        return at


class PackedLinear:
    """A packed weight [N, K] of one source or of several, one below the other (or gate and up, paired)."""

    def __init__(
        self,
        sources: Sequence[Rows],
        kind: Kind,
        *,
        paired: bool = False,
        threads: int = 1,
        library: ctypes.CDLL | None = None,
        arena: Arena | None = None,
    ) -> None:
        """Pack, into memory of its own or of an arena.

        Raises NativeUnavailable without a library, ValueError for a weight that it does not take.
        """
        self.kind, self.threads = kind, threads
        self.library = declared(library or native.best())
        prepared = [_prepared(rows, kind) for rows in sources]
        weights = [rows.weight for rows in prepared]
        self.n, self.k = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        grouping = {_grouping(weight) for weight in weights}
        if len(grouping) != 1 or any(weight.shape[1] != self.k for weight in weights):
            raise ValueError("sources of one weight have different inputs or groups")
        group, zeros = grouping.pop()
        biased = any(rows.bias is not None for rows in prepared)
        self.struct = LinearStruct(kind, group, zeros, biased, paired, 0, self.n, self.k, None)
        self.nbytes = self._bytes()
        self._memory = arena or Arena(self.nbytes)
        self.struct.memory = self._memory.take(self.nbytes)
        self._scratch = Memory(0)
        described = (SourceStruct * len(prepared))(*map(_source, prepared))
        if self.library.quire_linear_pack(ctypes.byref(self.struct), described, len(prepared), threads):
            raise ValueError(f"the sources do not make a weight of kind {kind.name}")

    def _bytes(self) -> int:
        nbytes = int(self.library.quire_linear_bytes(ctypes.byref(self.struct)))
        if not nbytes:
            raise ValueError(f"no native linear of kind {self.kind.name}, {self.n} x {self.k}, {self.struct.group}")
        return nbytes

    def __call__(self, x: torch.Tensor, store: Store = Store.F32, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return x · Wᵀ, [M, N] (gated: [M, N / 2]), for x [M, K] in float32 or bfloat16; ADD_F32 needs `out`."""
        if out is None:
            out = torch.zeros(len(x), self.n // 2 if store.gated else self.n, dtype=store.dtype)
        self.bound(x, store, out)()
        return out

    def bound(self, x: torch.Tensor, store: Store, out: torch.Tensor) -> Callable[[], None]:
        """Return the call that multiplies the contents of `x` at the time of the call.

        The call lasts as long as this object and both tensors. Raises ValueError when they do not fit.
        """
        shape = (len(x), self.n // 2 if store.gated else self.n)
        if x.stride(1) != 1 or x.shape[1] != self.k or out.shape != shape or out.dtype != store.dtype:
            raise ValueError(f"x is {tuple(x.shape)}, out {tuple(out.shape)} of {out.dtype}; K is {self.k}")
        if store.gated != bool(self.struct.paired):
            raise ValueError(f"a weight that is {'' if self.struct.paired else 'not '}paired cannot store {store.name}")
        needed = int(self.library.quire_linear_scratch(ctypes.byref(self.struct), len(x)))
        if needed > self._scratch.nbytes:
            self._scratch = Memory(needed)
        scratch = self._scratch
        source = (x.data_ptr(), _TYPES[x.dtype], x.stride(0), len(x))
        target = (out.data_ptr(), out.stride(0), int(store), scratch.address)
        return partial(self._run, scratch, ctypes.byref(self.struct), *source, *target, self.threads)

    def _run(self, _scratch: Memory, *arguments: object) -> None:
        if self.library.quire_linear_run(*arguments):
            raise ValueError("the native library refused the call")


def declared(library: ctypes.CDLL | None) -> ctypes.CDLL:
    """Return the library with its linear functions declared. Raises NativeUnavailable for none."""
    if library is None:
        raise NativeUnavailable("the native library was not built")
    linear = ctypes.POINTER(LinearStruct)
    library.quire_linear_bytes.argtypes, library.quire_linear_bytes.restype = [linear], ctypes.c_size_t
    library.quire_linear_scratch.argtypes, library.quire_linear_scratch.restype = [linear, _int64], ctypes.c_size_t
    library.quire_linear_pack.argtypes = [linear, ctypes.POINTER(SourceStruct), _int32, _int32]
    library.quire_linear_run.argtypes = [
        *(linear, _pointer, _int32, _int64, _int64),
        *(_pointer, _int64, _int32, _pointer, _int32),
    ]
    return library


def _prepared(rows: Rows, kind: Kind) -> Rows:
    """Return the source with arrays in the form that C reads. Raises ValueError when they do not suit the kind."""
    weight = rows.weight
    bias = None if rows.bias is None else rows.bias.float().contiguous()
    if isinstance(weight, torch.Tensor):
        if kind.whole or weight.dtype not in _TYPES or weight.dtype == torch.int8:
            raise ValueError(f"{weight.dtype} cannot be packed as {kind.name}")
        return Rows(weight if weight.stride(1) == 1 else weight.contiguous(), bias)
    if not kind.whole:
        raise ValueError(f"integers cannot be packed as {kind.name}")
    if kind in (Kind.I4_F32, Kind.I4_BF16) and weight.values.numel():
        least, most = torch.aminmax(weight.values)
        if least < -8 or most > 7:
            raise ValueError("an int4 weight has values beyond [-8, 7]")
    return Rows(_finer(weight), bias)


def _finer(weight: IntegerWeight) -> IntegerWeight:
    """Return the weight with groups of at most 1024 inputs, longer ones cut into equal parts; zeros are minimums."""
    group, shifts = weight.values.shape[1] // weight.scales.shape[1], _shifts(weight)
    parts = 1
    if weight.scales.shape[1] > 1 or shifts is not None:
        sizes = (size for size in range(_LARGEST_GROUP, 0, -_GRAIN) if group % size == 0)
        parts = group // next(sizes, group) if group > _LARGEST_GROUP else 1
    scales = weight.scales.float().repeat_interleave(parts, dim=1).contiguous()
    finer = None if shifts is None else shifts.repeat_interleave(parts, dim=1).contiguous()
    return IntegerWeight(weight.values.contiguous(), scales, minimums=finer)


def _shifts(weight: IntegerWeight) -> torch.Tensor | None:
    """Return what is added to each weight of a group, for its zero and its minimum together: float32 [N, groups]."""
    if weight.zeros is None:
        return weight.minimums
    of_zeros = -weight.zeros.float() * weight.scales.float()
    return of_zeros if weight.minimums is None else of_zeros + weight.minimums


def _grouping(weight: torch.Tensor | IntegerWeight) -> tuple[int, bool]:
    """Return the inputs of a group, 0 when there is one scale for each output, and whether there are minimums."""
    if isinstance(weight, torch.Tensor):
        return 0, False
    inputs, groups = weight.values.shape[1], weight.scales.shape[1]
    if inputs % groups:
        raise ValueError(f"{inputs} inputs cannot be shared out among {groups} groups")
    grouped = groups > 1 or weight.minimums is not None
    return (inputs // groups if grouped else 0), weight.minimums is not None


def _source(rows: Rows) -> SourceStruct:
    weight, bias = rows.weight, None if rows.bias is None else rows.bias.data_ptr()
    if isinstance(weight, torch.Tensor):
        shape = (weight.shape[0], weight.stride(0), _TYPES[weight.dtype])
        return SourceStruct(weight.data_ptr(), None, None, bias, *shape, 0)
    shifts = None if weight.minimums is None else weight.minimums.data_ptr()
    values = weight.values
    shape = (values.shape[0], values.stride(0), _TYPES[values.dtype])
    return SourceStruct(values.data_ptr(), weight.scales.data_ptr(), shifts, bias, *shape, 0)
