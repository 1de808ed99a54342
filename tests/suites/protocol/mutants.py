"""Simpler rules that fail. Each mutant overrides one rule of the real cores, or of an edge, and a search must notice.

    python -m tests.suites.protocol.mutants

prints the table: which search killed which mutant, by which invariant, after how many states or steps.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from common.lease import Admit, Copy, GrantBatch, Inventory
from common.types import BlockHash, BlockId, SequenceId, SequencePhase
from gpuworker.core.block_states import BlockStates, Content
from gpuworker.core.lease_agent import LeaseAgent
from gpuworker.core.lease_session import LeaseSession
from gpuworker.core.outcomes import Applied
from gpuworker.core.report_builder import SessionState
from gpuworker.core.sequence import Sequence as WorkerSequence
from gpuworker.core.step_scheduler import Composition, StepScheduler
from kvmanager.core import epochs, fork
from kvmanager.core.block import Block
from kvmanager.core.block_granter import BlockGranter
from kvmanager.core.config import LedgerConfig
from kvmanager.core.eviction import EvictionOrder, Restored
from kvmanager.core.free_list import FreeList
from kvmanager.core.ledger_state import LedgerState
from kvmanager.core.manager import Manager
from kvmanager.core.policies import LedgerPolicies
from kvmanager.core.preemption import PreemptionPolicy
from kvmanager.core.prefix_cache import PrefixCache
from kvmanager.core.rebuild import InventoryLoader
from kvmanager.core.report_applier import ReportApplier
from kvmanager.core.sequence import Sequence as ManagerSequence
from tests.suites.protocol.index import Index
from tests.suites.protocol.scenario import Scenario
from tests.suites.protocol.scenarios import ALL_FAULTS, LARGE, TINY
from tests.suites.protocol.search import Found, Pace, exhaust, walk
from tests.suites.protocol.state import Link, ModelManager
from tests.suites.protocol.world import World

Patch = tuple[Any, str, Any]
STEADY, HASTY = Pace(150, 0.06), Pace(150, 0.1)


@dataclass(frozen=True, slots=True)
class Exhaustive:
    """Every state of a tiny world, up to a number of them."""

    scenario: str
    max_states: int = 30_000

    def run(self) -> Found:
        return exhaust(TINY[self.scenario], self.max_states, peace_every=5)

    def shortened(self) -> Exhaustive:
        """Return the same search, about as long as it needs to kill."""
        return replace(self, max_states=4_000)

    def __str__(self) -> str:
        return f"exhaustive: {self.scenario}"


@dataclass(frozen=True, slots=True)
class Walks:
    """Random walks through a larger world, from one seed on."""

    scenario: str
    first_seed: int = 0
    walks: int = 400
    faults: tuple[str, ...] = tuple(ALL_FAULTS)
    pace: Pace = STEADY

    def shortened(self) -> Walks:
        """Return the same search, about as long as it needs to kill."""
        return replace(self, walks=50)

    @property
    def world(self) -> Scenario:
        faults = {kind: limit for kind, limit in ALL_FAULTS.items() if kind in self.faults}
        return replace(LARGE[self.scenario], max_faults=12, faults=faults)

    def run(self) -> Found:
        steps, found = 0, Found()
        for seed in range(self.first_seed, self.first_seed + self.walks):
            found = walk(self.world, seed, self.pace)
            steps += found.steps
            if found.violation is not None:
                break
        found.steps = found.states = steps
        return found

    def __str__(self) -> str:
        return f"walks: {self.scenario}"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One simpler rule: what it overrides, the search that kills it, and the invariants by which it may die."""

    name: str
    rule: str
    patches: tuple[Patch, ...]
    search: Exhaustive | Walks
    dies_by: tuple[str, ...]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the simpler rule during the block."""
        with ExitStack() as stack:
            for owner, attribute, value in self.patches:
                stack.enter_context(mock.patch.object(owner, attribute, value))
            yield

    def run(self) -> Found:
        """Search with the simpler rule."""
        with self.applied():
            return self.search.run()


# ---------------------------------------------------------------- rules of the worker

_admit, _inventory = LeaseAgent._admit, LeaseAgent.inventory
_take, _leave_if_idle = StepScheduler._take, LeaseAgent._leave_if_idle


def reset_only_when_it_waits(agent: LeaseAgent, admit: Admit, copied: frozenset[BlockId]) -> bool:
    sequence = agent._sequences.get(admit.sequence)
    return sequence is not None and sequence.phase is SequencePhase.WAITING and _admit(agent, admit, copied)


def wait_for_the_filler(scheduler: StepScheduler, sequence: WorkerSequence, room: int, step: Composition) -> int:
    """What an admission counted as shared is left to the sequence that was to fill it."""
    return 0 if sequence.num_computed_tokens < (sequence.cached_tokens or 0) else _take(scheduler, sequence, room, step)


def report_the_release_at_once(agent: LeaseAgent, sequence: WorkerSequence) -> None:
    if sequence.phase is SequencePhase.DRAINING_FINISH and sequence.in_flight:
        agent._report.finished(sequence.id, sequence.reason)
    else:
        _leave_if_idle(agent, sequence)


def apply_what_was_buffered(session: LeaseSession, _number: int, batch: GrantBatch) -> Applied | None:
    return session.agent.apply(batch) if session.open else None


def accept_any_manager(session: LeaseSession, _epoch: int) -> bool:
    return True


def leave_out_draining(agent: LeaseAgent) -> Inventory:
    whole, phases = _inventory(agent), (SequencePhase.WAITING, SequencePhase.RUNNING)
    return replace(whole, sequences=tuple(each for each in whole.sequences if each.phase in phases))


def adopt_orphans(_blocks: BlockStates, content: Content, index: dict[BlockHash, int]) -> int | None:
    return -1 if content.parent is None else index.get(content.parent, -1)


def keep_the_claim_until_bound(blocks: BlockStates, block: BlockId) -> None:
    blocks.pool.append(block)


def copy_what_will_be_there(blocks: BlockStates, _src: BlockId, dst: BlockId, slots: int) -> None:
    blocks.drop_claim(dst)
    blocks.fill[dst] = slots


def keep_content(agent: LeaseAgent) -> None:
    """Pending report content survives into the next session."""
    agent._report.state = SessionState.DETACHED


def attach_without_a_target(agent: LeaseAgent, _lease_target: int) -> None:
    agent._report.state = SessionState.OPEN


def nothing(*_: Any) -> None:
    """The rule is left out."""


def reuse_ids(world: World) -> SequenceId:
    return next(SequenceId(n) for n in range(99) if n not in world.agent._sequences)


# ---------------------------------------------------------------- rules of the manager

_register = PrefixCache.register


def obey(**policies: Any) -> Patch:
    """Return what gives every ledger of the model these policies in place of the real ones."""
    return (World, "policies", LedgerPolicies(**policies))


class ReleasesOnTheOrder(PreemptionPolicy):
    def order(self, state: LedgerState, victim: ManagerSequence) -> None:
        super().order(state, victim)
        ReportApplier().requeue(state, [(victim.id, victim.num_tokens)])


class LeavesPending(ReportApplier):
    def release(self, state: LedgerState, block_id: BlockId) -> None:
        state.block_pool.drop(state.block_pool.blocks[block_id])


class ReleasesFirst(ReportApplier):
    def __init__(self) -> None:
        super().__init__()
        reserve, bind, seal, trim, take_back, requeue, finish = self.columns
        self.columns = (reserve, requeue, finish, bind, seal, trim, take_back)


class CountsEveryStall(ReportApplier):
    def stall(self, state: LedgerState, stalled: tuple[SequenceId, ...]) -> None:
        state.stalled = (*state.stalled, *stalled)


class AdmitsWhenNoneEverStalled(BlockGranter):
    def admit(self, state: LedgerState) -> tuple[list[Copy], list[Admit]]:
        return ([], []) if state.stalled else super().admit(state)


class AssumesTheTargetIsKnown(InventoryLoader):
    def load(self, state: LedgerState, inventory: Inventory) -> None:
        super().load(state, inventory)
        state.last_sent_target = 0


class EvictsShallowestFirst(InventoryLoader):
    def eviction_order(self, restored: list[Restored]) -> list[BlockId]:
        return [each.block for each in sorted(restored, key=lambda each: (each.depth, each.last_used))]


def one_block_a_hash(cache: PrefixCache, block: Block, key: BlockHash, parent: BlockHash) -> None:
    if key in cache.entries:
        cache.forget_pending(block)
    else:
        _register(cache, block, key, parent)


def copy_all_known(num_tokens: int, _block_size: int) -> int:
    return num_tokens


def count_by_redis_alone(counter: int = 0, **_: int) -> int:
    return counter + 1


def never(*_: Any) -> bool:
    return False


def always(*_: Any) -> bool:
    return True


def expect_the_last_block_too(config: LedgerConfig, num_tokens: int) -> int:
    return num_tokens // config.block_size


# ---------------------------------------------------------------- another policy that the protocol allows

_popleft = FreeList.popleft


class EvictsTwoMore(BlockGranter):
    def make_free(self, state: LedgerState, count: int, beneficiary: ManagerSequence | None) -> int:
        evicted = super().make_free(state, count, beneficiary)
        for _ in range(min(2, len(state.block_pool.cached))):
            self.evict(state)
        return evicted


def grant_what_was_freed_last(free: FreeList) -> BlockId:
    if isinstance(free, EvictionOrder):
        return _popleft(free)
    newest = list(free)[-1]
    free.remove(newest)
    return newest


EVICTING_AHEAD: tuple[Patch, ...] = (
    obey(granter=EvictsTwoMore()),
    (FreeList, "popleft", grant_what_was_freed_last),
)
"""With today's order of free blocks no child ever outlives its parent at the worker; with this one it does."""

# ---------------------------------------------------------------- edges

_lose, _connect = World._lose, World.connect


def break_without_loss_of_session(_world: World, link: Link) -> None:
    link.up, link.to_manager, link.to_worker = False, (), ()


def resume(world: World, manager: int) -> bool:
    """Go on with the old session where both sides still have it; what was in the queues is lost."""
    old = world.links[-1] if world.links else None
    if old is None or old.served is None or old.manager != manager or not world.worker.open:
        return _connect(world, manager)
    old.up = True
    return True


def keep_the_generation(_world: World, manager: ModelManager) -> None:
    session = manager.session()
    if session is not None and session.ready:
        manager.publisher.restart(1, session.ledger.index_snapshot())


def no_jump(_world: World) -> int:
    return 0


CALM = ("cancel",)

MUTANTS = (
    Mutant(
        "1",
        "a dropped admit drops the resets of its blocks too",
        ((LeaseAgent, "_admit", reset_only_when_it_waits),),
        Walks("families", faults=CALM, pace=HASTY),
        ("I3",),
    ),
    Mutant(
        "2",
        "a sharer waits for the sequence named as filler",
        ((StepScheduler, "_take", wait_for_the_filler),),
        Exhaustive("cancel"),
        ("I10",),
    ),
    Mutant(
        "3",
        "a release is reported while a step of the sequence is in flight",
        ((LeaseAgent, "_leave_if_idle", report_the_release_at_once),),
        Exhaustive("cancel"),
        ("I2", "I4"),
    ),
    Mutant(
        "4",
        "commands buffered before a break are applied after it",
        ((LeaseSession, "receive", apply_what_was_buffered),),
        Exhaustive("break"),
        ("I2", "I3", "I4"),
    ),
    Mutant(
        "5",
        "the worker obeys two managers",
        ((LeaseSession, "receive", apply_what_was_buffered), (LeaseSession, "accepts_epoch", accept_any_manager)),
        Exhaustive("hand_over"),
        ("I2", "I3", "I4"),
    ),
    Mutant(
        "6",
        "draining sequences are missing from the inventory",
        ((LeaseAgent, "inventory", leave_out_draining),),
        Exhaustive("break_cancel"),
        ("I2", "I3", "I4"),
    ),
    Mutant(
        "7",
        "cached blocks whose parent is missing are adopted",
        ((BlockStates, "parent_index", adopt_orphans), *EVICTING_AHEAD),
        Walks("mixed"),
        ("I5",),
    ),
    Mutant(
        "8",
        "a leased, unbound block keeps its content",
        ((BlockStates, "lease", keep_the_claim_until_bound),),
        Walks("mixed"),
        ("I4",),
    ),
    Mutant(
        "9",
        "a victim's blocks are granted again on the order, not on the report",
        (obey(preemption=ReleasesOnTheOrder()),),
        Exhaustive("pressure"),
        ("I2", "I3", "I4"),
    ),
    Mutant(
        "10",
        "a freed block stays pending",
        (obey(reports=LeavesPending()),),
        Exhaustive("cancel"),
        ("I1", "I8"),
    ),
    Mutant(
        "11",
        "a slot number that is used again names the sequence",
        ((World, "new_sequence_id", reuse_ids), (LeaseAgent, "_check_id", nothing)),
        Exhaustive("cancel"),
        ("I2", "I3", "I4"),
    ),
    Mutant(
        "12",
        "a copy counts slots that its source has not filled yet",
        ((BlockStates, "copy", copy_what_will_be_there),),
        Exhaustive("fork"),
        ("I3",),
    ),
    Mutant(
        "13",
        "a session is resumed after a break",
        ((World, "_lose", break_without_loss_of_session), (World, "connect", resume)),
        Exhaustive("break"),
        ("I2", "I8", "I10"),
    ),
    Mutant(
        "14a",
        "report content is kept across a new attach",
        ((LeaseAgent, "detach", keep_content),),
        Exhaustive("break"),
        ("I2", "I4"),
    ),
    Mutant(
        "14b",
        "reports of an old session that are still queued are applied",
        ((Manager, "current", always),),
        Exhaustive("break"),
        ("I2", "I4"),
    ),
    Mutant(
        "15",
        "releases are applied before the binds and seals of their report",
        (obey(reports=ReleasesFirst()),),
        Exhaustive("pressure"),
        ("I2",),
    ),
    Mutant(
        "16",
        "stalls are counted and the count sticks",
        (obey(reports=CountsEveryStall(), granter=AdmitsWhenNoneEverStalled()),),
        Exhaustive("pressure"),
        ("I10",),
    ),
    Mutant(
        "17",
        "the lease target is sent only when it changes, also after a rebuild",
        (obey(loader=AssumesTheTargetIsKnown()), (LeaseAgent, "attached", attach_without_a_target)),
        Exhaustive("break_stop"),
        ("I8",),
    ),
    Mutant(
        "18",
        "the worker never gives leases back",
        ((LeaseAgent, "_return_excess", nothing),),
        Exhaustive("cancel"),
        ("I8", "I10"),
    ),
    Mutant(
        "19",
        "a fork's copy covers the last known token",
        ((LeaseAgent, "_uncover_last_known", nothing), (fork, "copy_length", copy_all_known)),
        Exhaustive("fork"),
        ("I10",),
    ),
    Mutant(
        "20",
        "the epoch comes from the counter in Redis alone",
        (
            (epochs, "next_epoch", count_by_redis_alone),
            (epochs, "must_rise", never),
            (World, "random_jump", no_jump),
        ),
        Walks("mixed"),
        ("I10",),
    ),
    Mutant(
        "21",
        "one block a hash",
        ((PrefixCache, "register", one_block_a_hash),),
        Walks("sharers", faults=CALM),
        ("I5",),
    ),
    Mutant(
        "22",
        "after a rebuild the order of eviction is not deepest first",
        (obey(loader=EvictsShallowestFirst()),),
        Walks("mixed"),
        ("I5",),
    ),
    Mutant(
        "23",
        "a rebuild keeps the generation",
        ((World, "republish", keep_the_generation),),
        Walks("mixed"),
        ("I5", "I6"),
    ),
    Mutant(
        "24",
        "index writes are not fenced",
        ((Index, "check", nothing),),
        Exhaustive("index"),
        ("I5", "I6"),
    ),
    Mutant(
        "26",
        "the block of the last known token may be shared before it is sealed",
        ((LedgerConfig, "hits_of", expect_the_last_block_too),),
        Exhaustive("nested_senior"),
        ("I10",),
    ),
    Mutant(
        "27",
        "after a wipe the next epoch is the highest known plus one",
        ((World, "random_jump", no_jump),),
        Walks("mixed"),
        ("I5", "I6"),
    ),
)


def main() -> None:
    """Print the table; the exit status counts survivors."""
    write = sys.stdout.write
    write(f"{'mutant':7}{'killed by':28}{'invariant':11}{'states':>8}{'steps':>9}{'seconds':>9}  rule\n")
    survivors = 0
    for mutant in MUTANTS:
        started = time.perf_counter()
        found = mutant.run()
        seconds = time.perf_counter() - started
        survivors += found.killed_by not in mutant.dies_by
        how = f"{mutant.search}" + (f", seed {found.seed}" if found.seed is not None else "")
        died = found.killed_by or "SURVIVES"
        write(f"{mutant.name:7}{how:28}{died:11}{found.states:8}{found.steps:9}{seconds:9.2f}  {mutant.rule}\n")
        sys.stdout.flush()
    sys.exit(survivors)


if __name__ == "__main__":
    main()
