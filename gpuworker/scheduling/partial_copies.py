"""Copies of a part of a cached block that were granted and have not run: the manager holds their sources until then.

A copy runs in the next step that is planned, before the rows of that step. It need not be a step of the sequence that
it is for. So the sequence may be preempted, and admitted again with another copy, before the step completes. A copy is
therefore known by its identity, and not by its sequence or its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.contracts.lease import Admit, Copy, TierCopy
from common.contracts.types import SequenceId


class PartialCopies:
    """The copies by the sequences that hold their destinations, at most one each."""

    __slots__ = ("_by_sequence",)

    def __init__(self) -> None:
        self._by_sequence: dict[SequenceId, Copy] = {}

    def granted(self, admits: Iterable[Admit], copies: Iterable[Copy], block_size: int) -> None:
        """Note the copies of admissions that count more tokens as cached than their shared blocks have."""
        targets = {copy.dst: copy for copy in copies}
        for admit in admits:
            own = admit.block_table[admit.n_shared :]
            if own and own[0] in targets and admit.cached_tokens > admit.n_shared * block_size:
                self._by_sequence[admit.sequence] = targets[own[0]]

    def left(self, sequence: SequenceId) -> None:
        """Forget the copy of a sequence whose block table is released: the manager learns that from the release."""
        self._by_sequence.pop(sequence, None)

    def ran(self, copies: Iterable[Copy | TierCopy]) -> tuple[SequenceId, ...]:
        """Return the sequences whose copies have run, and forget these copies."""
        done = set(map(id, copies))
        found = tuple([sequence for sequence, copy in self._by_sequence.items() if id(copy) in done])
        for sequence in found:
            del self._by_sequence[sequence]
        return found
