"""Simpler rules of the manager's cores, and another policy that the protocol allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

from common.contracts.lease import Admit, AttachOk, Copy, Inventory, blocks_before_window
from common.contracts.types import BlockHash, BlockId, SequenceId
from kvmanager.cache.block_pool import FreeBlocks
from kvmanager.cache.prefix_cache import PrefixCache
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.contracts.sequence import Sequence as ManagerSequence
from kvmanager.ledger import chunked_grants
from kvmanager.ledger.block_granter import BlockGranter, GrantPlan
from kvmanager.ledger.grant_order import Turn, next_turn
from kvmanager.ledger.ledger_state import LedgerState
from kvmanager.ledger.manager import Manager, WorkerRegistration
from kvmanager.ledger.partial_copy import PartialCopy, partial_copy
from kvmanager.ledger.policies import LedgerPolicies
from kvmanager.ledger.preemption import Exposure, PreemptionPolicy
from kvmanager.ledger.rebuild import InventoryLoader
from kvmanager.ledger.report_applier import ReportApplier
from tests.suites.protocol.mutant import Patch
from tests.suites.protocol.state import State

_register, _complete, _deepest_run = PrefixCache.register, Manager.complete, PrefixCache.deepest_run
_live_stalled, _comes_first, _lease_want = (
    LedgerState.live_stalled,
    chunked_grants.comes_first,
    chunked_grants.lease_want,
)


def obey(**policies: Any) -> Patch:
    """Return what gives every ledger of the model these policies in place of the real ones."""
    return (State, "policies", LedgerPolicies(**policies))


class ReleasesOnTheOrder(PreemptionPolicy):
    def order(self, state: LedgerState, victim: ManagerSequence) -> None:
        super().order(state, victim)
        ReportApplier().requeue(state, [(victim.id, victim.num_tokens)])


class LetsTenantsTakeTurns(PreemptionPolicy):
    def victims(
        self, sequence: ManagerSequence, running: list[ManagerSequence], exposure: Exposure, blocks: int
    ) -> list[ManagerSequence]:
        """A tenant without anything takes from any other one, which may then have nothing either."""
        if exposure.shares.running(sequence.tenant):
            return super().victims(sequence, running, exposure, blocks)
        return [each for each in running if each.tenant != sequence.tenant]


class LeavesPending(ReportApplier):
    def release(self, state: LedgerState, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            state.block_pool.drop(block)


class ReleasesFirst(ReportApplier):
    def __init__(self) -> None:
        super().__init__()
        reserve, bind, seal, parts, copied, trim, take_back, requeue, finish = self.columns
        self.columns = (reserve, requeue, finish, bind, seal, parts, copied, trim, take_back)


class CountsEveryStall(ReportApplier):
    def stall(self, state: LedgerState, stalled: tuple[SequenceId, ...]) -> None:
        state.stalled = (*state.stalled, *stalled)


class AdmitsWhenNoneEverStalled(BlockGranter):
    def admit(self, state: LedgerState, most: int | None = None) -> tuple[list[Copy], list[Admit]]:
        return ([], []) if state.stalled else super().admit(state, most)


class RemembersTheSource(BlockGranter):
    """It chooses the source of a copy when a sequence is first tried, and never looks again.

    The choice stands in a field that nothing else reads.
    """

    def plan(self, state: LedgerState, sequence: ManagerSequence) -> GrantPlan | None:
        found: Any = sequence.traceparent
        if not isinstance(found, PartialCopy):
            found = partial_copy(state, sequence, self._found(state, sequence).hits, spare=1)
            sequence.traceparent = found or ""
        return super().plan(state, sequence)

    def partial_source(self, state: LedgerState, sequence: ManagerSequence, plan: GrantPlan) -> PartialCopy | None:
        found: Any = sequence.traceparent
        whole = len(plan.hits) * state.config.block_size
        if isinstance(found, PartialCopy) and whole + found.slots < sequence.num_tokens:
            return found
        return super().partial_source(state, sequence, plan)


class ExpectsTheSource(BlockGranter):
    """The block into which another one is copied is shared by those that want the source's content."""

    def grant(
        self,
        state: LedgerState,
        sequence: ManagerSequence,
        plan: GrantPlan,
        passes: bool = False,
        part: PartialCopy | None = None,
    ) -> Admit:
        content = state.blocks.hash[part.source] if part is not None else None
        granted = super().grant(state, sequence, plan, passes, part)
        if content is not None:
            block = sequence.block_table[len(plan.hits)]
            state.cache.forget_pending(block)
            state.cache.expect(block, content)
        return granted


class KeepsTheSource(ReportApplier):
    def release_source(self, state: LedgerState, sequence: ManagerSequence) -> None:
        """Leave the source held when the sequence gives up its block table."""


class AssumesTheTargetIsKnown(InventoryLoader):
    def load(self, state: LedgerState, inventory: Inventory) -> Iterator[None]:
        yield from super().load(state, inventory)
        state.last_sent_target = 0


class EvictsShallowestFirst(InventoryLoader):
    def levels(self, by_depth: list[list[BlockId]]) -> Iterable[list[BlockId]]:
        return by_depth


def one_block_a_hash(cache: PrefixCache, block: BlockId, key: BlockHash, parent: BlockHash) -> None:
    if key in cache.entries:
        cache.forget_pending(block)
    else:
        _register(cache, block, key, parent)


def publish_beside_a_cached_copy(state: LedgerState, block: BlockId, key: BlockHash, parent: BlockHash) -> None:
    state.cache.register(block, key, parent)


def complete_without_reset(manager: Manager, registration: WorkerRegistration, inventory: Inventory) -> AttachOk:
    registration.attach = replace(registration.attach, reset=manager.last_reset)
    return _complete(manager, registration, inventory)


def lease_nothing_to_it(_state: LedgerState, _part: ManagerSequence) -> int:
    """What a prompt lacks is never leased."""
    return 0


def forget_who_lacks_blocks(_sequences: Iterable[ManagerSequence], _block_size: int) -> None:
    """A rebuild takes each sequence that runs for one that has all blocks of its prompt."""


def see_nobody_lacking(_state: LedgerState) -> None:
    """Whether a prompt already runs with a part of its blocks is not looked at."""


class AdmitsBesideStalled(BlockGranter):
    """Sequences are admitted although others are stalled: `whose` says which."""

    def __init__(self, whose: Callable[[Turn], bool]) -> None:
        self._whose = whose

    def admit(self, state: LedgerState, most: int | None = None) -> tuple[list[Copy], list[Admit]]:
        if not state.queue or not self._whose(next_turn(state)):
            return super().admit(state, most)
        stalled, state.stalled = state.stalled, ()
        try:
            return super().admit(state, most)
        finally:
            state.stalled = stalled


def put_the_begun_prompt_before_stalled_ones(state: LedgerState) -> list[SequenceId]:
    """While a begun prompt lacks blocks, no other sequence counts as stalled."""
    return [] if state.partly_granted() is not None else _live_stalled(state)


def put_an_old_one_before_the_begun_prompt(state: LedgerState, begun: ManagerSequence, of: ManagerSequence) -> bool:
    return not next_turn(state).by_age and _comes_first(state, begun, of)


def let_any_higher_priority_hold_blocks_back(state: LedgerState, begun: ManagerSequence) -> int:
    """A begun prompt gets nothing while a higher priority waits, whosever turn it is."""
    if any(state.sequences[each].priority > begun.priority for each in state.queue.heads()):
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


class EvictsTwoMore(BlockGranter):
    def make_free(self, state: LedgerState, count: int, beneficiary: ManagerSequence | None) -> int:
        evicted = super().make_free(state, count, beneficiary)
        for _ in range(min(2, len(state.block_pool.cached))):
            self.evict(state)
        return evicted


def grant_what_was_freed_last(free: FreeBlocks) -> BlockId:
    return free.pop()


EVICTING_AHEAD: tuple[Patch, ...] = (
    obey(granter=EvictsTwoMore()),
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
