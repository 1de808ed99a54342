"""The prefix cache of one worker: which blocks hold the content of a hash, and which blocks will hold it.

The map is hash -> copies. Every sealed block is registered, even if its hash has a copy. With one block per hash, the
first copy could be evicted while a sequence holds a private twin. That sequence would then seal a child without a
registered parent. For the index, a hash is a member while it has a copy: events report the first and the last copy.
Parent, depth and children of a hash stand in the columns of its first copy (`Blocks`); the depth is its index.

Where every layer of the model has a window, a token reads the blocks of the last slots alone. So a hash stays
registered when its parent goes: no block counts children, and each one may be evicted.

Where the pool has groups, a content has a key in each of them (`key_of`), and what is said of hashes holds for keys.
The parent of a key behind the first group is the hash itself. So the first group's block outlives those of the runs.

A copy that no sequence holds is worth its block only while it is the only one. So the copies of a hash are either one
cached block or blocks in use; `BlockStore` frees every other one. A look-up takes the first copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from common.contracts.errors import ProtocolViolation
from common.contracts.hashing import group_in, hash_in, key_of
from common.contracts.types import BlockHash, BlockId, FrameId, MissReason, SequenceId
from kvmanager.cache.eviction.interface import NO_MARK, Mark
from kvmanager.cache.frame_tier import NO_FRAME, FrameTier, Taken
from kvmanager.cache.state_tree import StateTree
from kvmanager.contracts.block import ROOT, Blocks
from kvmanager.contracts.index_events import Cleared, IndexEvent, IndexSnapshot, Removed, Stored

_WIDTH = len(BlockHash(bytes(16)))
_KEY_BYTES = 7
"""The last ones of a partial hash. Their number takes half the memory of the hash; a search compares whole hashes."""


# Which registered contents begin with a part of a block: the partial hashes that workers gave with seals and
# reserves.
# Contents are named by their block hashes, so nothing changes here when one of several copies comes or goes. What a
# worker did not say again after a rebuild is not known. The next sequence that hits such a block brings its partial
# hashes.
# There is one content for each cached block, so each object counts. The parts of a content are one value. Nearly
# every content is the only one with its first quarter: then the longer parts have no keys, and a search compares
# the value.
class PartialIndex:
    """Partial hash -> contents that begin with it. Each method takes O(1), however many contents begin alike.

    Where two contents or more have a key, all of them have the key of their next longer part too.
    """

    __slots__ = ("first", "others", "parts")

    def __init__(self) -> None:
        # The partial hashes of each content, one after the other.
        self.parts: dict[BlockHash, bytes] = {}
        # One content of each key, and the others of those that have several.
        self.first: dict[int, BlockHash] = {}
        self.others: dict[int, dict[BlockHash, None]] = {}

    def add(self, content: BlockHash, parts: Items[BlockHash]) -> None:
        """Add a registered content, unless it is known."""
        if content in self.parts or not parts:
            return
        self.parts[content] = b"".join(parts)
        self._enter(content, 0)

    def _enter(self, content: BlockHash, first: int) -> None:
        """Give a content the key of its part `first`; where another one has that key, both get longer ones."""
        for at, key in enumerate(self._keys(content)[first:], first):
            holder = self.first.setdefault(key, content)
            others = self.others.get(key)
            if holder == content or (others is not None and content in others):
                return
            if others is None:
                self.others[key] = {content: None}
                self._enter(holder, at + 1)
            else:
                others[content] = None

    def forget(self, content: BlockHash) -> None:
        """Remove a content that is registered no more; nothing when it is unknown."""
        if content not in self.parts:
            return
        for key in self._keys(content):
            others = self.others.get(key)
            if self.first.get(key) == content:
                if others:
                    self.first[key] = others.popitem()[0]
                else:
                    del self.first[key]
            elif others is not None:
                others.pop(content, None)
            if others is not None and not others:
                del self.others[key]
        del self.parts[content]

    def find(self, parts: Items[BlockHash]) -> tuple[BlockHash, int] | None:
        """Return a content that has the most of these leading parts, and how many; None when none has the first."""
        for part in reversed(parts):
            content = self.first.get(_key(part))
            if content is not None and (count := self._in_common(content, parts)):
                return content, count
        return None

    def _in_common(self, content: BlockHash, parts: Items[BlockHash]) -> int:
        known = self.parts[content]
        count = 0
        for at, part in enumerate(parts):
            if known[_WIDTH * at : _WIDTH * (at + 1)] != part:
                break
            count += 1
        return count

    def _keys(self, content: BlockHash) -> list[int]:
        """Return the keys of a content's parts, the shortest first."""
        known = self.parts[content]
        return [_key(known[at : at + _WIDTH]) for at in range(0, len(known), _WIDTH)]

    def clear(self) -> None:
        self.parts.clear()
        self.first.clear()
        self.others.clear()


def _key(part: bytes) -> int:
    return int.from_bytes(part[-_KEY_BYTES:], "big")


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The blocks of a prompt that need not be computed, why there are no more, and the first that was never seen.

    With UNRESUMABLE, `diverged_at` counts the leading blocks whose K and V are there; with UNFETCHED those that are
    there or on disk.
    `evicted_for` names the sequence that needed the room of the first evicted block, `retention` says what had become
    of that block's retention, if it had any.
    """

    hit_blocks: int
    miss_reason: MissReason
    diverged_at: int = 0
    evicted_for: str = field(default="", compare=False)
    retention: str = field(default="", compare=False)


class RunHits(NamedTuple):
    """The hits in a run; the `unread` ones before them hold no block.

    A block that is TRIMMED is in host memory: `frames` has the place and the frame of each.
    """

    unread: int
    blocks: list[BlockId]
    frames: tuple[tuple[int, FrameId], ...] = ()


Ghost = tuple[str, str, *Mark]
"""What is kept of an evicted hash: who needed the room, the fate of its retention, and the policy's mark.

There are up to four for each block. The garbage collector walks over a plain tuple of texts and numbers once, and over
an object of a class of its own at each of its rounds.
"""


class PrefixCache:
    """Registered and pending hashes, the ghosts of evicted ones, and the events that follow from changes."""

    __slots__ = (
        "_blocks", "_ghost_limit", "_linked", "_runs", "ambiguous", "below", "copies", "disk", "entries", "events",
        "ghosts", "number", "partials", "pending", "saved", "states", "tier", "watched",
    )  # fmt: skip

    def __init__(
        self,
        blocks: Blocks,
        ghost_limit: int,
        linked: bool = True,
        runs: int = 0,
        states: StateTree | None = None,
        tier: FrameTier | None = None,
        disk: FrameTier | None = None,
    ) -> None:
        """With `linked`, a hash is registered only while its parent is; else no block has children.

        `runs` counts the groups behind the first one, `states` has the checkpoints of one of them. `tier` has what was
        evicted into host memory, `disk` what was saved there.
        """
        self.states, self.tier, self.disk = states, tier, disk
        self.below: dict[BlockHash, FrameId] = {} if tier is None else tier.entries
        self.saved: dict[BlockHash, FrameId] = {} if disk is None else disk.entries
        self._blocks, self._linked, self._runs = blocks, linked, range(1, runs + 1)
        self._ghost_limit = ghost_limit
        # The first copy of each registered hash, and all copies of those that have several.
        self.entries: dict[BlockHash, BlockId] = {}
        self.copies: dict[BlockHash, list[BlockId]] = {}
        self.pending: dict[BlockHash, BlockId] = {}
        # What is known of the parts of registered hashes.
        self.partials = PartialIndex()
        # Hashes that two contents have. They are hits for neither, and nothing more is registered under or after them.
        self.ambiguous: set[BlockHash] = set()
        # Hashes whose blocks have not changed since they were given; empty after a change. See `RememberedMatch`.
        self.watched: frozenset[BlockHash] = frozenset()
        # Evicted hashes, the oldest first.
        self.ghosts: OrderedDict[BlockHash, Ghost] = OrderedDict()
        self.events: list[IndexEvent] = []
        self.number = 0

    # ------------------------------------------------------------ look-up

    def find_block(self, block_hash: BlockHash, parent: BlockHash, depth: int) -> BlockId | None:
        """Return a block with this content, or the block that will have the content.

        Two contents may have one hash of 16 bytes. So a block counts only with the same parent at the same depth, and
        not once two contents with its hash were seen.
        """
        block = self.entries.get(block_hash)
        if block is None:
            block = self.pending.get(block_hash)
            if block is None:
                return None
        if self.ambiguous and block_hash in self.ambiguous:
            return None
        blocks = self._blocks
        return block if blocks.index[block] == depth and blocks.parent[block] == parent else None

    def find_registered_block(self, block_hash: BlockHash, parent: BlockHash, depth: int) -> BlockId | None:
        """Return what `find_block` does, and None for a block that is still to be filled."""
        return self.find_block(block_hash, parent, depth) if block_hash in self.entries else None

    def has_block(self, block_hashes: Items[BlockHash], index: int) -> bool:
        """Return whether this block of a prompt is registered or pending."""
        return self.find_block(block_hashes[index], block_hashes[index - 1] if index else ROOT, index) is not None

    def copies_of(self, block_hash: BlockHash) -> list[BlockId]:
        """Return the blocks that hold a registered hash, the first one first."""
        return self.copies.get(block_hash) or [self.entries[block_hash]]

    def find_longest_prefix(self, block_hashes: Items[BlockHash], limit: int) -> list[BlockId]:
        """Return the blocks of the longest prefix of block_hashes[:limit] that is registered or pending."""
        hits: list[BlockId] = []
        parent = ROOT
        for depth, block_hash in enumerate(block_hashes[:limit]):
            block = self.find_block(block_hash, parent, depth)
            if block is None:
                break
            hits.append(block)
            parent = block_hash
        return hits

    def find_deepest_run(
        self,
        block_hashes: Items[BlockHash],
        limit: int,
        unread: Callable[[int], int],
        missing: list[int] | None = None,
    ) -> tuple[int, list[BlockId]]:
        """Return the blocks that are read behind the most hits of block_hashes[:limit], and how many stand before them.

        Of `hits` hits the first `unread(hits)` are not read, so they need not be there. All others must be registered:
        a sequence that lacks the blocks before a pending one could not compute it, if its filler left. `unread` never
        falls, so a missing block is read behind all fewer hits down to its place. `missing` gets each such place.
        """
        entries, hits = self.entries, limit
        while hits:
            begin, run = min(unread(hits), hits - 1), list[BlockId]()
            for index in range(begin, hits):
                block_hash, found = block_hashes[index], None
                if block_hash in entries:
                    found = self.find_block(block_hash, block_hashes[index - 1] if index else ROOT, index)
                if found is None:
                    break
                run.append(found)
            else:
                return begin, run
            hits = index
            if missing is not None:
                missing.append(index)
        return 0, []

    def is_below(self, key: BlockHash) -> bool:
        """Return whether host memory or the disk has a content."""
        return key in self.below or key in self.saved

    def explain_match(
        self, block_hashes: Items[BlockHash], num_tokens: int, block_size: int, present: int
    ) -> PrefixMatch:
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
        return self._explain_missing(block_hashes, hits, present)

    def _explain_missing(self, block_hashes: Items[BlockHash], hits: int, present: int) -> PrefixMatch:
        """Return the match of a prompt whose full block `present` was not found."""
        if not self._linked and self.has_block(block_hashes, present):
            return PrefixMatch(hits, MissReason.WINDOWED)
        if self.is_below(block_hashes[present]):
            there = next((at for at in range(present, len(block_hashes)) if not self.is_below(block_hashes[at])), None)
            return PrefixMatch(hits, MissReason.UNFETCHED, len(block_hashes) if there is None else there)
        ghost = self.ghosts.get(block_hashes[present])
        if ghost is not None:
            return PrefixMatch(hits, MissReason.EVICTED, evicted_for=ghost[0], retention=ghost[1])
        if not present:
            return PrefixMatch(0, MissReason.NEVER_SEEN)
        return PrefixMatch(hits, MissReason.DIVERGED_AT, present)

    def was_seen(self, block_hashes: Items[BlockHash], first: int, full: int) -> bool:
        """Return whether a block from the first one on was cached: then those before it were, and it was forgotten.

        This looks at each block, so it is for records alone.
        """
        known, ghosts, pending = self.entries, self.ghosts, self.pending
        return any(
            each in ghosts or ((each in known or each in pending) and self.has_block(block_hashes, first + place))
            for place, each in enumerate(block_hashes[first:full])
        )

    # ------------------------------------------------------------ membership

    def register_block(self, block: BlockId, block_hash: BlockHash, parent: BlockHash) -> Ghost | None:
        """Add a copy; `parent` is ROOT or, where hashes are linked, registered. Return what an eviction left."""
        blocks = self._blocks
        if blocks.pending[block] is not None:
            self.forget_pending(block)
        if self.watched:
            self.touch_hash(block_hash)
        blocks.hash[block], blocks.parent[block] = block_hash, parent
        first = self.entries.get(block_hash)
        if first is not None:
            self.copies.setdefault(block_hash, [first]).append(block)
            return None
        if parent and self._linked:
            blocks.children[self.entries[parent]] += 1
        self.entries[block_hash] = block
        self.note_stored(block_hash, blocks.index[block])
        return self.ghosts.pop(block_hash, None)

    def note_stored(self, key: BlockHash, depth: int) -> None:
        """Tell the index of a new hash. Where the pool has groups, a content is in the index while all groups have it.

        A hash that a frame has is in the index already.
        """
        if key in self.below or key in self.saved:
            return
        if self._runs:
            block_hash = hash_in(key)
            keys = self._keys_of(block_hash)
            if not all(each == key or self._has(each) for each in keys) or not self.ambiguous.isdisjoint(keys):
                return
            key = block_hash
        self.number += 1
        self.events.append(Stored(self.number, key, depth))

    def _keys_of(self, block_hash: BlockHash) -> list[BlockHash]:
        return [block_hash, *(key_of(block_hash, group) for group in self._runs)]

    def _has(self, key: BlockHash) -> bool:
        """Return whether a block or a frame has a content."""
        return key in self.entries or key in self.below or key in self.saved

    def forget_ghosts(self, block_hashes: Items[BlockHash]) -> None:
        """Forget the eviction of those hashes that are registered again."""
        for block_hash in block_hashes:
            if block_hash in self.entries:
                self.ghosts.pop(block_hash, None)

    def depth_after(self, parent: BlockHash) -> int:
        """Return the depth of a child of `parent`, which is registered or ROOT."""
        return self._blocks.index[self.entries[parent]] + 1 if parent else 0

    def is_ambiguous(self, block_hash: BlockHash, parent: BlockHash, depth: int) -> bool:
        """Return whether another content than a child of `parent` at this depth has, or had, this hash; remember that.

        The children of the two could not be told apart: each would count as a child of the registered one. The index
        does not have such a hash.
        """
        if block_hash in self.ambiguous:
            return True
        known = self._place_of(block_hash)
        if known is None or known == (parent, depth):
            return False
        self.ambiguous.add(block_hash)
        if self.watched:
            self.touch_hash(block_hash)
        self._leaves(block_hash, known[1])
        return True

    def _place_of(self, block_hash: BlockHash) -> tuple[BlockHash | None, int] | None:
        """Return the parent and the depth of what has a hash in a block, or else in a frame; None: nothing has it."""
        columns, at = self._blocks, self.entries.get(block_hash)
        for tier in (self.tier, self.disk):
            if at is None and tier is not None:
                columns, at = tier.frames, tier.entries.get(block_hash)
        return None if at is None else (columns.parent[at], columns.index[at])

    def _leaves(self, key: BlockHash, depth: int, going: Collection[BlockHash] = ()) -> None:
        """Tell the index of a hash that is ambiguous now, or has no copy any more.

        Those that are `going` have left too, and the index is told of them later.
        """
        if self._runs:
            block_hash = hash_in(key)
            others = [each for each in self._keys_of(block_hash) if each != key]
            if not all(each in going or self._has(each) for each in others) or not self.ambiguous.isdisjoint(others):
                return
            key = block_hash
        self.number += 1
        self.events.append(Removed(self.number, key, depth))

    def forget_block(self, block: BlockId, beneficiary: str = "", mark: Mark = NO_MARK, retention: str = "") -> int:
        """Drop a copy for a sequence and return its depth; when it was the last, the hash becomes a ghost."""
        blocks = self._blocks
        block_hash, depth = blocks.hash[block], blocks.index[block]
        assert block_hash is not None
        blocks.hash[block] = None
        if self.watched:
            self.touch_hash(block_hash)
        if block_hash in self.copies:
            self._drop_copy(block, block_hash)
            return depth
        del self.entries[block_hash]
        if self.states is not None and group_in(block_hash) == self.states.group:
            self.states.remove(hash_in(block_hash))
        self.partials.forget(block_hash)
        blocks.children[block] = 0
        parent = blocks.parent[block]
        if parent and self._linked:
            above = self.entries.get(parent)
            if above is None:
                raise ProtocolViolation(f"block {block} was cached without its parent")
            blocks.children[above] -= 1
        if block_hash not in self.ambiguous and block_hash not in self.below and block_hash not in self.saved:
            self._leaves(block_hash, depth)
        self.ghosts[block_hash] = (beneficiary, retention, *mark)
        if len(self.ghosts) > self._ghost_limit:
            self.ghosts.popitem(last=False)
        return depth

    def _drop_copy(self, block: BlockId, block_hash: BlockHash) -> None:
        """Drop one of several copies. If it was the first one, the next one counts the children from now on."""
        copies, children = self.copies[block_hash], self._blocks.children
        copies.remove(block)
        first = copies[0]
        if self.entries[block_hash] == block:
            self.entries[block_hash] = first
            children[first], children[block] = children[block], 0
        if len(copies) == 1:
            del self.copies[block_hash]

    def clear(self) -> None:
        """Forget everything, ghosts included, with one event. The caller frees the blocks."""
        blocks = self._blocks
        for block_hash, first in self.entries.items():
            blocks.children[first] = 0
            for block in self.copies.get(block_hash, (first,)):
                blocks.hash[block] = None
        self.entries.clear()
        self.partials.clear()
        if self.states is not None:
            self.states.clear()
        self.copies.clear()
        self.ghosts.clear()
        self.ambiguous.clear()
        self.watched = frozenset()
        self._empty_tiers()
        self.number += 1
        self.events.append(Cleared(self.number))

    def rebase(self) -> None:
        """Start again; the caller clears the blocks. The membership is cleared; event numbers and ghosts are kept."""
        self.pending.clear()
        self.partials.clear()
        if self.states is not None:
            self.states.clear()
        self.ambiguous.clear()
        self.copies.clear()
        self.watched = frozenset()
        known = self.entries or self.below or self.saved
        self._empty_tiers()
        if known:
            self.entries.clear()
            self.number += 1
            self.events.append(Cleared(self.number))

    # ------------------------------------------------------------ the tiers below

    def _empty_tiers(self) -> None:
        for tier in (self.tier, self.disk):
            if tier is not None:
                tier.clear()

    def may_leave_out(self, block: BlockId) -> bool:
        """Return whether an evicted block's content would take a frame, and nothing in frames stands behind it."""
        blocks, tier = self._blocks, self.tier
        key = blocks.hash[block]
        if tier is None or key is None or blocks.parent[block] is None or key in self.copies:
            return False
        return key not in self.below and key not in tier.apart

    def store_below(self, block: BlockId, worthless: bool = False) -> Taken | None:
        """Return the frame for what an evicted block holds, and what was dropped; None if there is nothing to do.

        Call it before `forget_block`. What the frames held leaves the index, unless a block has it. So does what frames
        hold behind the block, if none can be had. What is `worthless` is not stored, unless frames hold what is behind
        it.
        """
        tier, blocks = self.tier, self._blocks
        block_hash, parent = blocks.hash[block], blocks.parent[block]
        if tier is None or block_hash is None or parent is None or block_hash in self.copies:
            return None
        if worthless and block_hash not in tier.apart:
            # The block has it still, and leaves the index with it. Where frames hold what is behind it, it is no leaf.
            if not tier.drop(block_hash):
                tier.touch(block_hash)
            if self.disk is not None:
                self.disk.drop(block_hash)
            return None
        if block_hash in self.below:
            tier.touch(block_hash)
            return None
        taken = tier.take_frame(block_hash, parent, blocks.index[block])
        self.note_dropped(tier, taken)
        if taken.frame == NO_FRAME:
            if block_hash in tier.apart:
                self.drop_tree(tier, block_hash)
            return taken
        if self.watched:
            self.touch_hash(block_hash)
        return taken

    def note_dropped(self, tier: FrameTier, taken: Taken) -> None:
        """Note that frames of a tier were taken from what they held.

        What a block has, or for the disk a frame of host memory, nobody lacks before it leaves there, and is kept anew.
        """
        if not taken.dropped:
            return
        for key, _ in taken.dropped:
            if key in self.entries or (tier is self.disk and key in self.below):
                tier.order.forget_content(key)
        self._leave_tiers(taken.dropped)

    def note_arrived(self, tier: FrameTier, block_hash: BlockHash) -> None:
        """Let a tier have what a move has brought, and tell the index if it is new there."""
        if self.watched:
            self.touch_hash(block_hash)
        new, depth = self._place_of(block_hash) is None, tier.frames.index[tier.expected[block_hash]]
        if new:
            self.note_stored(block_hash, depth)
        tier.admit(block_hash)

    def drop_tree(self, tier: FrameTier, root: BlockHash) -> int:
        """Forget what a tier has of `root` and of all behind it, for it is of no use any more; return how many."""
        gone = tier.drop_tree(root)
        self._leave_tiers([(block_hash, depth) for depth, block_hash in gone])
        return len(gone)

    def _leave_tiers(self, gone: Items[tuple[BlockHash, int]]) -> None:
        """Note that frames do not hold hashes any more; these leave the index unless something else has them."""
        going = {block_hash for block_hash, _ in gone} if self._runs else set[BlockHash]()
        for block_hash, depth in gone:
            going.discard(block_hash)
            if self.watched:
                self.touch_hash(block_hash)
            if block_hash not in self.ambiguous and self._place_of(block_hash) is None:
                self._leaves(block_hash, depth, going)

    def clear_below(self) -> None:
        """Forget what all frames hold, the deepest first: a reader's view stays closed under prefixes."""
        found = set[tuple[int, BlockHash]]()
        for tier in (self.tier, self.disk):
            if tier is not None:
                found.update([(tier.frames.index[frame], key) for key, frame in tier.entries.items()])
                tier.clear()
        self._leave_tiers([(block_hash, depth) for depth, block_hash in sorted(found, reverse=True)])

    def clear_disk(self) -> None:
        """Forget what frames on disk hold, the deepest first."""
        if self.disk is not None:
            depths = self.disk.frames.index
            found = sorted([(depths[frame], key) for key, frame in self.saved.items()], reverse=True)
            self.disk.clear()
            self._leave_tiers([(block_hash, depth) for depth, block_hash in found])

    # ------------------------------------------------------------ pending

    def expect_block(self, block: BlockId, block_hash: BlockHash) -> None:
        """Let others share a block that will hold `block_hash`; the first such block wins."""
        if block_hash not in self.pending:
            if self.watched:
                self.touch_hash(block_hash)
            self.pending[block_hash] = block
            self._blocks.pending[block] = block_hash

    def forget_pending(self, block: BlockId) -> None:
        """Stop the sharing of an unsealed block, because it was sealed or freed."""
        block_hash = self._blocks.pending[block]
        if block_hash is not None:
            if self.watched:
                self.touch_hash(block_hash)
            del self.pending[block_hash]
            self._blocks.pending[block] = None

    # ------------------------------------------------------------ remembered matches

    def touch_hash(self, block_hash: BlockHash) -> None:
        """Stop watching if the blocks of a watched hash change."""
        if block_hash in self.watched:
            self.watched = frozenset()

    # ------------------------------------------------------------ the index

    def drain_events(self) -> tuple[IndexEvent, ...]:
        """Return the events since the last call, in the order of the changes."""
        events, self.events = tuple(self.events), []
        return events

    def take_snapshot(self) -> IndexSnapshot:
        """Return the whole membership, parents first."""
        index, ambiguous = self._blocks.index, self.ambiguous
        entries = [(key, index[block]) for key, block in self.entries.items() if key not in ambiguous]
        if self.tier is not None:
            entries += self._only_in_tiers()
        if self._runs:
            keys = {key for key, _ in entries}
            entries = [(key, depth) for key, depth in entries if keys.issuperset(self._keys_of(key))]
        entries.sort(key=itemgetter(1))
        return IndexSnapshot(self.number, tuple(entries))

    def _only_in_tiers(self) -> list[tuple[BlockHash, int]]:
        found = dict[BlockHash, int]()
        for tier in (self.tier, self.disk):
            if tier is not None:
                found.update([(key, tier.frames.index[frame]) for key, frame in tier.entries.items()])
        return [each for each in found.items() if each[0] not in self.entries and each[0] not in self.ambiguous]


@dataclass(frozen=True, slots=True)
class RememberedMatch:
    """The hits of a sequence that it reads, and how many of them no sequence holds; `unread` ones stand before them.

    The prefix cache watches the hashes of the hits, and the first hash that is no hit; with a window, those of
    `deciding_hashes`. The match holds until a block of one of these hashes is registered, evicted, expected, given up,
    taken into use or released. `runs` are the hits in each run, where the pool has groups; `cached_hits` then counts
    the pages of all hits that no sequence holds. The first group has `sealed` leading blocks then. `frames` of the host
    tier hold the blocks behind the hits.
    """

    sequence: SequenceId
    num_tokens: int
    hits: list[BlockId]
    match: PrefixMatch
    cached_hits: int
    unread: int = 0
    runs: tuple[RunHits, ...] = ()
    sealed: int = 0
    frames: tuple[FrameId, ...] = ()
