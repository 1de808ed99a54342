"""Which waiting sequence gets a row, and of which blocks: hits first, then fresh ones; all or nothing."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from common.lease import Admit, Copy
from common.types import BlockHash, BlockId, DecisionKind, MissReason, SequencePhase
from kvmanager.core import fork
from kvmanager.core.block import BlockState
from kvmanager.core.books import Books
from kvmanager.core.prefix_cache import PrefixMatch
from kvmanager.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Plan:
    """How a sequence would be admitted: blocks that it shares, how many it gets, and why there are no more hits."""

    hits: list[BlockId]
    fresh: int
    match: PrefixMatch


class Admission(Books):
    """The admission half of the ledger."""

    __slots__ = ()

    def queue_or_refuse(self, sequence: Sequence) -> None:
        """Queue a sequence, or refuse it for good when the whole pool could not hold it; those behind it proceed."""
        needed, there = sequence.max_blocks, self.config.num_blocks
        if needed <= there:
            self.queue.add(sequence)
            return
        del self.sequences[sequence.id]
        self.refused.append(sequence.id)
        self.totals.rejections += 1
        reason = f"{sequence.max_len} tokens need {needed} blocks; the pool has {there}"
        figures = {"needed_blocks": float(needed), "num_blocks": float(there), "max_len": float(sequence.max_len)}
        self.decisions.record(DecisionKind.REJECTION, "refused", sequence, (reason,), figures)

    def admit(self) -> tuple[list[Copy], list[Admit]]:
        """Admit from the head of the queue while it fits; nobody is passed over."""
        copies: list[Copy] = []
        admits: list[Admit] = []
        self.held = ""
        if not self.queue:
            return copies, admits
        if self.preempting or self.live_stalled():
            self.held = "deferred"
            return copies, admits
        fresh: set[BlockId] = set()
        while self.queue:
            if self.rows >= self.config.max_num_seqs:
                self.held = "deferred"
                break
            sequence = self.sequences[self.queue.first]
            plan = self.plan(sequence)
            if plan is None:
                self.held = "capacity"
                break
            source = self.copy_source(sequence, plan, fresh)
            admits.append(self.grant(sequence, plan))
            fresh.update(sequence.block_table[len(plan.hits) :])
            if source is not None:
                length = fork.copy_length(sequence.num_tokens, self.config.block_size)
                copies.append(Copy(source, sequence.block_table[len(plan.hits)], length))
        return copies, admits

    # ------------------------------------------------------------ hits

    def match(
        self, block_hashes: Items[BlockHash], num_tokens: int, cacheable: bool
    ) -> tuple[list[BlockId], PrefixMatch]:
        """Return the registered or pending blocks of a prompt's full blocks, and what that means."""
        if self.config.window:
            return [], PrefixMatch(0, MissReason.WINDOWED)
        if not self.config.prefix_caching or not cacheable:
            return [], PrefixMatch(0, MissReason.DISABLED)
        full = num_tokens // self.config.block_size
        present = self.cache.longest(block_hashes, full)
        match = self.cache.explain(block_hashes, num_tokens, self.config.block_size, len(present))
        return present[: match.hit_blocks], match

    def fork_parent(self, sequence: Sequence) -> Sequence | None:
        """Return the sequence that this one was forked from while it holds a row."""
        if sequence.fork_of is None:
            return None
        parent = self.sequences.get(sequence.fork_of)
        return None if parent is None or parent.phase is SequencePhase.WAITING else parent

    def plan(self, sequence: Sequence) -> Plan | None:
        """Return how the sequence would be admitted; None when there are not enough blocks for all of it."""
        available = self.block_pool.available
        if not available:
            return None
        config = self.config
        hits, match = self.match(sequence.block_hashes, sequence.num_tokens, sequence.cacheable)
        parent = self.fork_parent(sequence)
        if parent is not None:
            shared = fork.shared_full_blocks(parent, config.hits_of(sequence.num_tokens))
            hits = max(hits, shared, key=len)
        needed = sequence.max_blocks if config.runway == "max" else config.blocks_for(sequence.num_tokens)
        fresh = needed - len(hits)
        grows = needed < sequence.max_blocks
        slack = max(int(grows), config.watermark_blocks) if self.running else 0
        blocks = self.block_pool.blocks
        cached_hits = sum(blocks[block].state is BlockState.CACHED for block in hits)
        return Plan(hits, fresh, match) if fresh + slack <= available - cached_hits else None

    def copy_source(self, sequence: Sequence, plan: Plan, fresh: set[BlockId]) -> BlockId | None:
        """Return the block whose slots a fork's partial last block copies; None when there is nothing to copy.

        A block that this same batch hands out holds nothing yet: the worker copies before it admits.
        """
        parent = self.fork_parent(sequence)
        index = self.config.hits_of(sequence.num_tokens)
        if (
            parent is None
            or len(plan.hits) != index
            or not fork.copy_length(sequence.num_tokens, self.config.block_size)
        ):
            return None
        source = fork.copy_source(parent, index)
        return None if source in fresh else source

    # ------------------------------------------------------------ the grant

    def grant(self, sequence: Sequence, plan: Plan) -> Admit:
        """Give the sequence its row. Hits are held before anything is evicted for the fresh blocks."""
        blocks = self.block_pool.blocks
        for block in plan.hits:
            self.block_pool.hold(blocks[block])
        evicted = self.make_free(plan.fresh, sequence)
        self.queue.remove(sequence)
        sequence.block_table = list(plan.hits)
        sequence.n_shared = len(plan.hits)
        for _ in range(plan.fresh):
            self.place(self.block_pool.take(), sequence)
        self.start(sequence)
        return Admit(
            sequence.id,
            tuple(sequence.block_table),
            n_shared=len(plan.hits),
            cached_tokens=len(plan.hits) * self.config.block_size,
            miss_reason=plan.match.miss_reason,
            diverged_at=plan.match.diverged_at,
            decision_id=self._record_grant(sequence, plan, evicted),
        )

    def _record_grant(self, sequence: Sequence, plan: Plan, evicted: int) -> str:
        match, hits = plan.match, len(plan.hits)
        asked = sequence.cacheable and self.config.caches
        queried = min(sequence.num_tokens // self.config.block_size, len(sequence.block_hashes)) if asked else 0
        self.totals.count_admission(queried, match.hit_blocks, match.miss_reason.value, sequence.recompute)
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
            "available": float(self.block_pool.available),
            "waiting": float(len(self.queue)),
            "waited_seconds": self.clock.monotonic() - sequence.queued_at,
        }
        chosen = f"{hits} shared and {plan.fresh} fresh blocks"
        return self.decisions.record(DecisionKind.GRANT, chosen, sequence, tuple(reasons), figures)
