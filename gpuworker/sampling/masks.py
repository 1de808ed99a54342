"""The tokens that the constrained rows of a step may sample: the mask thread writes them, the sampler reads them."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from common.contracts.types import SequenceId
from gpuworker.native.library import best
from gpuworker.scheduling.stopping import FinishCause

_WORD = 32  # tokens in a word of a mask
NO_DRAFTS: Final[Mapping[SequenceId, tuple[int, ...]]] = MappingProxyType({})


class MaskListener(Protocol):
    """Receives the outcome of each step that has masks, before the engine does."""

    def sampled(self, masks: GrammarBitmask, tokens: Sequence[tuple[int, ...]], at_once: bool) -> Callable[[], None]:
        """Take in the sampled tokens that count, of each of the sequences at `masks.heads`.

        `at_once`: the calling thread may do the work that they bring. Return what it must do once the result is told.
        """
        ...

    def forced(self, masks: GrammarBitmask, tokens: Sequence[tuple[int, ...]]) -> dict[SequenceId, tuple[int, ...]]:
        """Return what constraints force to follow tokens that `sampled` reported."""
        ...

    def failed(self, masks: GrammarBitmask) -> None:
        """Handle a step that sampled nothing."""
        ...


class GrammarBitmask:
    """The masks of the C constrained rows among the S rows of a step that sample.

    `rows` [C] are their indices, `positions` [C] those of their tokens. The memory has the layout of the native
    library's quire_masks. `bits` [C, ceil(vocab / 32)]: bit i of word w allows token 32 w + i. `bits`, `ended` and
    `usable` are read only after the masks are open.

    The rows of a sequence's `drafts` follow its own row, its head.
    """

    def __init__(
        self,
        listener: MaskListener,
        sequences: Sequence[SequenceId],
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        sampling: int,
        vocab_size: int,
        drafts: Mapping[SequenceId, tuple[int, ...]] = NO_DRAFTS,
    ) -> None:
        self._listener, self.drafts = listener, drafts
        self.sequences, self.rows, self.positions = tuple(sequences), rows.tolist(), positions.tolist()
        self.bits = np.empty((len(rows), -(-vocab_size // _WORD)), dtype=np.uint32)
        self.of = np.full(sampling, -1, dtype=np.int32)  # [S]
        self.of[rows] = np.arange(len(rows), dtype=np.int32)
        self.ready, self.waited = np.zeros(1, dtype=np.uint32), np.zeros(1)
        self.ended: dict[SequenceId, FinishCause] = {}
        """Sequences that were complete before this step; their samples are discarded."""
        self.usable: dict[SequenceId, int] = {}
        """How many rows of a sequence with drafts have masks; samples behind those do not count."""
        self.heads = self._find_heads()
        """The index of the first row of each sequence, among the C, and the sequence."""
        self._open = threading.Event()

    def _find_heads(self) -> list[tuple[int, SequenceId]]:
        heads = list(enumerate(self.sequences))
        if not self.drafts:
            return heads
        return [(row, each) for row, each in heads if row == 0 or each != self.sequences[row - 1]]

    # ------------------------------------------------------------ the mask thread

    def open(self) -> None:
        """Release the sampler."""
        _open(self.ready)
        self._open.set()

    # ------------------------------------------------------------ the sampler

    def wait(self) -> None:
        """Wait for the masks, where the native library does not do it."""
        if not self._open.is_set():
            began = time.perf_counter()
            self._open.wait()
            self.waited[0] = time.perf_counter() - began

    # ------------------------------------------------------------ the executor

    def sampled(
        self,
        tokens: Sequence[int],
        counted: Mapping[SequenceId, tuple[int, ...]] = NO_DRAFTS,
        at_once: bool = False,
    ) -> tuple[dict[SequenceId, tuple[int, ...]], Callable[[], None]]:
        """Report the tokens of the S rows to the listener, before the engine receives them.

        `counted` are those that count, of sequences with drafts. Return the tokens that constraints force to follow,
        where that is news, and what the caller must do in any case once the engine has the tokens.
        """
        rows = self.rows
        known = [counted.get(each) or (tokens[rows[row]],) for row, each in self.heads]
        rest = self._listener.sampled(self, known, at_once)
        return self._listener.forced(self, known), rest

    def failed(self) -> None:
        """Report to the listener that the step sampled nothing, before the engine receives the failure."""
        self._listener.failed(self)


def _open(ready: npt.NDArray[np.uint32]) -> None:
    """Release a native sampler that waits for `ready` [1], or will wait for it."""
    library = best()
    if library is None:
        ready[0] = 1
    else:
        library.quire_masks_open(ctypes.c_void_p(ready.ctypes.data))
