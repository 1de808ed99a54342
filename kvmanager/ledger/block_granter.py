"""The grant policy: which waiting sequence gets which blocks, which blocks are evicted for it, and which are leased."""

from __future__ import annotations

import heapq
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
from kvmanager.cache.group_match import GroupMatcher
from kvmanager.cache.prefix_cache import PrefixMatch, RememberedMatch, RunHits
from kvmanager.cache.window_match import match_in_window, settled
from kvmanager.contracts.block import CACHED
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger import backfill, checkpoints, chunked_grants, evicting, grant_order
from kvmanager.ledger.backfill import Growth, Reservation
from kvmanager.ledger.block_store import BlockStore
from kvmanager.ledger.ledger_state import LedgerState
from kvmanager.ledger.partial_copy import PartialCopy, learn, partial_copy
from kvmanager.ledger.preemption import Shortage
from kvmanager.ledger.sequence_table import SequenceTable
from kvmanager.ledger.shares import TenantShares

_PASSES: Final = "passes one that lacks blocks"
_REQUESTS: Final = 8
"""Requests that the record of a wait names at most."""
_TENANTS: Final = 4
"""Tenants that the record of a wait names at most."""


@dataclass(frozen=True, slots=True)
class GrantPlan:
    """How a sequence would be admitted: the blocks that it shares, how many it gets, and why there are no more hits.

    `left` blocks are available then. Its block table begins with `unread` empty places, for hits that left its window:
    see `grant_blocks`. Where the pool has groups, `fresh` counts pages, and a table of each group gets `fresh_blocks`.
    At the places of `checkpoints` the sequence is to leave its states; those at `asked` ones are never superseded. With
    a `tail` it gets one block more, for the states behind its last full block.
    """

    hits: list[BlockId]
    fresh: int
    match: PrefixMatch
    left: int = 0
    unread: int = 0
    runs: tuple[RunHits, ...] = ()
    fresh_blocks: tuple[int, ...] = ()
    checkpoints: tuple[int, ...] = ()
    asked: frozenset[int] = frozenset()
    tail: bool = False

    @property
    def shared(self) -> int:
        """Blocks that the sequence does not compute: hits, and those before them that it does not read."""
        return self.unread + len(self.hits)


def admit_sequences(state: LedgerState, most: int | None = None) -> tuple[list[Copy], list[Admit]]:
    """Admit the next sequence while it fits, `most` at once. One that begins to wait for states counts too."""
    copies: list[Copy] = []
    admits: list[Admit] = []
    waits = 0
    sequences, admission = state.sequences, state.admission
    admission.blocked_by = ""
    if not sequences.queue:
        return copies, admits
    if sequences.preempting or sequences.find_stalled():
        admission.blocked_by = "deferred"
        return copies, admits
    fresh, part = set[BlockId](), sequences.find_begun_prompt()
    while sequences.queue:
        if len(admits) + waits == most:
            admission.blocked_by = "batch"
            break
        turn = grant_order.next_turn(state)
        sequence = turn.sequence
        if part is not None and chunked_grants.comes_first(state, part, sequence):
            admission.blocked_by = "prompt"
            break
        if sequences.admitted >= count_places(state, sequence):
            admission.blocked_by = "places"
            break
        if state.store.states is not None and _waits_for_states(state, sequence):
            waits += 1
            continue
        plan = plan_admission(state, sequence)
        if plan is None and state.give_up_copy_sources():
            plan = plan_admission(state, sequence)
        if plan is None:
            admission.blocked_by = "capacity"
            break
        grant_order.count_turn(state.admission, turn)
        _admit_sequence(state, sequence, plan, copies, admits, fresh)
    return copies, admits


def _waits_for_states(state: LedgerState, sequence: Sequence) -> bool:
    """Let a sequence leave the queue for a planned checkpoint, if that saves it enough; return whether it does."""
    place = checkpoints.find_planned(state, sequence)
    if place is None or not checkpoints.is_worth_waiting(
        state.config, place, len(find_match(state.store, sequence).hits)
    ):
        return False
    needed = _count_fresh_blocks(state, sequence)
    sequence.awaited = True
    state.sequences.queue.remove_sequence(sequence)
    owner = state.sequences.live[state.sequences.planned.wait(sequence.id, sequence.block_hashes[place])]
    _record_wait(state, sequence, (ShortfallReason.CHECKPOINT.value, owner.name), (needed, needed))
    return True


def _admit_sequence(
    state: LedgerState,
    sequence: Sequence,
    plan: GrantPlan,
    copies: list[Copy],
    admits: list[Admit],
    fresh: set[BlockId],
    passes: bool = False,
) -> None:
    """Admit one sequence; it may pass the next one. `fresh` are the blocks that this batch grants."""
    source, size, shared = find_fork_source(state, sequence, plan, fresh), state.config.block_size, plan.shared
    part = find_partial_source(state.store, sequence, plan) if source is None else None
    admits.append(grant_blocks(state, sequence, plan, passes, part))
    fresh.update(sequence.block_table[shared:])
    if source is not None:
        length = fork_copy_length(sequence.num_tokens, size)
        copies.append(Copy(source, sequence.block_table[shared], length))
    elif part is not None:
        copies.append(Copy(part.source, sequence.block_table[shared], shared * size + part.slots))


def begin_prompt(state: LedgerState, copies: list[Copy], admits: list[Admit]) -> None:
    """Let the next sequence, which lacks blocks, begin with a part of its prompt's, and get the others later."""
    config = state.config
    if (
        state.admission.blocked_by != "capacity"
        or not config.grants_parts
        or state.sequences.find_begun_prompt() is not None
    ):
        return
    turn = grant_order.next_turn(state)
    sequence = turn.sequence
    plan, missing = _plan_with_match(state, sequence, find_match(state.store, sequence))
    free = plan.fresh - missing
    if (
        sequence.gave_up
        or config.holds_whole(sequence.preemptions)
        or not chunked_grants.is_enough(config, free, plan.fresh)
    ):
        return
    until = _promise_blocks(state, sequence).until
    part = chunked_grants.first_part(state, sequence, plan.fresh, free, until)
    if part:
        grant_order.count_turn(state.admission, turn)
        state.sequences.partial, state.admission.blocked_by = sequence.id, "prompt"
        _admit_sequence(state, sequence, replace(plan, fresh=part, left=0), copies, admits, set())
        sequence.queued_at = state.clock.monotonic()  # it waits on, for the others


def _find_awaited(state: LedgerState) -> Sequence | None:
    """Return the sequence for whose blocks those behind it wait; None where blocks are not the reason."""
    if state.admission.blocked_by == "prompt":
        return state.sequences.find_begun_prompt()
    return grant_order.next_turn(state).sequence if state.admission.blocked_by == "capacity" else None


def _promise_blocks(state: LedgerState, head: Sequence) -> Reservation:
    """Return when the next sequence will have its blocks, as it was foreseen not long ago."""
    kept = state.admission.reservation_of(head)
    if kept is None or kept.is_due(state.worker.steps):
        kept = state.admission.reservation = make_reservation(state, head, kept)
    return kept


def backfill_sequences(state: LedgerState, copies: list[Copy], admits: list[Admit]) -> None:
    """Add to a batch those that pass the next sequence, which lacks blocks."""
    config, now = state.config, state.worker.steps
    head = _find_awaited(state)
    if head is None or not config.backfill or config.slides:
        return
    kept = state.admission.reservation_of(head)
    if kept is not None and kept.is_over(now):
        return
    spare = state.store.pool.available - config.watermark_blocks
    waiting = (state.sequences.live[each] for each in state.sequences.queue)
    candidates = backfill.candidates_behind(waiting, head, spare)
    if head.block_table:
        candidates = [each for each in candidates if not chunked_grants.begins_alike(head, each)]
    if not candidates:
        return
    kept = _promise_blocks(state, head)
    candidates = [each for each in candidates if kept.admits(each, now)]
    if not candidates:
        return
    fresh = {block for admit in admits for block in admit.block_table[admit.n_shared :]}
    growth = backfill.growth_beside(head, state.sequences.live.values(), now, config.block_size)
    for sequence in candidates:
        if kept.admits(sequence, now) and _may_pass(state, sequence, growth):
            plan, missing = _plan_with_match(state, sequence, find_match(state.store, sequence))
            if missing <= 0:
                # An earlier admission may have been by age: this one is not.
                sequence.by_age = False
                _admit_sequence(state, sequence, plan, copies, admits, fresh, passes=True)
                growth.add_sequence(sequence, now)
                kept.count_passed(sequence, now)


def make_reservation(state: LedgerState, head: Sequence, old: Reservation | None) -> Reservation:
    """Look when the next sequence will have its blocks."""
    config, now, size = state.config, state.worker.steps, state.config.block_size
    missing = count_missing_blocks(state, head) - state.store.pool.leased
    hits = frozenset(() if head.block_table else find_match(state.store, head).hits)
    runs = [each for each in backfill.running(state.sequences.live.values()) if each is not head]
    holders = backfill.holders_of(runs, state.store.blocks.refs, hits, now, size)
    found = backfill.reserved(holders, missing, size, config.runway_slots)
    growth = head.max_blocks - config.admission_blocks(head.num_tokens)
    return backfill.renewed(old, head, growth, found, now, state.store.pool.in_use)


def _may_pass(state: LedgerState, sequence: Sequence, growth: Growth) -> bool:
    """Return whether a sequence has a place, leaves its tenant within its share, and does not empty the pool."""
    sequences, config = state.sequences, state.config
    if sequences.admitted >= config.max_num_seqs:
        return False
    blocks = sequence.max_blocks
    if len(sequences.tenants) > 1 and TenantShares(config, sequences.tenants).load_of(sequence.tenant, 1, blocks) > 1.0:
        return False
    return growth.fits_blocks(backfill.steps_of(sequence), state.store.pool.available - blocks)


def explain_waits(state: LedgerState) -> None:
    """Record why those that joined the queue and were not admitted wait."""
    if state.sequences.queue.unexplained and state.admission.blocked_by not in ("deferred", "batch"):
        head = state.sequences.find_begun_prompt() if state.admission.blocked_by == "prompt" else None
        head = head or grant_order.next_turn(state).sequence
        record_waits(state, head)


def count_places(state: LedgerState, sequence: Sequence) -> int:
    """Return how many sequences may hold a block table if this one is to be among them.

    A tenant at its share or over it leaves some places free, so that the others need not wait for a preemption.
    """
    config, tenants = state.config, state.sequences.tenants
    if len(tenants) > 1 and TenantShares(config, tenants).load_of(sequence.tenant) >= 1.0:
        return config.max_num_seqs - config.spare_places
    return config.max_num_seqs


# ------------------------------------------------------------ hits


def match_prefix(
    store: BlockStore, block_hashes: Items[BlockHash], num_tokens: int, cacheable: bool
) -> tuple[list[BlockId], PrefixMatch]:
    """Return the registered or pending blocks of a prompt's full blocks, and the match that they give.

        block_hashes   | 0 | 1 | 2 | 3 | 4 | 5 |  + the tokens behind the last full block
        found          | x | x | x |   |                                hits: blocks 0, 1, 2
        with a window  |   |   | x | x |                                hits: 2, 3; the match counts 4

    Where every layer has a window, the match has more hits than there are blocks: the others left the window. The block
    of the last token is never a hit, because that token's logits must be computed.
    """
    config, cache = store.config, store.cache
    if not config.prefix_caching or not cacheable:
        return [], PrefixMatch(0, MissReason.DISABLED)
    full = min(num_tokens // config.block_size, len(block_hashes))
    if config.groups:
        found = GroupMatcher(cache, store.blocks, config, block_hashes, num_tokens).match()
        return found.hits, found.match
    if config.window:
        return match_in_window(cache, config, block_hashes, num_tokens, full)
    present = cache.find_longest_prefix(block_hashes, full)
    match = cache.explain_match(block_hashes, num_tokens, config.block_size, len(present))
    return present[: match.hit_blocks], match


def find_fork_parent(sequences: SequenceTable, sequence: Sequence) -> Sequence | None:
    """Return the sequence that this one was forked from while that one holds a block table to share."""
    if sequence.fork_of is None or sequence.computes_all:
        return None
    parent = sequences.live.get(sequence.fork_of)
    if parent is None or parent.phase is SequencePhase.WAITING or parent.computes_all:
        return None
    return parent


def plan_admission(state: LedgerState, sequence: Sequence) -> GrantPlan | None:
    """Return how the sequence would be admitted; None when there are not enough blocks for all of it."""
    if not state.store.pool.available:
        return None
    plan, missing = _plan_or_remember(state, sequence)
    return None if missing > 0 else plan


def count_missing_blocks(state: LedgerState, sequence: Sequence) -> int:
    """Return how many blocks are missing for the prompt of a sequence; 0 or less when there are enough."""
    if sequence.block_table:
        return chunked_grants.missing_blocks(state, sequence)
    return _plan_or_remember(state, sequence)[1]


def measure_shortage(state: LedgerState, sequence: Sequence) -> Shortage:
    """Return what a sequence lacks that waits for blocks."""
    plan, missing = _plan_or_remember(state, sequence)
    if state.config.groups:
        hits = frozenset((*plan.hits, *(block for run in plan.runs for block in run.blocks)))
        return Shortage(missing, plan.left + missing, hits)
    return Shortage(missing, _count_slack(state, sequence, plan.shared + plan.fresh), frozenset(plan.hits))


def _plan_or_remember(state: LedgerState, sequence: Sequence) -> tuple[GrantPlan, int]:
    """Return how the sequence would be admitted, and how many blocks are missing for that; remember a match."""
    found = find_match(state.store, sequence)
    plan, missing = _plan_with_match(state, sequence, found)
    if missing > 0 and found is not state.store.remembered:
        state.store.remember_match(sequence, found)
    return plan, missing


def _count_fresh_blocks(state: LedgerState, sequence: Sequence) -> int:
    if sequence.phase is SequencePhase.RUNNING:
        return sequence.lacking(state.config.block_size)
    return _plan_with_match(state, sequence, find_match(state.store, sequence))[0].fresh


def find_match(store: BlockStore, sequence: Sequence) -> RememberedMatch:
    return store.recall_match(sequence) or _match_anew(store, sequence)


def _plan_with_match(state: LedgerState, sequence: Sequence, found: RememberedMatch) -> tuple[GrantPlan, int]:
    config, available = state.config, state.store.pool.available
    if config.groups:
        return _plan_in_groups(state, sequence, found)
    hits, cached_hits, unread = found.hits, found.cached_hits, found.unread
    parent = find_fork_parent(state.sequences, sequence)
    if parent is not None:
        shared = _find_shared_blocks(parent, config.hits_of(sequence.num_tokens))
        if len(shared) > unread + len(hits):
            hits, cached_hits, unread = shared, 0, 0
    needed = _count_wanted_blocks(state.config, sequence, unread, len(hits))
    fresh = needed - unread - len(hits)
    slack = _count_slack(state, sequence, needed)
    missing = fresh + slack - (available - cached_hits)
    return GrantPlan(hits, fresh, found.match, slack - missing, unread), missing


def _plan_in_groups(state: LedgerState, sequence: Sequence, found: RememberedMatch) -> tuple[GrantPlan, int]:
    """Return how a sequence would be admitted where the pool has groups.

    A checkpoint that is a hit takes pages beside what the sequence computes on. Where both do not fit, the sequence
    computes all: else it would wait for pages that only its own hit holds.
    """
    plan, missing = _plan_on_hits(state, sequence, found)
    if missing > 0 and found.hits and any(run.checkpoints for run in sequence.runs):
        without = replace(found, hits=[], runs=_no_hits(state.config), cached_hits=0)
        other, lacking = _plan_on_hits(state, sequence, without)
        if lacking <= 0:
            return replace(other, match=PrefixMatch(0, MissReason.UNRESUMABLE, len(found.hits))), lacking
    return plan, missing


def _no_hits(config: LedgerConfig) -> tuple[RunHits, ...]:
    return tuple([RunHits(0, []) for _ in config.groups[1:]])


def _plan_on_hits(state: LedgerState, sequence: Sequence, found: RememberedMatch) -> tuple[GrantPlan, int]:
    config, parent = state.config, find_fork_parent(state.sequences, sequence)
    hits, runs, cached = found.hits, found.runs, found.cached_hits
    states = any(run.checkpoints for run in sequence.runs)
    if parent is not None and not states and not any(run.trimmed for run in parent.runs):
        most = min(config.hits_of(sequence.num_tokens), *(len(run.table) for run in parent.runs))
        shared = parent.block_table[:most]
        if len(shared) > len(hits):
            hits, cached = shared, 0
            runs = tuple([RunHits(0, run.table[: len(shared)]) for run in parent.runs])
    whole, shares = -(-sequence.num_tokens // config.block_size), len(hits)
    fresh = [whole - shares]
    for number, run in enumerate(runs):
        if sequence.runs[number].checkpoints:
            fresh.append(0)
            continue
        most = max(config.held_run(number, whole), len(run.blocks) + 1)
        fresh.append(min(whole, run.unread + most) - shares)
    pages = sum(group.pages * count for group, count in zip(config.groups, fresh, strict=True))
    # What `_count_slack` does: a run may grow although the first table is whole.
    tables = zip(fresh, (False, *(run.checkpoints for run in sequence.runs)), strict=True)
    slack, grows = 0, any(shares + count < sequence.max_blocks for count, sparse in tables if not sparse)
    if state.sequences.running:
        slack = max(config.stall_pages * grows, config.watermark_blocks)
    missing = pages + slack - (state.store.pool.available - cached)
    plan = GrantPlan(hits, pages, found.match, slack - missing, 0, runs, tuple(fresh))
    if states and missing <= 0:
        plan = _with_checkpoints(config, sequence, plan, found.sealed)
    return plan, missing


def _with_checkpoints(config: LedgerConfig, sequence: Sequence, plan: GrantPlan, sealed: int) -> GrantPlan:
    """Return a plan with the checkpoints that the sequence is to leave."""
    places, asked = checkpoints.choose_places(config, sequence, plan.shared, plan.left, sealed)
    taken = config.groups[-1].pages * len(places)
    return replace(plan, fresh=plan.fresh + taken, left=plan.left - taken, checkpoints=places, asked=asked)


def _with_tail(state: LedgerState, sequence: Sequence, plan: GrantPlan) -> GrantPlan:
    """Return a plan with a tail, if the sequence gets one."""
    if not checkpoints.gives_tail(state, sequence, plan.fresh, plan.left):
        return plan
    size = state.config.groups[-1].pages
    return replace(plan, fresh=plan.fresh + size, left=plan.left - size, tail=True)


def _count_slack(state: LedgerState, sequence: Sequence, blocks: int) -> int:
    """Return how many blocks an admission with so many leaves to the growth of those that run and its own."""
    return max(int(blocks < sequence.max_blocks), state.config.watermark_blocks) if state.sequences.running else 0


def _count_wanted_blocks(config: LedgerConfig, sequence: Sequence, unread: int, hits: int) -> int:
    """Return the places with which a sequence is admitted, `unread` empty ones and `hits` blocks included."""
    if config.holds_whole(sequence.preemptions):
        return sequence.max_blocks
    whole = -(-sequence.num_tokens // config.block_size)
    # A fork may share more than its window; its partial last block comes after that.
    return min(whole, unread + max(config.admission_blocks(sequence.num_tokens), hits + 1))


def _match_anew(store: BlockStore, sequence: Sequence) -> RememberedMatch:
    if store.config.groups:
        return _match_groups(store, sequence)
    hits, match = match_prefix(store, sequence.block_hashes, sequence.num_tokens, sequence.takes_hits)
    states = store.blocks.state
    cached_hits = [states[block] for block in hits].count(CACHED)
    unread = match.hit_blocks - len(hits)
    return RememberedMatch(sequence.id, sequence.num_tokens, hits, match, cached_hits, unread)


def _match_groups(store: BlockStore, sequence: Sequence) -> RememberedMatch:
    config, blocks = store.config, store.blocks
    if not config.prefix_caching or not sequence.takes_hits:
        disabled, runs = PrefixMatch(0, MissReason.DISABLED), _no_hits(config)
        return RememberedMatch(sequence.id, sequence.num_tokens, [], disabled, 0, 0, runs)
    found = GroupMatcher(store.cache, blocks, config, sequence.block_hashes, sequence.num_tokens).match()
    every = (*found.hits, *(block for run in found.runs for block in run.blocks))
    cached = sum(blocks.pages_of(block) for block in every if blocks.state[block] is CACHED)
    return RememberedMatch(
        sequence.id, sequence.num_tokens, found.hits, found.match, cached, 0, found.runs, found.sealed
    )


def find_fork_source(state: LedgerState, sequence: Sequence, plan: GrantPlan, fresh: set[BlockId]) -> BlockId | None:
    """Return the block whose slots a fork's partial last block copies; None when there is nothing to copy.

    A block that this same batch grants holds nothing yet, because the worker copies before it admits.
    """
    config = state.config
    parent = find_fork_parent(state.sequences, sequence)
    index = config.hits_of(sequence.num_tokens)
    if config.groups:
        return None  # a fork computes the tokens of the partial block itself
    if parent is None or plan.shared != index or not fork_copy_length(sequence.num_tokens, config.block_size):
        return None
    source = _find_copied_block(parent, index)
    return None if source in fresh else source


def find_partial_source(store: BlockStore, sequence: Sequence, plan: GrantPlan) -> PartialCopy | None:
    """Return the part of a cached block that is copied behind the hits; None when there is nothing to copy."""
    return partial_copy(store, sequence, plan.hits, plan.left)


# ------------------------------------------------------------ the grant


def grant_blocks(
    state: LedgerState,
    sequence: Sequence,
    plan: GrantPlan,
    passes: bool = False,
    part: PartialCopy | None = None,
) -> Admit:
    """Give a waiting sequence its block table, and return the answer to the worker.

        | TRIMMED, plan.unread | plan.hits            | plan.fresh                          | growth, leased later  |
        | left the window      | shared, not computed | a copied part, then computed slots  |                       |
        |<------------- n_shared = plan.shared ------>|
        |<--------------------------------- block_table ---------------------------------->|
        |<---------------------------------------------- max_blocks -------------------------------------------->|

    Hits, and the block of which a part is copied, are referenced before anything is evicted for the fresh blocks.
    """
    store = state.store
    store.remembered, parent = None, find_fork_parent(state.sequences, sequence)
    if store.states is not None:
        plan = _with_tail(state, sequence, plan)
    match = settled(store.cache, state.config, sequence.block_hashes, sequence.num_tokens, plan.match)
    if match is not plan.match:
        plan = replace(plan, match=match)
    for block in plan.hits:
        store.pool.hold_block(block)
    for run in plan.runs:
        for block in run.blocks:
            store.pool.hold_block(block)
    learn(store, sequence, plan.hits)
    if part is not None:
        state.hold_copy_source(sequence, part.source)
    evicted = evicting.evict_until_free(state, plan.fresh, sequence)
    state.sequences.queue.remove_sequence(sequence)
    sequence.waited += state.clock.monotonic() - sequence.queued_at
    sequence.block_table = [*[TRIMMED] * plan.unread, *plan.hits]
    sequence.n_shared, sequence.trimmed = plan.shared, plan.unread
    sequence.own_from = min(sequence.own_from, plan.shared, sequence.own_from if parent is None else parent.own_from)
    if state.config.groups:
        _fill_tables(store, sequence, plan)
    else:
        store.append_fresh_blocks(plan.fresh, sequence)
    state.sequences.planned.plan([sequence.block_hashes[place] for place in plan.checkpoints], sequence.id)
    state.sequences.start_sequence(sequence, state.worker.steps)
    return Admit(
        sequence.id,
        tuple(sequence.block_table),
        n_shared=plan.shared,
        cached_tokens=plan.shared * state.config.block_size + (part.slots if part is not None else 0),
        miss_reason=plan.match.miss_reason,
        diverged_at=plan.match.diverged_at,
        decision_id=record_grant(state, sequence, plan, evicted, passes, part),
        runs=tuple([tuple(run.table) for run in sequence.runs]) if sequence.runs else (),
        pages=_further_pages(store, sequence) if store.blocks.others else (),
    )


def _fill_tables(store: BlockStore, sequence: Sequence, plan: GrantPlan) -> None:
    """Give a sequence the tables of a plan where the pool has groups; the table of the first one has its hits."""
    first, *others = plan.fresh_blocks
    store.append_fresh_blocks(first, sequence)
    for run, hits, count in zip(sequence.runs, plan.runs, others, strict=True):
        run.table, run.trimmed = [*[TRIMMED] * hits.unread, *hits.blocks], hits.unread
        if run.checkpoints:
            run.asked = plan.asked
            for place in plan.checkpoints:
                store.append_checkpoint(place, sequence, run)
            sequence.has_tail = plan.tail
            if plan.tail:
                store.append_checkpoint(len(sequence.block_table) - 1, sequence, run)
        else:
            store.append_fresh_run(count, sequence, run)


def _further_pages(store: BlockStore, sequence: Sequence) -> tuple[BlockId, ...]:
    """Return the further pages of the blocks that a sequence does not share, by group."""
    tables, others = (sequence.block_table, *(run.table for run in sequence.runs)), store.blocks.others
    return tuple([page for table in tables for block in table[sequence.n_shared :] for page in others.get(block, ())])


# ------------------------------------------------------------ the lease pool


def lease_blocks(state: LedgerState, count: int) -> list[BlockId]:
    """Lease up to `count` blocks, also by evicting cached ones."""
    if count > state.store.pool.available:
        state.give_up_copy_sources()
    count = min(count, state.store.pool.available)
    evicting.evict_until_free(state, count, None)
    return [state.store.pool.lease_block() for _ in range(count)]


def lease_free_blocks(store: BlockStore, target: int) -> list[BlockId]:
    """Lease up to the target from free blocks alone, and leave the watermark free."""
    pool = store.pool
    spare = len(pool.free) - store.config.watermark_blocks
    return [pool.lease_block() for _ in range(min(target - pool.leased, spare))]


# ------------------------------------------------------------ forks
#
# Copy-on-write for sequences of one prompt: full blocks are shared, the partial last block is copied, never shared. A
# fork computes its last known token itself, for the logits. So a copy covers num_tokens - 1 slots. If the copy held the
# last token too, nothing would be left to compute, and the fork would wait for ever.
def _find_shared_blocks(parent: Sequence, limit: int) -> list[BlockId]:
    """Return up to `limit` leading blocks of the parent's block table. The caller checks that they are full."""
    shared = parent.block_table[:limit]
    return shared[: shared.index(TRIMMED)] if TRIMMED in shared else shared


def fork_copy_length(num_tokens: int, block_size: int) -> int:
    """Return how many leading tokens of the fork the copy covers: 0 when its last block holds only the last token."""
    return num_tokens - 1 if (num_tokens - 1) % block_size else 0


def _find_copied_block(parent: Sequence, index: int) -> BlockId | None:
    """Return the parent's block at the place of the fork's partial block; None when it has none or trimmed it."""
    if index >= len(parent.block_table) or parent.block_table[index] == TRIMMED:
        return None
    return parent.block_table[index]


# ------------------------------------------------------------ records


def _await(store: BlockStore, hits: list[BlockId]) -> int:
    """Leave hits on blocks that are not sealed to be counted once they are; return how many there are."""
    unsealed = [block for block in hits if store.blocks.hash[block] is None]
    for block in unsealed:
        store.blocks.awaited[block] = store.blocks.awaited.get(block, 0) + 1
    return len(unsealed)


_MISSES: Final = {
    MissReason.DIVERGED_AT: "never seen from block {} on",
    MissReason.UNRESUMABLE: "K and V of {} blocks are there, and no checkpoint of states, or no room for it",
}


def _reasons(
    sequence: Sequence, plan: GrantPlan, passes: bool, part: PartialCopy | None, lacking: int
) -> tuple[str, ...]:
    """Return in words why there are no more hits, and what else is special about a grant that lacks so many blocks."""
    match = plan.match
    reasons = [match.miss_reason.value]
    if (where := _MISSES.get(match.miss_reason)) is not None:
        reasons.append(where.format(match.diverged_at))
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
        reasons.append("computes all its tokens")
    if sequence.recompute:
        reasons.append("computed again after a preemption")
    return tuple(reasons)


def record_grant(
    state: LedgerState, sequence: Sequence, plan: GrantPlan, evicted: int, passes: bool, part: PartialCopy | None
) -> str:
    """Count an admission, record it, and return the id of the record."""
    match, hits = plan.match, plan.shared
    awaited = _await(state.store, plan.hits[: match.hit_blocks]) if not sequence.recompute else 0
    asked = sequence.takes_hits and state.config.prefix_caching
    queried = min(sequence.num_tokens // state.config.block_size, len(sequence.block_hashes)) if asked else 0
    state.totals.count_admission(queried, match.hit_blocks - awaited, match.miss_reason.value, sequence.recompute)
    lacking = sequence.lacking(state.config.block_size) if sequence.id == state.sequences.partial else 0
    state.totals.chunked_grants += bool(lacking)
    if part is not None and not sequence.recompute:
        state.totals.partial_hits += 1
        state.totals.partial_hit_tokens += part.slots
    reasons = _reasons(sequence, plan, passes, part, lacking)
    passed_by, waited = state.sequences.queue.count_admission(sequence), state.clock.monotonic() - sequence.queued_at
    figures = {
        "num_tokens": float(sequence.num_tokens),
        "hit_blocks": float(hits),
        "fresh_blocks": float(plan.fresh),
        "evicted": float(evicted),
        "available": float(state.store.pool.available),
        "waiting": float(state.sequences.waiting),
        "waited_seconds": waited,
        **({"lacking_blocks": float(lacking)} if lacking else {}),
        **({"passes": 1.0} if passes else {}),
        **({"passed_by": float(passed_by)} if passed_by and waited else {}),
        **({"partial_tokens": float(part.slots)} if part is not None else {}),
        **({"checkpoints": float(len(plan.checkpoints))} if plan.checkpoints else {}),
        **({"tails": 1.0} if plan.tail else {}),
    }
    chosen = f"{hits} shared and {plan.fresh} fresh blocks"
    if state.config.groups:
        chosen = f"{hits} shared blocks and {plan.fresh} fresh pages"
    kind = DecisionKind.GRANT
    return state.decisions.record(kind, chosen, sequence, reasons, figures, beneficiary=match.evicted_for)


def record_waits(state: LedgerState, head: Sequence) -> None:
    """Record why the sequences that have joined the queue wait, once for each wait; `head` is admitted next."""
    waiting = [state.sequences.live[each] for each in state.sequences.queue.unexplained]
    state.sequences.queue.unexplained.clear()
    holders, head_needed = _holders(state.sequences), _count_fresh_blocks(state, head)
    for sequence in waiting:
        needed = head_needed if sequence is head else _count_fresh_blocks(state, sequence)
        reason, first = _reason(state, sequence, head)
        _record_wait(state, sequence, (reason.value, first), (needed, head_needed), holders)


def _record_wait(
    state: LedgerState,
    sequence: Sequence,
    why: tuple[str, str],
    needed: tuple[int, int],
    holders: tuple[Candidate, ...] = (),
) -> None:
    """Record that a sequence waits: the reason and whom it waits for, the blocks that it and the next one need."""
    (reason, first), (own, of_next) = why, needed
    figures = {
        "needed": float(own),
        "head_needed": float(of_next),
        "available": float(state.store.pool.available),
        "num_blocks": float(state.config.num_blocks),
        "running": float(state.sequences.admitted),
        "waiting": float(state.sequences.waiting),
    }
    kind = DecisionKind.SHORTFALL
    state.decisions.record(kind, "waits", sequence, (reason,), figures, holders, beneficiary=first)


def _reason(state: LedgerState, sequence: Sequence, head: Sequence) -> tuple[ShortfallReason, str]:
    """Return why a sequence waits, and the name of the one that goes first, unless it is this one."""
    if sequence is not head:
        return ShortfallReason.BEHIND, head.name
    return (ShortfallReason.PLACES if state.admission.blocked_by == "places" else ShortfallReason.BLOCKS), ""


def _holders(sequences: SequenceTable) -> tuple[Candidate, ...]:
    """Return the tenants and the requests that hold the most blocks; a shared block counts for its first sequence."""
    blocks: dict[str, int] = {}
    counts: dict[str, int] = {}
    requests: dict[str, int] = {}
    for each in sequences.live.values():
        if each.phase is SequencePhase.WAITING:
            continue
        held = each.own_blocks
        blocks[each.tenant] = blocks.get(each.tenant, 0) + held
        counts[each.tenant] = counts.get(each.tenant, 0) + 1
        requests[each.name] = requests.get(each.name, 0) + held
    tenants = heapq.nlargest(_TENANTS, blocks, key=lambda tenant: (blocks[tenant], tenant))
    greatest = heapq.nlargest(_REQUESTS, requests, key=lambda name: (requests[name], name))
    return (
        *(_tenant(each, blocks[each], counts[each]) for each in tenants),
        *(Candidate(each, terms=(("blocks", float(requests[each])),)) for each in greatest),
    )


def _tenant(name: str, blocks: int, sequences: int) -> Candidate:
    return Candidate(f"{TENANT_CANDIDATE}{name}", terms=(("blocks", float(blocks)), ("sequences", float(sequences))))
