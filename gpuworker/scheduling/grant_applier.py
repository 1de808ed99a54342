"""Applies what the manager grants: copies of blocks, block tables of waiting sequences, and leases for the pool."""

from __future__ import annotations

from common.contracts.lease import Admit, GrantBatch
from common.contracts.types import BlockId, SequenceId, SequencePhase
from gpuworker.scheduling.block_states import BlockStates
from gpuworker.scheduling.grant_check import check_grants, leading_empty
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.scheduling.partial_copies import PartialCopies
from gpuworker.scheduling.sequence import Sequence
from gpuworker.scheduling.step_scheduler import StepScheduler


class GrantApplier:
    """The rules by which grants change blocks and sequences. It has no state of its own."""

    def __init__(
        self,
        config: AgentConfig,
        sequences: dict[SequenceId, Sequence],
        blocks: BlockStates,
        scheduler: StepScheduler,
        partial_copies: PartialCopies,
    ) -> None:
        self._block_size, self._window = config.block_size, config.window
        self._sequences = sequences
        self._blocks = blocks
        self._scheduler = scheduler
        self._partial_copies = partial_copies

    def apply(self, batch: GrantBatch) -> tuple[Admit, ...]:
        """Apply the grants of a batch, and return the admissions of sequences that still waited.

        Raises ProtocolViolation, with nothing applied, as `check_grants` does.
        """
        check_grants(batch, self._blocks, self._sequences, self._block_size, self._window)
        for copy in batch.copy:
            slots = copy.length % self._block_size or self._block_size
            self._blocks.copy(copy.src, copy.dst, slots)
        copied = frozenset(copy.dst for copy in batch.copy)
        admitted = tuple([admit for admit in batch.admit if self._admit(admit, copied)])
        if batch.copy:
            self._partial_copies.granted(admitted, batch.copy, self._block_size)
        for block in batch.lease:
            self._blocks.lease(block)
        return admitted

    def _admit(self, admit: Admit, copied: frozenset[BlockId]) -> bool:
        """Empty the granted blocks; give the block table to the sequence if it still waits.

        The blocks of a dropped admission are emptied too: a second sharer may already be admitted on them.
        """
        sequence = self._sequences.get(admit.sequence)
        self._blocks.reset_fresh(admit.block_table[admit.n_shared :], copied)
        if sequence is None or sequence.phase is not SequencePhase.WAITING:
            return False
        sequence.start(admit.block_table, admit.cached_tokens)
        if empty := leading_empty(admit.block_table):
            sequence.trimmed = empty
            sequence.skip(empty * self._block_size, self._block_size)
        self._blocks.hold(admit.block_table)
        self._uncover_last_known(sequence, admit.n_shared)
        self._scheduler.add(sequence)
        return True

    def _uncover_last_known(self, sequence: Sequence, n_shared: int) -> None:
        """Leave the slot of the last token unfilled in a copied block: its logits must be computed."""
        index, offset = divmod(len(sequence.tokens) - 1, self._block_size)
        if n_shared <= index < len(sequence.block_table):
            block = sequence.block_table[index]
            self._blocks.fill[block] = min(self._blocks.fill[block], offset)
