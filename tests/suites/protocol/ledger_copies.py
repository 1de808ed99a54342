"""Copies and hashable keys of a ledger, for searches over many futures."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

from common.contracts.clock import Clock
from kvmanager.cache.block_pool import BlockPool
from kvmanager.cache.eviction.interface import EvictionOrder
from kvmanager.cache.eviction.lru import LeastRecentlyUsed
from kvmanager.cache.frame_tier import FrameTier
from kvmanager.cache.prefix_cache import PrefixCache
from kvmanager.cache.retention import Retention
from kvmanager.contracts.block import Blocks
from kvmanager.contracts.sequence import Run, Sequence
from kvmanager.ledger.block_store import BlockStore
from kvmanager.ledger.ledger import Ledger
from kvmanager.ledger.ledger_state import DecisionLog, LedgerState
from kvmanager.ledger.sequence_table import SequenceTable, WaitingQueue


def copy_ledger(ledger: Ledger) -> Ledger:
    """Return an independent copy that shares configuration, clock and source of decision ids."""
    new = Ledger.__new__(Ledger)
    new.state = _copy_state(ledger.state)
    return new


def ledger_key(ledger: Ledger) -> tuple[object, ...]:
    """Return everything that later decisions depend on as a hashable value; arrivals count by their order only."""
    state = ledger.state
    by_arrival = sorted(state.sequences.live.values(), key=lambda sequence: sequence.arrival)
    return (
        _blocks_key(state.store.blocks),
        tuple(state.store.pool.free),
        tuple(state.store.pool.cached),
        tuple([_sequence_key(each) for each in by_arrival]),
        tuple(state.sequences.queue),
        state.sequences.stalled,
        tuple(state.worker.refused),
        state.worker.last_sent_target,
        state.worker.lease_want,
        state.worker.draining,
        ledger.has_more,
        state.worker.resets.key(),
        tuple(state.sequences.copying.items()),
        tuple(sorted(state.store.cache.partials.first.items())),
        state.store.states.key() if state.store.states is not None else None,
        state.sequences.planned.key(),
        _partial_key(state) if state.config.grants_parts else None,
        _age_key(state) if state.config.max_wait else None,
        _tier_key(state) if state.store.tier is not None else None,
        # The gate's counts decide nothing before a thousand stores.
        (state.store.loads, state.gate.open),
    )


# ---------------------------------------------------------------- copies


def _copy_state(old: LedgerState) -> LedgerState:
    new = LedgerState.__new__(LedgerState)
    new.config, new.clock, new.peers = old.config, old.clock, old.peers
    new.decisions, new.totals = _copy_decisions(old.decisions), old.totals.clone()
    new.store, new.sequences = _copy_store(old.store, old.clock), _copy_sequences(old.sequences)
    reservation = old.admission.reservation
    new.admission = replace(old.admission, reservation=replace(reservation) if reservation else None)
    worker = old.worker
    new.worker = replace(worker, refused=worker.refused.copy(), resets=replace(worker.resets))
    new.tier_copies, new.transfers, new.peers = old.tier_copies.copy(), old.transfers.copy(), old.peers
    new.ahead, new.gate = old.ahead.copy(), deepcopy(old.gate)
    return new


def _copy_store(old: BlockStore, clock: Clock) -> BlockStore:
    new = BlockStore.__new__(BlockStore)
    new.config, new.blocks = old.config, _copy_blocks(old.blocks)
    new.states = old.states.copy(new.blocks) if old.states is not None else None
    new.cache = _copy_cache(old.cache, new.blocks)
    new.cache.states = new.states
    new.tier = new.cache.tier = _copy_tier(old.tier) if old.tier is not None else None
    new.cache.below = new.tier.entries if new.tier is not None else {}
    new.disk = new.cache.disk = _copy_tier(old.disk) if old.disk is not None else None
    new.cache.saved = new.disk.entries if new.disk is not None else {}
    new.eviction = _copy_order(old, new)
    # No model retains or pins blocks, so there are no marks to copy.
    new.retention = Retention(
        new.blocks, new.cache.entries, new.eviction, clock, old.config.retention_limits, old.config.block_pages
    )
    new.pool = _copy_pool(old.pool, new)
    new.remembered, new.loads = None, old.loads
    return new


def _copy_sequences(old: SequenceTable) -> SequenceTable:
    new = SequenceTable(old.block_size, old.groups, old.window)
    new.live = {key: _copy_sequence(sequence) for key, sequence in old.live.items()}
    new.tenants, new.copying, new.preempting = old.tenants.copy(), old.copying.copy(), old.preempting.copy()
    new.queue, new.stalled, new.partial = _copy_queue(old.queue), old.stalled, old.partial
    new.planned, new.fetching = old.planned.copy(), old.fetching.copy()
    new.running, new.admitted, new.growth = old.running, old.admitted, old.growth
    new.next_arrival = old.next_arrival
    return new


def _copy_blocks(old: Blocks) -> Blocks:
    new = Blocks(0)
    for name in Blocks.__slots__:
        setattr(new, name, getattr(old, name).copy())
    return new


def _copy_list(old: LeastRecentlyUsed) -> LeastRecentlyUsed:
    new = LeastRecentlyUsed.__new__(LeastRecentlyUsed)
    new._sentinel, new._length = old._sentinel, old._length
    new._next, new._previous = old._next.copy(), old._previous.copy()
    return new


def _copy_pool(old: BlockPool, store: BlockStore) -> BlockPool:
    new = BlockPool.__new__(BlockPool)
    new.blocks, new.cached = store.blocks, store.eviction
    new.retention = store.retention
    new.marks, new.pinned = store.retention.marks, store.retention.pinned
    new.free, new.leased = old.free.copy(), old.leased
    new.states, new.early, new.left = store.states, old.early, old.left
    new.others, new.cached_others = store.blocks.others, old.cached_others
    return new


def _copy_order(old: BlockStore, new: BlockStore) -> EvictionOrder:
    """Return a copy that knows the blocks and the entries of the new ledger in place of those of the old one."""
    if isinstance(old.eviction, LeastRecentlyUsed):
        order = _copy_list(old.eviction)
        order._blocks, order._entries = new.blocks, {} if old.config.window else new.cache.entries
        order._aside, order._ready, order._number = {}, [], 0
        return order
    return deepcopy(old.eviction, {id(old.blocks): new.blocks, id(old.cache.entries): new.cache.entries})


def _copy_cache(old: PrefixCache, blocks: Blocks) -> PrefixCache:
    new = PrefixCache(blocks, old._ghost_limit, old._linked, len(old._runs))
    new.entries, new.copies = old.entries.copy(), {key: copies.copy() for key, copies in old.copies.items()}
    new.pending, new.ghosts, new.ambiguous = old.pending.copy(), old.ghosts.copy(), old.ambiguous.copy()
    new.events, new.number = old.events.copy(), old.number
    partials = new.partials
    partials.parts, partials.first = old.partials.parts.copy(), old.partials.first.copy()
    partials.others = {part: others.copy() for part, others in old.partials.others.items()}
    return new


def _copy_tier(old: FrameTier) -> FrameTier:
    new = FrameTier.__new__(FrameTier)
    new.frames, new.entries, new._pages = _copy_blocks(old.frames), old.entries.copy(), old._pages
    new.free, new.apart, new.expected = old.free.copy(), old.apart.copy(), old.expected.copy()
    new.to_come = old.to_come
    if isinstance(old.order, LeastRecentlyUsed):
        new.order = order = _copy_list(old.order)
        order._blocks, order._entries, order.withheld = new.frames, new.entries, ()
        order._aside, order._ready, order._number = old.order._aside.copy(), old.order._ready.copy(), old.order._number
    else:
        new.order = deepcopy(old.order, {id(old.frames): new.frames, id(old.entries): new.entries})
    return new


def _copy_queue(old: WaitingQueue) -> WaitingQueue:
    new = WaitingQueue()
    new._lines = {tenant: line.copy() for tenant, line in old._lines.items()}
    new._arrivals = {tenant: line.copy() for tenant, line in old._arrivals.items()}
    new.admissions = old.admissions.copy()
    return new


def _copy_decisions(old: DecisionLog) -> DecisionLog:
    new = DecisionLog(old._clock, old._ids)
    new._records = old._records.copy()
    return new


def _copy_sequence(old: Sequence) -> Sequence:
    new = Sequence.__new__(Sequence)
    for name in Sequence.__slots__:
        setattr(new, name, getattr(old, name))
    new.block_hashes, new.block_table, new.forks = old.block_hashes.copy(), old.block_table.copy(), old.forks.copy()
    new.runs = tuple([_copy_run(run) for run in old.runs])
    new.fetch = old.fetch and replace(old.fetch, open=old.fetch.open.copy(), failed=old.fetch.failed.copy())
    return new


def _copy_run(old: Run) -> Run:
    new = Run(old.group, old.pages, old.checkpoints, old.most)
    new.table, new.trimmed, new.asked = old.table.copy(), old.trimmed, old.asked
    return new


# ---------------------------------------------------------------- keys


def _partial_key(state: LedgerState) -> tuple[object, ...]:
    """Return what decides when a prompt begins with a part of its blocks; steps count from now on."""
    promised, now = state.admission.reservation, state.worker.steps
    until = None if promised is None or promised.until is None else max(0, promised.until - now)
    ends = tuple(
        [min(now - each.started_at, each.max_len) for each in state.sequences.live.values() if each.block_table]
    )
    return (state.sequences.partial, promised and promised.sequence, until, promised and promised.is_due(now), ends)


def _tier_key(state: LedgerState) -> tuple[object, ...]:
    tiers = [each for each in (state.store.tier, state.store.disk) if each is not None]
    held = [(tuple(tier.frames.hash), tuple(tier.free), tuple(tier.order), frozenset(tier.expected)) for tier in tiers]
    parts = tuple([frozenset(tier.frames.others.items()) for tier in tiers])
    moves = state.store.disk is not None or state.peers is not None
    ahead = state.ahead.key(state.clock.monotonic())
    return tuple(held), parts, tuple(state.tier_copies), (state.transfers.key(), ahead) if moves else None


def _age_key(state: LedgerState) -> tuple[object, ...]:
    """Return what decides whose turn it is by age; a wait counts up to the one that makes old."""
    now, longest = state.clock.monotonic(), state.config.max_wait
    ages = [min(longest, each.waited + now - each.queued_at) for each in state.sequences.live.values()]
    waits = [(each.by_age, min(longest, each.waited)) for each in state.sequences.live.values()]
    return (min(state.admission.admitted_in_turn, state.config.in_turn), tuple(ages), tuple(waits))


def _blocks_key(blocks: Blocks) -> tuple[object, ...]:
    states = tuple([state.value for state in blocks.state])
    content = (tuple(blocks.hash), tuple(blocks.pending), tuple(blocks.parent))
    pages = frozenset(blocks.others.items()), bytes(blocks.group)
    return (states, tuple(blocks.refs), *content, tuple(blocks.owner), tuple(blocks.index), *pages)


def _sequence_key(each: Sequence) -> tuple[object, ...]:
    return (
        each.id, each.num_tokens, each.max_blocks, each.priority, each.tenant, tuple(each.block_hashes), each.cacheable,
        each.fork_of, each.phase.value, tuple(each.block_table), each.n_shared, each.trimmed, each.recompute,
        each.copy_source, each.computed, each.preemptions, tuple([tuple(run.table) for run in each.runs]),
        each.awaited, each.asked_peers, each.has_tail, each.fetch and each.fetch.key(),
    )  # fmt: skip
