"""What the frames of the host tier hold, once all copies that were ordered so far have run.

Copies run before the rows of the next step, in the order in which they were ordered. So what an order says holds for
all that is ordered behind it, and a step that fails voids blocks and frames alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import Admit, CachedBlock, TierCopy
from common.contracts.types import BlockId, FrameId, SequenceId
from gpuworker.scheduling.block_states import BlockStates, Content
from gpuworker.scheduling.sequence import Sequence


class FrameClaims:
    """The content of frames. None stands for one that the worker does not claim: it has reset its cache meanwhile."""

    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames
        self.held: dict[FrameId, Content | None] = {}

    def check(
        self,
        copies: Items[TierCopy],
        admits: Items[Admit],
        blocks: BlockStates,
        sequences: Mapping[SequenceId, Sequence],
    ) -> list[BlockId]:
        """Return the blocks that are loaded; each is one that an admission shares.

        Raises ProtocolViolation when there is no such frame or block, when a frame is loaded that holds nothing, and
        when a block is loaded for nobody, or with another content than the sequence has at its place.
        """
        blocks.refuse_unknown([each.block for each in copies])
        stored: dict[FrameId, Content | None] = {}
        loaded: dict[BlockId, Content | None] = {}
        for each in copies:
            if not 0 <= each.frame < self.num_frames:
                raise ProtocolViolation(f"the manager named frame {each.frame}; this worker has {self.num_frames}")
            if not each.load:
                stored[each.frame] = blocks.content.get(each.block)
                continue
            if each.frame not in stored and each.frame not in self.held:
                raise ProtocolViolation(f"block {each.block} was to be loaded from frame {each.frame}, which is empty")
            loaded[each.block] = stored[each.frame] if each.frame in stored else self.held[each.frame]
        unused = set(loaded)
        for admit in admits if loaded else ():
            sequence = sequences.get(admit.sequence)
            for place, block in enumerate(admit.block_table[: admit.n_shared]):
                if block in loaded:
                    unused.discard(block)
                    _check_place(sequence, place, block, loaded[block])
        if unused:
            raise ProtocolViolation(f"blocks {sorted(unused)} were to be loaded, and no admission shares them")
        return list(loaded)

    def apply(self, copies: Items[TierCopy], blocks: BlockStates) -> None:
        """Account for copies that were checked."""
        for each in copies:
            if each.load:
                blocks.fill_with(each.block, self.held[each.frame])
            else:
                self.held[each.frame] = blocks.content.get(each.block)

    def forget_all(self) -> None:
        """Forget what frames hold: the prefix cache was reset."""
        self.held.clear()

    def claims(self) -> tuple[CachedBlock, ...]:
        """Return what frames hold for an inventory; each claim says where it stands."""
        return tuple(
            CachedBlock(frame, each.hash, -1, each.last_used, each.parent or each.hash, each.depth)
            for frame, each in sorted(self.held.items())
            if each is not None
        )


class Loads(NamedTuple):
    """Places of a sequence's block table, `first` to `end` - 1, whose blocks are loaded for it."""

    sequence: SequenceId
    first: int
    end: int


def find_loads(copies: Items[TierCopy], admits: Items[Admit]) -> Iterator[Loads]:
    """Yield for whom blocks are loaded. A block that two admissions share is loaded for the first of them."""
    loaded = {each.block for each in copies if each.load}
    for admit in admits if loaded else ():
        shared = admit.block_table[: admit.n_shared]
        places = [place for place, block in enumerate(shared) if block in loaded]
        if places:
            loaded.difference_update(shared)
            yield Loads(admit.sequence, places[0], places[-1] + 1)


def _check_place(sequence: Sequence | None, place: int, block: BlockId, content: Content | None) -> None:
    if sequence is None or content is None:
        return
    if sequence.block_hashes[place : place + 1] != [content.hash]:
        what = f"block {block} at place {place}, loaded with another content"
        raise ProtocolViolation(f"sequence {sequence.id} was granted {what}")
