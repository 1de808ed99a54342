"""The prefix cache of one worker: which blocks hold the content of which hash, and which are about to.

The map is hash -> copies. Every sealed block is registered, also when its hash has a copy: with one block per hash
the first copy could be evicted under a sequence that holds a private twin and then seals the child. Outside, a hash
is a member while it has a copy: an event says when the first one comes and when the last one goes.
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
    """A registered hash: the blocks that hold it, its parent's hash (ROOT for a chain's first) and its depth."""

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

    def find(self, key: BlockHash) -> BlockId | None:
        """Return a block with this content, one that a row holds if there is one, or the block that will have it."""
        entry = self.entries.get(key)
        if entry is None:
            return self.pending.get(key)
        if len(entry.blocks) > 1:
            for block in entry.blocks:
                if self._blocks[block].refs:
                    return block
        return entry.blocks[0]

    def longest(self, block_hashes: Items[BlockHash], limit: int) -> list[BlockId]:
        """Return the blocks of the longest prefix of chain[:limit] that is registered or pending."""
        hits = []
        for key in block_hashes[:limit]:
            block = self.find(key)
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

    def register(self, block: Block, key: BlockHash, parent: BlockHash) -> None:
        """Add a copy; `parent` is registered, or ROOT."""
        self.forget_pending(block)
        block.hash = key
        entry = self.entries.get(key)
        if entry is not None:
            entry.blocks.append(block.id)
            return
        depth = self.entries[parent].depth + 1 if parent else 0
        self.entries[key] = Entry(parent, depth, [block.id])
        self.ghosts.pop(key, None)
        self.number += 1
        self.events.append(Stored(self.number, key, depth))

    def has_parent(self, parent: BlockHash) -> bool:
        """Return whether a child of `parent` may be registered."""
        return parent == ROOT or parent in self.entries

    def evict(self, block: Block) -> int:
        """Drop a copy and return its depth; when it was the last, the hash becomes a ghost."""
        assert block.hash is not None
        key, block.hash = block.hash, None
        entry = self.entries[key]
        entry.blocks.remove(block.id)
        if entry.blocks:
            return entry.depth
        del self.entries[key]
        self.number += 1
        self.events.append(Removed(self.number, key, entry.depth))
        self.ghosts[key] = None
        if len(self.ghosts) > self._ghost_limit:
            self.ghosts.popitem(last=False)
        return entry.depth

    def clear(self) -> None:
        """Forget everything, ghosts included; one event says so. The caller frees the blocks."""
        for entry in self.entries.values():
            for block in entry.blocks:
                self._blocks[block].hash = None
        self.entries.clear()
        self.ghosts.clear()
        self.number += 1
        self.events.append(Cleared(self.number))

    def rebase(self, blocks: list[Block]) -> None:
        """Start again over fresh blocks; a membership that was there is cleared, event numbers and ghosts go on."""
        self._blocks = blocks
        self.pending.clear()
        if self.entries:
            self.entries.clear()
            self.number += 1
            self.events.append(Cleared(self.number))

    # ------------------------------------------------------------ pending

    def expect(self, block: Block, key: BlockHash) -> None:
        """Let others share a block that will hold `key`; the first such block wins."""
        if key not in self.pending:
            self.pending[key] = block.id
            block.pending = key

    def forget_pending(self, block: Block) -> None:
        """End the sharing of a block before it is sealed: it was sealed, or it was freed."""
        if block.pending is not None:
            del self.pending[block.pending]
            block.pending = None

    # ------------------------------------------------------------ outside

    def drain_events(self) -> tuple[IndexEvent, ...]:
        """Return the events since the last call, in the order of the changes."""
        events, self.events = tuple(self.events), []
        return events

    def snapshot(self) -> IndexSnapshot:
        """Return the whole membership, parents first."""
        entries = sorted(((key, entry.depth) for key, entry in self.entries.items()), key=lambda each: each[1])
        return IndexSnapshot(self.number, tuple(entries))
