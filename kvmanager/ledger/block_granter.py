"""The grant policy: which waiting sequence gets which blocks, which blocks are evicted for it, and which are leased."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Final

from common.contracts.lease import PARTIAL_REASON, RETENTION_REASON, Admit, Copy
from common.contracts.turns import BY_AGE
from common.contracts.types import (
    TENANT_CANDIDATE,
    TRIMMED,
    BlockHash,
    BlockId,
    Candidate,
    DecisionKind,
    MissReason,
    SequencePhase,
    ShortfallReason,
)
from kvmanager.cache.prefix_cache import PrefixMatch
from kvmanager.cache.remembered_match import RememberedMatch
from kvmanager.cache.retention_terms import Fate
from kvmanager.cache.window_match import match_in_window, settled
from kvmanager.contracts.block import CACHED
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger import backfill, chunked_grants, fork, grant_order
from kvmanager.ledger.backfill import Growth, Reservation
from kvmanager.ledger.ledger_state import LedgerState
from kvmanager.ledger.partial_copy import PartialCopy, learn, partial_copy
from kvmanager.ledger.preemption import Shortage
from kvmanager.ledger.shares import TenantShares

# Makes room: frees cached blocks in the order of eviction, drops their content, and records which went and why.


_NAMED: Final = 8
"""Evicted blocks that a record lists at most; its figures have the total number."""


class Evictor:
    """The rules of eviction. It has no state of its own."""

    def make_free(self, state: LedgerState, count: int, beneficiary: Sequence | None) -> int:
        """Evict until `count` blocks are free and return how many were evicted. The caller checks that it can."""
        missing = count - len(state.block_pool.free)
        if missing <= 0:
            return 0
        name, totals = beneficiary.name if beneficiary else "", state.totals
        retained, pinned = totals.retained_evictions, totals.pinned_evictions
        evicted, fates = list[Candidate](), dict[Fate, list[str]]()
        for _ in range(min(missing, _NAMED)):
            evicted.append(self.evict(state, name))
            if (found := state.retention.evicted) is not None:
                fates.setdefault(found.fate, []).append(evicted[-1].name)
        for _ in range(missing - len(evicted)):
            self.uncache(state, name)
        figures = {"evicted": float(missing), "cached": float(len(state.block_pool.cached)), "wanted": float(count)}
        order = state.block_pool.cached
        reasons: tuple[str, ...] = ("no block is free", order.reason, f"policy {order.name}")
        if retained := totals.retained_evictions - retained:
            figures["retained"] = float(retained)
        if pinned := totals.pinned_evictions - pinned:
            figures["pinned"] = float(pinned)
        reasons += tuple(f"{', '.join(names)}: {fate.value}" for fate, names in fates.items())
        named = ", ".join(each.name for each in evicted) + (" and more" if missing > _NAMED else "")
        state.decisions.record(DecisionKind.EVICTION, named, beneficiary, reasons, figures, tuple(evicted))
        return missing

    def drop_cached(self, state: LedgerState) -> int:
        """Free every cached block and return how many there were.

        An idle pool forgets all with one event. Otherwise the blocks go leaves first, as in an eviction. Blocks that
        only copies hold lose their content too; they are free once their copies are reported.
        """
        pool = state.block_pool
        copied = self._only_copied(state)
        dropped = len(pool.cached) + len(copied)
        if pool.in_use:
            # Nothing is learned of their uses: they go for another reason than want of room.
            for block in sorted((*pool.cached, *copied), key=state.blocks.index.__getitem__, reverse=True):
                state.cache.evict(block)
                if block not in copied:
                    pool.free_cached(block)
        else:
            state.cache.clear()
            pool.free_all_cached()
        state.retention.forget_cached()
        state.totals.reset_blocks += dropped
        figures = {"dropped": float(dropped), "in_use": float(state.block_pool.in_use)}
        reasons = ("an operator reset the prefix cache", "blocks in use stay")
        state.decisions.record(DecisionKind.RESET, f"{dropped} cached blocks", None, reasons, figures)
        return dropped

    def _only_copied(self, state: LedgerState) -> set[BlockId]:
        """Return the registered sources of copies that no block table holds."""
        blocks = state.blocks
        held = Counter(each.copy_source for each in state.sequences.values() if each.copy_source is not None)
        return {block for block, count in held.items() if blocks.refs[block] == count and blocks.hash[block]}

    def evict(self, state: LedgerState, beneficiary: str = "") -> Candidate:
        """Free the next block in the order of eviction and drop its content; return the record of the block."""
        block, depth = self.uncache(state, beneficiary)
        figures, retention = state.block_pool.cached.why(block), state.retention.evicted
        if retention is None:
            return Candidate(f"block {block}", terms=(("depth", float(depth)),), figures=figures)
        figures += (("retention_priority", float(retention.priority)),)
        return Candidate(f"block {block}", terms=(("depth", float(depth)),), figures=figures)

    def uncache(self, state: LedgerState, beneficiary: str) -> tuple[BlockId, int]:
        """Free the next block in the order of eviction; return it and the depth of what it held."""
        pool, retention, fate = state.block_pool, state.retention, ""
        retention.evicted = None
        block = pool.uncache()
        evicted = retention.evicted
        if evicted is not None:
            fate = evicted.fate.value
            state.totals.retained_evictions += evicted.fate is Fate.RETAINED
            state.totals.pinned_evictions += evicted.fate is Fate.PINNED
        state.totals.evictions += 1
        return block, state.cache.evict(block, beneficiary, pool.cached.mark_of(block), fate)


# The record of an admission: which blocks a sequence shares, which are fresh, and why there are no more hits.


_PASSES: Final = "passes one that lacks blocks"


@dataclass(frozen=True, slots=True)
class GrantPlan:
    """How a sequence would be admitted: the blocks that it shares, how many it gets, and why there are no more hits.

    `left` blocks are available then. Its block table begins with `unread` empty places, for hits that left its window.
    """

    hits: list[BlockId]
    fresh: int
    match: PrefixMatch
    left: int = 0
    unread: int = 0

    @property
    def shared(self) -> int:
        """Blocks that the sequence does not compute: hits, and those before them that it does not read."""
        return self.unread + len(self.hits)


def _await(state: LedgerState, hits: list[BlockId]) -> int:
    """Leave hits on blocks that are not sealed to be counted once they are; return how many there are."""
    unsealed = [block for block in hits if state.blocks.hash[block] is None]
    for block in unsealed:
        state.blocks.awaited[block] = state.blocks.awaited.get(block, 0) + 1
    return len(unsealed)


def _reasons(
    sequence: Sequence, plan: GrantPlan, passes: bool, part: PartialCopy | None, lacking: int
) -> tuple[str, ...]:
    """Return in words why there are no more hits, and what else is special about a grant that lacks so many blocks."""
    match = plan.match
    reasons = [match.miss_reason.value]
    if match.miss_reason is MissReason.DIVERGED_AT:
        reasons.append(f"never seen from block {match.diverged_at} on")
    if plan.unread:
        reasons.append(f"the first {plan.unread} of the shared blocks left the window and are not needed")
    if part is not None:
        reasons.append(f"{PARTIAL_REASON}{part.slots} slots are copied from block {part.source}")
    if match.retention:
        reasons.append(f"{RETENTION_REASON}{match.retention}")
    if passes:
        reasons.append(_PASSES)
    elif sequence.by_age:
        reasons.append(BY_AGE)
    if lacking:
        reasons.append(f"begins with a part of its prompt's blocks, and gets {lacking} others as they come free")
    if sequence.computes_all:
        reasons.append("computes all its tokens, for their log-probabilities")
    if sequence.recompute:
        reasons.append("computed again after a preemption")
    return tuple(reasons)


def record_grant(
    state: LedgerState, sequence: Sequence, plan: GrantPlan, evicted: int, passes: bool, part: PartialCopy | None
) -> str:
    """Count an admission, record it, and return the id of the record."""
    match, hits = plan.match, plan.shared
    awaited = _await(state, plan.hits[: match.hit_blocks]) if not sequence.recompute else 0
    asked = sequence.takes_hits and state.config.caches
    queried = min(sequence.num_tokens // state.config.block_size, len(sequence.block_hashes)) if asked else 0
    state.totals.count_admission(queried, match.hit_blocks - awaited, match.miss_reason.value, sequence.recompute)
    lacking = sequence.lacking(state.config.block_size) if sequence.id == state.partial else 0
    state.totals.chunked_grants += bool(lacking)
    if part is not None and not sequence.recompute:
        state.totals.partial_hits += 1
        state.totals.partial_hit_tokens += part.slots
    reasons = _reasons(sequence, plan, passes, part, lacking)
    passed_by, waited = state.queue.count_admission(sequence), state.clock.monotonic() - sequence.queued_at
    figures = {
        "num_tokens": float(sequence.num_tokens),
        "hit_blocks": float(hits),
        "fresh_blocks": float(plan.fresh),
        "evicted": float(evicted),
        "available": float(state.block_pool.available),
        "waiting": float(len(state.queue)),
        "waited_seconds": waited,
        **({"lacking_blocks": float(lacking)} if lacking else {}),
        **({"passes": 1.0} if passes else {}),
        **({"passed_by": float(passed_by)} if passed_by and waited else {}),
        **({"partial_tokens": float(part.slots)} if part is not None else {}),
    }
    chosen = f"{hits} shared and {plan.fresh} fresh blocks"
    kind = DecisionKind.GRANT
    return state.decisions.record(kind, chosen, sequence, reasons, figures, beneficiary=match.evicted_for)


# The record of a sequence that was not admitted at once: what it lacks, who goes first, who holds the blocks.
# There is one record for each wait, made when the wait begins. It names at most _REQUESTS requests and _TENANTS
# tenants.


_REQUESTS: Final = 8
_TENANTS: Final = 4


def explain_waits(state: LedgerState, head: Sequence, fresh_blocks: Callable[[Sequence], int]) -> None:
    """Record why the sequences that have joined the queue wait; `head` is admitted next.

    `fresh_blocks` returns how many blocks a sequence needs beside those that it would share.
    """
    waiting = [state.sequences[each] for each in state.queue.unexplained]
    state.queue.unexplained.clear()
    if not waiting:
        return
    holders, head_needed = _holders(state), fresh_blocks(head)
    for sequence in waiting:
        needed = head_needed if sequence is head else fresh_blocks(sequence)
        figures = {
            "needed": float(needed),
            "head_needed": float(head_needed),
            "available": float(state.block_pool.available),
            "num_blocks": float(state.config.num_blocks),
            "running": float(state.admitted),
            "waiting": float(len(state.queue)),
        }
        reason, first = _reason(state, sequence, head)
        kind = DecisionKind.SHORTFALL
        state.decisions.record(kind, "waits", sequence, (reason.value,), figures, holders, beneficiary=first)


def _reason(state: LedgerState, sequence: Sequence, head: Sequence) -> tuple[ShortfallReason, str]:
    """Return why a sequence waits, and the name of the one that goes first, unless it is this one."""
    if sequence is not head:
        return ShortfallReason.BEHIND, head.name
    return (ShortfallReason.PLACES if state.blocked_by == "places" else ShortfallReason.BLOCKS), ""


def _holders(state: LedgerState) -> tuple[Candidate, ...]:
    """Return the tenants and the requests that hold the most blocks; a shared block counts for its first sequence."""
    blocks: dict[str, int] = {}
    sequences: dict[str, int] = {}
    requests: dict[str, int] = {}
    for each in state.sequences.values():
        if each.phase is SequencePhase.WAITING:
            continue
        held = each.own_blocks
        blocks[each.tenant] = blocks.get(each.tenant, 0) + held
        sequences[each.tenant] = sequences.get(each.tenant, 0) + 1
        requests[each.name] = requests.get(each.name, 0) + held
    tenants = heapq.nlargest(_TENANTS, blocks, key=lambda tenant: (blocks[tenant], tenant))
    greatest = heapq.nlargest(_REQUESTS, requests, key=lambda name: (requests[name], name))
    return (
        *(_tenant(each, blocks[each], sequences[each]) for each in tenants),
        *(Candidate(each, terms=(("blocks", float(requests[each])),)) for each in greatest),
    )


def _tenant(name: str, blocks: int, sequences: int) -> Candidate:
    return Candidate(f"{TENANT_CANDIDATE}{name}", terms=(("blocks", float(blocks)), ("sequences", float(sequences))))


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
