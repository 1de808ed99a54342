"""How sequences leave: they end or are preempted, drain while a step in flight contains them, and free their blocks."""

from __future__ import annotations

from common.contracts.types import FinishReason, SequenceId, SequencePhase
from gpuworker.scheduling.block_states import BlockStates, Content
from gpuworker.scheduling.draft_tally import DraftTallies
from gpuworker.scheduling.drafting import DraftModel
from gpuworker.scheduling.group_table import Tail
from gpuworker.scheduling.outcomes import Completion, Loaded, SequenceFinished
from gpuworker.scheduling.partial_copies import PartialCopies
from gpuworker.scheduling.report_builder import ReportBuilder
from gpuworker.scheduling.sequence import Sequence
from gpuworker.scheduling.step_scheduler import StepScheduler
from gpuworker.scheduling.stopping import FinishCause


class Departures:
    """The sequences that ended or lost their blocks since the last completion.

    A `step` is that of the last plan: no later step has used the blocks of a sequence that leaves. `recounted` has the
    cached tokens of prompts that were planned since the last completion, where the grants said other numbers.
    """

    def __init__(
        self,
        sequences: dict[SequenceId, Sequence],
        blocks: BlockStates,
        scheduler: StepScheduler,
        report: ReportBuilder,
        partial_copies: PartialCopies,
        draft_model: DraftModel | None,
    ) -> None:
        self._sequences = sequences
        self._blocks = blocks
        self._scheduler = scheduler
        self._report = report
        self._partial_copies = partial_copies
        self._draft_model = draft_model
        self._clear()

    def _clear(self) -> None:
        self._finished: list[SequenceFinished] = []
        self._preempted: list[SequenceId] = []
        self._forgotten: list[SequenceId] = []
        self.recounted: dict[SequenceId, int] = {}

    def completion(
        self,
        tokens: dict[SequenceId, tuple[int, ...]],
        computed: int,
        scored: tuple[SequenceId, ...],
        drafts: DraftTallies,
        loaded: dict[SequenceId, Loaded] | None = None,
    ) -> Completion:
        """Return the completion of a step, with all departures since the last one."""
        left = tuple(self._finished), tuple(self._preempted), tuple(self._forgotten)
        completion = Completion(tokens, *left, computed, scored, drafts, self.recounted, loaded or {})
        if self._finished or self._preempted or self._forgotten or self.recounted:
            self._clear()
        return completion

    def cancel(self, sequence_id: SequenceId, reason: FinishReason, step: int) -> None:
        """End a sequence in any phase; nothing when it is unknown or has ended already."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None and sequence.phase is not SequencePhase.DRAINING_FINISH:
            self.end(sequence, FinishCause(reason))
            self.leave_if_idle(sequence, step)

    def hand_over(self, sequence_id: SequenceId, step: int) -> None:
        """End a sequence that goes on elsewhere, behind the tokens of the steps in flight; one of these may end it."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.phase is SequencePhase.DRAINING_FINISH:
            return
        if sequence.phase is SequencePhase.RUNNING:
            self._halt(sequence)
        sequence.phase, sequence.leaves = SequencePhase.DRAINING_FINISH, True
        self.leave_if_idle(sequence, step)

    def preempt(self, sequence_id: SequenceId, step: int) -> bool:
        """Take a sequence's blocks; False when it does not run."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.phase is not SequencePhase.RUNNING:
            return False
        self._halt(sequence)
        sequence.phase = SequencePhase.DRAINING_PREEMPT
        self.leave_if_idle(sequence, step)
        return True

    def end(self, sequence: Sequence, ending: FinishCause) -> None:
        """Report a sequence's end and keep it out of later steps.

        Its block table stays until no step in flight has it.
        """
        if sequence.phase is SequencePhase.RUNNING:
            self._halt(sequence)
        sequence.phase, sequence.leaves = SequencePhase.DRAINING_FINISH, False
        sequence.reason = ending.reason
        cause = ending.stop_token, ending.message, ending.wrong_field, ending.embedding
        self._finished.append(SequenceFinished(sequence.id, ending.reason, sequence.usage(), *cause))

    def _halt(self, sequence: Sequence) -> None:
        """Leave a sequence out of later steps and of the stalled set, so that it does not come back as stalled."""
        self._scheduler.remove(sequence)
        stalled = self._report.stalled
        if sequence.id in stalled:
            self._report.stalled = tuple(each for each in stalled if each != sequence.id)

    def leave_if_idle(self, sequence: Sequence, step: int) -> None:
        """Release the block table of a draining sequence, unless a step in flight contains it."""
        if not sequence.draining or sequence.in_flight:
            return
        if sequence.leaves:
            self.end(sequence, FinishCause(FinishReason.CANCELLED))
        self._partial_copies.left(sequence.id)
        if sequence.block_table:
            if sequence.tail is not None and sequence.tail.saved:
                self._seal_tail(sequence.tail, sequence, step)
            self._blocks.let_go(sequence.held_blocks(), step)
            self._forgotten.append(sequence.id)
        if sequence.phase is SequencePhase.DRAINING_FINISH:
            self._forget(sequence)
            return
        sequence.requeue()
        self._preempted.append(sequence.id)
        self._report.preempted(sequence.id, len(sequence.tokens))

    def _seal_tail(self, tail: Tail, sequence: Sequence, step: int) -> None:
        """Seal the states behind the last full block of a sequence that leaves: others may go on from there."""
        block_hash, group = sequence.block_hashes[tail.place], len(sequence.tables) - 1
        self._blocks.content[tail.block] = Content(block_hash, None, tail.place, step, group)
        self._report.seal(tail.block, block_hash)

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.id]
        if sequence.drafter is not None and self._draft_model is not None:
            self._draft_model.release(sequence.drafter)
        self._report.finished(sequence.id, sequence.reason)
