"""The frames of a tier below the pool, host memory or disk: what cached blocks held, to be copied back.

A block's content goes into a frame of host memory when the block is evicted, and stays there while a copy of it is in a
block again:

    cached --evicted--> stored into a frame        a frame --loaded--> in use, and the frame keeps its content

The worker makes these copies in the order in which it was told, before the rows of its next step. So a frame holds its
content from the order on, for everything that is ordered later. A transfer takes longer, and may fail
(`kvmanager/ledger/transfers.py`):

    free --expect--> expected --admit--> cached              expected --abandon--> free

Blocks and frames of host memory are one forest: the parent of a hash that a frame has is in a block or in a frame.
Blocks alone are closed under prefixes, so a prompt's hits are a run of blocks and a run of frames behind it. Frames on
disk are closed under prefixes by themselves: they outlive the worker's process.

Where the pool has groups, a frame is room for a page, and what is said of hashes holds for keys (`key_of`). A block
goes into as many frames as it has pages, which need not be adjacent, and is named by the first one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Items
from typing import Final, NamedTuple

from common.contracts.errors import ProtocolViolation
from common.contracts.hashing import group_in, key_of
from common.contracts.lease import CachedBlocks
from common.contracts.types import BlockHash, FrameId
from kvmanager.cache.block_pool import FreeBlocks
from kvmanager.cache.eviction.choice import order_of
from kvmanager.cache.eviction.interface import NO_MARK
from kvmanager.cache.eviction.restored import order_after_rebuild
from kvmanager.contracts.block import CACHED, FREE, IN_USE, PART, ROOT, Blocks
from kvmanager.contracts.ledger_config import EvictionName


class Taken(NamedTuple):
    """The frame for a content, NO_FRAME if too few could be had, and the hashes and depths of what went for it."""

    frame: FrameId
    dropped: tuple[tuple[BlockHash, int], ...] = ()


NO_FRAME: Final = FrameId(-1)


class Unit(NamedTuple):
    """The group of a content, and its frames."""

    group: int
    frames: tuple[FrameId, ...]


class FrameTier:
    """Frames by what they hold. Its columns are those of blocks: a frame is free, cached, or in use.

    One in use is held by a grant or a move that reads it, or it is `expected`: a move is to fill it.
    """

    __slots__ = ("_pages", "apart", "entries", "expected", "frames", "free", "order", "to_come")

    def __init__(self, num_frames: int, eviction: EvictionName, block_pages: tuple[int, ...] = (1,)) -> None:
        """`block_pages` are the frames of a content, by its group."""
        self.frames, self._pages = Blocks(num_frames), block_pages
        self.entries: dict[BlockHash, FrameId] = {}
        self.order = order_of(eviction, self.frames, self.entries)
        self.clear()

    def clear(self) -> None:
        """Forget what all frames hold."""
        self.order.empty()
        self.frames.clear()
        self.entries.clear()
        self.free = FreeBlocks(map(FrameId, range(len(self.frames))))
        # How many frames hold children of a hash that no frame has.
        self.apart: dict[BlockHash, int] = {}
        # What frames are to hold once their moves are done. Such a hash counts as a child of its parent.
        self.expected: dict[BlockHash, FrameId] = {}
        # The frames of these.
        self.to_come = 0

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def held(self) -> int:
        """Frames of contents that are there."""
        return len(self.frames) - len(self.free) - self.to_come

    def pages_of(self, key: BlockHash) -> int:
        """Return how many frames a content takes."""
        return self._pages[group_in(key)]

    def find(self, key: BlockHash, parent: BlockHash, depth: int) -> FrameId | None:
        """Return the frame of a content, by its key."""
        frame = self.entries.get(key)
        if frame is None or self.frames.index[frame] != depth or self.frames.parent[frame] != parent:
            return None
        return frame

    def find_run(
        self, block_hashes: Items[BlockHash], first: int, end: int, ambiguous: Collection[BlockHash] = ()
    ) -> list[FrameId]:
        """Return the frames of the longest run of block_hashes[first:end] from its begin on.

        It ends before a hash that two contents have.
        """
        frames, run = self.frames, list[FrameId]()
        parent = block_hashes[first - 1] if first else ROOT
        for depth in range(first, end):
            frame = self.entries.get(block_hashes[depth])
            if frame is None or frames.index[frame] != depth or frames.parent[frame] != parent:
                break
            if ambiguous and block_hashes[depth] in ambiguous:
                break
            run.append(frame)
            parent = block_hashes[depth]
        return run

    # ------------------------------------------------------------ stores

    def take_frame(self, block_hash: BlockHash, parent: BlockHash, depth: int) -> Taken:
        """Give a content that no frame has frames, if need be those of the least worth."""
        taken = self._take(block_hash)
        if taken.frame != NO_FRAME:
            self._describe(taken.frame, block_hash, parent, depth)
            self._enter(taken.frame, block_hash)
            self._order_new(taken.frame)
        return taken

    def _take(self, key: BlockHash) -> Taken:
        """Take as many frames out of the free ones as a content has; drop others for them while there are too few."""
        count, free, dropped = self.pages_of(key), self.free, list[tuple[BlockHash, int]]()
        if count > len(self.frames) - self.to_come:  # whatever goes, there will be too few
            return Taken(NO_FRAME)
        while len(free) < count:
            if not self.order.can_pop():
                return Taken(NO_FRAME, tuple(dropped))
            frame = self.order.pop_block()
            depth = self.frames.index[frame]
            dropped.append((self._forget(frame), depth))
            self._set_free(frame)
        first, others = free.popleft(), tuple([free.popleft() for _ in range(count - 1)])
        self._join(first, group_in(key), others)
        return Taken(first, tuple(dropped))

    def _join(self, first: FrameId, group: int, others: tuple[FrameId, ...]) -> None:
        """Make the frames of one content of a frame and others."""
        self.frames.group[first] = group
        for frame in others:
            self.frames.state[frame] = PART
        if others:
            self.frames.others[first] = others

    def touch(self, block_hash: BlockHash) -> None:
        """Count the frame of a content, if there is one, as released now: its block was evicted."""
        frame = self.entries.get(block_hash)
        if frame is not None and self.frames.state[frame] is CACHED:
            self.order.discard_block(frame)
            self.order.add_block(frame)

    def _describe(self, frame: FrameId, block_hash: BlockHash, parent: BlockHash, depth: int) -> None:
        """Note what a frame holds, or is to hold, and count it as a child of its parent."""
        frames = self.frames
        frames.hash[frame], frames.parent[frame], frames.index[frame] = block_hash, parent, depth
        if parent:
            self._count_child(parent, 1)

    def _enter(self, frame: FrameId, block_hash: BlockHash) -> None:
        """Let a frame have a content."""
        self.frames.state[frame], self.frames.children[frame] = CACHED, self.apart.pop(block_hash, 0)
        self.entries[block_hash] = frame

    def _order_new(self, frame: FrameId) -> None:
        self.order.note_registered(frame, self.entries.get(self.frames.parent[frame] or ROOT), NO_MARK)
        self.order.add_block(frame)

    def _forget(self, frame: FrameId) -> BlockHash:
        frames = self.frames
        block_hash, parent = frames.hash[frame], frames.parent[frame] or ROOT
        assert block_hash is not None, "only a frame that holds something is taken"
        frames.hash[frame] = None
        del self.entries[block_hash]
        if frames.children[frame]:
            self.apart[block_hash], frames.children[frame] = frames.children[frame], 0
        if parent:
            self._count_child(parent, -1)
        return block_hash

    def _count_child(self, parent: BlockHash, by: int) -> None:
        above = self.entries.get(parent)
        if above is not None:
            self.frames.children[above] += by
        elif count := self.apart.get(parent, 0) + by:
            self.apart[parent] = count
        else:
            del self.apart[parent]

    # ------------------------------------------------------------ loads

    def hold(self, frames: Iterable[FrameId]) -> None:
        """Keep frames that a grant loads, while it evicts blocks."""
        for frame in frames:
            self.order.reuse_block(frame)
            self.frames.state[frame] = IN_USE

    def release(self, frames: Items[FrameId]) -> None:
        """Give back the frames of a run: their loads are ordered, or the moves that read them have ended."""
        for frame in reversed(frames):
            self.frames.state[frame] = CACHED
            self.order.add_block(frame)

    # ------------------------------------------------------------ moves

    def expect(self, block_hash: BlockHash, parent: BlockHash, depth: int) -> Taken:
        """Do what `take_frame` does for a content that a move is to bring: it is no hit before that."""
        taken = self._take(block_hash)
        if taken.frame != NO_FRAME:
            self._describe(taken.frame, block_hash, parent, depth)
            self.frames.state[taken.frame] = IN_USE
            self.expected[block_hash] = taken.frame
            self.to_come += self.pages_of(block_hash)
            self.touch(parent)  # it is no leaf any more
        return taken

    def admit(self, block_hash: BlockHash) -> None:
        """Let a frame have the content that a move has brought."""
        frame = self._take_expected(block_hash)
        self._enter(frame, block_hash)
        self._order_new(frame)

    def abandon(self, block_hash: BlockHash) -> None:
        """Free the frame of a move that brought nothing, or brought what has no place any more."""
        frame = self._take_expected(block_hash)
        if parent := self.frames.parent[frame]:
            self._count_child(parent, -1)
            self.touch(parent)  # it may be a leaf now
        self._set_free(frame)

    def _take_expected(self, key: BlockHash) -> FrameId:
        self.to_come -= self.pages_of(key)
        return self.expected.pop(key)

    def pages_at(self, frame: FrameId) -> tuple[FrameId, ...]:
        """Return all frames of the content that begins at one."""
        return (frame, *self.frames.others.get(frame, ())) if self.frames.others else (frame,)

    def _set_free(self, frame: FrameId) -> None:
        self.frames.hash[frame], self.frames.state[frame] = None, FREE
        self.free.append(frame)
        if self.frames.others:
            for other in self.frames.others.pop(frame, ()):
                self.frames.state[other] = FREE
                self.free.append(other)

    def end_read(self, frame: FrameId, block_hash: BlockHash) -> bool:
        """Give back a frame that a move has read; return whether it still holds what was read."""
        if self.entries.get(block_hash) == frame:
            self.release([frame])
            return True
        if self.frames.state[frame] is IN_USE and self.frames.hash[frame] is None:
            self._set_free(frame)  # its content was dropped meanwhile
        return False

    def drop_tree(self, root: BlockHash) -> list[tuple[int, BlockHash]]:
        """Forget `root`, if a frame has it, and its descendants, which no reader can use any more.

        Return the depths and hashes, the deepest first. A frame that a move reads is free once that has ended. This
        looks at every frame, so it is for what is rare.
        """
        frames, gone, known = self.frames, list[tuple[int, BlockHash]](), {root}
        # What is behind the first group comes after the first group's content of its place, its parent.
        for depth, _, frame in sorted((frames.index[at], group_in(key), at) for key, at in self.entries.items()):
            block_hash, parent = frames.hash[frame] or ROOT, frames.parent[frame]
            if block_hash == root or (parent and parent in known):
                known.add(block_hash)
                gone.append((depth, block_hash))
        for _, block_hash in reversed(gone):
            frame = self.entries[block_hash]
            if frames.state[frame] is CACHED:
                self.order.discard_block(frame)
                self._forget(frame)
                self._set_free(frame)
            else:
                self._forget(frame)
            self.touch(frames.parent[frame] or ROOT)
        return gone[::-1]

    def drop(self, key: BlockHash) -> bool:
        """Forget a content that nothing stands behind, if a frame has it that may go; return whether it did."""
        frame = self.entries.get(key)
        if frame is None or self.frames.state[frame] is not CACHED or self.frames.children[frame]:
            return False
        self.order.discard_block(frame)
        self._forget(frame)
        self._set_free(frame)
        return True

    # ------------------------------------------------------------ rebuilds

    def restore(
        self,
        claims: CachedBlocks,
        blocks: Blocks,
        entries: dict[BlockHash, FrameId],
        alone: bool = False,
        units: Items[Unit] = (),
    ) -> Iterator[None]:
        """Take over what a worker's frames hold, behind parents that blocks or frames have; others stay free.

        `blocks` and `entries` are those of the prefix cache. With `alone` only frames of this tier count as parents.
        Where the pool has groups, `units` say of each claim which group it is of, and which frames it has.
        Raises ProtocolViolation for a frame that there is not, or that stands twice.
        """
        frames, named, by_depth = self.frames, set[FrameId](), dict[int, list[int]]()
        for row, depth in enumerate(claims.depths):
            unit = units[row] if units else Unit(0, (claims.blocks[row],))
            for frame in unit.frames:
                if not 0 <= frame < len(frames) or frame in named:
                    text = f"frame {frame} stands twice in the inventory, or is none of {len(frames)}"
                    raise ProtocolViolation(text)
                named.add(frame)
            # Behind the first group's content of a place, its parent, stand those of the others.
            by_depth.setdefault(2 * depth + (unit.group > 0), []).append(row)
            if row % _AT_ONCE == 0:
                yield
        last_used, levels, done = [0] * len(frames), list[list[FrameId]](), 0
        for level_depth, rows in sorted(by_depth.items()):
            level, depth = list[FrameId](), level_depth // 2
            for row in rows:
                frame, group = claims.blocks[row], units[row].group if units else 0
                parent = claims.hashes[row] if group else claims.parent_hashes[row] if depth else ROOT
                key = key_of(claims.hashes[row], group)
                if self._fits(key, parent, depth, blocks, entries, alone):
                    self._describe(frame, key, parent, depth)
                    self._enter(frame, key)
                    self._join(frame, group, units[row].frames[1:] if units else ())
                    level.append(frame)
                    last_used[frame] = claims.last_used[row]
                done += 1
                if done % _AT_ONCE == 0:
                    yield
            levels.append(level)
        for part in order_after_rebuild(reversed(levels), last_used.__getitem__):
            self.order.restore_blocks(part)
            yield
        self.free = FreeBlocks([frame for frame in self.free if frames.state[frame] is FREE])

    def _fits(
        self,
        key: BlockHash,
        parent: BlockHash,
        depth: int,
        blocks: Blocks,
        entries: dict[BlockHash, FrameId],
        alone: bool,
    ) -> bool:
        """Return whether a content has its parent before it, or beside it, and no other content its hash."""
        if key in self.entries:
            return False
        same = entries.get(key)
        if same is not None and (blocks.index[same], blocks.parent[same]) != (depth, parent):
            return False
        if not parent:
            return True
        place = depth if group_in(key) else depth - 1
        above, at = None if alone else entries.get(parent), self.entries.get(parent)
        return (above is not None and blocks.index[above] == place) or (
            at is not None and self.frames.index[at] == place
        )


_AT_ONCE = 1 << 13
"""Claims of one step of a rebuild."""
