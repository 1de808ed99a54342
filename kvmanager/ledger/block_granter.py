"""The grant policy: which waiting sequence gets which blocks, which blocks are evicted for it, and which are leased."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

from common.contracts.lease import Admit, Copy
from common.contracts.types import TRIMMED, BlockHash, BlockId, MissReason, SequencePhase
from kvmanager.cache.prefix_cache import PrefixMatch
from kvmanager.cache.remembered_match import RememberedMatch
from kvmanager.cache.window_match import match_in_window, settled
from kvmanager.contracts.block import CACHED
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger import backfill, chunked_grants, fork, grant_order
from kvmanager.ledger.backfill import Growth, Reservation
from kvmanager.ledger.evictor import Evictor
from kvmanager.ledger.grant_record import GrantPlan, record_grant
from kvmanager.ledger.ledger_state import LedgerState
from kvmanager.ledger.partial_copy import PartialCopy, learn, partial_copy
from kvmanager.ledger.preemption import Shortage
from kvmanager.ledger.shares import TenantShares
from kvmanager.ledger.shortfall import explain_waits


class BlockGranter(Evictor):
    """Admits the next sequence, then those that may pass it: hits first, then fresh blocks, all or nothing.

    It has no state of its own.
    """

    def admit(self, state: LedgerState, most: int | None = None) -> tuple[list[Copy], list[Admit]]:
        """Admit the next sequence while it fits, `most` sequences at once."""
        copies: list[Copy] = []
        admits: list[Admit] = []
        state.blocked_by = ""
        if not state.queue:
            return copies, admits
        if state.preempting or state.live_stalled():
            state.blocked_by = "deferred"
            return copies, admits
        fresh, part = set[BlockId](), state.partly_granted()
        while state.queue:
            if len(admits) == most:
                state.blocked_by = "batch"
                break
            turn = grant_order.next_turn(state)
            sequence = turn.sequence
            if part is not None and chunked_grants.comes_first(state, part, sequence):
                state.blocked_by = "prompt"
                break
            if state.admitted >= self.places(state, sequence):
                state.blocked_by = "places"
                break
            plan = self.plan(state, sequence)
            if plan is None and state.give_up_sources():
                plan = self.plan(state, sequence)
            if plan is None:
                state.blocked_by = "capacity"
                break
            grant_order.count_turn(state, turn)
            self._admit(state, sequence, plan, copies, admits, fresh)
        return copies, admits

    def _admit(
        self,
        state: LedgerState,
        sequence: Sequence,
        plan: GrantPlan,
        copies: list[Copy],
        admits: list[Admit],
        fresh: set[BlockId],
        passes: bool = False,
    ) -> None:
        """Admit one sequence; it may pass the next one. `fresh` are the blocks that this batch grants."""
        source, size, shared = self.copy_source(state, sequence, plan, fresh), state.config.block_size, plan.shared
        part = self.partial_source(state, sequence, plan) if source is None else None
        admits.append(self.grant(state, sequence, plan, passes, part))
        fresh.update(sequence.block_table[shared:])
        if source is not None:
            length = fork.copy_length(sequence.num_tokens, size)
            copies.append(Copy(source, sequence.block_table[shared], length))
        elif part is not None:
            copies.append(Copy(part.source, sequence.block_table[shared], shared * size + part.slots))

    def begin(self, state: LedgerState, copies: list[Copy], admits: list[Admit]) -> None:
        """Let the next sequence, which lacks blocks, begin with a part of its prompt's, and get the others later."""
        config = state.config
        if state.blocked_by != "capacity" or not config.grants_parts or state.partly_granted() is not None:
            return
        turn = grant_order.next_turn(state)
        sequence = turn.sequence
        plan, missing = self._plan(state, sequence, self._found(state, sequence))
        free = plan.fresh - missing
        if (
            sequence.gave_up
            or config.holds_whole(sequence.preemptions)
            or not chunked_grants.is_enough(config, free, plan.fresh)
        ):
            return
        until = self._promised(state, sequence).until
        part = chunked_grants.first_part(state, sequence, plan.fresh, free, until)
        if part:
            grant_order.count_turn(state, turn)
            state.partial, state.blocked_by = sequence.id, "prompt"
            self._admit(state, sequence, replace(plan, fresh=part, left=0), copies, admits, set())
            sequence.queued_at = state.clock.monotonic()  # it waits on, for the others

    def _awaited(self, state: LedgerState) -> Sequence | None:
        """Return the sequence for whose blocks those behind it wait; None where blocks are not the reason."""
        if state.blocked_by == "prompt":
            return state.partly_granted()
        return grant_order.next_turn(state).sequence if state.blocked_by == "capacity" else None

    def _promised(self, state: LedgerState, head: Sequence) -> Reservation:
        """Return when the next sequence will have its blocks, as it was foreseen not long ago."""
        kept = state.reservation if state.reservation and state.reservation.sequence == head.id else None
        if kept is None or kept.is_due(state.steps):
            kept = state.reservation = self._reserve(state, head, kept)
        return kept

    def backfill(self, state: LedgerState, copies: list[Copy], admits: list[Admit]) -> None:
        """Add to a batch those that pass the next sequence, which lacks blocks."""
        config, now = state.config, state.steps
        head = self._awaited(state)
        if head is None or not config.backfill or config.window:
            return
        kept = state.reservation if state.reservation and state.reservation.sequence == head.id else None
        if kept is not None and kept.is_over(now):
            return
        spare = state.block_pool.available - config.watermark_blocks
        waiting = (state.sequences[each] for each in state.queue)
        candidates = backfill.candidates_behind(waiting, head, spare)
        if head.block_table:
            candidates = [each for each in candidates if not chunked_grants.begins_alike(head, each)]
        if not candidates:
            return
        kept = self._promised(state, head)
        candidates = [each for each in candidates if kept.admits(each, now)]
        if not candidates:
            return
        fresh = {block for admit in admits for block in admit.block_table[admit.n_shared :]}
        growth = backfill.growth_beside(head, state.sequences.values(), now, config.block_size)
        for sequence in candidates:
            if kept.admits(sequence, now) and self._may_pass(state, sequence, growth):
                plan, missing = self._plan(state, sequence, self._found(state, sequence))
                if missing <= 0:
                    # An earlier admission may have been by age: this one is not.
                    sequence.by_age = False
                    self._admit(state, sequence, plan, copies, admits, fresh, passes=True)
                    growth.started(sequence, now)
                    kept.passed(sequence, now)

    def _reserve(self, state: LedgerState, head: Sequence, old: Reservation | None) -> Reservation:
        """Look when the next sequence will have its blocks."""
        config, now, size = state.config, state.steps, state.config.block_size
        missing = self.missing_blocks(state, head) - state.block_pool.leased
        hits = frozenset(() if head.block_table else self._found(state, head).hits)
        runs = [each for each in backfill.running(state.sequences.values()) if each is not head]
        holders = backfill.holders_of(runs, state.blocks.refs, hits, now, size)
        found = backfill.reserved(holders, missing, size, config.runway_slots)
        growth = head.max_blocks - config.admission_blocks(head.num_tokens)
        return backfill.renewed(old, head, growth, found, now, state.block_pool.in_use)

    def _may_pass(self, state: LedgerState, sequence: Sequence, growth: Growth) -> bool:
        """Return whether a sequence has a place, leaves its tenant within its share, and does not empty the pool."""
        if state.admitted >= state.config.max_num_seqs:
            return False
        blocks = sequence.max_blocks
        if len(state.tenants) > 1 and TenantShares(state).load(sequence.tenant, 1, blocks) > 1.0:
            return False
        return growth.fits(backfill.steps_of(sequence), state.block_pool.available - blocks)

    def explain(self, state: LedgerState) -> None:
        """Record why those that joined the queue and were not admitted wait."""
        if state.queue.unexplained and state.blocked_by not in ("deferred", "batch"):
            head = state.partly_granted() if state.blocked_by == "prompt" else None
            head = head or grant_order.next_turn(state).sequence
            explain_waits(state, head, lambda each: self._fresh(state, each))

    def places(self, state: LedgerState, sequence: Sequence) -> int:
        """Return how many sequences may hold a block table if this one is to be among them.

        A tenant at its share or over it leaves some places free, so that the others need not wait for a preemption.
        """
        places = state.config.max_num_seqs
        if len(state.tenants) > 1 and TenantShares(state).load(sequence.tenant) >= 1.0:
            places -= state.config.spare_places
        return places

    # ------------------------------------------------------------ hits

    def match(
        self, state: LedgerState, block_hashes: Items[BlockHash], num_tokens: int, cacheable: bool
    ) -> tuple[list[BlockId], PrefixMatch]:
        """Return the registered or pending blocks of a prompt's full blocks, and the match that they give.

        Where every layer has a window, the match has more hits than there are blocks: the others left the window.
        """
        config, cache = state.config, state.cache
        if not config.prefix_caching or not cacheable:
            return [], PrefixMatch(0, MissReason.DISABLED)
        full = min(num_tokens // config.block_size, len(block_hashes))
        if config.window:
            return match_in_window(cache, config, block_hashes, num_tokens, full)
        present = cache.longest(block_hashes, full)
        match = cache.explain(block_hashes, num_tokens, config.block_size, len(present))
        return present[: match.hit_blocks], match

    def fork_parent(self, state: LedgerState, sequence: Sequence) -> Sequence | None:
        """Return the sequence that this one was forked from while that one holds a block table to share."""
        if sequence.fork_of is None or sequence.computes_all:
            return None
        parent = state.sequences.get(sequence.fork_of)
        if parent is None or parent.phase is SequencePhase.WAITING or parent.computes_all:
            return None
        return parent

    def plan(self, state: LedgerState, sequence: Sequence) -> GrantPlan | None:
        """Return how the sequence would be admitted; None when there are not enough blocks for all of it."""
        if not state.block_pool.available:
            return None
        plan, missing = self._demand(state, sequence)
        return None if missing > 0 else plan

    def missing_blocks(self, state: LedgerState, sequence: Sequence) -> int:
        """Return how many blocks are missing for the prompt of a sequence; 0 or less when there are enough."""
        if sequence.block_table:
            return chunked_grants.missing_blocks(state, sequence)
        return self._demand(state, sequence)[1]

    def shortage(self, state: LedgerState, sequence: Sequence) -> Shortage:
        """Return what a sequence lacks that waits for blocks."""
        plan, missing = self._demand(state, sequence)
        return Shortage(missing, self._slack(state, sequence, plan.shared + plan.fresh), frozenset(plan.hits))

    def _demand(self, state: LedgerState, sequence: Sequence) -> tuple[GrantPlan, int]:
        """Return how the sequence would be admitted, and how many blocks are missing for that; remember a match."""
        found = self._found(state, sequence)
        plan, missing = self._plan(state, sequence, found)
        if missing > 0 and found is not state.remembered:
            state.remember(sequence, found)
        return plan, missing

    def _fresh(self, state: LedgerState, sequence: Sequence) -> int:
        if sequence.phase is SequencePhase.RUNNING:
            return sequence.lacking(state.config.block_size)
        return self._plan(state, sequence, self._found(state, sequence))[0].fresh

    def _found(self, state: LedgerState, sequence: Sequence) -> RememberedMatch:
        return state.recall(sequence) or self._match_anew(state, sequence)

    def _plan(self, state: LedgerState, sequence: Sequence, found: RememberedMatch) -> tuple[GrantPlan, int]:
        config, available = state.config, state.block_pool.available
        hits, cached_hits, unread = found.hits, found.cached_hits, found.unread
        parent = self.fork_parent(state, sequence)
        if parent is not None:
            shared = fork.shared_full_blocks(parent, config.hits_of(sequence.num_tokens))
            if len(shared) > unread + len(hits):
                hits, cached_hits, unread = shared, 0, 0
        needed = self._wanted(state, sequence, unread, len(hits))
        fresh = needed - unread - len(hits)
        slack = self._slack(state, sequence, needed)
        missing = fresh + slack - (available - cached_hits)
        return GrantPlan(hits, fresh, found.match, slack - missing, unread), missing

    def _slack(self, state: LedgerState, sequence: Sequence, blocks: int) -> int:
        """Return how many blocks an admission with so many leaves to the growth of those that run and its own."""
        return max(int(blocks < sequence.max_blocks), state.config.watermark_blocks) if state.running else 0

    def _wanted(self, state: LedgerState, sequence: Sequence, unread: int, hits: int) -> int:
        """Return the places with which a sequence is admitted, `unread` empty ones and `hits` blocks included."""
        config = state.config
        if config.holds_whole(sequence.preemptions):
            return sequence.max_blocks
        whole = -(-sequence.num_tokens // config.block_size)
        # A fork may share more than its window; its partial last block comes after that.
        return min(whole, unread + max(config.admission_blocks(sequence.num_tokens), hits + 1))

    def _match_anew(self, state: LedgerState, sequence: Sequence) -> RememberedMatch:
        hits, match = self.match(state, sequence.block_hashes, sequence.num_tokens, sequence.takes_hits)
        states = state.blocks.state
        cached_hits = [states[block] for block in hits].count(CACHED)
        unread = match.hit_blocks - len(hits)
        return RememberedMatch(sequence.id, sequence.num_tokens, hits, match, cached_hits, unread)

    def copy_source(
        self, state: LedgerState, sequence: Sequence, plan: GrantPlan, fresh: set[BlockId]
    ) -> BlockId | None:
        """Return the block whose slots a fork's partial last block copies; None when there is nothing to copy.

        A block that this same batch grants holds nothing yet, because the worker copies before it admits.
        """
        config = state.config
        parent = self.fork_parent(state, sequence)
        index = config.hits_of(sequence.num_tokens)
        if parent is None or plan.shared != index or not fork.copy_length(sequence.num_tokens, config.block_size):
            return None
        source = fork.copy_source(parent, index)
        return None if source in fresh else source

    def partial_source(self, state: LedgerState, sequence: Sequence, plan: GrantPlan) -> PartialCopy | None:
        """Return the part of a cached block that is copied behind the hits; None when there is nothing to copy."""
        return partial_copy(state, sequence, plan.hits, plan.left)

    # ------------------------------------------------------------ the grant

    def grant(
        self,
        state: LedgerState,
        sequence: Sequence,
        plan: GrantPlan,
        passes: bool = False,
        part: PartialCopy | None = None,
    ) -> Admit:
        """Give the sequence its block table. Hits are referenced before anything is evicted for the fresh blocks.

        So is the block of which a part is copied.
        """
        state.remembered, parent = None, self.fork_parent(state, sequence)
        match = settled(state.cache, state.config, sequence.block_hashes, sequence.num_tokens, plan.match)
        plan = replace(plan, match=match)
        for block in plan.hits:
            state.block_pool.hold(block)
        learn(state, sequence, plan.hits)
        if part is not None:
            state.hold_source(sequence, part.source)
        evicted = self.make_free(state, plan.fresh, sequence)
        state.queue.remove(sequence)
        sequence.waited += state.clock.monotonic() - sequence.queued_at
        sequence.block_table = [*[TRIMMED] * plan.unread, *plan.hits]
        sequence.n_shared, sequence.trimmed = plan.shared, plan.unread
        sequence.own_from = min(
            sequence.own_from, plan.shared, sequence.own_from if parent is None else parent.own_from
        )
        state.append_fresh(plan.fresh, sequence)
        state.start(sequence)
        return Admit(
            sequence.id,
            tuple(sequence.block_table),
            n_shared=plan.shared,
            cached_tokens=plan.shared * state.config.block_size + (part.slots if part is not None else 0),
            miss_reason=plan.match.miss_reason,
            diverged_at=plan.match.diverged_at,
            decision_id=record_grant(state, sequence, plan, evicted, passes, part),
        )

    # ------------------------------------------------------------ the lease pool

    def lease(self, state: LedgerState, count: int) -> list[BlockId]:
        """Lease up to `count` blocks, also by evicting cached ones."""
        if count > state.block_pool.available:
            state.give_up_sources()
        count = min(count, state.block_pool.available)
        self.make_free(state, count, None)
        return [state.block_pool.lease() for _ in range(count)]

    def lease_further(self, state: LedgerState, target: int) -> list[BlockId]:
        """Lease up to the target from free blocks alone, and leave the watermark free."""
        pool = state.block_pool
        spare = len(pool.free) - state.config.watermark_blocks
        return [pool.lease() for _ in range(min(target - pool.leased, spare))]
