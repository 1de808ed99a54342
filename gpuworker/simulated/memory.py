"""What the memory of a simulated worker holds where blocks move or layers keep states, in 32 bits a page.

A state is the CRC of all tokens that it has read. It lies at its sequence, and in each page of a checkpoint:

    tokens  a b c d e f g   block size 4      state behind f: crc(abcdef)
    pages   K and V of a b c d: crc(abcd)     a checkpoint behind d, of two pages: crc(abcd), crc(abcd)

A frame of host memory holds what the block held that was copied into it. An image is that in 16 bytes. A row that goes
on with another state, or reads a block that holds other tokens, is wrong from there on.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from common.contracts.lease import Copy, TierCopy, unread_blocks
from common.contracts.transfers import Medium, Place
from common.contracts.types import BlockId, FrameId, KvGroup, KvGroupKind, SequenceId
from gpuworker.memory.layout import attending_groups, state_group
from gpuworker.scheduling.batch_plan import ScheduledRow, StepPlan
from gpuworker.scheduling.images import Image

_ONE_GROUP = (KvGroup(KvGroupKind.FULL, 0, 1, ()),)
_NOTHING = -1  # what a place holds before its sequence's first row
_IMAGE: Final = Struct("<iiq")
IMAGE_BYTES: Final = _IMAGE.size


class _Content(NamedTuple):
    """What a page holds: part `part` of a block of `group`, written behind tokens with this CRC."""

    group: int
    part: int
    crc: int


class _Read:
    """The tokens of a sequence, and their CRC at each boundary of blocks."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = array("I", tokens)
        self.state = _NOTHING
        self.right = True
        self._bounds = [0]

    def crc(self, end: int, block_size: int) -> int:
        """Return the CRC of the first `end` tokens."""
        blocks, bounds = end // block_size, self._bounds
        while len(bounds) <= blocks:
            at = (len(bounds) - 1) * block_size
            bounds.append(crc32(self.tokens[at : at + block_size], bounds[-1]))
        return crc32(self.tokens[blocks * block_size : end], bounds[blocks])


_EMPTY: Final = _Content(-1, -1, _NOTHING)  # the image of a place that holds nothing


class SimulatedMemory:
    """Follows what steps write and read. The engine's thread calls it, once a step, in the order of the steps.

    Implements `Images`.
    """

    def __init__(self, groups: Sequence[KvGroup], block_size: int) -> None:
        # Where the pool has no groups, each block is a page that all layers read.
        self._groups, self._block_size = attending_groups(groups) if groups else _ONE_GROUP, block_size
        self._keeps_states = state_group(groups) is not None
        self._states = len(self._groups)
        self._frames: dict[FrameId, _Content | None] = {}
        self._state_pages = groups[-1].pages if groups else 0
        self._pages: dict[BlockId, _Content] = {}
        self._read: dict[SequenceId, _Read] = {}

    def add_sequence(self, sequence: SequenceId, tokens: Sequence[int]) -> None:
        self._read[sequence] = _Read(tokens)

    def remove(self, sequence: SequenceId) -> None:
        self._read.pop(sequence, None)

    def copy(self, copies: Sequence[Copy | TierCopy]) -> None:
        """Copy blocks into frames and frames into blocks, in list order.

        A part of a block is filled up by its sequence, which then writes what the block holds.
        """
        for each in copies:
            if isinstance(each, Copy):
                self._pages.pop(each.dst, None)
            elif not each.load:
                self._frames[each.frame] = self._pages.get(each.block)
            elif (held := self._frames.get(each.frame)) is not None:
                self._pages[each.block] = held
            else:
                self._pages.pop(each.block, None)

    def take(self, place: Place) -> Image:
        """Implement `Images`."""
        held = self._frames.get(place.index) if place.medium is Medium.HOST else self._pages.get(place.index)
        return _IMAGE.pack(*(held or _EMPTY))

    def land(self, frame: FrameId, image: Image, of_states: bool = False) -> None:
        """Implement `Images`."""
        held = _Content(*_IMAGE.unpack(image))
        self._frames[frame] = None if held == _EMPTY else held

    def load(self, plan: StepPlan) -> None:
        """Read checkpoints before the rows run. A page that holds anything else makes the state another one."""
        for sequence, pages in plan.loads:
            found = [self._pages.get(page) for page in pages]
            crc = found[0].crc if found[0] is not None else _NOTHING
            whole = [_Content(self._states, part, crc) for part in range(self._state_pages)]
            self._read[sequence].state = crc if found == whole else _NOTHING

    def run(self, row: ScheduledRow) -> bool:
        """Compute a row; return whether its sequence has read the right state and the right K and V all along."""
        read, end = self._read[row.sequence], row.start + row.length
        if not row.start:
            read.state, read.right = 0, True
        if self._keeps_states:
            read.right &= read.state == read.crc(row.start, self._block_size)
        read.right &= self._are_right(row, read)
        if read.state != _NOTHING:
            read.state = crc32(read.tokens[row.start : end], read.state)
        self._write(row, read)
        return read.right

    def append(self, sequence: SequenceId, token: int) -> None:
        """Take the token that a row sampled."""
        self._read[sequence].tokens.append(token)

    def save(self, plan: StepPlan) -> None:
        """Write checkpoints behind the rows."""
        for sequence, pages in plan.saves:
            for part, page in enumerate(pages):
                self._pages[page] = _Content(self._states, part, self._read[sequence].state)

    def _are_right(self, row: ScheduledRow, read: _Read) -> bool:
        """Return whether each full block before a row, of those that it reads, holds the tokens of its sequence."""
        size, pages = self._block_size, self._pages
        for number, (group, table) in enumerate(zip(self._groups, row.tables or (row.blocks,), strict=False)):
            for block in range(unread_blocks(group, row.start, size), row.start // size):
                crc = read.crc((block + 1) * size, size)
                for part, page in enumerate(table[block * group.pages : (block + 1) * group.pages]):
                    if pages.get(page) != (number, part, crc):
                        return False
        return True

    def _write(self, row: ScheduledRow, read: _Read) -> None:
        """Write K and V of a row; a block that is full holds the tokens before its end, another one nothing yet."""
        size, end = self._block_size, row.start + row.length
        for number, (group, table) in enumerate(zip(self._groups, row.tables or (row.blocks,), strict=False)):
            for block in range(row.start // size, -(-end // size)):
                crc = read.crc((block + 1) * size, size) if (block + 1) * size <= end else _NOTHING
                for part, page in enumerate(table[block * group.pages : (block + 1) * group.pages]):
                    self._pages[page] = _Content(number, part, crc)
