"""What an admission grants where the pool has groups: which pages its fresh blocks have, and whether it is sound."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from functools import partial

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import Admit, GrantBatch, unread_blocks
from common.contracts.types import TRIMMED, BlockId, KvGroup, KvGroupKind, SequenceId
from gpuworker.scheduling.block_states import BlockStates, Content, PageBlocks
from gpuworker.scheduling.frame_claims import LoadedBlock
from gpuworker.scheduling.sequence import Sequence


def leading_empty(block_table: tuple[BlockId, ...]) -> int:
    """Return how many places at the start of a block table have no block."""
    if not block_table or block_table[0] != TRIMMED:
        return 0
    return next((place for place, block in enumerate(block_table) if block != TRIMMED), len(block_table))


def fresh_blocks(admit: Admit, groups: Items[KvGroup]) -> Iterator[tuple[int, tuple[BlockId, ...]]]:
    """Yield the group and the pages of each block that an admission grants anew.

    Raises ProtocolViolation when the blocks lack pages, or there are too many.
    """
    at = 0
    for group, table in enumerate((admit.block_table, *admit.runs)):
        for block in table[admit.n_shared :]:
            if block == TRIMMED and groups[group].kind is KvGroupKind.STATE:
                continue
            others = admit.pages[at : at + groups[group].pages - 1]
            at += groups[group].pages - 1
            yield group, (block, *others)
    if at != len(admit.pages):
        what = f"blocks that have {at} further pages, with {len(admit.pages)} of them"
        raise ProtocolViolation(f"sequence {admit.sequence} was granted {what}")


class GroupGrantCheck:
    """Checks the admissions of one batch, in order. `granted` are the pages that they grant anew, so far.

    The blocks that are `loaded` from host memory are full.
    """

    def __init__(
        self,
        blocks: BlockStates,
        made: PageBlocks,
        block_size: int,
        groups: Items[KvGroup],
        loaded: Mapping[BlockId, LoadedBlock],
    ) -> None:
        self._blocks, self._made, self._block_size, self._groups = blocks, made, block_size, groups
        self._loaded = loaded
        self._fresh: dict[BlockId, int] = {}
        self._shared = set[BlockId]()
        self.granted: list[BlockId] = []

    def check(self, admit: Admit, sequence: Sequence | None) -> None:
        """Raise ProtocolViolation when an admission names no block, one of another group, or one that lacks slots."""
        runs, shared = admit.runs, admit.n_shared
        if len(runs) != len(self._groups) - 1 or not all(map(partial(self._fits, admit), self._groups[1:], runs)):
            lengths = ", ".join(str(len(run)) for run in runs)
            what = f"runs of {lengths or 'no'} blocks beside a table of {len(admit.block_table)}, {shared} shared"
            raise ProtocolViolation(f"sequence {admit.sequence} was granted {what}")
        for group, pages in fresh_blocks(admit, self._groups):
            self._fresh[pages[0]] = group
            self.granted += pages
        for block in admit.block_table[:shared]:
            self._check_group(admit, block, 0)
        for group, run in enumerate(runs, start=1):
            self._check_run(admit, sequence, group, run)

    @staticmethod
    def _fits(admit: Admit, group: KvGroup, run: tuple[BlockId, ...]) -> bool:
        """Return whether a run has all shared places, and none behind the table but checkpoints of a begun prompt."""
        return admit.n_shared <= len(run) and (group.kind is KvGroupKind.STATE or len(run) <= len(admit.block_table))

    def _check_run(self, admit: Admit, sequence: Sequence | None, group: int, run: tuple[BlockId, ...]) -> None:
        """Check the shared places of a run: it may lack those alone that no token reads, all at its beginning."""
        empty, size = leading_empty(run[: admit.n_shared]), self._block_size
        most = unread_blocks(self._groups[group], admit.n_shared * size, size)
        if empty > most:
            what = f"a table of group {group} without its first {empty} blocks; it may lack {most}"
            raise ProtocolViolation(f"sequence {admit.sequence} was granted {what}")
        states = self._groups[group].kind is KvGroupKind.STATE
        for place in range(empty, admit.n_shared):
            self._check_group(admit, run[place], group)
            if states:
                self._check_state(admit, sequence, place, run[place])
            else:
                self._check_beside(admit, sequence, place, run[place])
        if states and sequence is not None:
            self._check_places(admit, sequence, run)

    def _check_places(self, admit: Admit, sequence: Sequence, run: tuple[BlockId, ...]) -> None:
        """Check that each checkpoint to be left ends a chunk of known tokens; at the last one's place is the tail.

        A prompt that begins with a part of its blocks has no tail.
        """
        last = (len(sequence.tokens) - 1) // self._block_size
        for place in range(last + (last < len(admit.block_table)), len(run)):
            if run[place] != TRIMMED:
                what = f"a checkpoint at place {place}, which its {len(sequence.tokens)} tokens do not pass"
                raise ProtocolViolation(f"sequence {admit.sequence} was granted {what}")

    def _check_state(self, admit: Admit, sequence: Sequence | None, place: int, block: BlockId) -> None:
        """Check that a checkpoint was saved, and is that of the sequence's own tokens where it is still claimed.

        All K/V before it must be there: a sequence goes on from the first slot that is not filled.
        """
        content, wanted = self._content_of(block), sequence.block_hashes[place:] if sequence is not None else []
        other = content is not None and bool(wanted) and content.hash != wanted[0]
        if block in self._fresh or self._fill_of(block) != self._block_size or other:
            what = f"block {block} as the state behind place {place}, which it does not hold"
            raise ProtocolViolation(f"sequence {admit.sequence} was granted {what}")
        for before in admit.block_table[: place + 1]:
            if before in self._fresh or self._fill_of(before) != self._block_size:
                what = f"the state behind place {place}, and block {before} before that, which is not full"
                raise ProtocolViolation(f"sequence {admit.sequence} was granted {what}")

    def _check_group(self, admit: Admit, block: BlockId, group: int) -> None:
        loaded = self._loaded.get(block)
        known = self._fresh.get(block, self._made.group.get(block)) if loaded is None else loaded.group
        if known != group:
            raise ProtocolViolation(f"sequence {admit.sequence} shares block {block} in group {group}: it is not there")
        if block not in self._fresh and loaded is None:
            self._shared.add(block)

    def _fill_of(self, block: BlockId) -> int:
        return self._block_size if block in self._loaded else self._blocks.fill[block]

    def _content_of(self, block: BlockId) -> Content | None:
        loaded = self._loaded.get(block)
        return self._blocks.content.get(block) if loaded is None else loaded.content

    def refuse_broken(self, pages: Iterable[BlockId]) -> None:
        """Raise ProtocolViolation when one of these pages begins a new life, and its block is shared."""
        for page in pages:
            block = self._made.block_of(page)
            if block in self._shared:
                raise ProtocolViolation(f"the manager grants page {page} anew, and shares block {block} of it")

    def _check_beside(self, admit: Admit, sequence: Sequence | None, place: int, block: BlockId) -> None:
        """Check that a shared block of a run has the content, and as many slots as the first group's block there.

        A sequence computes a position in all groups at once, so neither may be ahead of the other.
        """
        beside, content = admit.block_table[place], self._content_of(block)
        if block in self._fresh and beside in self._fresh:
            return
        wanted = sequence.block_hashes[place : place + 1] if sequence is not None else None
        other = content is not None and wanted is not None and wanted != [content.hash]
        if block in self._fresh or beside in self._fresh or self._fill_of(block) != self._fill_of(beside) or other:
            what = f"block {block}, which does not hold what block {beside} of place {place} holds"
            raise ProtocolViolation(f"sequence {admit.sequence} was granted {what}")


def check_groups(
    batch: GrantBatch,
    blocks: BlockStates,
    made: PageBlocks,
    sequences: Mapping[SequenceId, Sequence],
    block_size: int,
    groups: Items[KvGroup],
    loaded: Mapping[BlockId, LoadedBlock],
) -> list[BlockId]:
    """Check every admission of a batch, and return the pages that they grant anew. Raises as `check` does."""
    check = GroupGrantCheck(blocks, made, block_size, groups, loaded)
    for admit in batch.admit:
        check.check(admit, sequences.get(admit.sequence))
    blocks.refuse_unknown(check.granted)
    check.refuse_broken((*check.granted, *(page for each in loaded.values() for page in each.pages), *batch.lease))
    return check.granted
