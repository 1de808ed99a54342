"""Checkpoints that running sequences are to leave, and the sequences that wait for them.

K and V of a block are shared while another sequence fills it. States are not: whoever shares that block would compute
its tokens for them all the same. So a sequence waits for a checkpoint that is planned far enough behind its own hits,
instead of computing what is being computed. It waits until the checkpoint is sealed, or the sequence that is to leave
it has passed it, was preempted or has left; and once a stay in the queue.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from common.contracts.types import BlockHash, SequenceId


class PlannedStates:
    """Planned checkpoints by the hash of the block that they stand behind. Of two for one content the first counts."""

    __slots__ = ("_owners", "_waiting", "awaited")

    def __init__(self) -> None:
        self._owners: dict[BlockHash, SequenceId] = {}
        self._waiting: dict[BlockHash, list[SequenceId]] = {}
        # What each sequence waits for.
        self.awaited: dict[SequenceId, BlockHash] = {}

    def plan(self, states: Iterable[BlockHash], owner: SequenceId) -> None:
        for state in states:
            self._owners.setdefault(state, owner)

    def deepest(self, block_hashes: Items[BlockHash], first: int, end: int) -> int | None:
        """Return the last place from `first` to `end` - 1 of a prompt behind which a checkpoint is planned."""
        if not self._owners:
            return None
        return next((place for place in range(end - 1, first - 1, -1) if block_hashes[place] in self._owners), None)

    def wait(self, sequence: SequenceId, state: BlockHash) -> SequenceId:
        """Let a sequence wait for a planned checkpoint; return whose it is."""
        self._waiting.setdefault(state, []).append(sequence)
        self.awaited[sequence] = state
        return self._owners[state]

    def stop_waiting(self, sequence: SequenceId) -> bool:
        """Forget a sequence that waits; return whether it did."""
        state = self.awaited.pop(sequence, None)
        if state is None:
            return False
        self._waiting[state].remove(sequence)
        if not self._waiting[state]:
            del self._waiting[state]
        return True

    def end(self, state: BlockHash, owner: SequenceId | None = None) -> list[SequenceId]:
        """Forget a planned checkpoint, of any sequence or only if it is that one's; return who has waited for it."""
        if state not in self._owners or (owner is not None and self._owners[state] != owner):
            return []
        del self._owners[state]
        woken = self._waiting.pop(state, [])
        for sequence in woken:
            del self.awaited[sequence]
        return woken

    def copy(self) -> PlannedStates:
        twin = PlannedStates()
        twin._owners, twin.awaited = self._owners.copy(), self.awaited.copy()
        twin._waiting = {state: waiting.copy() for state, waiting in self._waiting.items()}
        return twin

    def key(self) -> tuple[object, ...]:
        """Return who waits for what and whom, hashable."""
        return frozenset(self._owners.items()), tuple(self.awaited.items())
