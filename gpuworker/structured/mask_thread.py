"""The grammar mask thread: follows the masked sequences of a runner and fills the masks of its steps.

While a step is computed, the tokens of the previous step become known. The thread takes them in and fills the masks of
the running step. Only sampling waits for the masks, and only if they are late.

Why sampling never waits forever. The masks of a step open when each of their rows is settled. For that the thread has
taken in all tokens before the row's position, or it no longer follows the sequence. Those tokens came with `add`, which
precedes the step in the thread's queue, or earlier steps sampled them. Steps run in order. The executor ends every step
with masks in `sampled` or `failed`, before it reports the outcome. `sampled` takes the tokens in, `failed` gives the
sequences up. The collector may do the thread's work itself. It then holds the turn from before the report on, and
always does the work after it; what is put meanwhile waits. So when a step samples, all earlier steps have ended, and
its rows are settled or will be once the thread reaches them. Cancelled and finished sequences change nothing: the
thread follows a sequence until `remove`, which comes when no unfinished step contains it. The thread waits for nothing
but its queue. The limits of llguidance bound its work, and an error of any kind ends the sequence, not the thread. When
a runner is closed, its executor ends first, while this thread still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from common.contracts.types import FinishReason, SequenceId
from common.process.cores import usable_cores
from gpuworker.engine.ports import MaskLateness
from gpuworker.sampling.masks import NO_DRAFTS, GrammarBitmask
from gpuworker.sampling.rows import SampledRow
from gpuworker.scheduling.stopping import FinishCause
from gpuworker.scheduling.thought import ThoughtFollower
from gpuworker.serial_thread import SerialThread
from gpuworker.structured.grammars import GrammarCompiler
from gpuworker.structured.sequence import Constrained, allow, allow_others, forbid, unfollowable

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


# One sequence whose tokens a mask limits: by a constraint, by a budget of thoughts, or by both.
class Followed:
    """Only the mask thread uses it. `position` is that of the next token.

    What ends a thought by force comes before what the constraint allows; a constraint that lets the thought end there
    takes it in like any other token. Without a constraint, end tokens are forbidden before min_tokens here.
    """

    def __init__(
        self,
        row: SampledRow,
        output: Sequence[int],
        constrained: Constrained | None,
        thought: ThoughtFollower | None = None,
    ) -> None:
        self.position = row.prompt_tokens
        self._constrained, self._thought = constrained, thought
        self._ends, self._ends_from = row.end_tokens, row.prompt_tokens + row.params.min_tokens
        for token in output:
            self.consume(token)

    @property
    def ending(self) -> FinishCause | None:
        """Why no token follows."""
        return None if self._constrained is None else self._constrained.ending

    @property
    def matcher(self) -> LLMatcher | None:
        """What fills the mask before `settle`; None where nothing does."""
        return None if self._constrained is None or self._forced is not None else self._constrained.matcher

    def consume(self, token: int) -> None:
        """Take in the token at `position`."""
        constrained, thought = self._constrained, self._thought
        if constrained is not None:
            constrained.consume(token)
        if thought is not None:
            if constrained is not None:
                self._blame_budget()
            thought.take(token)
        self.position += 1

    @property
    def plain(self) -> bool:
        """Whether `settle` changes nothing of a mask that allows any token besides the ends of a text."""
        return self._thought is None and self._constrained is not None and self._constrained.plain

    def settle(self, bits: npt.NDArray[np.uint32]) -> None:
        """Make of what `matcher` has filled, [words], the tokens to sample."""
        if (forced := self._forced) is not None:
            bits[:] = 0
            allow(bits, [forced])
        elif self._constrained is not None:
            self._constrained.settle(bits)
        else:
            bits[:] = np.uint32(0xFFFFFFFF)
            if self.position < self._ends_from:
                forbid(bits, self._ends)

    def _blame_budget(self) -> None:
        """Name the budget as the fault where the constraint lets no thought end in the middle of it."""
        assert self._constrained is not None
        ending = self._constrained.ending
        if self._forced is not None and ending is not None and ending.reason is FinishReason.ERROR:
            self._constrained.ending = replace(ending, wrong_field=ending.wrong_field or "thought_budget")

    @property
    def _forced(self) -> int | None:
        return None if self._thought is None else self._thought.forced


_CORES_PER_THREAD, _MOST_THREADS = 4, 8
_ALL = np.uint32(0xFFFFFFFF)
_Live = Constrained | Followed
_LIVE = (Constrained, Followed)
_FAILED = FinishCause(FinishReason.ERROR, message="a step failed")
_UNKNOWN = FinishCause(FinishReason.ERROR, message="the constraint of this sequence is not known to the runner")


class GrammarMaskThread:
    """The engine's thread calls `add`, `remove` and `masks`; the executor calls `sampled` and `failed`.

    Any thread may read `lateness`. With `foresee`, `forced` has news.
    """

    def __init__(self, grammars: GrammarCompiler, foresee: bool = False) -> None:
        self._grammars, self._foresees = grammars, foresee
        self._thread = SerialThread("quire-masks")
        # Only for the mask thread: every sequence between `add` and `remove`, or why it is no longer followed.
        self._states: dict[SequenceId, _Live | FinishCause] = {}
        self._waiting: list[GrammarBitmask] = []  # in order of steps; two at most
        self._fillers = max(1, min(_MOST_THREADS, usable_cores() // _CORES_PER_THREAD))
        self._executor: LLExecutor | None = None
        # Forced tokens and the position of the first of them, until a result tells them.
        self._runs: dict[SequenceId, tuple[int, tuple[int, ...]]] = {}
        self.lateness = MaskLateness()

    # ------------------------------------------------------------ the engine's thread

    def add(self, sequence: SequenceId, row: SampledRow, output: Sequence[int]) -> None:
        """Follow a sequence whose output so far is `output`."""
        self._thread.put(lambda: self._add(sequence, row, output))

    def remove(self, sequence: SequenceId) -> None:
        """Forget a sequence; no unfinished step has it."""
        self._thread.put(lambda: self._remove(sequence))

    def masks(
        self,
        sequences: Sequence[SequenceId],
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        drafts: Mapping[SequenceId, tuple[int, ...]] = NO_DRAFTS,
    ) -> GrammarBitmask:
        """Return the masks of a step that will be submitted: for C rows of the S sequences that sample in it.

        `rows` [C] are those with a constraint, `positions` [S] those of the tokens to sample. A sequence stands among
        the S once more for each of its `drafts`.
        """
        constrained, vocab_size = [sequences[row] for row in rows.tolist()], self._grammars.vocab_size
        masks = GrammarBitmask(self, constrained, rows, positions[rows], len(sequences), vocab_size, drafts)
        self._thread.run(lambda: self._begin(masks))
        return masks

    def close(self) -> None:
        """End the thread; no step is unfinished."""
        self._thread.close()

    # ------------------------------------------------------------ the executor

    def sampled(self, masks: GrammarBitmask, tokens: Sequence[tuple[int, ...]], at_once: bool) -> Callable[[], None]:
        """Take in the sampled tokens that count, of each sequence of a step; `at_once`: on the calling thread if idle.

        The masks of the next step then wait for one change of threads less. The caller runs what this returns after
        it gave the result to the engine, which plans meanwhile. Where results have forced tokens, nothing is left.
        """
        work = partial(self._take_in, masks, tokens)
        if not at_once:
            self._thread.put(work)
        elif self._thread.claim(work):
            if not self._foresees:
                return partial(self._thread.do_claimed, work)
            self._thread.do_claimed(work)
        return _nothing

    def forced(self, masks: GrammarBitmask, tokens: Sequence[tuple[int, ...]]) -> dict[SequenceId, tuple[int, ...]]:
        """Return what constraints force to follow the tokens of a step, where that is news."""
        found = {}
        for (row, sequence), sampled in zip(masks.heads, tokens, strict=True) if self._runs else ():
            begin = masks.positions[row]
            position, run = self._runs.pop(sequence, (0, ()))
            if position == begin + len(sampled):
                found[sequence] = run
            elif position == begin and run[: len(sampled)] == sampled:
                found[sequence] = run[len(sampled) :]
        return found

    def failed(self, masks: GrammarBitmask) -> None:
        """Stop following the sequences of a failed step; they end with it."""
        self._thread.put(lambda: self._lose(masks))

    # ------------------------------------------------------------ the mask thread

    def _add(self, sequence: SequenceId, row: SampledRow, output: Sequence[int]) -> None:
        try:
            self._states[sequence] = self._follow(row, output)
        except BaseException as error:  # noqa: BLE001 - see `_end`
            self._end([sequence], error)

    def _follow(self, row: SampledRow, output: Sequence[int]) -> _Live:
        constraint, budget = row.params.constraint, row.params.thought
        if budget is None and constraint is not None:
            return Constrained.by(self._grammars, row, output)
        thought = None if budget is None else ThoughtFollower(budget, self._grammars.spelling())
        return Followed(row, output, None if constraint is None else Constrained.by(self._grammars, row, ()), thought)

    def _remove(self, sequence: SequenceId) -> None:
        self._states.pop(sequence, None)
        self._runs.pop(sequence, None)

    def _begin(self, masks: GrammarBitmask) -> None:
        """Keep the masks until they are settled; if they are already, the engine's thread fills them not itself."""
        self._waiting.append(masks)
        if self._are_settled(masks):
            self._thread.do_there(self._open_what_is_settled)

    def _are_settled(self, masks: GrammarBitmask) -> bool:
        return all(self._is_settled(sequence, masks.positions[row]) for row, sequence in masks.heads)

    def _take_in(self, masks: GrammarBitmask, tokens: Sequence[tuple[int, ...]]) -> None:
        waited = float(masks.waited[0])
        steps, late, seconds = self.lateness
        self.lateness = MaskLateness(steps + 1, late + (waited > 0), seconds + waited)
        for (_, sequence), counted in zip(masks.heads, tokens, strict=True):
            state = self._states.get(sequence)
            if isinstance(state, _LIVE):
                try:
                    for token in counted:
                        state.consume(token)
                    if masks.drafts and self._foresees:  # no masks of a next step wait, which would show it
                        self._note_run(sequence)
                except BaseException as error:  # noqa: BLE001 - see `_end`
                    self._end([sequence], error)
        self._open_what_is_settled()

    def _lose(self, masks: GrammarBitmask) -> None:
        self._states.update({sequence: _FAILED for sequence in masks.sequences if sequence in self._states})
        self._open_what_is_settled()

    def _open_what_is_settled(self) -> None:
        for masks in tuple(self._waiting):
            if self._are_settled(masks):
                self._waiting.remove(masks)
                try:
                    self._fill(masks)
                    if self._foresees:
                        self._foresee(masks)
                except BaseException as error:  # noqa: BLE001 - see `_end`
                    self._end(masks.sequences, error)
                self._tell_ends(masks)
                masks.open()

    def _is_settled(self, sequence: SequenceId, position: int) -> bool:
        state = self._states.get(sequence)
        return not isinstance(state, _LIVE) or state.position >= position

    def _fill(self, masks: GrammarBitmask) -> None:
        """Fill the rows of all whose outputs go on."""
        bits, states, drafts = masks.bits, self._states, masks.drafts
        found = [(row, states.get(sequence), sequence in drafts) for row, sequence in masks.heads]
        going_on = [(row, each, drafts) for row, each, drafts in found if isinstance(each, _LIVE) and not each.ending]
        wanted = [(each.matcher, row) for row, each, drafts in going_on if not drafts]
        self._compute(bits, [(matcher, row) for matcher, row in wanted if matcher is not None])
        self._compute_behind(masks)
        others = allow_others(bits, self._grammars.ends)
        for row, each, _ in going_on:
            if not (others[row] and each.plain):
                each.settle(bits[row])
        self._settle_drafts(masks)

    def _compute(self, bits: npt.NDArray[np.uint32], wanted: list[tuple[LLMatcher, int]]) -> None:
        address, (rows, words) = bits.ctypes.data, bits.shape
        if len(wanted) < 2 or self._fillers < 2:
            for alone, row in wanted:
                alone.unsafe_compute_mask_ptr(address + 4 * words * row, 4 * words)
        else:
            self._threads().unsafe_compute_mask_ptr(wanted, address, 4 * words, rows)

    def _compute_behind(self, masks: GrammarBitmask) -> None:
        """Fill the masks of sequences with drafts, from those of their heads on; what cannot be filled stays 0.

        Copies of their matchers follow the drafts: what fails behind a wrong draft ends no sequence.
        """
        bits, address, (rows, words) = masks.bits, masks.bits.ctypes.data, masks.bits.shape
        drafting = self._drafting(masks)
        copies = [(state.matcher.deep_copy(), row, list(drafts)) for state, row, drafts in drafting]
        for _, row, drafts in drafting:
            bits[row : row + 1 + len(drafts)] = 0
        if copies:
            self._threads().unsafe_compute_mask_ptr_with_draft_token(copies, address, 4 * words, rows)
        for (state, row, _), (copy, _, _) in zip(drafting, copies, strict=True):
            if copy.is_error():  # if it failed at once, the sequence must
                self._compute(bits, [(state.matcher, row)])

    def _settle_drafts(self, masks: GrammarBitmask) -> None:
        for state, row, drafts in self._drafting(masks):
            behind = masks.bits[row + 1 : row + 1 + len(drafts)]
            usable = state.settle_drafts(behind, drafts)
            behind[usable:] = _ALL
            masks.usable[masks.sequences[row]] = usable + 1

    def _drafting(self, masks: GrammarBitmask) -> list[tuple[Constrained, int, tuple[int, ...]]]:
        """Return the state of each sequence with drafts whose output goes on, the row of its head, and the drafts."""
        if not masks.drafts:
            return []
        known = [(self._states.get(each), row, masks.drafts.get(each, ())) for row, each in masks.heads]
        return [
            (state, row, drafts)
            for state, row, drafts in known
            if drafts and isinstance(state, Constrained) and state.ending is None
        ]

    def _foresee(self, masks: GrammarBitmask) -> None:
        """Note the tokens that a constraint forces, where a mask shows that it forces any."""
        narrow = np.count_nonzero(masks.bits, axis=1) == 1
        for row, sequence in masks.heads:
            word = int(masks.bits[row].max()) if narrow[row] else 0
            if word and not word & (word - 1):
                try:
                    self._note_run(sequence)
                except BaseException as error:  # noqa: BLE001 - see `_end`
                    self._end([sequence], error)

    def _note_run(self, sequence: SequenceId) -> None:
        state = self._states.get(sequence)
        if isinstance(state, Constrained) and state.ending is None and (run := state.forced_run()):
            self._runs[sequence] = state.position, run

    def _tell_ends(self, masks: GrammarBitmask) -> None:
        """Allow every token for finished sequences; their samples are discarded."""
        for row, sequence in masks.heads:
            state = self._states.get(sequence, _UNKNOWN)
            ending = state.ending if isinstance(state, _LIVE) else state
            if ending is not None:
                masks.bits[row : row + 1 + len(masks.drafts.get(sequence, ()))] = _ALL
                masks.ended[sequence] = ending

    def _threads(self) -> LLExecutor:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._fillers)
        return self._executor

    def _end(self, sequences: Iterable[SequenceId], error: BaseException) -> None:
        """End these sequences by an error; the thread and the other sequences continue.

        A panic of the library is not an Exception, and sampling waits for this thread: so every error ends up here.
        """
        self._states.update(dict.fromkeys(sequences, unfollowable(error)))


def _nothing() -> None:
    pass
