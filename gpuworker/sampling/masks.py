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
    """Receives the outcome of each step that has masks, before the engine does."""

    def sampled(self, masks: GrammarBitmask, tokens: Sequence[int]) -> None:
        """Take in the sampled tokens of the C constrained rows of a step."""
        ...

    def failed(self, masks: GrammarBitmask) -> None:
        """Handle a step that sampled nothing."""
        ...


class GrammarBitmask:
    """The masks of the C constrained rows among the S rows of a step that sample.

    `rows` [C] are their indices, `positions` [C] those of their tokens. The memory has the layout of the native
    library's quire_masks. `bits` [C, ceil(vocab / 32)]: bit i of word w allows token 32 w + i. `bits` and `ended` are
    read only after the masks are open.
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
        """Sequences that were complete before this step; their samples are discarded."""
        self._open = threading.Event()

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

    def sampled(self, tokens: Sequence[int]) -> None:
        """Report the tokens of the S rows to the listener, before the engine receives them."""
        self._listener.sampled(self, [tokens[row] for row in self.rows])

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
