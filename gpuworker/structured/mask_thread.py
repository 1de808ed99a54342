"""The grammar mask thread: follows the constrained sequences of a runner and fills the masks of its steps.

While a step is computed, the tokens of the previous step become known. The thread takes them in and fills the masks of
the running step. Only sampling waits for the masks, and only if they are late.

Why sampling never waits forever. The masks of a step open when each of their rows is settled: either the thread has
taken in all tokens before the row's position, or it no longer follows the sequence. Those tokens came with `add`, which
precedes the step in the thread's queue, or earlier steps sampled them. Steps run in order. The executor ends every step
with masks in `sampled` or `failed`, before it reports the outcome: `sampled` takes the tokens in, `failed` gives the
sequences up. So when a step samples, all earlier steps have ended, and its rows are settled or will be once the thread
reaches them. Cancelled and finished sequences change nothing: the thread follows a sequence until `remove`, which comes
when no unfinished step contains it. The thread waits for nothing but its queue. The limits of llguidance bound its
work, and an error of any kind ends the sequence, not the thread. When a runner is closed, its executor ends first,
while this thread still runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from common.errors import QuireError
from common.process.cores import usable_cores
from common.types import FinishReason, SequenceId
from gpuworker.core.stopping import FinishCause
from gpuworker.engine.ports import MaskLateness
from gpuworker.sampling.masks import GrammarBitmask
from gpuworker.sampling.rows import SampledRow
from gpuworker.serial_thread import SerialThread
from gpuworker.structured.grammars import GrammarCompiler
from gpuworker.structured.sequence import Constrained

if TYPE_CHECKING:
    from llguidance import LLExecutor

log = logging.getLogger(__name__)
_CORES_PER_THREAD, _MOST_THREADS = 4, 8
_ALL = np.uint32(0xFFFFFFFF)
_FAILED = FinishCause(FinishReason.ERROR, message="a step failed")
_UNKNOWN = FinishCause(FinishReason.ERROR, message="the constraint of this sequence is not known to the runner")


class GrammarMaskThread:
    """The engine's thread calls `add`, `remove` and `masks`; the executor calls `sampled` and `failed`.

    Any thread may read `lateness`.
    """

    def __init__(self, grammars: GrammarCompiler) -> None:
        self._grammars = grammars
        self._thread = SerialThread("quire-masks")
        # Only for the mask thread: every sequence between `add` and `remove`, or why it is no longer followed.
        self._states: dict[SequenceId, Constrained | FinishCause] = {}
        self._waiting: list[GrammarBitmask] = []  # in order of steps; two at most
        self._executor: LLExecutor | None = None
        self.lateness = MaskLateness()

    # ------------------------------------------------------------ the engine's thread

    def add(self, sequence: SequenceId, row: SampledRow, output: Sequence[int]) -> None:
        """Follow a sequence whose output so far is `output`."""
        self._thread.put(lambda: self._add(sequence, row, output))

    def remove(self, sequence: SequenceId) -> None:
        """Forget a sequence; no unfinished step has it."""
        self._thread.put(lambda: self._remove(sequence))

    def masks(
        self, sequences: Sequence[SequenceId], rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> GrammarBitmask:
        """Return the masks of a step that will be submitted: for C rows of the S sequences that sample in it.

        `rows` [C] are those with a constraint, `positions` [S] those of the tokens to sample.
        """
        constrained, vocab_size = [sequences[row] for row in rows], self._grammars.vocab_size
        masks = GrammarBitmask(self, constrained, rows, positions[rows], len(sequences), vocab_size)
        self._thread.put(lambda: self._begin(masks))
        return masks

    def close(self) -> None:
        """End the thread; no step is unfinished."""
        self._thread.close()

    # ------------------------------------------------------------ the executor

    def sampled(self, masks: GrammarBitmask, tokens: Sequence[int]) -> None:
        """Take in the sampled tokens of the C rows of a step."""
        self._thread.put(lambda: self._take_in(masks, tokens))

    def failed(self, masks: GrammarBitmask) -> None:
        """Stop following the sequences of a failed step; they end with it."""
        self._thread.put(lambda: self._lose(masks))

    # ------------------------------------------------------------ the mask thread

    def _add(self, sequence: SequenceId, row: SampledRow, output: Sequence[int]) -> None:
        assert row.params.constraint is not None, "only sequences with a constraint are followed"
        with self._ending_what_fails([sequence]):
            self._states[sequence] = Constrained(self._grammars.compile(row.params.constraint), row, output)

    def _remove(self, sequence: SequenceId) -> None:
        self._states.pop(sequence, None)

    def _begin(self, masks: GrammarBitmask) -> None:
        self._waiting.append(masks)
        self._open_what_is_settled()

    def _take_in(self, masks: GrammarBitmask, tokens: Sequence[int]) -> None:
        waited = float(masks.waited[0])
        steps, late, seconds = self.lateness
        self.lateness = MaskLateness(steps + 1, late + (waited > 0), seconds + waited)
        for sequence, token in zip(masks.sequences, tokens, strict=True):
            state = self._states.get(sequence)
            if isinstance(state, Constrained):
                with self._ending_what_fails([sequence]):
                    state.consume(token)
        self._open_what_is_settled()

    def _lose(self, masks: GrammarBitmask) -> None:
        self._states.update({sequence: _FAILED for sequence in masks.sequences if sequence in self._states})
        self._open_what_is_settled()

    def _open_what_is_settled(self) -> None:
        for masks in tuple(self._waiting):
            if all(map(self._is_settled, masks.sequences, masks.positions)):
                self._waiting.remove(masks)
                with self._ending_what_fails(masks.sequences):
                    self._fill(masks)
                self._tell_ends(masks)
                masks.open()

    def _is_settled(self, sequence: SequenceId, position: int) -> bool:
        state = self._states.get(sequence)
        return not isinstance(state, Constrained) or state.position >= position

    def _fill(self, masks: GrammarBitmask) -> None:
        """Fill the rows of all whose outputs go on."""
        states = [(self._states.get(each), row) for row, each in enumerate(masks.sequences)]
        going_on = [(each, row) for each, row in states if isinstance(each, Constrained) and each.ending is None]
        address, (rows, words) = masks.bits.ctypes.data, masks.bits.shape
        if len(going_on) == 1:
            ((alone, row),) = going_on
            alone.matcher.unsafe_compute_mask_ptr(address + 4 * words * row, 4 * words)
        elif going_on:  # one call for all: each call releases the GIL, and another thread may keep it for long
            wanted = [(each.matcher, row) for each, row in going_on]
            self._threads().unsafe_compute_mask_ptr(wanted, address, 4 * words, rows)
        for each, row in going_on:
            each.settle(masks.bits[row])

    def _tell_ends(self, masks: GrammarBitmask) -> None:
        """Allow every token for finished sequences; their samples are discarded."""
        for row, sequence in enumerate(masks.sequences):
            state = self._states.get(sequence, _UNKNOWN)
            ending = state.ending if isinstance(state, Constrained) else state
            if ending is not None:
                masks.bits[row] = _ALL
                masks.ended[sequence] = ending

    def _threads(self) -> LLExecutor:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(max(1, min(_MOST_THREADS, usable_cores() // _CORES_PER_THREAD)))
        return self._executor

    @contextmanager
    def _ending_what_fails(self, sequences: Iterable[SequenceId]) -> Iterator[None]:
        """End these sequences on any error; the thread and the other sequences continue."""
        try:
            yield
        except QuireError as refused:  # the constraint was not checked before
            self._states.update(dict.fromkeys(sequences, FinishCause(FinishReason.ERROR, message=str(refused))))
        except BaseException as error:  # a panic of the library is no Exception, and sampling waits for this thread
            log.error("a constraint could not be followed", exc_info=True)
            ending = FinishCause(FinishReason.ERROR, message=f"the constraint could not be followed: {error!r}")
            self._states.update(dict.fromkeys(sequences, ending))
