"""The blocks of a draft model's own KV cache: which sequence has them, and which one loses them to another.

They are not leased blocks: nothing is shared, sealed or reported. A sequence keeps its blocks while it waits after a
preemption. The sequence that drafted longest ago loses its blocks first. The draft model computes that text again if
the sequence is to draft again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from common.contracts.types import BlockId, SequenceId
from gpuworker.scheduling.model_drafter import DraftState, ModelDrafter


class DraftStore:
    """Gives out `num_blocks` blocks of `block_size` slots, to at most `max_num_seqs` sequences at once."""

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        self.num_blocks = num_blocks
        self._free = [BlockId(block) for block in reversed(range(num_blocks))]
        self._block_size, self._max_num_seqs = block_size, max_num_seqs
        self._drafters: OrderedDict[SequenceId, ModelDrafter] = OrderedDict()
        self._next = 0

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def place(
        self, drafter: ModelDrafter, positions: int, kept: Collection[SequenceId] = ()
    ) -> list[SequenceId] | None:
        """Give a drafter blocks for so many positions, and return the sequences that lost theirs for it.

        Those in `kept` lose none. Return None, and change nothing, where there would be too few blocks.
        """
        state = drafter.state
        held = 0 if state is None else len(state.blocks)
        missing = -(-positions // self._block_size) - held
        losers = self._losers(missing, state, kept)
        if losers is None:
            return None
        for each in losers:
            self.release(self._drafters[each])
        if state is None:
            state = drafter.state = DraftState(SequenceId(self._next))
            self._next += 1
        if missing > 0:
            state.blocks += tuple([self._free.pop() for _ in range(missing)])
        self._drafters[state.sequence] = drafter
        self._drafters.move_to_end(state.sequence)
        return losers

    def _losers(self, missing: int, state: DraftState | None, kept: Collection[SequenceId]) -> list[SequenceId] | None:
        """Return the sequences that lose their blocks, the least recently used first; None where that is too little."""
        free, room = len(self._free), self._max_num_seqs - len(self._drafters) + (state is not None)
        losers = []
        for sequence, other in self._drafters.items():
            if free >= missing and room > 0:
                break
            if sequence not in kept and other.state is not state:
                losers.append(sequence)
                free, room = free + len(_state_of(other).blocks), room + 1
        return losers if free >= missing and room > 0 else None

    def release(self, drafter: ModelDrafter) -> SequenceId | None:
        """Take a drafter's blocks back, and return the number of its sequence, if it has one."""
        if drafter.state is None:
            return None
        state, drafter.state = drafter.state, None
        self._free += reversed(state.blocks)
        del self._drafters[state.sequence]
        return state.sequence


def _state_of(drafter: ModelDrafter) -> DraftState:
    assert drafter.state is not None, "a sequence in the store has a state"
    return drafter.state
