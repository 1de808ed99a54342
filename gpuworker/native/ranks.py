"""The memory that the ranks of one host share (gpuworker/native/quire_ranks.h), on a file without a name.

It has slots for ranks of other hosts, too; `HostRanks` is what a process fills these by.

Each rank maps all of it. Pages that no step has touched take no memory, so it is sized for the largest step.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

MAX_RANKS: Final = 16
_LINE: Final = 64
_WORD: Final = 2**32 - 1
_int32, _int64, _uint32, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_void_p


class CountersStruct(ctypes.Structure):
    """quire_rank_counters."""

    _fields_ = (
        *((name, _uint32) for name in ("met", "sleepers", "begun", "beats", "serving", "floats", "rows", "given")),
        ("reserved", _uint32 * 8),
    )


class BoardStruct(ctypes.Structure):
    """quire_rank_board."""

    _fields_ = (
        ("ranks", CountersStruct * MAX_RANKS),
        *((name, _uint32) for name in ("tokens", "kept", "hidden", "vocab")),
        ("reserved", _uint32 * 12),
    )


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

    def follow(self, rank: int, beats: int, serving: bool) -> None:
        """Take over what a rank of another host says of itself."""
        self.struct.ranks[rank].beats, self.struct.ranks[rank].serving = beats, serving


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


@dataclass(frozen=True, slots=True)
class BoardSizes:
    """What decides where everything lies behind the board: the largest step, and the model's sizes."""

    steps: StepSizes
    hidden: int
    vocab: int
    ranks: int

    @property
    def part_floats(self) -> int:
        return self.steps.rows * self.hidden

    @property
    def step_bytes(self) -> int:
        """Of all ranks together, without logits."""
        return 8 * self.steps.tokens + 4 * 2 * self.ranks * self.part_floats

    def map(self, board: RankBoard) -> BoardMemory:
        """Map all of the memory; the file grows to it. Raises OSError."""
        ids = _rounded(ctypes.sizeof(BoardStruct))
        parts = ids + _rounded(8 * self.steps.tokens)
        logits = parts + _rounded(4 * 2 * self.ranks * self.part_floats)
        end = logits + _rounded(4 * self.steps.kept * self.vocab)
        mapped = _mapped(board.descriptor, end)

        def tensor(dtype: torch.dtype, offset: int, *shape: int) -> torch.Tensor:
            return torch.frombuffer(mapped, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)

        return BoardMemory(
            tensor(torch.int64, ids, self.steps.tokens),
            tensor(torch.float32, parts, 2, self.ranks, self.part_floats),
            tensor(torch.float32, logits, self.steps.kept, self.vocab),
        )


class BoardMemory(NamedTuple):
    """The memory behind the board, which the tensors keep."""

    token_ids: torch.Tensor  # [tokens]
    parts: torch.Tensor  # [2, ranks, part_floats]
    logits: torch.Tensor  # [kept, vocab]


class RankMemory:
    """What the steps of a model share with the other ranks; `struct` describes it to the library."""

    def __init__(self, board: RankBoard, rank: int, sizes: BoardSizes, tokens: tuple[int, int]) -> None:
        """`tokens` are those of the vocabulary that this rank has: from one to before another. Raises OSError."""
        self.sizes, self.step_bytes = sizes.steps, sizes.step_bytes
        self._memory = memory = sizes.map(board)
        self.logits = memory.logits
        words = board.struct
        words.tokens, words.kept = sizes.steps.tokens, sizes.steps.kept
        words.hidden, words.vocab = sizes.hidden, sizes.vocab
        first, end = tokens
        places = ctypes.addressof(board.struct), memory.token_ids.data_ptr(), memory.parts.data_ptr()
        self.struct = RanksStruct(rank, sizes.ranks, *places, sizes.part_floats, first, end - first)
        self._board = board


MET: Final = 0
BEGUN: Final = 1


class HostRanks:
    """The ranks of one host, as a process sees them that runs none and carries what they share to other hosts."""

    def __init__(self, library: ctypes.CDLL, board: RankBoard, own: range, size: int) -> None:
        """`own` are the ranks of this host, of `size` in all."""
        self._await, self._advance = library.quire_ranks_await, library.quire_ranks_advance
        self._await.argtypes, self._await.restype = (_pointer, _int32, _int32, _int32, _uint32), _int32
        self._advance.argtypes, self._advance.restype = (_pointer, _int32, _int32, _int32), None
        self.board, self.own, self.size = board, own, size
        self.others = [each for each in (range(own.start), range(own.stop, size)) if each]
        self._memory: tuple[BoardSizes, BoardMemory] | None = None

    @property
    def memory(self) -> BoardMemory:
        """What the ranks share, once one of them has loaded."""
        words = self.board.struct
        sizes = BoardSizes(StepSizes(words.tokens, words.kept), words.hidden, words.vocab, self.size)
        if self._memory is None or self._memory[0] != sizes:
            self._memory = sizes, sizes.map(self.board)
        return self._memory[1]

    def have_come(self, ranks: range, counter: int, wanted: int) -> bool:
        """Return whether all of these ranks have moved a counter so far; waits for a tenth of a second or two."""
        place = ctypes.addressof(self.board.struct)
        return bool(self._await(place, ranks.start, len(ranks), counter, wanted & _WORD))

    def move_on(self, ranks: range, counter: int) -> None:
        """Move a counter of ranks of other hosts on, after what was written for them."""
        self._advance(ctypes.addressof(self.board.struct), ranks.start, len(ranks), counter)

    def given(self) -> torch.Tensor:
        """Return the tokens [T] of the step that rank 0 has begun."""
        return self.memory.token_ids[: self.board.struct.ranks[0].given]

    def written(self) -> tuple[int, int]:
        """Return the floats of its part, and the rows of logits, that each rank has written for the meeting."""
        first = self.board.struct.ranks[self.own.start]
        return first.floats, first.rows


def _mapped(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map the beginning of the file; it grows where it is shorter, and no rank makes it shorter."""
    if os.fstat(descriptor).st_size < nbytes:
        os.ftruncate(descriptor, nbytes)
    return mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE
