"""The prefix cache of one worker: which blocks hold the content of a hash, and which blocks will hold it.

The map is hash -> copies. Every sealed block is registered, even if its hash has a copy. With one block per hash, the
first copy could be evicted while a sequence holds a private twin. That sequence would then seal a child without a
registered parent. For the index, a hash is a member while it has a copy: events report the first and the last copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass

from common.types import BlockHash, BlockId, MissReason
from kvmanager.core.block import ROOT, Block
from kvmanager.core.index_events import Cleared, IndexEvent, IndexSnapshot, Removed, Stored


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The blocks of a prompt that need not be computed, why there are no more, and the first that was never seen."""

    hit_blocks: int
    miss_reason: MissReason
    diverged_at: int = 0


class Entry:
    """A registered hash: the blocks that hold it, its parent's hash (ROOT for a first block) and its depth."""

    __slots__ = ("blocks", "depth", "parent")

    def __init__(self, parent: BlockHash, depth: int, blocks: list[BlockId]) -> None:
        self.parent = parent
        self.depth = depth
        self.blocks = blocks


class PrefixCache:
    """Registered and pending hashes, the ghosts of evicted ones, and the events that follow from changes."""

    __slots__ = ("_blocks", "_ghost_limit", "entries", "events", "ghosts", "number", "pending")

    def __init__(self, blocks: list[Block], ghost_limit: int) -> None:
        self._blocks = blocks
        self._ghost_limit = ghost_limit
        self.entries: dict[BlockHash, Entry] = {}
        self.pending: dict[BlockHash, BlockId] = {}
        self.ghosts: OrderedDict[BlockHash, None] = OrderedDict()
        self.events: list[IndexEvent] = []
        self.number = 0

    # ------------------------------------------------------------ look-up

    def find(self, block_hash: BlockHash) -> BlockId | None:
        """Return a block with this content, preferably one in use, or the block that will have the content."""
        entry = self.entries.get(block_hash)
        if entry is None:
            return self.pending.get(block_hash)
        if len(entry.blocks) > 1:
            for block in entry.blocks:
                if self._blocks[block].refs:
                    return block
        return entry.blocks[0]

    def longest(self, block_hashes: Items[BlockHash], limit: int) -> list[BlockId]:
        """Return the blocks of the longest prefix of block_hashes[:limit] that is registered or pending."""
        hits = []
        for block_hash in block_hashes[:limit]:
            block = self.find(block_hash)
            if block is None:
                break
            hits.append(block)
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
        if block_hashes[present] in self.ghosts:
            return PrefixMatch(hits, MissReason.EVICTED)
        if not present:
            return PrefixMatch(0, MissReason.NEVER_SEEN)
        return PrefixMatch(hits, MissReason.DIVERGED_AT, present)

    # ------------------------------------------------------------ membership

    def register(self, block: Block, block_hash: BlockHash, parent: BlockHash) -> None:
        """Add a copy; `parent` is registered, or ROOT."""
        self.forget_pending(block)
        block.hash = block_hash
        entry = self.entries.get(block_hash)
        if entry is not None:
            entry.blocks.append(block.id)
            return
        depth = self.entries[parent].depth + 1 if parent else 0
        self.entries[block_hash] = Entry(parent, depth, [block.id])
        self.ghosts.pop(block_hash, None)
        self.number += 1
        self.events.append(Stored(self.number, block_hash, depth))

    def has_parent(self, parent: BlockHash) -> bool:
        """Return whether a child of `parent` may be registered."""
        return parent == ROOT or parent in self.entries

    def evict(self, block: Block) -> int:
        """Drop a copy and return its depth; when it was the last, the hash becomes a ghost."""
        assert block.hash is not None
        block_hash, block.hash = block.hash, None
        entry = self.entries[block_hash]
        entry.blocks.remove(block.id)
        if entry.blocks:
            return entry.depth
        del self.entries[block_hash]
        self.number += 1
        self.events.append(Removed(self.number, block_hash, entry.depth))
        self.ghosts[block_hash] = None
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
        self.number += 1
        self.events.append(Cleared(self.number))

    def rebase(self, blocks: list[Block]) -> None:
        """Start again with new blocks. The membership is cleared; event numbers and ghosts are kept."""
        self._blocks = blocks
        self.pending.clear()
        if self.entries:
            self.entries.clear()
            self.number += 1
            self.events.append(Cleared(self.number))

    # ------------------------------------------------------------ pending

    def expect(self, block: Block, block_hash: BlockHash) -> None:
        """Let others share a block that will hold `block_hash`; the first such block wins."""
        if block_hash not in self.pending:
            self.pending[block_hash] = block.id
            block.pending = block_hash

    def forget_pending(self, block: Block) -> None:
        """Stop the sharing of an unsealed block, because it was sealed or freed."""
        if block.pending is not None:
            del self.pending[block.pending]
            block.pending = None

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
