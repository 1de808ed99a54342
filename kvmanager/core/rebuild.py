"""A ledger from an inventory: what a worker holds is the whole truth at the start of a session."""

from __future__ import annotations

from common.errors import ProtocolViolation
from common.lease import CachedBlock, Inventory, InventorySequence
from common.types import TRIMMED, BlockId, SequencePhase
from kvmanager.core.admission import Admission
from kvmanager.core.block import ROOT, BlockState
from kvmanager.core.eviction import Restored
from kvmanager.core.sequence import Sequence


def rebuild(books: Admission, inventory: Inventory) -> None:
    """Replace the ledger's state. Raises ProtocolViolation when the inventory contradicts itself."""
    books.empty()
    rows = [_enrol(books, entry) for entry in inventory.sequences]
    for sequence, block_table in rows:
        _restore_row(books, sequence, block_table)
    for block_id in inventory.pool:
        _restore_lease(books, block_id)
    cached = _restore_claims(books, inventory.cached_blocks)
    for sequence, block_table in rows:
        _restore_content(books, sequence, block_table)
    books.restore_cached(cached)
    # Until the first report tells more, the worker keeps the runway that it has.
    books.lease_want = len(inventory.pool)


def _enrol(books: Admission, entry: InventorySequence) -> tuple[Sequence, tuple[BlockId, ...]]:
    sequence = books.enrol(entry.reserve, entry.arrival)
    # Its length may have grown since it was submitted, and then its tokens are no longer its parent's.
    sequence.fork_of = None
    sequence.phase = entry.phase
    if entry.phase is SequencePhase.WAITING:
        books.queue_or_refuse(sequence)
    return sequence, entry.block_table if books.holds_row(entry.phase) else ()


def _restore_row(books: Admission, sequence: Sequence, block_table: tuple[BlockId, ...]) -> None:
    if sequence.phase is SequencePhase.WAITING:
        return
    if len(block_table) > sequence.max_blocks:
        raise ProtocolViolation(
            f"sequence {sequence.id} has a row of {len(block_table)} blocks, of {sequence.max_blocks} at most"
        )
    for index, block_id in enumerate(block_table):
        if block_id == TRIMMED:
            sequence.trimmed = index + 1
            continue
        block = books.block_pool.get(block_id)
        if block.state is BlockState.FREE:
            books.block_pool.free.remove(block.id)
            block.state, block.index = BlockState.IN_USE, index
        elif block.index != index:
            raise ProtocolViolation(f"block {block_id} stands at {block.index} in one row and at {index} in another")
        block.refs += 1
    sequence.block_table = list(block_table)
    books.start(sequence, sequence.phase)


def _restore_lease(books: Admission, block_id: BlockId) -> None:
    block = books.block_pool.get(block_id)
    if block.state is not BlockState.FREE:
        raise ProtocolViolation(f"block {block_id} is in the pool although it is {block.state.value}")
    books.block_pool.free.remove(block.id)
    block.state = BlockState.LEASED
    books.block_pool.leased += 1


def _restore_claims(books: Admission, cached_blocks: tuple[CachedBlock, ...]) -> list[Restored]:
    """Register claims whose parent is registered; return those that no row holds."""
    cached: list[Restored] = []
    if not books.config.caches:
        return cached
    for number, claim in enumerate(cached_blocks):
        block = books.block_pool.get(claim.block)
        if block.state is BlockState.LEASED or block.hash is not None:
            raise ProtocolViolation(f"block {claim.block} is claimed although it is leased, or claimed twice")
        parent = (
            cached_blocks[claim.parent].hash if 0 <= claim.parent < number else ROOT if claim.parent == -1 else None
        )
        if parent is None or not books.adopts(parent):
            continue
        books.cache.register(block, claim.hash, parent)
        if block.state is BlockState.FREE:
            block.index = books.cache.entries[claim.hash].depth
            cached.append(Restored(block.id, block.index, claim.last_used))
    return cached


def _restore_content(books: Admission, sequence: Sequence, block_table: tuple[BlockId, ...]) -> None:
    """Say what the blocks of a row hold or will hold; hashes of sealed blocks continue the chain of the prompt."""
    block_hashes, full = sequence.block_hashes, books.config.hits_of(sequence.num_tokens)
    for index, block_id in enumerate(block_table):
        if block_id == TRIMMED:
            continue
        block = books.block_pool.blocks[block_id]
        if block.parent is None:
            books.describe(block, sequence, index)
        if block.hash is None:
            if index < min(full, len(block_hashes)) and books.config.caches:
                books.cache.expect(block, block_hashes[index])
        elif index == len(block_hashes):
            block_hashes.append(block.hash)
        elif index < len(block_hashes) and block_hashes[index] != block.hash:
            raise ProtocolViolation(f"block {block_id} is claimed with another hash than its prompt's")
