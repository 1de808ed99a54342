"""The tokens that the constrained rows of a step may sample: the mask thread writes them, the sampler reads them."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from common.types import SequenceId
from gpuworker.core.stopping import FinishCause
from gpuworker.native.library import best

_WORD = 32  # tokens in a word of a mask


class MaskListener(Protocol):
    """Learns the outcome of each step that has masks, before the engine does."""

    def sampled(self, masks: GrammarBitmask, tokens: Sequence[int]) -> None:
        """Take in what the C constrained rows of a step have drawn."""
        ...

    def failed(self, masks: GrammarBitmask) -> None:
        """Take note that a step drew nothing."""
        ...


class GrammarBitmask:
    """The masks of C of the S rows of a step that sample; `rows` [C] says which, `positions` [C] of which tokens.

    Memory is that of the native library's quire_masks. `bits` [C, ceil(vocab / 32)]: bit i of word w allows token
    32 w + i. Nobody reads `bits` or `ended` before the masks are open.
    """

    def __init__(
        self,
        listener: MaskListener,
        sequences: Sequence[SequenceId],
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        sampling: int,
        vocab_size: int,
    ) -> None:
        self._listener = listener
        self.sequences, self.rows, self.positions = tuple(sequences), rows.tolist(), positions.tolist()
        self.bits = np.empty((len(rows), -(-vocab_size // _WORD)), dtype=np.uint32)
        self.of = np.full(sampling, -1, dtype=np.int32)  # [S]
        self.of[rows] = np.arange(len(rows), dtype=np.int32)
        self.ready, self.waited = np.zeros(1, dtype=np.uint32), np.zeros(1)
        self.ended: dict[SequenceId, FinishCause] = {}
        """Those whose output had come to its end before this step; what they draw in it is nothing."""
        self._open = threading.Event()

    # ------------------------------------------------------------ the mask thread

    def open(self) -> None:
        """Let the draw go on."""
        _open(self.ready)
        self._open.set()

    # ------------------------------------------------------------ who draws

    def wait(self) -> None:
        """Wait for the masks, where the native library does not do it."""
        if not self._open.is_set():
            began = time.perf_counter()
            self._open.wait()
            self.waited[0] = time.perf_counter() - began

    # ------------------------------------------------------------ who tells what a step drew

    def sampled(self, tokens: Sequence[int]) -> None:
        """Hand on what the S rows have drawn, before the engine hears of it."""
        self._listener.sampled(self, [tokens[row] for row in self.rows])

    def failed(self) -> None:
        """Say that the step drew nothing, before the engine hears of it."""
        self._listener.failed(self)


def _open(ready: npt.NDArray[np.uint32]) -> None:
    """Release a native draw that waits for `ready` [1], or will wait for it."""
    library = best()
    if library is None:
        ready[0] = 1
    else:
        library.quire_masks_open(ctypes.c_void_p(ready.ctypes.data))
