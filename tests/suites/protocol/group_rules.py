"""Simpler rules of pools with groups of layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from common.contracts.hashing import hash_in
from common.contracts.lease import Admit, Inventory
from common.contracts.types import TRIMMED, BlockHash, BlockId
from gpuworker.scheduling.block_states import BlockStates
from gpuworker.scheduling.group_grants import GroupGrantCheck
from gpuworker.scheduling.lease_agent import BlockCloser, LeaseAgent
from gpuworker.scheduling.sequence import Sequence as WorkerSequence
from kvmanager.cache.block_pool import BlockPool
from kvmanager.cache.group_match import GroupMatcher
from kvmanager.cache.prefix_cache import PrefixCache
from kvmanager.contracts.index_events import Removed, Stored
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger import runway
from kvmanager.ledger.block_store import BlockStore
from kvmanager.ledger.runway import RunwayTerms

_inventory, _trim_runs, _fill_up = LeaseAgent.inventory, BlockCloser._trim_runs, BlockStates.fill_up
_bind_pages = BlockPool.bind_pages
_publish_new, _held_blocks = BlockStore.publish_new_block, Sequence.held_blocks
_runway_terms, _post_init = runway.runway_terms, LedgerConfig.__post_init__


# ---------------------------------------------------------------- the worker


def trim_ahead_of_rows(closer: BlockCloser, sequence: WorkerSequence, _next_position: int, step: int) -> None:
    """What no later plan reads is released, although rows in flight have it."""
    _trim_runs(closer, sequence, sequence.num_computed_tokens, step)


def tell_first_pages_alone(agent: LeaseAgent) -> Inventory:
    whole, made = _inventory(agent), agent._blocks.made
    if made is None:
        return whole
    firsts = set(made.pages)
    return replace(whole, block_pages=tuple(page for page in whole.block_pages if page in firsts))


def void_by_the_first_page(blocks: BlockStates, page: BlockId) -> None:
    """The claim of a block is dropped with its first page alone."""
    assert blocks.made is not None
    if blocks.made.break_block(page) == page:
        blocks.drop_claim(page)


def want_blocks(sequence: WorkerSequence, places: int) -> int:
    """A block is counted as one page."""
    return sum([max(0, places - len(table)) for table in sequence.tables])


def fill_up_the_first_group(blocks: BlockStates, table: Any, start: int, end: int, shift: int) -> None:
    """Right drafts count as computed in the blocks of the first group alone."""
    if blocks.made is None or blocks.made.group[table[start >> shift]] == 0:
        _fill_up(blocks, table, start, end, shift)


def take_any_run(
    check: GroupGrantCheck, admit: Admit, sequence: WorkerSequence | None, group: int, run: tuple[BlockId, ...]
) -> None:
    """The shared places of a run are not checked."""


# ---------------------------------------------------------------- the manager


def read_the_last_block(matcher: GroupMatcher, _run: int, hits: int) -> int:
    """A run is hit by the last block before the boundary, whatever else is read behind it."""
    return max(0, hits - 1)


def free_first_pages_alone(_pool: BlockPool, _block: BlockId) -> int:
    return 0


def evict_parents_first(sequence: Sequence) -> Iterator[BlockId]:
    """The blocks of the first group are released before those of runs."""
    runs = {block for run in sequence.runs for block in run.table}
    every = [block for block in _held_blocks(sequence) if block != TRIMMED]
    yield from sorted(every, key=lambda block: block in runs)


def count_no_children_in_runs(
    store: BlockStore, block: BlockId, key: BlockHash, parent: BlockHash, before: BlockId | None = None
) -> None:
    """A block of a run has no parent, so a full block may be evicted under it."""
    _publish_new(store, block, key, parent, before)
    if store.blocks.group[block]:
        store.blocks.children[store.cache.entries[parent]] -= 1


def tell_of_the_first_group(cache: PrefixCache, key: BlockHash, depth: int) -> None:
    """The index is told of what the first group has, whether or not the runs have it."""
    if key == hash_in(key):
        cache.number += 1
        cache.events.append(Stored(cache.number, key, depth))


def untell_of_the_first_group(cache: PrefixCache, key: BlockHash, depth: int) -> None:
    if key == hash_in(key):
        cache.number += 1
        cache.events.append(Removed(cache.number, key, depth))


def bind_first_pages_alone(pool: BlockPool, block: BlockId, group: int, _others: tuple[BlockId, ...]) -> None:
    """Of the pages of a bound block, the first one leaves the lease pool."""
    _bind_pages(pool, block, group, ())


def mix_sealed_and_pending(matcher: GroupMatcher, present: list[BlockId]) -> int:
    """The leading blocks of a place count, whoever fills them, and whether or not they are sealed."""
    for index in range(min(len(present), matcher._limit)):
        if any(matcher._unread(run, index + 1) or matcher._find(index, run) is None for run in matcher._runs):
            return index
    return min(len(present), matcher._limit)


def sort_by_depth_alone(store: BlockStore, cached: list[BlockId], by_depth: list[list[BlockId]]) -> None:
    """Blocks of runs stand beside those of the first group at their depth."""
    for block in [each for each in cached if store.blocks.hash[each] is not None]:
        while store.blocks.index[block] >= len(by_depth):
            by_depth.append([])
        by_depth[store.blocks.index[block]].append(block)


def lease_one_page_for_a_stalled_sequence(
    config: LedgerConfig, lease_want: int, stalled: int, growth: int, running: int, pressed: bool = False
) -> RunwayTerms:
    terms = _runway_terms(config, lease_want, 0, growth, running, pressed)
    want = min(max(terms.want, stalled), growth)
    return RunwayTerms(want, max(want, terms.reach))


def with_one_page_a_stall(config: LedgerConfig) -> None:
    """A stalled sequence is taken to lack one page, whatever the blocks of a place have."""
    _post_init(config)
    object.__setattr__(config, "stall_pages", 1)
