"""Builds a ledger's state from an inventory: at the start of a session the worker's blocks are the whole truth."""

from __future__ import annotations

from common.errors import ProtocolViolation
from common.lease import CachedBlock, Inventory, InventorySequence
from common.types import TRIMMED, BlockHash, BlockId, SequencePhase
from kvmanager.core.block import ROOT, Block, BlockState
from kvmanager.core.eviction.restored import Restored, order_after_rebuild
from kvmanager.core.ledger_state import LedgerState
from kvmanager.core.sequence import Sequence


class InventoryLoader:
    """The rules by which an inventory becomes a ledger's state. It has no state of its own."""

    def load(self, state: LedgerState, inventory: Inventory) -> None:
        """Replace the ledger's state. Raises ProtocolViolation when the inventory contradicts itself."""
        state.empty()
        loaded = [(_register(state, entry), entry.block_table) for entry in inventory.sequences]
        tables = [(sequence, table) for sequence, table in loaded if sequence.phase is not SequencePhase.WAITING]
        for sequence, table in tables:
            _restore_table(state, sequence, table)
        for block_id in inventory.pool:
            _restore_lease(state, block_id)
        cached = self._restore_cached_blocks(state, inventory.cached_blocks)
        for sequence, table in tables:
            _restore_content(state, sequence, table)
        for block_id in self.eviction_order(cached):
            state.block_pool.free.remove(block_id)
            state.block_pool.blocks[block_id].state = BlockState.CACHED
            state.block_pool.cached.add(state.block_pool.blocks[block_id])
        # The worker keeps its present runway until its first report.
        state.lease_want = len(inventory.pool)

    def adopts(self, state: LedgerState, parent: BlockHash) -> bool:
        """Return whether a cached block with this parent is registered.

        If the parent is not registered, an ancestor may have been granted to another sequence in the meantime.
        """
        return state.cache.has_parent(parent)

    def eviction_order(self, restored: list[Restored]) -> list[BlockId]:
        """Return the registered blocks that no block table holds in the order of their eviction."""
        return order_after_rebuild(restored)

    def _restore_cached_blocks(self, state: LedgerState, cached_blocks: tuple[CachedBlock, ...]) -> list[Restored]:
        """Register cached blocks whose parent is registered; return those that no block table holds.

        A block that no block table holds stays free when another one has its content.
        """
        cached: list[Restored] = []
        if not state.config.caches:
            return cached
        for number, entry in enumerate(cached_blocks):
            block = state.block_pool.get(entry.block)
            if block.state is BlockState.LEASED or block.hash is not None:
                raise ProtocolViolation(f"cached block {entry.block} is leased, or stands twice in the inventory")
            parent = (
                cached_blocks[entry.parent].hash if 0 <= entry.parent < number else ROOT if entry.parent == -1 else None
            )
            if parent is None or not self.adopts(state, parent) or state.cache.is_ambiguous(entry.hash, parent):
                continue
            depth = state.cache.depth_after(parent)
            if block.state is BlockState.FREE and entry.hash not in state.cache.entries:
                block.index = depth
                state.cache.register(block, entry.hash, parent)
                cached.append(Restored(block.id, depth, entry.last_used))
            elif block.state is BlockState.IN_USE and block.index == depth:
                _restore_in_use(state, block, entry.hash, parent)
        return [each for each in cached if state.block_pool.blocks[each.block].hash is not None]


def _register(state: LedgerState, entry: InventorySequence) -> Sequence:
    sequence = state.register(entry.reserve, entry.arrival)
    # The sequence may have grown since its submission, and then its tokens differ from its parent's.
    sequence.fork_of = None
    sequence.phase = entry.phase
    if entry.phase is SequencePhase.WAITING:
        state.queue_or_refuse(sequence)
    return sequence


def _restore_in_use(state: LedgerState, block: Block, block_hash: BlockHash, parent: BlockHash) -> None:
    """Register a block of a block table. Another block with its content, if no block table holds it, stays free."""
    state.cache.register(block, block_hash, parent)
    first = state.block_pool.blocks[state.cache.entries[block_hash].blocks[0]]
    if first.state is BlockState.FREE:
        state.cache.evict(first)


def _restore_table(state: LedgerState, sequence: Sequence, table: tuple[BlockId, ...]) -> None:
    if len(table) > sequence.max_blocks:
        raise ProtocolViolation(
            f"sequence {sequence.id} has a block table of {len(table)} blocks; at most {sequence.max_blocks} fit"
        )
    for index, block_id in enumerate(table):
        if block_id == TRIMMED:
            sequence.trimmed = index + 1
            continue
        block = state.block_pool.get(block_id)
        if block.state is BlockState.FREE:
            state.block_pool.free.remove(block.id)
            block.state, block.index = BlockState.IN_USE, index
        elif block.index != index:
            raise ProtocolViolation(
                f"block {block_id} has index {block.index} in one block table and {index} in another"
            )
        block.refs += 1
    sequence.block_table = list(table)
    state.start(sequence, sequence.phase)


def _restore_lease(state: LedgerState, block_id: BlockId) -> None:
    block = state.block_pool.get(block_id)
    if block.state is not BlockState.FREE:
        raise ProtocolViolation(f"block {block_id} is in the lease pool although it is {block.state.value}")
    state.block_pool.free.remove(block.id)
    block.state = BlockState.LEASED
    state.block_pool.leased += 1


def _restore_content(state: LedgerState, sequence: Sequence, table: tuple[BlockId, ...]) -> None:
    """Set the present or future content of a table's blocks; hashes of sealed blocks extend the block hashes."""
    block_hashes = sequence.block_hashes
    for index, block_id in enumerate(table):
        if block_id == TRIMMED:
            continue
        block = state.block_pool.blocks[block_id]
        if block.parent is None:
            state.describe(block, sequence, index)
        if block.hash is None:
            state.expect(block, sequence, index)
        elif index == len(block_hashes):
            block_hashes.append(block.hash)
        elif index < len(block_hashes) and block_hashes[index] != block.hash:
            raise ProtocolViolation(f"block {block_id} has another hash in the inventory than in its sequence's prompt")
