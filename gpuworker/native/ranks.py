"""The memory that the ranks of one host share (gpuworker/native/quire_ranks.h), on a file without a name.

Each rank maps all of it. Pages that no step has touched take no memory, so it is sized for the largest step.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from typing import Final

import torch

MAX_RANKS: Final = 16
_LINE: Final = 64
_int32, _int64, _uint32, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_void_p


class CountersStruct(ctypes.Structure):
    """quire_rank_counters."""

    _fields_ = (
        *((name, _uint32) for name in ("met", "sleepers", "begun", "beats", "serving")),
        ("reserved", _uint32 * 11),
    )


class BoardStruct(ctypes.Structure):
    """quire_rank_board."""

    _fields_ = (("ranks", CountersStruct * MAX_RANKS),)


class RanksStruct(ctypes.Structure):
    """quire_ranks."""

    _fields_ = (
        *((name, _int32) for name in ("rank", "size")),
        *((name, _pointer) for name in ("board", "token_ids", "parts")),
        *((name, _int64) for name in ("part_floats", "first_token", "tokens")),
    )


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The largest step: its tokens, and the rows of logits that it keeps."""

    tokens: int
    kept: int

    @property
    def rows(self) -> int:
        return max(self.tokens, self.kept)


class RankBoard:
    """The counters of all ranks, at the beginning of the memory that they share."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = _mapped(descriptor, ctypes.sizeof(BoardStruct))
        self.struct = BoardStruct.from_buffer(self._map)

    @classmethod
    def make(cls) -> RankBoard:
        """Return the board of new ranks. Raises OSError where the system gives no memory to share."""
        return cls(os.memfd_create("quire-ranks", os.MFD_CLOEXEC))

    def close(self) -> None:
        """Close the file; what is mapped of it stays."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def beats(self, rank: int) -> int:
        return int(self.struct.ranks[rank].beats)

    @property
    def serving(self) -> bool:
        """Whether a rank that stands still ends the worker: not while models load."""
        return bool(self.struct.ranks[0].serving)

    def serve(self) -> None:
        self.struct.ranks[0].serving = 1


class Beat:
    """A native thread that beats for a rank: a process that runs beats, whatever its Python code does."""

    def __init__(self, library: ctypes.CDLL, board: RankBoard, rank: int, seconds: float) -> None:
        """Raises OSError when the thread cannot be started."""
        start, self._stop = library.quire_beat_start, library.quire_beat_stop
        start.argtypes, start.restype = (_pointer, _int32, ctypes.c_double), _pointer
        self._stop.argtypes, self._stop.restype = (_pointer,), None
        self._board = board
        self._beat = start(ctypes.addressof(board.struct), rank, seconds)
        if not self._beat:
            raise OSError("the thread that beats for a rank could not be started")

    def close(self) -> None:
        """End the thread; a second call does nothing."""
        beat, self._beat = self._beat, None
        if beat:
            self._stop(beat)


class RankMemory:
    """What the steps of a model share with the other ranks; `struct` describes it to the library."""

    def __init__(
        self, board: RankBoard, rank: int, size: int, sizes: StepSizes, hidden: int, vocab: int, tokens: tuple[int, int]
    ) -> None:
        """`tokens` are those of the vocabulary that this rank has: from one to before another. Raises OSError."""
        self.sizes, part = sizes, sizes.rows * hidden
        used = _rounded(ctypes.sizeof(BoardStruct))
        ids, used = used, used + _rounded(8 * sizes.tokens)
        parts, used = used, used + _rounded(4 * 2 * size * part)
        logits, used = used, used + _rounded(4 * sizes.kept * vocab)
        self._map = _mapped(board.descriptor, used)
        self.step_bytes = 8 * sizes.tokens + 4 * 2 * size * part
        """Of all ranks together, without logits."""
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.logits = torch.frombuffer(self._map, dtype=torch.float32, count=sizes.kept * vocab, offset=logits)
        self.logits = self.logits.view(sizes.kept, vocab)
        first, end = tokens
        self.struct = RanksStruct(rank, size, base, base + ids, base + parts, part, first, end - first)


def _mapped(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map the beginning of the file; it grows where it is shorter, and no rank makes it shorter."""
    if os.fstat(descriptor).st_size < nbytes:
        os.ftruncate(descriptor, nbytes)
    return mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE
