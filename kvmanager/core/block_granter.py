"""The grant policy: which waiting sequence gets which blocks, which blocks are evicted for it, and which are leased."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from common.lease import Admit, Copy
from common.types import BlockHash, BlockId, Candidate, DecisionKind, MissReason, SequencePhase
from kvmanager.core import fork
from kvmanager.core.block import BlockState
from kvmanager.core.ledger_state import LedgerState
from kvmanager.core.prefix_cache import PrefixMatch
from kvmanager.core.sequence import Sequence

_NAMED = 8
"""Evicted blocks that a record lists at most; its figures have the total number."""


@dataclass(frozen=True, slots=True)
class GrantPlan:
    """How a sequence would be admitted: the blocks that it shares, how many it gets, and why there are no more hits."""

    hits: list[BlockId]
    fresh: int
    match: PrefixMatch


class BlockGranter:
    """Admits in queue order, hits first, then fresh blocks, all or nothing. It has no state of its own."""

    def admit(self, state: LedgerState) -> tuple[list[Copy], list[Admit]]:
        """Admit from the head of the queue while it fits; no sequence is passed over."""
        copies: list[Copy] = []
        admits: list[Admit] = []
        state.blocked_by = ""
        if not state.queue:
            return copies, admits
        if state.preempting or state.live_stalled():
            state.blocked_by = "deferred"
            return copies, admits
        fresh: set[BlockId] = set()
        while state.queue:
            if state.admitted >= state.config.max_num_seqs:
                state.blocked_by = "deferred"
                break
            sequence = state.sequences[state.queue.first]
            plan = self.plan(state, sequence)
            if plan is None:
                state.blocked_by = "capacity"
                break
            source = self.copy_source(state, sequence, plan, fresh)
            admits.append(self.grant(state, sequence, plan))
            fresh.update(sequence.block_table[len(plan.hits) :])
            if source is not None:
                length = fork.copy_length(sequence.num_tokens, state.config.block_size)
                copies.append(Copy(source, sequence.block_table[len(plan.hits)], length))
        return copies, admits

    # ------------------------------------------------------------ hits

    def match(
        self, state: LedgerState, block_hashes: Items[BlockHash], num_tokens: int, cacheable: bool
    ) -> tuple[list[BlockId], PrefixMatch]:
        """Return the registered or pending blocks of a prompt's full blocks, and the match that they give."""
        if state.config.window:
            return [], PrefixMatch(0, MissReason.WINDOWED)
        if not state.config.prefix_caching or not cacheable:
            return [], PrefixMatch(0, MissReason.DISABLED)
        full = num_tokens // state.config.block_size
        present = state.cache.longest(block_hashes, full)
        match = state.cache.explain(block_hashes, num_tokens, state.config.block_size, len(present))
        return present[: match.hit_blocks], match

    def fork_parent(self, state: LedgerState, sequence: Sequence) -> Sequence | None:
        """Return the sequence that this one was forked from while that one holds a block table."""
        if sequence.fork_of is None:
            return None
        parent = state.sequences.get(sequence.fork_of)
        return None if parent is None or parent.phase is SequencePhase.WAITING else parent

    def plan(self, state: LedgerState, sequence: Sequence) -> GrantPlan | None:
        """Return how the sequence would be admitted; None when there are not enough blocks for all of it."""
        available = state.block_pool.available
        if not available:
            return None
        config = state.config
        hits, match = self.match(state, sequence.block_hashes, sequence.num_tokens, sequence.cacheable)
        parent = self.fork_parent(state, sequence)
        if parent is not None:
            shared = fork.shared_full_blocks(parent, config.hits_of(sequence.num_tokens))
            hits = max(hits, shared, key=len)
        needed = sequence.max_blocks if config.runway == "max" else config.blocks_for(sequence.num_tokens)
        fresh = needed - len(hits)
        grows = needed < sequence.max_blocks
        slack = max(int(grows), config.watermark_blocks) if state.running else 0
        blocks = state.block_pool.blocks
        cached_hits = sum(blocks[block].state is BlockState.CACHED for block in hits)
        return GrantPlan(hits, fresh, match) if fresh + slack <= available - cached_hits else None

    def copy_source(
        self, state: LedgerState, sequence: Sequence, plan: GrantPlan, fresh: set[BlockId]
    ) -> BlockId | None:
        """Return the block whose slots a fork's partial last block copies; None when there is nothing to copy.

        A block that this same batch grants holds nothing yet, because the worker copies before it admits.
        """
        config = state.config
        parent = self.fork_parent(state, sequence)
        index = config.hits_of(sequence.num_tokens)
        if parent is None or len(plan.hits) != index or not fork.copy_length(sequence.num_tokens, config.block_size):
            return None
        source = fork.copy_source(parent, index)
        return None if source in fresh else source

    # ------------------------------------------------------------ the grant

    def grant(self, state: LedgerState, sequence: Sequence, plan: GrantPlan) -> Admit:
        """Give the sequence its block table. Hits are referenced before anything is evicted for the fresh blocks."""
        pool = state.block_pool
        for block in plan.hits:
            pool.hold(pool.blocks[block])
        evicted = self.make_free(state, plan.fresh, sequence)
        state.queue.remove(sequence)
        sequence.block_table = list(plan.hits)
        sequence.n_shared = len(plan.hits)
        for _ in range(plan.fresh):
            state.append_block(pool.take(), sequence)
        state.start(sequence)
        return Admit(
            sequence.id,
            tuple(sequence.block_table),
            n_shared=len(plan.hits),
            cached_tokens=len(plan.hits) * state.config.block_size,
            miss_reason=plan.match.miss_reason,
            diverged_at=plan.match.diverged_at,
            decision_id=_record_grant(state, sequence, plan, evicted),
        )

    # ------------------------------------------------------------ eviction

    def make_free(self, state: LedgerState, count: int, beneficiary: Sequence | None) -> int:
        """Evict until `count` blocks are free and return how many were evicted. The caller checks that it can."""
        missing = count - len(state.block_pool.free)
        if missing <= 0:
            return 0
        evicted = [self.evict(state) for _ in range(missing)]
        figures = {"evicted": float(missing), "cached": float(len(state.block_pool.cached)), "wanted": float(count)}
        reasons = ("no block is free", "released longest ago, leaves first")
        named = ", ".join(each.name for each in evicted[:_NAMED]) + (" and more" if missing > _NAMED else "")
        state.decisions.record(DecisionKind.EVICTION, named, beneficiary, reasons, figures, tuple(evicted[:_NAMED]))
        return missing

    def evict(self, state: LedgerState) -> Candidate:
        """Free the next block in the order of eviction and drop its content; return the record of the block."""
        block = state.block_pool.uncache()
        depth = state.cache.evict(block)
        state.totals.evictions += 1
        return Candidate(f"block {block.id}", terms=(("depth", float(depth)),))

    # ------------------------------------------------------------ the lease pool

    def lease(self, state: LedgerState, count: int) -> list[BlockId]:
        """Lease up to `count` blocks, also by evicting cached ones."""
        count = min(count, state.block_pool.available)
        self.make_free(state, count, None)
        return [state.block_pool.lease() for _ in range(count)]

    def lease_further(self, state: LedgerState, target: int) -> list[BlockId]:
        """Lease up to the target from free blocks alone, and leave the watermark free."""
        pool = state.block_pool
        spare = len(pool.free) - state.config.watermark_blocks
        return [pool.lease() for _ in range(min(target - pool.leased, spare))]


def _record_grant(state: LedgerState, sequence: Sequence, plan: GrantPlan, evicted: int) -> str:
    match, hits = plan.match, len(plan.hits)
    asked = sequence.cacheable and state.config.caches
    queried = min(sequence.num_tokens // state.config.block_size, len(sequence.block_hashes)) if asked else 0
    state.totals.count_admission(queried, match.hit_blocks, match.miss_reason.value, sequence.recompute)
    reasons = [match.miss_reason.value]
    if match.miss_reason is MissReason.DIVERGED_AT:
        reasons.append(f"never seen from block {match.diverged_at} on")
    if sequence.recompute:
        reasons.append("computed again after a preemption")
    figures = {
        "num_tokens": float(sequence.num_tokens),
        "hit_blocks": float(hits),
        "fresh_blocks": float(plan.fresh),
        "evicted": float(evicted),
        "available": float(state.block_pool.available),
        "waiting": float(len(state.queue)),
        "waited_seconds": state.clock.monotonic() - sequence.queued_at,
    }
    chosen = f"{hits} shared and {plan.fresh} fresh blocks"
    return state.decisions.record(DecisionKind.GRANT, chosen, sequence, tuple(reasons), figures)
