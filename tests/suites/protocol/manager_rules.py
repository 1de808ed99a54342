"""Simpler rules of the manager's cores, and another policy that the protocol allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

from common.contracts.lease import Admit, AttachOk, Copy, Inventory, blocks_before_window
from common.contracts.types import BlockHash, BlockId, SequenceId
from kvmanager.cache.block_pool import FreeBlocks
from kvmanager.cache.eviction.restored import order_after_rebuild
from kvmanager.cache.prefix_cache import PrefixCache
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.contracts.sequence import Sequence as ManagerSequence
from kvmanager.ledger import block_granter, chunked_grants, evicting, grant_plan, preemption, rebuild, report_applier
from kvmanager.ledger.block_store import BlockStore
from kvmanager.ledger.grant_order import Turn, next_turn
from kvmanager.ledger.grant_plan import GrantPlan
from kvmanager.ledger.ledger_state import LedgerState
from kvmanager.ledger.partial_copy import PartialCopy, partial_copy
from kvmanager.ledger.preemption import Exposure
from kvmanager.ledger.registry import WorkerRegistration, WorkerRegistry
from kvmanager.ledger.sequence_table import SequenceTable
from tests.suites.protocol.mutant import Patch

_register, _complete, _deepest_run = PrefixCache.register_block, WorkerRegistry.complete, PrefixCache.find_deepest_run
_live_stalled = SequenceTable.find_stalled
_comes_first, _lease_want = chunked_grants.comes_first, chunked_grants.lease_want
_order_preemption, _entitled_victims = preemption.order_preemption, preemption.entitled_victims
_admit_sequences, _plan_admission = block_granter.admit_sequences, grant_plan.plan_admission
_find_partial_source, _grant_blocks = grant_plan.find_partial_source, block_granter.grant_blocks
_evict_until_free, _release_block_table = evicting.evict_until_free, report_applier.release_block_table
_load_inventory = rebuild.load_inventory


def release_on_the_order(state: LedgerState, victim: ManagerSequence) -> None:
    _order_preemption(state, victim)
    report_applier.requeue_preempted(state, [(victim.id, victim.num_tokens)])


def let_tenants_take_turns(
    sequence: ManagerSequence, running: list[ManagerSequence], exposure: Exposure, blocks: int
) -> list[ManagerSequence]:
    """A tenant without anything takes from any other one, which may then have nothing either."""
    if exposure.shares.count_running(sequence.tenant):
        return _entitled_victims(sequence, running, exposure, blocks)
    return [each for each in running if each.tenant != sequence.tenant]


def leave_pending(store: BlockStore, blocks: Iterable[BlockId]) -> None:
    for block in blocks:
        store.pool.drop_block(block)


def apply_releases_first() -> Patch:
    *others, requeue, finish = report_applier.COLUMNS
    reserve, *rest = others
    return (report_applier, "COLUMNS", (reserve, requeue, finish, *rest))


def count_every_stall(state: LedgerState, stalled: tuple[SequenceId, ...]) -> None:
    state.sequences.stalled = (*state.sequences.stalled, *stalled)


def admit_when_none_ever_stalled(state: LedgerState, most: int | None = None) -> tuple[list[Copy], list[Admit]]:
    return ([], []) if state.sequences.stalled else _admit_sequences(state, most)


def choose_the_source_early(state: LedgerState, sequence: ManagerSequence) -> GrantPlan | None:
    """The source of a copy is chosen when a sequence is first tried, and stays.

    The choice stands in a field that nothing else reads.
    """
    found: Any = sequence.traceparent
    if not isinstance(found, PartialCopy):
        hits = grant_plan.find_match(state.store, sequence).hits
        sequence.traceparent = partial_copy(state.store, sequence, hits, spare=1) or ""  # type: ignore[assignment]
    return _plan_admission(state, sequence)


def take_the_early_source(store: BlockStore, sequence: ManagerSequence, plan: GrantPlan) -> PartialCopy | None:
    found: Any = sequence.traceparent
    whole = len(plan.hits) * store.config.block_size
    if isinstance(found, PartialCopy) and whole + found.slots < sequence.num_tokens:
        return found
    return _find_partial_source(store, sequence, plan)


def expect_the_source(
    state: LedgerState,
    sequence: ManagerSequence,
    plan: GrantPlan,
    passes: bool = False,
    part: PartialCopy | None = None,
) -> Admit:
    """The block into which another one is copied is shared by those that want the source's content."""
    content = state.store.blocks.hash[part.source] if part is not None else None
    granted = _grant_blocks(state, sequence, plan, passes, part)
    if content is not None:
        block = sequence.block_table[len(plan.hits)]
        state.store.cache.forget_pending(block)
        state.store.cache.expect_block(block, content)
    return granted


def keep_the_source(state: LedgerState, sequence: ManagerSequence) -> None:
    """The source stays held when the sequence gives up its block table."""
    source, copying = sequence.copy_source, state.sequences.copying.get(sequence.id)
    sequence.copy_source = None
    _release_block_table(state, sequence)
    sequence.copy_source = source
    if copying is not None:
        state.sequences.copying[sequence.id] = copying


def assume_the_target_is_known(state: LedgerState, inventory: Inventory) -> Iterator[None]:
    yield from _load_inventory(state, inventory)
    state.worker.last_sent_target = 0


def evict_shallowest_first(
    levels: Iterable[list[BlockId]], last_used: Callable[[BlockId], int]
) -> Iterator[list[BlockId]]:
    return order_after_rebuild(list(levels)[::-1], last_used)


def one_block_a_hash(cache: PrefixCache, block: BlockId, key: BlockHash, parent: BlockHash) -> None:
    if key in cache.entries:
        cache.forget_pending(block)
    else:
        _register(cache, block, key, parent)


def publish_beside_a_cached_copy(store: BlockStore, block: BlockId, key: BlockHash, parent: BlockHash) -> None:
    store.cache.register_block(block, key, parent)


def complete_without_reset(manager: WorkerRegistry, registration: WorkerRegistration, inventory: Inventory) -> AttachOk:
    registration.attach = replace(registration.attach, reset=manager.last_reset)
    return _complete(manager, registration, inventory)


def lease_nothing_to_it(_state: LedgerState, _part: ManagerSequence) -> int:
    """What a prompt lacks is never leased."""
    return 0


def forget_who_lacks_blocks(_sequences: Iterable[ManagerSequence], _block_size: int) -> None:
    """A rebuild takes each sequence that runs for one that has all blocks of its prompt."""


def see_nobody_lacking(_sequences: SequenceTable) -> None:
    """Whether a prompt already runs with a part of its blocks is not looked at."""


def admit_beside_stalled(whose: Callable[[Turn], bool]) -> Callable[..., tuple[list[Copy], list[Admit]]]:
    """Sequences are admitted although others are stalled: `whose` says which."""

    def admit_sequences(state: LedgerState, most: int | None = None) -> tuple[list[Copy], list[Admit]]:
        if not state.sequences.queue or not whose(next_turn(state)):
            return _admit_sequences(state, most)
        stalled, state.sequences.stalled = state.sequences.stalled, ()
        try:
            return _admit_sequences(state, most)
        finally:
            state.sequences.stalled = stalled

    return admit_sequences


def put_the_begun_prompt_before_stalled_ones(sequences: SequenceTable) -> list[SequenceId]:
    """While a begun prompt lacks blocks, no other sequence counts as stalled."""
    return [] if sequences.find_begun_prompt() is not None else _live_stalled(sequences)


def put_an_old_one_before_the_begun_prompt(state: LedgerState, begun: ManagerSequence, of: ManagerSequence) -> bool:
    return not next_turn(state).by_age and _comes_first(state, begun, of)


def let_any_higher_priority_hold_blocks_back(state: LedgerState, begun: ManagerSequence) -> int:
    """A begun prompt gets nothing while a higher priority waits, whosever turn it is."""
    if any(state.sequences.live[each].priority > begun.priority for each in state.sequences.queue.heads()):
        return chunked_grants.left_to_others(state, begun)
    return _lease_want(state, begun)


def hold_no_source(_state: LedgerState, _sequence: ManagerSequence, _block: BlockId) -> None:
    """The source of a copy may be evicted at once."""


def copy_all_known(num_tokens: int, _block_size: int) -> int:
    return num_tokens


def count_by_redis_alone(counter: int = 0, **_: int) -> int:
    return counter + 1


def admit_whole_prompts(config: LedgerConfig, num_tokens: int) -> int:
    return -(-num_tokens // config.block_size)


def expect_the_last_block_too(config: LedgerConfig, num_tokens: int) -> int:
    return num_tokens // config.block_size


# ---------------------------------------------------------------- another policy that the protocol allows


def evict_two_more(state: LedgerState, count: int, beneficiary: ManagerSequence | None) -> int:
    evicted = _evict_until_free(state, count, beneficiary)
    for _ in range(min(2, len(state.store.pool.cached))):
        evicting.evict_next(state)
    return evicted


def grant_what_was_freed_last(free: FreeBlocks) -> BlockId:
    return free.pop()


EVICTING_AHEAD: tuple[Patch, ...] = (
    (evicting, "evict_until_free", evict_two_more),
    (FreeBlocks, "popleft", grant_what_was_freed_last),
)
"""With today's order of free blocks no child ever outlives its parent at the worker; with this one it does."""


def reach_back_too_little(config: LedgerConfig, hits: int) -> int:
    """A window is taken to end one token later than it does."""
    return blocks_before_window(hits * config.block_size + 1, config.window, config.block_size)


def run_of_any_blocks(
    cache: PrefixCache,
    block_hashes: Items[BlockHash],
    limit: int,
    unread: Callable[[int], int],
    missing: list[int] | None = None,
) -> tuple[int, list[BlockId]]:
    """Blocks behind empty places need not be sealed."""
    entries = cache.entries
    cache.entries = entries | cache.pending
    try:
        return _deepest_run(cache, block_hashes, limit, unread, missing)
    finally:
        cache.entries = entries
