"""A ledger from an inventory alone: what is registered, what is refused, and what is evicted first after it."""

from __future__ import annotations

import random
from typing import Any, get_args

import pytest

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import CachedBlock, CachedBlocks, Inventory, InventorySequence
from common.contracts.types import TRIMMED, BlockHash, BlockId, SequenceId, SequencePhase
from kvmanager.contracts.index_events import Cleared
from kvmanager.contracts.ledger_config import EvictionName
from kvmanager.ledger.evicting import evict_next
from kvmanager.ledger.ledger import Ledger
from kvmanager.ledger.rebuild import STEP_BLOCKS
from tests.support.kvmanager.fake_worker import FakeWorker
from tests.support.kvmanager.index_replica import IndexReplica
from tests.support.kvmanager.ledgers import (
    EMPTY,
    admit,
    block_table,
    copies,
    finish,
    hashes,
    make_ledger,
    play,
    prompt,
    reserve,
    run_through,
)

HASHES = hashes(prompt(48))
OTHER = hashes(prompt(48, start=700))
RUNNING, WAITING = SequencePhase.RUNNING, SequencePhase.WAITING


def cached(block: int, key: BlockHash, parent: int = -1, last_used: int = 0) -> CachedBlock:
    return CachedBlock(BlockId(block), key, parent, last_used)


def live(number: int, length: int, blocks: tuple[int, ...], phase: SequencePhase = RUNNING, **options: Any) -> Any:
    options.setdefault("max_len", 60)
    entry = reserve(number, prompt(length), **options)
    return InventorySequence(entry, phase, arrival=number, block_table=tuple(map(BlockId, blocks)))


def rebuilt(num_blocks: int, **columns: Any) -> Ledger:
    ledger = make_ledger(num_blocks)
    ledger.rebuild(Inventory(**columns))
    ledger.check_invariants()
    return ledger


def test_block_tables_pool_and_cached_blocks_are_taken_over() -> None:
    cached_blocks = (cached(0, HASHES[0]), cached(1, HASHES[1], 0), cached(5, OTHER[0]))
    ledger = rebuilt(8, sequences=(live(1, 40, (0, 1, 2)),), pool=(3, 4), cached_blocks=cached_blocks)
    pool = ledger.pool_counts()
    assert (pool.free, pool.leased, pool.in_use, pool.cached, pool.running) == (2, 2, 3, 1, 1)
    assert block_table(ledger, 1) == (0, 1, 2)
    assert admit(ledger, reserve(2, prompt(33)))[0].block_table == (0, 1, 6)


def test_what_was_there_before_is_forgotten() -> None:
    ledger = make_ledger(8)
    run_through(ledger, 1, prompt(48))
    admit(ledger, reserve(2, prompt(20, start=90)), reserve(3, prompt(128)))
    ledger.rebuild(EMPTY)
    ledger.check_invariants()
    pool = ledger.pool_counts()
    assert (pool.free, pool.running, pool.waiting, len(ledger.state.store.cache.entries)) == (8, 0, 0, 0)


def test_a_cached_block_without_a_registered_parent_is_not_registered() -> None:
    cached_blocks = (cached(0, HASHES[0]), cached(1, HASHES[1], 0), cached(2, OTHER[1], -2), cached(3, OTHER[2], 2))
    ledger = rebuilt(5, cached_blocks=cached_blocks)
    assert list(ledger.state.store.pool.cached) == [1, 0]
    assert list(ledger.state.store.pool.free) == [2, 3, 4]


def test_a_block_of_a_block_table_is_not_registered_behind_another_tables_block() -> None:
    """A reset of the cache came while a sequence shared block 4: the worker claims the sequence's second block alone.

    Block 0 has what block 4 has. As its child, block 1 would lose its parent when block 0 is evicted.
    """
    cached_blocks = (cached(0, HASHES[0]), cached(1, HASHES[1], 0))
    ledger = rebuilt(8, sequences=(live(1, 40, (4, 1, 2)),), cached_blocks=cached_blocks)
    assert [ledger.state.store.blocks.hash[block] for block in (0, 1, 4)] == [HASHES[0], None, None]
    assert (ledger.pool_counts().cached, ledger.pool_counts().in_use) == (1, 3)


def test_after_a_rebuild_the_deepest_are_evicted_first_then_the_longest_unused() -> None:
    cached_blocks = (
        cached(0, HASHES[0], last_used=9),
        cached(1, HASHES[1], 0, last_used=9),
        cached(2, HASHES[2], 1, last_used=9),
        cached(3, OTHER[0], last_used=1),
        cached(4, OTHER[1], 3, last_used=1),
    )
    ledger = rebuilt(5, cached_blocks=cached_blocks)
    assert list(ledger.state.store.pool.cached) == [2, 4, 1, 3, 0]


def test_draining_sequences_keep_their_blocks_until_their_report() -> None:
    sequences = (
        live(1, 20, (0, 1), SequencePhase.DRAINING_FINISH),
        live(2, 20, (2, 3), SequencePhase.DRAINING_PREEMPT),
    )
    ledger = rebuilt(4, sequences=sequences)
    assert (ledger.pool_counts().free, ledger.pool_counts().in_use, ledger.pool_counts().preempting) == (0, 4, 1)
    finish(ledger, 1)
    batch = play(ledger, preempted=((2, 21),))
    assert batch is not None
    assert [granted.sequence for granted in batch.admit] == [2]


def test_waiting_sequences_queue_by_priority_and_their_old_arrival() -> None:
    sequences = tuple(live(number, 20, (), WAITING, priority=number // 3) for number in (3, 2, 1))
    ledger = rebuilt(8, sequences=sequences)
    assert list(ledger.state.sequences.queue) == [3, 1, 2]
    batch = ledger.schedule()
    assert batch is not None
    assert [granted.sequence for granted in batch.admit] == [3, 1, 2]


def test_a_waiting_sequence_beyond_the_pool_is_refused_again() -> None:
    ledger = rebuilt(2, sequences=(live(1, 40, (), WAITING),))
    batch = ledger.schedule()
    assert batch is not None
    assert batch.cancel == (1,)


def test_unsealed_blocks_of_prompts_are_pending_again_but_no_generated_ones() -> None:
    grown = InventorySequence(
        reserve(1, prompt(70), max_len=90, block_hashes=hashes(prompt(48))), RUNNING, 0, tuple(map(BlockId, range(5)))
    )
    ledger = rebuilt(8, sequences=(grown,), cached_blocks=(cached(0, HASHES[0]),))
    assert ledger.state.store.cache.pending == {HASHES[1]: 1, HASHES[2]: 2}


def test_generated_blocks_that_are_sealed_after_a_rebuild_are_registered() -> None:
    tokens = prompt(70)
    grown = InventorySequence(
        reserve(1, tokens, max_len=90, block_hashes=hashes(tokens)[:1]), RUNNING, 0, tuple(map(BlockId, range(5)))
    )
    cached_blocks = (cached(0, hashes(tokens)[0]), cached(1, hashes(tokens)[1], 0))
    ledger = rebuilt(8, sequences=(grown,), cached_blocks=cached_blocks)
    play(ledger, seal=((2, hashes(tokens)[2]), (3, hashes(tokens)[3])))
    assert ledger.pool_counts().totals.ignored_seals == 0
    assert ledger.look_up_prompt(hashes(tokens), 70).hit_blocks == 4


def test_the_worker_keeps_its_runway_until_its_first_report_says_more() -> None:
    ledger = rebuilt(8, sequences=(live(1, 16, (0,), max_len=128),), pool=(1, 2, 3))
    batch = ledger.schedule()
    assert batch is not None
    assert (batch.lease_target, batch.lease) == (3, ())


def test_a_pool_that_nobody_needs_is_called_back() -> None:
    ledger = rebuilt(8, pool=(1, 2, 3))
    batch = ledger.schedule()
    assert batch is not None
    assert batch.lease_target == 0


def test_a_rebuild_leaves_a_gap_that_leads_followers_to_a_snapshot() -> None:
    """A million blocks make no million events."""
    ledger, replica = make_ledger(8), IndexReplica()
    run_through(ledger, 1, prompt(17))
    assert replica.apply(ledger.drain_index_events())
    ledger.rebuild(
        Inventory(
            (live(1, 20, (4, 5), block_hashes=OTHER[:1]),), cached_blocks=(cached(4, OTHER[0]), cached(2, OTHER[1], 0))
        )
    )
    events = ledger.drain_index_events()
    assert events == (Cleared(2),)
    assert replica.apply(events)
    finish(ledger, 1)
    run_through(ledger, 2, prompt(17, start=90))
    assert not replica.apply(ledger.drain_index_events())
    replica.load(ledger.index_snapshot())
    assert set(replica.depths) == {OTHER[0], OTHER[1], hashes(prompt(17, start=90))[0]}


def test_trimmed_places_stay_trimmed() -> None:
    ledger = make_ledger(8, 4, window=4)
    entry = InventorySequence(reserve(1, prompt(10), 20, block_size=4), RUNNING, 0, (TRIMMED, BlockId(3), BlockId(5)))
    ledger.rebuild(Inventory((entry,)))
    play(ledger, trim=((1, 2),))
    assert block_table(ledger, 1) == (TRIMMED, TRIMMED, 5)
    finish(ledger, 1)
    assert ledger.pool_counts().free == 8


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"pool": (1, 1)}, "in the lease pool although it is leased"),
        ({"pool": (0,), "sequences": (live(1, 20, (0, 1)),)}, "in the lease pool although it is in_use"),
        ({"pool": (8,)}, "not one of the 8"),
        ({"sequences": (live(1, 20, (0, 1)), live(1, 20, (2, 3)))}, "reserved twice"),
        ({"sequences": (live(1, 20, (0, 1)), live(2, 20, (1, 2)))}, "index 1 in one block table and 0 in another"),
        ({"sequences": (live(1, 20, (0, 1, 2, 3, 4)),)}, "a block table of 5 blocks; at most 4"),
        ({"pool": (0,), "cached_blocks": (cached(0, HASHES[0]),)}, "cached block 0 is leased"),
        ({"cached_blocks": (cached(0, HASHES[0]), cached(0, HASHES[1], 0))}, "stands twice in the inventory"),
        (
            {"sequences": (live(1, 20, (0, 1)),), "cached_blocks": (cached(0, OTHER[0]),)},
            "another hash in the inventory",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_inventory_that_contradicts_itself_is_refused(columns: dict[str, Any], words: str) -> None:
    with pytest.raises(ProtocolViolation, match=words):
        rebuilt(8, **columns)


@pytest.mark.searches
@pytest.mark.parametrize("seed", range(6))
def test_rebuilding_at_any_time_gives_the_state_that_was_there(seed: int) -> None:
    """Block tables, leases and the prefix map survive; free and cached blocks may change places in their orders."""
    pick = random.Random(seed)
    ledger, worker = make_ledger(30, 4), FakeWorker(30, 4)
    for _ in range(300):
        if len(worker.live) < 8 and pick.random() < 0.4:
            tokens = [pick.randrange(2) for _ in range(pick.randrange(1, 30))]
            worker.submit(tokens, len(tokens) + pick.randrange(40))
        worker.step()
        ledger.apply_report(worker.report())
        worker.deliver(ledger.schedule())
        twin = make_ledger(30, 4)
        worker.drop_report()
        twin.rebuild(worker.inventory())
        twin.check_invariants()
        assert {key: set(blocks) for key, blocks in copies(twin).items()} == {
            key: set(blocks) for key, blocks in copies(ledger).items()
        }
        assert twin.state.store.blocks.state == ledger.state.store.blocks.state
        assert [(each.id, each.block_table) for each in twin.state.sequences.live.values()] == [
            (each.id, each.block_table)
            for each in sorted(ledger.state.sequences.live.values(), key=lambda each: each.arrival)
        ]
        assert list(twin.state.sequences.queue) == list(ledger.state.sequences.queue)
    assert SequenceId(0) not in worker.live


def large_inventory(count: int, chain: int, pick: random.Random) -> Inventory:
    """Return an idle worker's inventory of so many cached blocks, in chains."""
    return Inventory(
        cached_blocks=CachedBlocks(
            [BlockId(block) for block in range(count)],
            [BlockHash(block.to_bytes(16, "little")) for block in range(1, count + 1)],
            [block - 1 if block % chain else -1 for block in range(count)],
            [pick.randrange(1 << 40) for _ in range(count)],
        )
    )


@pytest.mark.searches
@pytest.mark.parametrize("chain", [1, 32])
def test_no_step_of_a_large_rebuild_handles_many_blocks(chain: int) -> None:
    count = 100_000
    ledger = make_ledger(count + 5)
    inventory = large_inventory(count, chain, random.Random(7))
    registered = ordered = free = steps = 0
    for _ in ledger.rebuild_in_steps(inventory):
        state, steps = ledger.state, steps + 1
        assert len(state.store.cache.entries) - registered <= STEP_BLOCKS
        assert len(state.store.pool.cached) - ordered <= 5 * STEP_BLOCKS
        assert len(state.store.pool.free) - free <= STEP_BLOCKS
        registered, ordered, free = (
            len(state.store.cache.entries),
            len(state.store.pool.cached),
            len(state.store.pool.free),
        )
    assert (registered, ordered, free) == (count, count, 5)
    assert steps >= 3 * count // STEP_BLOCKS
    ledger.check_invariants()
    by_use = sorted(range(count), key=lambda block: (-(block % chain), inventory.cached_blocks[block].last_used))
    assert list(ledger.state.store.pool.cached) == by_use


@pytest.mark.parametrize("policy", get_args(EvictionName))
def test_a_policy_takes_restored_blocks_as_if_they_were_released_one_by_one(policy: str) -> None:
    pick = random.Random(3)
    ledgers = [make_ledger(100, eviction=policy) for _ in range(2)]
    for each in ledgers:
        each.rebuild(large_inventory(96, 6, pick))
    order = sorted(range(96), key=lambda block: (-(block % 6), pick.random()))
    at_once, one_by_one = (each.state.store.eviction for each in ledgers)
    for policy_order in (at_once, one_by_one):
        policy_order.empty()
    at_once.restore_blocks(map(BlockId, order))
    for block in order:
        one_by_one.add_block(BlockId(block))
    for each in ledgers:
        each.check_invariants()
    evicted = [[evict_next(each.state) for _ in range(96)] for each in ledgers]
    assert evicted[0] == evicted[1]
