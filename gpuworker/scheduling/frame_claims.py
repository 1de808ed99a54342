"""What the frames of a tier hold; those of the host tier once all copies that were ordered so far have run.

Copies run before the rows of the next step, in the order in which they were ordered. So what an order says holds for
all that is ordered behind it, and a step that fails voids blocks and frames alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from typing import Final, NamedTuple

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import Admit, CachedBlock, TierCopy
from common.contracts.types import BlockId, FrameId, SequenceId
from gpuworker.scheduling.block_states import BlockStates, Content, PageBlocks
from gpuworker.scheduling.sequence import Sequence


class Claims(NamedTuple):
    """What frames of a tier hold, as an inventory says it.

    Where the pool has groups: the group of each content, and the frames of all contents, one after the other.
    """

    contents: tuple[CachedBlock, ...] = ()
    groups: tuple[int, ...] = ()
    pages: tuple[FrameId, ...] = ()


NOTHING_CLAIMED: Final = Claims()


class LoadedBlock(NamedTuple):
    """A block that a batch loads: its group, its pages, and its content; None: it is not claimed."""

    group: int
    pages: tuple[BlockId, ...]
    content: Content | None


class Move(NamedTuple):
    """The copies of one block: its group, its pages, and as many frames."""

    group: int
    pages: tuple[BlockId, ...]
    frames: tuple[FrameId, ...]
    load: bool


# What a batch makes of frames, in the order of its copies, while the batch is checked and nothing is applied.
class _Stored:
    def __init__(self, claims: FrameClaims) -> None:
        self._claims = claims
        self._units: dict[FrameId, tuple[Move, Content | None]] = {}
        # The first frame of the content that each frame has now; None: of none.
        self._first: dict[FrameId, FrameId | None] = {}

    def store(self, move: Move, content: Content | None) -> None:
        for frame in move.frames:
            first = self._first_of(frame)
            found = None if first is None else self.find(first)
            if found is not None:  # of what is overwritten in part, no frame has anything
                self._first.update(dict.fromkeys(found[1]))
        self._first.update(dict.fromkeys(move.frames, move.frames[0]))
        self._units[move.frames[0]] = move, content

    def _first_of(self, frame: FrameId) -> FrameId | None:
        if frame in self._first:
            return self._first[frame]
        return frame if self._claims.made is None else self._claims.made.block_of(frame)

    def find(self, frame: FrameId) -> tuple[int, tuple[FrameId, ...], Content | None] | None:
        """Return the group, the frames and the content of what begins at a frame; None: nothing does."""
        if frame in self._first:
            if self._first[frame] != frame:
                return None
            move, content = self._units[frame]
            return move.group, move.frames, content
        return self._claims.find(frame)


class FrameClaims:
    """The content of frames. None stands for one that the worker does not claim: it has reset its cache meanwhile.

    Where the pool has groups, a frame holds a page: `made` knows which frames have one content, by the first of them.
    """

    def __init__(self, num_frames: int, block_pages: tuple[int, ...] = ()) -> None:
        self.num_frames = num_frames
        self.made = PageBlocks(block_pages) if block_pages else None
        self.held: dict[FrameId, Content | None] = {}

    def find(self, frame: FrameId) -> tuple[int, tuple[FrameId, ...], Content | None] | None:
        """Return the group, the frames and the content of what begins at a frame; None: nothing does."""
        if frame not in self.held:
            return None
        made = self.made
        return (
            (0, (frame,), self.held[frame])
            if made is None
            else (made.group[frame], made.pages[frame], self.held[frame])
        )

    def check(
        self,
        copies: Items[TierCopy],
        admits: Items[Admit],
        blocks: BlockStates,
        sequences: Mapping[SequenceId, Sequence],
    ) -> dict[BlockId, LoadedBlock]:
        """Return the blocks that are loaded; each is one that an admission shares.

        Raises ProtocolViolation when there is no such frame or block, when a frame is loaded that holds nothing, when a
        content is copied in part, and when a block is loaded for nobody, or with another content than the sequence has
        at its place.
        """
        blocks.refuse_unknown([each.block for each in copies])
        for each in copies:
            if not 0 <= each.frame < self.num_frames:
                raise ProtocolViolation(f"the manager named frame {each.frame}; this worker has {self.num_frames}")
        loaded = self._find_loaded(copies, blocks)
        unused = set(loaded)
        for admit in admits if loaded else ():
            sequence = sequences.get(admit.sequence)
            for table in (admit.block_table, *admit.runs):
                for place, block in enumerate(table[: admit.n_shared]):
                    if block in loaded:
                        unused.discard(block)
                        _check_place(sequence, place, block, loaded[block].content)
        if unused:
            raise ProtocolViolation(f"blocks {sorted(unused)} were to be loaded, and no admission shares them")
        return loaded

    def _find_loaded(self, copies: Items[TierCopy], blocks: BlockStates) -> dict[BlockId, LoadedBlock]:
        """Return the blocks that are loaded. Raises ProtocolViolation for what cannot be copied so."""
        stored, loaded, at = _Stored(self), dict[BlockId, LoadedBlock](), 0
        while at < len(copies):
            first = copies[at]
            if first.load:
                found = stored.find(first.frame)
                if found is None:
                    what = f"block {first.block} was to be loaded from frame {first.frame}, which is empty"
                    raise ProtocolViolation(what)
                group, whole, content = found
                move = _moved(copies[at : at + len(whole)], group, whole)
                loaded[move.pages[0]] = LoadedBlock(group, move.pages, content)
            else:
                group, whole = _block_at(first.block, blocks)
                move = _moved(copies[at : at + len(whole)], group, whole)
                stored.store(move, blocks.content.get(first.block))
            at += len(whole)
        return loaded

    def apply(self, copies: Items[TierCopy], blocks: BlockStates) -> None:
        """Account for copies that were checked."""
        if self.made is not None:
            self._apply_pages(copies, blocks)
            return
        for each in copies:
            if each.load:
                blocks.fill_with(each.block, self.held[each.frame])
            else:
                self.held[each.frame] = blocks.content.get(each.block)

    def _apply_pages(self, copies: Items[TierCopy], blocks: BlockStates) -> None:
        at = 0
        while at < len(copies):
            first = copies[at]
            if first.load:
                found = self.find(first.frame)
                assert found is not None, "copies were checked"
                group, whole, content = found
                blocks.make_block(group, tuple([each.block for each in copies[at : at + len(whole)]]))
                blocks.fill_with(first.block, content)
            else:
                group, whole = _block_at(first.block, blocks)
                self._make(group, tuple([each.frame for each in copies[at : at + len(whole)]]))
                self.held[first.frame] = blocks.content.get(first.block)
            at += len(whole)

    def _make(self, group: int, frames: tuple[FrameId, ...]) -> None:
        """Let frames have one content; what they were a part of is no more."""
        assert self.made is not None
        self.void(frames)
        self.made.make_block(group, frames)

    def void(self, frames: Iterable[FrameId]) -> None:
        """Forget what frames hold, and what they are a part of."""
        for frame in frames:
            void = frame if self.made is None else self.made.break_block(frame)
            if void is not None:
                self.held.pop(void, None)

    def claim(self, frames: tuple[FrameId, ...], content: Content) -> None:
        """Let frames hold a content that a transfer has brought."""
        if self.made is not None:
            self._make(content.group, frames)
        self.held[frames[0]] = content

    def forget_all(self) -> None:
        """Forget what frames hold: the prefix cache was reset."""
        self.held.clear()
        if self.made is not None:
            self.made = PageBlocks(self.made.sizes)

    def claims(self) -> Claims:
        """Return what frames hold for an inventory; each claim says where it stands."""
        held, made = [(frame, each) for frame, each in sorted(self.held.items()) if each is not None], self.made
        contents = tuple(
            CachedBlock(frame, each.hash, -1, each.last_used, each.parent or each.hash, each.depth)
            for frame, each in held
        )
        if made is None:
            return Claims(contents)
        groups = tuple([made.group[frame] for frame, _ in held])
        return Claims(contents, groups, tuple([page for frame, _ in held for page in made.pages[frame]]))


class Loads(NamedTuple):
    """The places of a sequence's tables, `first` to `end` - 1, at which blocks are loaded for it, by `copies`."""

    sequence: SequenceId
    first: int
    end: int
    copies: int


def find_loads(copies: Items[TierCopy], admits: Items[Admit], made: PageBlocks | None = None) -> Iterator[Loads]:
    """Yield for whom blocks are loaded. A block that two admissions share is loaded for the first of them.

    Where the pool has groups, `made` knows the pages of the blocks.
    """
    loaded = {each.block for each in copies if each.load}
    for admit in admits if loaded else ():
        places, count = list[int](), 0
        for table in (admit.block_table, *admit.runs):
            for place, block in enumerate(table[: admit.n_shared]):
                if block in loaded:
                    loaded.discard(block)
                    places.append(place)
                    count += 1 if made is None else len(made.pages[block])
        if places:
            yield Loads(admit.sequence, min(places), max(places) + 1, count)


def _block_at(block: BlockId, blocks: BlockStates) -> tuple[int, tuple[BlockId, ...]]:
    """Return the group and the pages of a block that is stored."""
    if blocks.made is None:
        return 0, (block,)
    pages = blocks.made.pages.get(block)
    if pages is None:
        raise ProtocolViolation(f"block {block} was to be stored, and it is none")
    return blocks.made.group[block], pages


def _moved(copies: Items[TierCopy], group: int, whole: tuple[BlockId, ...]) -> Move:
    """Return what the copies of one block move. Raises ProtocolViolation unless they are all of it, in its order."""
    pages, frames = tuple([each.block for each in copies]), tuple([each.frame for each in copies])
    load = copies[0].load
    if (frames if load else pages) != whole or any(each.load != load for each in copies):
        what = f"frame {frames[0]}" if load else f"block {pages[0]}"
        raise ProtocolViolation(f"{what} was to be copied in part: pages {pages} and frames {frames}, of {whole}")
    return Move(group, pages, frames, load)


def _check_place(sequence: Sequence | None, place: int, block: BlockId, content: Content | None) -> None:
    if sequence is None or content is None:
        return
    if sequence.block_hashes[place : place + 1] != [content.hash]:
        what = f"block {block} at place {place}, loaded with another content"
        raise ProtocolViolation(f"sequence {sequence.id} was granted {what}")
