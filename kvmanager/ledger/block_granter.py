"""The grant policy: which waiting sequence gets which blocks, which blocks are evicted for it, and which are leased."""

from __future__ import annotations

from dataclasses import replace

from common.contracts.hashing import key_of
from common.contracts.lease import Admit, Copy
from common.contracts.types import TRIMMED, BlockId, FrameId, ShortfallReason
from kvmanager.cache.window_match import settled
from kvmanager.contracts.sequence import Run, Sequence
from kvmanager.ledger import (
    backfill,
    checkpoints,
    chunked_grants,
    evicting,
    grant_order,
    grant_plan,
    grant_records,
    transfers,
)
from kvmanager.ledger.backfill import Growth, Reservation
from kvmanager.ledger.block_store import BlockStore
from kvmanager.ledger.grant_plan import GrantPlan
from kvmanager.ledger.ledger_state import LedgerState
from kvmanager.ledger.partial_copy import PartialCopy, learn
from kvmanager.ledger.shares import TenantShares


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
    waiting = state.store.tier is not None or state.store.states is not None
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
        if waiting and _leaves_queue(state, sequence):
            waits += 1
            continue
        plan = grant_plan.plan_admission(state, sequence)
        if plan is None and state.give_up_copy_sources():
            plan = grant_plan.plan_admission(state, sequence)
        if plan is None:
            admission.blocked_by = "capacity"
            break
        grant_order.count_turn(state.admission, turn)
        _admit_sequence(state, sequence, plan, copies, admits, fresh)
    return copies, admits


def _leaves_queue(state: LedgerState, sequence: Sequence) -> bool:
    """Let a sequence leave the queue if something of its prompt is about to be there; return whether it does."""
    if state.store.tier is not None and transfers.await_fetch(state, sequence):
        return True
    return state.store.states is not None and _waits_for_states(state, sequence)


def _waits_for_states(state: LedgerState, sequence: Sequence) -> bool:
    """Let a sequence leave the queue for a planned checkpoint, if that saves it enough; return whether it does."""
    place = _find_awaited_place(state, sequence)
    if place is None:
        return False
    needed = grant_plan.count_fresh_blocks(state, sequence)
    sequence.awaited = True
    state.sequences.queue.remove_sequence(sequence)
    owner = state.sequences.live[state.sequences.planned.wait(sequence.id, sequence.block_hashes[place])]
    grant_records.record_wait(state, sequence, (ShortfallReason.CHECKPOINT.value, owner.name), (needed, needed))
    return True


def _find_awaited_place(state: LedgerState, sequence: Sequence) -> int | None:
    """Return the place of the planned checkpoint for which a sequence is to wait; None: it waits for none."""
    place = checkpoints.find_planned(state, sequence)
    if place is None:
        return None
    found = grant_plan.find_match(state.store, sequence)
    hits = len(found.hits) + len(found.frames)
    return place if checkpoints.is_worth_waiting(state.config, place, hits) else None


def _is_to_wait(state: LedgerState, sequence: Sequence) -> bool:
    """Return whether a sequence that could pass is to wait for a checkpoint, or for the disk, once it has its turn."""
    if state.store.tier is not None and transfers.find_fetch(state, sequence, from_peers=False) is not None:
        return True
    return state.store.states is not None and _find_awaited_place(state, sequence) is not None


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
    size, shared = state.config.block_size, plan.shared
    source = grant_plan.find_fork_source(state, sequence, plan, fresh)
    part = grant_plan.find_partial_source(state.store, sequence, plan) if source is None else None
    admits.append(grant_blocks(state, sequence, plan, passes, part))
    fresh.update(sequence.block_table[shared:])
    if source is not None:
        length = grant_plan.fork_copy_length(sequence.num_tokens, size)
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
    found = grant_plan.find_match(state.store, sequence)
    plan, missing = grant_plan.plan_with_match(state, sequence, found)
    free = plan.fresh - missing
    if (
        sequence.gave_up
        or config.holds_whole(sequence.preemptions)
        or grant_plan.plan_part(config, sequence, plan, free, found.sealed) is None
    ):
        return
    until = _promise_blocks(state, sequence).until
    most = chunked_grants.most_of_part(state, sequence, free, until)
    part = grant_plan.plan_part(config, sequence, plan, most, found.sealed)
    if part is not None:
        grant_order.count_turn(state.admission, turn)
        state.sequences.partial, state.admission.blocked_by = sequence.id, "prompt"
        _admit_sequence(state, sequence, part, copies, admits, set())
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
    if head is None or not config.backfill:
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
        if kept.admits(sequence, now) and _may_pass(state, sequence, growth) and not _is_to_wait(state, sequence):
            plan, missing = grant_plan.plan_with_match(state, sequence, grant_plan.find_match(state.store, sequence))
            if missing <= 0:
                extra = 0
                if config.keeps_states:
                    plan, extra = _bound_states(state, sequence, plan, kept, growth)
                # An earlier admission may have been by age: this one is not.
                sequence.by_age = False
                _admit_sequence(state, sequence, plan, copies, admits, fresh, passes=True)
                growth.add_sequence(sequence, now)
                kept.count_passed(sequence, now, extra)


def _bound_states(
    state: LedgerState, sequence: Sequence, plan: GrantPlan, kept: Reservation, growth: Growth
) -> tuple[GrantPlan, int]:
    """Return the plan of one that passes, and the pages of its checkpoints, which keep the promise too or are left out.

    It gets no tail: that would stay until its end.
    """
    extra = state.config.groups[-1].pages * len(plan.checkpoints)
    if extra and not (kept.admits(sequence, state.worker.steps, extra) and _may_pass(state, sequence, growth, extra)):
        plan, extra = replace(plan, fresh=plan.fresh - extra, checkpoints=(), asked=frozenset()), 0
    return replace(plan, left=0), extra


def make_reservation(state: LedgerState, head: Sequence, old: Reservation | None) -> Reservation:
    """Look when the next sequence will have its blocks."""
    config, now, size = state.config, state.worker.steps, state.config.block_size
    missing = grant_plan.count_missing_blocks(state, head) - state.store.pool.leased
    hits = frozenset[BlockId]()
    if not head.block_table:
        found = grant_plan.find_match(state.store, head)
        hits = frozenset(grant_plan.every_hit(found.hits, found.runs))
    runs = [each for each in backfill.running(state.sequences.live.values()) if each is not head]
    holders = backfill.holders_of(runs, state.store.blocks.refs, hits, now, size)
    promised = backfill.reserved(holders, missing, size, config.runway_slots)
    growth = head.most_held - config.admission_blocks(head.num_tokens)
    return backfill.renewed(old, head, growth, promised, now, state.store.pool.in_use)


def _may_pass(state: LedgerState, sequence: Sequence, growth: Growth, extra: int = 0) -> bool:
    """Return whether a sequence has a place, leaves its tenant within its share, and does not empty the pool.

    It holds `extra` blocks beside those of its tokens.
    """
    sequences, config = state.sequences, state.config
    if sequences.admitted >= config.max_num_seqs:
        return False
    blocks = sequence.most_held + extra
    if len(sequences.tenants) > 1 and TenantShares(config, sequences.tenants).load_of(sequence.tenant, 1, blocks) > 1.0:
        return False
    return growth.fits_blocks(backfill.steps_of(sequence), state.store.pool.available - blocks)


def explain_waits(state: LedgerState) -> None:
    """Record why those that joined the queue and were not admitted wait."""
    if state.sequences.queue.unexplained and state.admission.blocked_by not in ("deferred", "batch"):
        head = state.sequences.find_begun_prompt() if state.admission.blocked_by == "prompt" else None
        head = head or grant_order.next_turn(state).sequence
        grant_records.record_waits(state, head)


def count_places(state: LedgerState, sequence: Sequence) -> int:
    """Return how many sequences may hold a block table if this one is to be among them.

    A tenant at its share or over it leaves some places free, so that the others need not wait for a preemption.
    """
    config, tenants = state.config, state.sequences.tenants
    if len(tenants) > 1 and TenantShares(config, tenants).load_of(sequence.tenant) >= 1.0:
        return config.max_num_seqs - config.spare_places
    return config.max_num_seqs


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
        | left the window      | shared, not computed | loaded from plan.frames, or a       |                       |
        |                      |                      | copied part, then computed slots    |                       |
        |<------------- n_shared = plan.shared, with loaded ones ->|
        |<--------------------------------- block_table ---------------------------------->|
        |<---------------------------------------------- max_blocks -------------------------------------------->|

    Hits, frames, and the block of which a part is copied are held before anything is evicted for the fresh blocks.
    """
    store = state.store
    store.remembered, parent = None, grant_plan.find_fork_parent(state.sequences, sequence)
    if store.states is not None:
        plan = grant_plan.add_tail(state, sequence, plan)
    match = settled(store.cache, state.config, sequence.block_hashes, sequence.num_tokens, plan.match)
    if match is not plan.match:
        plan = replace(plan, match=match)
    for block in grant_plan.every_hit(plan.hits, plan.runs) if plan.runs else plan.hits:
        store.pool.hold_block(block)
    learn(store, sequence, plan.hits)
    if part is not None:
        state.hold_copy_source(sequence, part.source)
    loads = plan.loads
    if loads and store.tier is not None:
        store.tier.hold(loads)
    evicted = evicting.evict_until_free(state, plan.fresh, sequence)
    state.sequences.queue.remove_sequence(sequence)
    sequence.waited += state.clock.monotonic() - sequence.queued_at
    sequence.block_table = [*[TRIMMED] * plan.unread, *plan.hits]
    sequence.n_shared, sequence.trimmed = plan.present, plan.unread
    if plan.frames:
        state.load_frames(sequence, plan.frames)
    sequence.own_from = min(sequence.own_from, plan.present, sequence.own_from if parent is None else parent.own_from)
    if state.config.groups:
        _fill_tables(state, sequence, plan)
    else:
        store.append_fresh_blocks(plan.fresh - len(plan.frames), sequence)
    if loads and store.tier is not None:
        store.tier.release(loads)
    state.sequences.planned.plan([sequence.block_hashes[place] for place in plan.checkpoints], sequence.id)
    state.sequences.start_sequence(sequence, state.worker.steps)
    return Admit(
        sequence.id,
        tuple(sequence.block_table),
        n_shared=plan.shared,
        cached_tokens=plan.shared * state.config.block_size + (part.slots if part is not None else 0),
        miss_reason=plan.match.miss_reason,
        diverged_at=plan.match.diverged_at,
        decision_id=grant_records.record_grant(state, sequence, plan, evicted, passes, part),
        runs=tuple([tuple(run.table) for run in sequence.runs]) if sequence.runs else (),
        pages=_further_pages(store, sequence, plan.shared) if store.blocks.others else (),
        fetched=transfers.fetched_for(state, sequence, plan) if sequence.fetch is not None else None,
    )


def _fill_tables(state: LedgerState, sequence: Sequence, plan: GrantPlan) -> None:
    """Give a sequence the tables of a plan where the pool has groups; the table of the first one has its hits."""
    store, (first, *others) = state.store, plan.fresh_blocks
    store.append_fresh_blocks(first, sequence)
    for run, hits, count in zip(sequence.runs, plan.runs, others, strict=True):
        run.table, run.trimmed = [*[TRIMMED] * hits.unread, *hits.blocks], hits.unread
        for place, frame in hits.frames:
            run.table[place] = _load_into_run(state, sequence, run, place, frame)
        if run.checkpoints:
            run.asked = plan.asked
            for place in plan.checkpoints:
                store.append_checkpoint(place, sequence, run)
            sequence.has_tail = plan.tail
            if plan.tail:
                store.append_checkpoint(len(sequence.block_table) - 1, sequence, run)
        else:
            store.append_fresh_run(count, sequence, run)


def _load_into_run(state: LedgerState, sequence: Sequence, run: Run, place: int, frame: FrameId) -> BlockId:
    """Let a new block of a run get what frames hold. The first group's block of its place is there already."""
    store, block_hash = state.store, sequence.block_hashes[place]
    block, key = state.load_into_run(sequence, run, place, frame), key_of(block_hash, run.group)
    if key in store.cache.entries:
        store.publish_block(block, key, block_hash)
    else:
        before = checkpoints.enter_checkpoint(state, block, block_hash)
        store.publish_new_block(block, key, block_hash, before)
    return block


def _further_pages(store: BlockStore, sequence: Sequence, shared: int) -> tuple[BlockId, ...]:
    """Return the further pages of the blocks behind those that a sequence shares, by group."""
    tables, others = (sequence.block_table, *(run.table for run in sequence.runs)), store.blocks.others
    return tuple([page for table in tables for block in table[shared:] for page in others.get(block, ())])


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
