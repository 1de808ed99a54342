"""Copies and hashable keys of a ledger, for searches over many futures."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TypeVar

from kvmanager.core.block import Block
from kvmanager.core.block_pool import BlockPool
from kvmanager.core.decisions import DecisionLog
from kvmanager.core.eviction.interface import EvictionOrder
from kvmanager.core.eviction.lru import LeastRecentlyUsed
from kvmanager.core.free_list import FreeList
from kvmanager.core.ledger import Ledger
from kvmanager.core.ledger_state import LedgerState
from kvmanager.core.prefix_cache import Entry, PrefixCache
from kvmanager.core.sequence import Sequence
from kvmanager.core.waiting_queue import WaitingQueue

FreeListT = TypeVar("FreeListT", bound=FreeList)


def copy_ledger(ledger: Ledger) -> Ledger:
    """Return an independent copy that shares policies, configuration, clock and source of decision ids."""
    new = Ledger.__new__(Ledger)
    new.policies, new.state = ledger.policies, _copy_state(ledger.state)
    return new


def ledger_key(ledger: Ledger) -> tuple[object, ...]:
    """Return everything that later decisions depend on as a hashable value; arrivals count by their order only."""
    state = ledger.state
    by_arrival = sorted(state.sequences.values(), key=lambda sequence: sequence.arrival)
    return (
        tuple([_block_key(block) for block in state.block_pool.blocks]),
        tuple(state.block_pool.free),
        tuple(state.block_pool.cached),
        tuple([_sequence_key(each) for each in by_arrival]),
        tuple(state.queue),
        state.stalled,
        tuple(state.refused),
        state.last_sent_target,
        state.lease_want,
        state.resets.key(),
    )


# ---------------------------------------------------------------- copies


def _copy_state(old: LedgerState) -> LedgerState:
    new = LedgerState.__new__(LedgerState)
    new.config, new.clock, new.decisions = old.config, old.clock, _copy_decisions(old.decisions)
    new.totals, new.cache = old.totals.clone(), _copy_cache(old.cache)
    new.eviction = _copy_order(old.eviction, old.cache, new.cache)
    new.block_pool = _copy_pool(old.block_pool, new.eviction)
    new.cache._blocks = new.block_pool.blocks
    new.sequences = {key: _copy_sequence(sequence) for key, sequence in old.sequences.items()}
    new.tenants = old.tenants.copy()
    new.queue, new.preempting = _copy_queue(old.queue), old.preempting.copy()
    new.stalled, new.refused, new.last_sent_target = old.stalled, old.refused.copy(), old.last_sent_target
    new.resets, new.remembered = replace(old.resets), None
    new.lease_want, new.growth, new.blocked_by = old.lease_want, old.growth, old.blocked_by
    new.running, new.admitted, new.next_arrival = old.running, old.admitted, old.next_arrival
    new.admitted_in_turn, new.steps, new.last_step = old.admitted_in_turn, old.steps, old.last_step
    return new


def _copy_block(old: Block) -> Block:
    new = Block(old.id)
    new.state, new.refs, new.hash, new.pending = old.state, old.refs, old.hash, old.pending
    new.parent, new.owner, new.index, new.awaited = old.parent, old.owner, old.index, old.awaited
    return new


def _copy_list(old: FreeListT) -> FreeListT:
    new = type(old).__new__(type(old))
    new._sentinel, new._length = old._sentinel, old._length
    new._next, new._previous = old._next.copy(), old._previous.copy()
    return new


def _copy_pool(old: BlockPool, cached: EvictionOrder) -> BlockPool:
    new = BlockPool.__new__(BlockPool)
    new.blocks = [_copy_block(block) for block in old.blocks]
    new.free, new.cached, new.leased = _copy_list(old.free), cached, old.leased
    return new


def _copy_order(old: EvictionOrder, cache: PrefixCache, new: PrefixCache) -> EvictionOrder:
    """Return a copy that knows the entries of the new cache in place of those of the old one."""
    if isinstance(old, LeastRecentlyUsed):
        return _copy_list(old)
    known: dict[int, object] = {id(entry): new.entries[key] for key, entry in cache.entries.items()}
    return deepcopy(old, known | {id(cache.entries): new.entries})


def _copy_cache(old: PrefixCache) -> PrefixCache:
    new = PrefixCache([], old._ghost_limit)
    new.entries = {key: Entry(e.parent, e.depth, e.blocks.copy(), e.children) for key, e in old.entries.items()}
    new.pending, new.ghosts, new.ambiguous = old.pending.copy(), old.ghosts.copy(), old.ambiguous.copy()
    new.events, new.number = old.events.copy(), old.number
    return new


def _copy_queue(old: WaitingQueue) -> WaitingQueue:
    new = WaitingQueue()
    new._lines = {tenant: line.copy() for tenant, line in old._lines.items()}
    new._arrivals = {tenant: line.copy() for tenant, line in old._arrivals.items()}
    return new


def _copy_decisions(old: DecisionLog) -> DecisionLog:
    new = DecisionLog(old._clock, old._ids)
    new._records = old._records.copy()
    return new


def _copy_sequence(old: Sequence) -> Sequence:
    new = Sequence.__new__(Sequence)
    for name in Sequence.__slots__:
        setattr(new, name, getattr(old, name))
    new.block_hashes, new.block_table = old.block_hashes.copy(), old.block_table.copy()
    return new


# ---------------------------------------------------------------- keys


def _block_key(block: Block) -> tuple[object, ...]:
    return (block.state.value, block.refs, block.hash, block.pending, block.parent, block.owner, block.index)


def _sequence_key(each: Sequence) -> tuple[object, ...]:
    return (
        each.id, each.num_tokens, each.max_blocks, each.priority, each.tenant, tuple(each.block_hashes), each.cacheable,
        each.fork_of, each.phase.value, tuple(each.block_table), each.n_shared, each.trimmed, each.recompute,
    )  # fmt: skip
