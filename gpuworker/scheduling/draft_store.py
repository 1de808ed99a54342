"""The blocks of a draft model's own KV cache: which sequence has them, and which one loses them to another.

They are not leased blocks: nothing is shared, sealed or reported. A sequence keeps its blocks while it waits after a
preemption. The sequence that drafted longest ago loses its blocks first. The draft model computes that text again if
the sequence is to draft again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from common.contracts.types import BlockId, SequenceId
from gpuworker.scheduling.model_drafter import ModelDrafter, Seat


class DraftStore:
    """Gives out `num_blocks` blocks of `block_size` slots, to at most `seats` sequences at once."""

    def __init__(self, num_blocks: int, block_size: int, seats: int) -> None:
        self.num_blocks = num_blocks
        self._free = [BlockId(block) for block in reversed(range(num_blocks))]
        self._block_size, self._seats = block_size, seats
        self._seated: OrderedDict[SequenceId, ModelDrafter] = OrderedDict()
        self._next = 0

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def place(
        self, drafter: ModelDrafter, positions: int, kept: Collection[SequenceId] = ()
    ) -> list[SequenceId] | None:
        """Give a drafter a seat with blocks for so many positions, and return the seats that others lost for it.

        Those in `kept` lose none. Return None, and change nothing, where there would be too few blocks.
        """
        seat = drafter.seat
        held = 0 if seat is None else len(seat.blocks)
        missing = -(-positions // self._block_size) - held
        losers = self._losers(missing, seat, kept)
        if losers is None:
            return None
        for each in losers:
            self.release(self._seated[each])
        if seat is None:
            seat = drafter.seat = Seat(SequenceId(self._next))
            self._next += 1
        if missing > 0:
            seat.blocks += tuple([self._free.pop() for _ in range(missing)])
        self._seated[seat.sequence] = drafter
        self._seated.move_to_end(seat.sequence)
        return losers

    def _losers(self, missing: int, seat: Seat | None, kept: Collection[SequenceId]) -> list[SequenceId] | None:
        """Return the sequences that lose their seats, the least recently used first; None where that is too little."""
        free, seats = len(self._free), self._seats - len(self._seated) + (seat is not None)
        losers = []
        for sequence, other in self._seated.items():
            if free >= missing and seats > 0:
                break
            if sequence not in kept and other.seat is not seat:
                losers.append(sequence)
                free, seats = free + len(_seat(other).blocks), seats + 1
        return losers if free >= missing and seats > 0 else None

    def release(self, drafter: ModelDrafter) -> SequenceId | None:
        """Take a drafter's blocks back, and return the number of its seat, if it has one."""
        if drafter.seat is None:
            return None
        seat, drafter.seat = drafter.seat, None
        self._free += reversed(seat.blocks)
        del self._seated[seat.sequence]
        return seat.sequence


def _seat(drafter: ModelDrafter) -> Seat:
    assert drafter.seat is not None, "a sequence in the store has a seat"
    return drafter.seat
