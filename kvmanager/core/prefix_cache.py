"""The prefix cache of one worker: which blocks hold the content of a hash, and which blocks will hold it.

The map is hash -> copies. Every sealed block is registered, even if its hash has a copy. With one block per hash, the
first copy could be evicted while a sequence holds a private twin. That sequence would then seal a child without a
registered parent. For the index, a hash is a member while it has a copy: events report the first and the last copy.

A copy that no sequence holds is worth its block only while it is the only one. So the copies of a hash are either one
cached block or blocks in use; `LedgerState` frees every other one. A look-up takes the first copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

from common.errors import ProtocolViolation
from common.types import BlockHash, BlockId, MissReason
from kvmanager.core.block import ROOT, Block
from kvmanager.core.eviction.interface import NO_MARK, Mark
from kvmanager.core.index_events import Cleared, IndexEvent, IndexSnapshot, Removed, Stored


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The blocks of a prompt that need not be computed, why there are no more, and the first that was never seen.

    `evicted_for` names the sequence that needed the room of the first evicted block.
    """

    hit_blocks: int
    miss_reason: MissReason
    diverged_at: int = 0
    evicted_for: str = field(default="", compare=False)


class Entry:
    """A registered hash: the blocks that hold it, its parent's hash (ROOT for a first block) and its depth.

    `children` counts the registered hashes whose parent it is.
    """

    __slots__ = ("blocks", "children", "depth", "parent")

    def __init__(self, parent: BlockHash, depth: int, blocks: list[BlockId], children: int = 0) -> None:
        self.parent = parent
        self.depth = depth
        self.blocks = blocks
        self.children = children


class Ghost(NamedTuple):
    """What is kept of an evicted hash: the name of the sequence that needed the room, and the policy's mark."""

    evicted_for: str
    mark: Mark


class PrefixCache:
    """Registered and pending hashes, the ghosts of evicted ones, and the events that follow from changes."""

    __slots__ = ("_blocks", "_ghost_limit", "ambiguous", "entries", "events", "ghosts", "number", "pending", "watched")

    def __init__(self, blocks: list[Block], ghost_limit: int) -> None:
        self._blocks = blocks
        self._ghost_limit = ghost_limit
        self.entries: dict[BlockHash, Entry] = {}
        self.pending: dict[BlockHash, BlockId] = {}
        # Hashes that two contents have; nothing more is registered after them.
        self.ambiguous: set[BlockHash] = set()
        # Hashes whose blocks have not changed since they were given; empty after a change. See `RememberedMatch`.
        self.watched: frozenset[BlockHash] = frozenset()
        # Evicted hashes, the oldest first.
        self.ghosts: OrderedDict[BlockHash, Ghost] = OrderedDict()
        self.events: list[IndexEvent] = []
        self.number = 0

    # ------------------------------------------------------------ look-up

    def find(self, block_hash: BlockHash, parent: BlockHash, depth: int) -> BlockId | None:
        """Return a block with this content, or the block that will have the content.

        Two contents may have one hash of 16 bytes. So a block counts only with the same parent at the same depth.
        """
        entry = self.entries.get(block_hash)
        if entry is not None:
            return entry.blocks[0] if entry.depth == depth and entry.parent == parent else None
        pending = self.pending.get(block_hash)
        if pending is None:
            return None
        block = self._blocks[pending]
        return pending if block.index == depth and block.parent == parent else None

    def has_twin(self, block: Block) -> bool:
        """Return whether another block has the same content as this registered one."""
        return block.hash is not None and len(self.entries[block.hash].blocks) > 1

    def longest(self, block_hashes: Items[BlockHash], limit: int) -> list[BlockId]:
        """Return the blocks of the longest prefix of block_hashes[:limit] that is registered or pending."""
        hits: list[BlockId] = []
        parent = ROOT
        for block_hash in block_hashes[:limit]:
            block = self.find(block_hash, parent, len(hits))
            if block is None:
                break
            hits.append(block)
            parent = block_hash
        return hits

    def explain(self, block_hashes: Items[BlockHash], num_tokens: int, block_size: int, present: int) -> PrefixMatch:
        """Return the match of a prompt of `num_tokens` tokens, of whose full blocks the first `present` were found.

        The block that holds the last token is no hit, because that token's logits must be computed.
        """
        full = min(num_tokens // block_size, len(block_hashes))
        if not full:
            return PrefixMatch(0, MissReason.BELOW_BLOCK)
        limit = min(full, (num_tokens - 1) // block_size)
        hits = min(present, limit)
        if present == full:
            return PrefixMatch(hits, MissReason.CAPPED if full > limit else MissReason.FULL_HIT)
        ghost = self.ghosts.get(block_hashes[present])
        if ghost is not None:
            return PrefixMatch(hits, MissReason.EVICTED, evicted_for=ghost.evicted_for)
        if not present:
            return PrefixMatch(0, MissReason.NEVER_SEEN)
        return PrefixMatch(hits, MissReason.DIVERGED_AT, present)

    # ------------------------------------------------------------ membership

    def register(self, block: Block, block_hash: BlockHash, parent: BlockHash) -> Ghost | None:
        """Add a copy; `parent` is registered, or ROOT. Return what was kept of its last eviction."""
        self.forget_pending(block)
        self.touch(block_hash)
        block.hash = block_hash
        entry = self.entries.get(block_hash)
        if entry is not None:
            entry.blocks.append(block.id)
            return None
        depth = 0
        if parent:
            above = self.entries[parent]
            above.children += 1
            depth = above.depth + 1
        self.entries[block_hash] = Entry(parent, depth, [block.id])
        self.number += 1
        self.events.append(Stored(self.number, block_hash, depth))
        return self.ghosts.pop(block_hash, None)

    def has_parent(self, parent: BlockHash) -> bool:
        """Return whether a child of `parent` may be registered."""
        return parent == ROOT or (parent in self.entries and parent not in self.ambiguous)

    def depth_after(self, parent: BlockHash) -> int:
        """Return the depth of a child of `parent`, which is registered or ROOT."""
        return self.entries[parent].depth + 1 if parent else 0

    def is_ambiguous(self, block_hash: BlockHash, parent: BlockHash) -> bool:
        """Return whether another content than a child of `parent` has this hash; remember that.

        The children of the two could not be told apart: each would count as a child of the registered one.
        """
        entry = self.entries.get(block_hash)
        if entry is None or entry.parent == parent:
            return False
        self.ambiguous.add(block_hash)
        return True

    def depth_of(self, block: Block) -> int:
        """Return the depth of what a block holds; 0 for the first block of a prompt."""
        assert block.hash is not None
        return self.entries[block.hash].depth

    def evict(self, block: Block, beneficiary: str = "", mark: Mark = NO_MARK) -> int:
        """Drop a copy for a sequence and return its depth; when it was the last, the hash becomes a ghost."""
        assert block.hash is not None
        block_hash, block.hash = block.hash, None
        self.touch(block_hash)
        entry = self.entries[block_hash]
        entry.blocks.remove(block.id)
        if entry.blocks:
            return entry.depth
        del self.entries[block_hash]
        if entry.parent:
            if (parent := self.entries.get(entry.parent)) is None:
                raise ProtocolViolation(f"block {block.id} was cached without its parent")
            parent.children -= 1
        self.number += 1
        self.events.append(Removed(self.number, block_hash, entry.depth))
        self.ghosts[block_hash] = Ghost(beneficiary, mark)
        if len(self.ghosts) > self._ghost_limit:
            self.ghosts.popitem(last=False)
        return entry.depth

    def clear(self) -> None:
        """Forget everything, ghosts included, with one event. The caller frees the blocks."""
        for entry in self.entries.values():
            for block in entry.blocks:
                self._blocks[block].hash = None
        self.entries.clear()
        self.ghosts.clear()
        self.ambiguous.clear()
        self.watched = frozenset()
        self.number += 1
        self.events.append(Cleared(self.number))

    def rebase(self, blocks: list[Block]) -> None:
        """Start again with new blocks. The membership is cleared; event numbers and ghosts are kept."""
        self._blocks = blocks
        self.pending.clear()
        self.ambiguous.clear()
        self.watched = frozenset()
        if self.entries:
            self.entries.clear()
            self.number += 1
            self.events.append(Cleared(self.number))

    # ------------------------------------------------------------ pending

    def expect(self, block: Block, block_hash: BlockHash) -> None:
        """Let others share a block that will hold `block_hash`; the first such block wins."""
        if block_hash not in self.pending:
            self.touch(block_hash)
            self.pending[block_hash] = block.id
            block.pending = block_hash

    def forget_pending(self, block: Block) -> None:
        """Stop the sharing of an unsealed block, because it was sealed or freed."""
        if block.pending is not None:
            self.touch(block.pending)
            del self.pending[block.pending]
            block.pending = None

    # ------------------------------------------------------------ remembered matches

    def touch(self, block_hash: BlockHash) -> None:
        """Stop watching if the blocks of a watched hash change."""
        if block_hash in self.watched:
            self.watched = frozenset()

    # ------------------------------------------------------------ the index

    def drain_events(self) -> tuple[IndexEvent, ...]:
        """Return the events since the last call, in the order of the changes."""
        events, self.events = tuple(self.events), []
        return events

    def snapshot(self) -> IndexSnapshot:
        """Return the whole membership, parents first."""
        entries = sorted(
            ((block_hash, entry.depth) for block_hash, entry in self.entries.items()), key=lambda each: each[1]
        )
        return IndexSnapshot(self.number, tuple(entries))
