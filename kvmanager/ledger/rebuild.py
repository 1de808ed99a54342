"""Builds a ledger's state from an inventory: at the start of a session the worker's blocks are the whole truth.

An inventory may have a million cached blocks, and the manager serves other workers meanwhile. So a rebuild is carried
out in steps of some milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from itertools import islice
from typing import Final

from common.contracts.errors import ProtocolViolation
from common.contracts.hashing import group_in, hash_in, key_of
from common.contracts.lease import CachedBlock, CachedBlocks, Inventory, InventorySequence
from common.contracts.types import TRIMMED, BlockHash, BlockId, FrameId, SequencePhase
from kvmanager.cache.eviction.restored import order_after_rebuild
from kvmanager.cache.frame_tier import Unit
from kvmanager.contracts.block import ROOT, BlockState
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.contracts.sequence import Run, Sequence
from kvmanager.ledger.block_store import BlockStore
from kvmanager.ledger.chunked_grants import partial_of
from kvmanager.ledger.ledger_state import LedgerState

STEP_BLOCKS: Final = 1 << 13
"""Blocks of one step."""


def load_inventory(state: LedgerState, inventory: Inventory) -> Iterator[None]:
    """Replace the ledger's state, step by step; the state is consistent after the last step alone.

    Raises ProtocolViolation when the inventory contradicts itself.
    """
    state.empty()
    state.store.pool.free.clear()
    if state.config.groups:
        _restore_pages(state.store, inventory)
    loaded = [(_register(state, entry), entry) for entry in inventory.sequences]
    held = [(sequence, entry) for sequence, entry in loaded if sequence.phase is not SequencePhase.WAITING]
    tables = [(sequence, entry.block_table) for sequence, entry in held]
    for sequence, entry in held:
        _restore_tables(state, sequence, entry)
    if state.config.grants_parts:
        state.sequences.partial = partial_of((sequence for sequence, _ in tables), state.config.block_size)
    for block in inventory.pool:
        _restore_lease(state.store, block)
    yield
    cached: list[BlockId] = []
    entries = CachedBlocks.of(inventory.cached_blocks)
    if state.config.prefix_caching:
        yield from _restore_cache(state, entries, cached)
    yield from _restore_frames(state.store, inventory)
    for sequence, table in tables:
        _restore_content(state.store, sequence, table)
        for run in sequence.runs:
            _restore_content_of_run(state.store, sequence, run)
    yield from _restore_order(state.store, cached, entries)
    yield from _restore_states(state.store)
    yield from _restore_pins(state.store)
    _free_parts(state.store)
    yield from _restore_free(state.store)
    # The worker keeps its present runway until its first report.
    state.worker.lease_want = len(inventory.pool)


def _restore_cache(state: LedgerState, entries: CachedBlocks, cached: list[BlockId]) -> Iterator[None]:
    """Register the cached blocks of an inventory, and add those that no block table holds."""
    cache, config = state.store.cache, state.config
    events, restore = len(cache.events), _restore_cached_blocks
    if config.slides:
        restore = _restore_in_groups if config.groups else _restore_in_window
    for first in range(0, len(entries), STEP_BLOCKS):
        restore(state, entries, first, cached)
        yield
    if len(entries):
        # There are no events of a rebuild. A gap in their numbers leads each follower to take a snapshot.
        del cache.events[events:]
        cache.number += 1


def _restore_cached_blocks(state: LedgerState, entries: CachedBlocks, first: int, cached: list[BlockId]) -> None:
    """Register the cached blocks of one step whose parent is registered; add those that no block table holds.

    A block that no block table holds stays free when another one has its content.
    """
    blocks, cache, hashes = state.store.blocks, state.store.cache, entries.hashes
    states, hash_of, parent_of, depth_of = blocks.state, blocks.hash, blocks.parent, blocks.index
    registered, ambiguous, children = cache.entries, cache.ambiguous, blocks.children
    step = slice(first, first + STEP_BLOCKS)
    columns = zip(entries.blocks[step], hashes[step], entries.parents[step], strict=True)
    _check_range(state.store, entries.blocks[step])
    for number, (block, block_hash, at) in enumerate(columns, start=first):
        of = states[block]
        if of is BlockState.LEASED or hash_of[block] is not None:
            raise ProtocolViolation(f"cached block {block} is leased, or stands twice in the inventory")
        parent = ROOT if at == -1 else hashes[at] if 0 <= at < number else None
        if parent is None or not (parent == ROOT or parent in registered):
            continue
        if of is not BlockState.FREE or block_hash in registered or ambiguous:
            if _restore_copy(state, block, block_hash, parent, cache.depth_after(parent)):
                cached.append(block)
            continue
        # What `PrefixCache.register_block` does with a new hash, without an event: most of the time of a rebuild.
        if parent:
            above = registered[parent]
            depth_of[block] = depth_of[above] + 1
            children[above] += 1
        else:
            depth_of[block] = 0
        hash_of[block], parent_of[block] = block_hash, parent
        registered[block_hash] = block
        cached.append(block)
    if cache.ghosts:
        cache.forget_ghosts(hashes[step])


def _restore_frames(store: BlockStore, inventory: Inventory) -> Iterator[None]:
    """Take over what the worker's host memory and its disk hold; there are no events of that either."""
    below = inventory.frames, inventory.frame_groups, inventory.frame_pages
    saved = inventory.saved, inventory.saved_groups, inventory.saved_pages
    for tier, (claims, groups, pages) in ((store.tier, below), (store.disk, saved)):
        if tier is None or not claims:
            continue
        frames = CachedBlocks.of(claims)
        if len(frames.depths) != len(frames):
            raise ProtocolViolation("frames of a tier came without their depths")
        units = _units_of(store.config, claims, groups, pages) if store.config.groups else ()
        yield from tier.restore(frames, store.blocks, store.cache.entries, tier is store.disk, units)
        store.cache.number += 1


def _units_of(config: LedgerConfig, claims: Items[CachedBlock], named: Items[int], pages: Items[FrameId]) -> list[Unit]:
    """Return of each claim of a tier which group it is of, and which frames it has."""
    groups, units, at = config.groups, list[Unit](), 0
    for claim, group in zip(claims, named, strict=False):
        size = groups[group].pages if group < len(groups) else 0
        frames = tuple(pages[at : at + size])
        if not size or len(frames) < size or frames[0] != claim.block:
            raise ProtocolViolation(
                f"an inventory has a frame of group {group} of {len(groups)}, or lacks frames of it"
            )
        units.append(Unit(group, frames))
        at += size
    if not len(units) == len(claims) == len(named) or at != len(pages):
        what = f"{len(named)} groups and {len(pages)} frames, which make {at}"
        raise ProtocolViolation(f"an inventory has {len(claims)} contents of a tier, {what}")
    return units


def _restore_pins(store: BlockStore) -> Iterator[None]:
    """Hold the cached blocks of pinned contents."""
    pinned = list(store.retention.pinned)
    for first in range(0, len(pinned), STEP_BLOCKS):
        for block_hash in pinned[first : first + STEP_BLOCKS]:
            store.retention.hold_pinned(block_hash)
        yield


def _restore_states(store: BlockStore) -> Iterator[None]:
    """Enter the registered checkpoints behind the last ones of their chains; which of them were tails is not known."""
    blocks, entries, states = store.blocks, store.cache.entries, store.states
    if states is None:
        return
    keys = [key for key in entries if group_in(key) == states.group]
    found = sorted((blocks.index[entries[key]], hash_in(key), entries[key]) for key in keys)
    # The last checkpoint up to each block of a chain that was followed.
    last: dict[BlockHash, BlockHash | None] = {ROOT: None}
    for number, (_, state, block) in enumerate(found):
        passed, at = list[BlockHash](), blocks.parent[entries[state]] or ROOT
        while at not in last:
            passed.append(at)
            at = blocks.parent[entries[at]] or ROOT
        above = last[at]
        last.update(dict.fromkeys(passed, above))
        last[state] = state
        states.add(state, above)
        if blocks.state[block] is BlockState.CACHED:
            states.note_cached(state, block)
        if number % STEP_BLOCKS == 0:
            yield
    for key, block in entries.items():
        if not group_in(key) and blocks.state[block] is BlockState.CACHED and not blocks.children[block]:
            states.note_end(block)
    yield


def _restore_order(store: BlockStore, cached: list[BlockId], entries: CachedBlocks) -> Iterator[None]:
    """Put the registered blocks that no block table holds into the order of their eviction."""
    if not cached:
        return
    by_depth: list[list[BlockId]] = [[]]
    # With a window any block may be evicted before another one, so all are of one level.
    sort = _take_registered if store.config.window else _sort_by_depth
    for first in range(0, len(cached), STEP_BLOCKS):
        sort(store, cached[first : first + STEP_BLOCKS], by_depth)
        yield
    states, last_used = store.blocks.state, [0] * len(store.blocks)
    for first in range(0, len(entries), STEP_BLOCKS):
        step = slice(first, first + STEP_BLOCKS)
        for block, used in zip(entries.blocks[step], entries.last_used[step], strict=True):
            last_used[block] = used
        yield
    due = 0
    depth_of, windowed = store.blocks.index, store.config.window > 0
    rank = (lambda block: (last_used[block] << 32) - depth_of[block]) if windowed else last_used.__getitem__
    for part in order_after_rebuild(reversed(by_depth), rank):
        for block in part:
            states[block] = BlockState.CACHED
        store.pool.cached.restore_blocks(part)
        if store.blocks.others:
            store.pool.cached_others += sum(store.blocks.pages_of(block) - 1 for block in part)
        due += len(part)
        if due >= STEP_BLOCKS or not part:
            due = 0
            yield


def _check_range(store: BlockStore, blocks: Iterable[BlockId]) -> None:
    for block in (min(blocks), max(blocks)):
        store.pool.check_block(block)


def _take_registered(store: BlockStore, cached: list[BlockId], by_depth: list[list[BlockId]]) -> None:
    """Add cached blocks to the first level; one whose content a block in use has stays free."""
    hash_of = store.blocks.hash
    by_depth[0] += [block for block in cached if hash_of[block] is not None]


def _sort_by_depth(store: BlockStore, cached: list[BlockId], by_depth: list[list[BlockId]]) -> None:
    """Add cached blocks to those of their depth; one whose content a block in use has stays free.

    Where the pool has groups, blocks of runs come after the first group's of their depth, whose children they are.
    """
    depth_of, hash_of, group_of = store.blocks.index, store.blocks.hash, store.blocks.group
    for block in cached:
        if hash_of[block] is None:
            continue
        depth = 2 * depth_of[block] + (group_of[block] > 0) if store.config.groups else depth_of[block]
        while depth >= len(by_depth):
            by_depth.append([])
        by_depth[depth].append(block)


def _restore_free(store: BlockStore) -> Iterator[None]:
    """Put the blocks that nothing holds into the list of free ones."""
    states, free = store.blocks.state, store.pool.free
    numbers = iter(range(len(states)))
    while step := list(islice(numbers, STEP_BLOCKS)):
        for block in step:
            if states[block] is BlockState.FREE:
                free.append(BlockId(block))
        yield


def _register(state: LedgerState, entry: InventorySequence) -> Sequence:
    sequence = state.sequences.register_sequence(entry.reserve, entry.arrival, state.clock.monotonic())
    # The sequence may have grown since its submission, and then its tokens differ from its parent's.
    sequence.fork_of = None
    sequence.phase, sequence.preemptions = entry.phase, _preemptions_of(state.config, sequence, entry)
    if entry.phase is SequencePhase.WAITING:
        state.queue_or_refuse(sequence)
    return sequence


def _preemptions_of(config: LedgerConfig, sequence: Sequence, entry: InventorySequence) -> int:
    """Return how often a sequence counts as preempted.

    One that runs without all its blocks may be preempted once more, whatever its count: the bound of its last manager
    was a higher one, or none. Several such sequences that nobody may preempt would wait for each other's blocks.
    """
    most = config.max_preemptions
    lacks = entry.phase is not SequencePhase.WAITING and len(entry.block_table) < sequence.max_blocks
    return min(entry.preemptions, most - 1) if lacks and most else entry.preemptions


def _restore_in_window(state: LedgerState, entries: CachedBlocks, first: int, cached: list[BlockId]) -> None:
    """Do what `_restore_cached_blocks` does where every layer has a window: each block says itself where it stands."""
    if len(entries.depths) != len(entries):
        raise ProtocolViolation("cached blocks of a windowed model came without their depths")
    step, blocks = slice(first, first + STEP_BLOCKS), state.store.blocks
    columns = zip(
        entries.blocks[step], entries.hashes[step], entries.parent_hashes[step], entries.depths[step], strict=True
    )
    _check_range(state.store, entries.blocks[step])
    for block, block_hash, before, depth in columns:
        if blocks.state[block] is BlockState.LEASED or blocks.hash[block] is not None:
            raise ProtocolViolation(f"cached block {block} is leased, or stands twice in the inventory")
        if _restore_copy(state, block, block_hash, before if depth else ROOT, depth):
            cached.append(block)
    state.store.cache.forget_ghosts(entries.hashes[step])


def _restore_in_groups(state: LedgerState, entries: CachedBlocks, first: int, cached: list[BlockId]) -> None:
    """Do what `_restore_cached_blocks` does where the pool has groups.

    A block of a run counts beside the first group's block of its content, whose entry is its parent.
    """
    blocks, cache, hashes = state.store.blocks, state.store.cache, entries.hashes
    step = slice(first, first + STEP_BLOCKS)
    columns = zip(entries.blocks[step], hashes[step], entries.parents[step], strict=True)
    _check_range(state.store, entries.blocks[step])
    for number, (block, block_hash, at) in enumerate(columns, start=first):
        of, group = blocks.state[block], blocks.group[block]
        lacks = len(blocks.others.get(block, ())) + 1 != state.config.groups[group].pages
        if of in (BlockState.LEASED, BlockState.PART) or blocks.hash[block] is not None or lacks:
            raise ProtocolViolation(f"cached block {block} is leased, stands twice in the inventory, or lacks pages")
        parent = ROOT if at == -1 else hashes[at] if 0 <= at < number else None
        if parent is None or (parent and parent not in cache.entries) or (group and parent != block_hash):
            continue
        depth = blocks.index[cache.entries[block_hash]] if group else cache.depth_after(parent)
        if _restore_copy(state, block, key_of(block_hash, group), parent, depth):
            cached.append(block)
    cache.forget_ghosts([key_of(each, group) for each in hashes[step] for group in range(len(state.config.groups))])


def _restore_copy(state: LedgerState, block: BlockId, block_hash: BlockHash, parent: BlockHash, depth: int) -> bool:
    """Register a cached block that is no new hash of a free block, where it may be; return whether no table holds it.

    A block of a block table counts at its own depth alone, and behind the block before it in that table: a worker that
    has reset its cache may claim this one and no longer that one. Another block with its content stays free.
    """
    cache, blocks = state.store.cache, state.store.blocks
    if parent in cache.ambiguous or cache.is_ambiguous(block_hash, parent, depth):
        return False
    is_free = blocks.state[block] is BlockState.FREE
    if is_free and block_hash not in cache.entries:
        blocks.index[block] = depth
        cache.register_block(block, block_hash, parent)
        return True
    if not is_free and blocks.index[block] == depth and state.follows_parent(block, parent):
        cache.register_block(block, block_hash, parent)
        first = cache.entries[block_hash]
        if blocks.state[first] is BlockState.FREE:
            cache.forget_block(first)
    return False


def _restore_pages(store: BlockStore, inventory: Inventory) -> None:
    """Say of each block that the inventory names which group it is of, and which pages it has."""
    groups, blocks, pages, at = store.config.groups, store.blocks, inventory.block_pages, 0
    taken = set[BlockId]()
    for group in inventory.block_groups:
        if group >= len(groups) or at + groups[group].pages > len(pages):
            raise ProtocolViolation(f"an inventory has a block of group {group} of {len(groups)}, or lacks its pages")
        block, *others = pages[at : at + groups[group].pages]
        at += groups[group].pages
        for page in (block, *others):
            store.pool.check_block(page)
            if page in taken:
                raise ProtocolViolation(f"page {page} stands in two blocks of the inventory")
            taken.add(page)
        blocks.group[block] = group
        for page in others:
            blocks.state[page] = BlockState.PART
        if others:
            blocks.others[block] = tuple(others)
    if at != len(pages):
        raise ProtocolViolation(f"an inventory has {len(pages)} pages of blocks that have {at}")


def _free_parts(store: BlockStore) -> None:
    """Free the further pages of blocks that no table holds and whose content is not registered."""
    blocks = store.blocks
    for block in [block for block in blocks.others if blocks.state[block] is BlockState.FREE]:
        for page in blocks.others.pop(block):
            blocks.state[page] = BlockState.FREE


def _restore_tables(state: LedgerState, sequence: Sequence, entry: InventorySequence) -> None:
    if len(entry.runs) != len(sequence.runs):
        raise ProtocolViolation(f"sequence {sequence.id} has {len(entry.runs)} runs; expected {len(sequence.runs)}")
    sequence.trimmed = _restore_table(state, sequence, entry.block_table)
    if sequence.trimmed and sequence.runs:
        raise ProtocolViolation(f"sequence {sequence.id} has a table of the first group without some of its blocks")
    sequence.block_table = list(entry.block_table)
    for run, table in zip(sequence.runs, entry.runs, strict=True):
        if len(table) > len(entry.block_table) and not run.checkpoints:
            what = f"a run of {len(table)} blocks beside a table of {len(entry.block_table)}"
            raise ProtocolViolation(f"sequence {sequence.id} has {what}")
        run.trimmed, run.table = _restore_table(state, sequence, table, run.group, run.pages), list(table)
    # Which of these other requests computed before is not known.
    sequence.own_from = len(entry.block_table)
    state.sequences.start_sequence(sequence, state.worker.steps, sequence.phase)


def _restore_table(
    state: LedgerState, sequence: Sequence, table: tuple[BlockId, ...], group: int = 0, pages: int | None = None
) -> int:
    """Hold the blocks of a table, and return how many of its leading places are trimmed."""
    if len(table) > sequence.max_blocks:
        raise ProtocolViolation(
            f"sequence {sequence.id} has a block table of {len(table)} blocks; at most {sequence.max_blocks} fit"
        )
    blocks, trimmed = state.store.blocks, 0
    for index, block in enumerate(table):
        if block == TRIMMED:
            trimmed += trimmed == index
            continue
        state.store.pool.check_block(block)
        if blocks.group[block] != group or blocks.pages_of(block) != (pages or sequence.block_pages):
            raise ProtocolViolation(f"block {block} stands in a table of group {group}, of which it is not")
        if blocks.state[block] is BlockState.FREE:
            blocks.state[block], blocks.index[block], blocks.owner[block] = BlockState.IN_USE, index, sequence.id
        elif blocks.state[block] is not BlockState.IN_USE:
            raise ProtocolViolation(f"block {block} stands in a table, and is a further page of another block")
        elif blocks.index[block] != index:
            raise ProtocolViolation(
                f"block {block} has index {blocks.index[block]} in one block table and {index} in another"
            )
        blocks.refs[block] += 1
    return trimmed


def _restore_lease(store: BlockStore, block: BlockId) -> None:
    store.pool.check_block(block)
    of = store.blocks.state[block]
    if of is not BlockState.FREE:
        raise ProtocolViolation(f"block {block} is in the lease pool although it is {of.value}")
    store.blocks.state[block] = BlockState.LEASED
    store.pool.leased += 1


def _restore_content(store: BlockStore, sequence: Sequence, table: tuple[BlockId, ...]) -> None:
    """Set the present or future content of a table's blocks; hashes of sealed blocks extend the block hashes."""
    blocks, block_hashes = store.blocks, sequence.block_hashes
    for index, block in enumerate(table):
        if block == TRIMMED:
            continue
        block_hash = blocks.hash[block]
        if blocks.parent[block] is None:
            store.describe_block(block, sequence, index)
        if block_hash is None:
            store.expect_content(block, sequence, index)
        elif index == len(block_hashes):
            block_hashes.append(block_hash)
        elif index < len(block_hashes) and block_hashes[index] != block_hash:
            raise ProtocolViolation(f"block {block} has another hash in the inventory than in its sequence's prompt")


def _restore_content_of_run(store: BlockStore, sequence: Sequence, run: Run) -> None:
    blocks = store.blocks
    for index, block in enumerate(run.table):
        if block == TRIMMED:
            continue
        key = blocks.hash[block]
        if blocks.parent[block] is None:
            store.describe_block(block, sequence, index)
        if key is None:
            if not run.checkpoints:
                store.expect_content(block, sequence, index, run.group)
        elif sequence.block_hashes[index : index + 1] not in ([], [hash_in(key)]):
            raise ProtocolViolation(f"block {block} has another hash in the inventory than in its sequence's prompt")
