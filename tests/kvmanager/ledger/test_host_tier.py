"""A ledger with frames of host memory: what an eviction stores, what an admission loads, what the index is told."""

from __future__ import annotations

import pytest

from common.contracts.lease import HOST_REASON, CachedBlock, Inventory, TierCopy
from common.contracts.types import BlockHash, BlockId, DecisionKind, MissReason
from kvmanager.contracts.index_events import Cleared, Removed, Stored
from kvmanager.ledger.ledger import Ledger
from tests.support.kvmanager.ledgers import admit, finish, hashes, make_ledger, play, prompt, reserve, run_through, seal

FIRST, SECOND = prompt(5 * 16 - 1), prompt(5 * 16 - 1, start=500)
"""Four full blocks each, and a part of a fifth."""


def ledger(frames: int = 8, blocks: int = 6) -> Ledger:
    return make_ledger(blocks, host_frames=frames)


def copy(block: int, frame: int, load: bool = False) -> TierCopy:
    return TierCopy(BlockId(block), BlockId(frame), load)


def test_what_is_evicted_is_stored_and_what_is_stored_is_loaded() -> None:
    made = ledger()
    run_through(made, 0, FIRST)
    batch = play(made, reserve=(reserve(1, SECOND),))
    assert batch is not None
    assert batch.tier == (copy(3, 0), copy(2, 1), copy(1, 2)), "leaves first; two of six blocks were free"
    assert batch.admit[0].n_shared == 0
    seal(made, 1, hashes(SECOND))
    finish(made, 1)
    batch = play(made, reserve=(reserve(2, FIRST),))
    assert batch is not None
    (granted,) = batch.admit
    assert (granted.n_shared, granted.cached_tokens, granted.miss_reason) == (4, 64, MissReason.FULL_HIT)
    loads = [each for each in batch.tier if each.load]
    assert [each.frame for each in loads] == [2, 1, 0], "block 0 is still there"
    assert [each.block for each in loads] == list(granted.block_table[1:4])
    stores = [each for each in batch.tier if not each.load]
    assert len(stores) == 3
    assert batch.tier[:3] == tuple(stores), "blocks are emptied before they are loaded"
    totals = made.pool_counts().totals
    assert (totals.host_stores, totals.host_loads) == (6, 3)
    records = [each for each in made.drain_decisions() if each.kind is DecisionKind.GRANT]
    assert dict(records[-1].figures)["host_blocks"] == 3
    assert f"{HOST_REASON}3 of 4 cached blocks are loaded" in records[-1].reasons


def test_a_content_that_a_frame_has_is_stored_once() -> None:
    made = ledger()
    for number, tokens in enumerate((FIRST, SECOND, FIRST, SECOND)):
        run_through(made, number, tokens)
    totals = made.pool_counts().totals
    assert (totals.evictions, totals.host_stores, totals.host_loads) == (9, 6, 6), "three of each leave the pool"


def test_the_index_hears_of_what_neither_blocks_nor_frames_have() -> None:
    made = ledger(frames=2)
    run_through(made, 0, FIRST)
    assert [type(each) for each in made.drain_index_events()] == [Stored] * 4
    play(made, reserve=(reserve(1, SECOND),))
    keys = hashes(FIRST)
    (event,) = made.drain_index_events()
    assert isinstance(event, Removed)
    assert (event.hash, event.depth) == (keys[3], 3), "the third eviction took the frame of the first one"
    assert {key for key, _ in made.index_snapshot().entries} == set(keys[:3])


def test_a_lookup_counts_frames() -> None:
    made = ledger()
    run_through(made, 0, FIRST)
    run_through(made, 1, SECOND)
    found = made.look_up_prompt(hashes(FIRST), len(FIRST))
    assert (found.hit_blocks, found.miss_reason) == (4, MissReason.FULL_HIT)
    assert ledger(frames=0).look_up_prompt(hashes(FIRST), len(FIRST)).hit_blocks == 0


@pytest.mark.parametrize("idle", [True, False])
def test_a_reset_empties_frames(idle: bool) -> None:
    made = ledger()
    run_through(made, 0, FIRST)
    run_through(made, 1, SECOND)
    if not idle:
        admit(made, reserve(2, prompt(8, start=900)))
    made.drain_index_events()
    made.reset_cache(1)
    made.check_invariants()
    batch = made.schedule()
    assert batch is not None
    assert (batch.reset, batch.tier) == (1, ())
    assert made.index_snapshot().entries == ()
    events = made.drain_index_events()
    if idle:
        assert [type(each) for each in events] == [Cleared]
    else:
        gone = [each.hash for each in events if isinstance(each, Removed)]
        assert sorted(gone) == sorted({*hashes(FIRST), *hashes(SECOND)})
    assert made.look_up_prompt(hashes(FIRST), len(FIRST)).hit_blocks == 0


def test_an_inventory_brings_frames_back_behind_blocks() -> None:
    made, keys = ledger(), hashes(FIRST)
    frames = tuple(
        CachedBlock(BlockId(frame), keys[depth], -1, 0, keys[depth - 1], depth) for frame, depth in ((5, 1), (2, 2))
    )
    made.rebuild(Inventory(cached_blocks=(CachedBlock(BlockId(3), keys[0], -1, 0),), frames=frames))
    made.check_invariants()
    assert made.look_up_prompt(keys, len(FIRST)).hit_blocks == 3
    assert {key for key, _ in made.index_snapshot().entries} == set(keys[:3])
    batch = play(made, reserve=(reserve(0, FIRST),))
    assert batch is not None
    assert [(each.frame, each.load) for each in batch.tier] == [(5, True), (2, True)]
    assert batch.admit[0].block_table[0] == 3


def test_a_prompt_that_begins_with_a_part_of_its_blocks_loads_all_but_the_last_of_them() -> None:
    huge = prompt(128, start=500)
    made = make_ledger(10, first_part=32, host_frames=40)
    run_through(made, 0, huge)
    run_through(made, 1, prompt(158, start=5000))
    admit(made, reserve(2, prompt(60), max_len=80))
    (begun,) = admit(made, reserve(3, huge, max_len=136))
    assert (len(begun.block_table), begun.n_shared) == (4, 3), "without frames it begins with four blocks, too"


def test_blocks_that_are_computed_again_are_no_hits_of_frames_for_one_that_computes_all() -> None:
    made = ledger()
    run_through(made, 0, FIRST)
    run_through(made, 1, SECOND)
    (granted,) = admit(made, reserve(2, FIRST, computes_all=True))
    assert granted.n_shared == 0


def test_where_layers_have_windows_or_nothing_is_cached_there_are_no_frames() -> None:
    assert make_ledger(6, host_frames=8, window=32).state.store.tier is None
    assert make_ledger(6, host_frames=8, prefix_caching=False).state.store.tier is None


def test_another_content_with_the_hash_of_a_frame_is_no_hit() -> None:
    made, keys = ledger(), hashes(FIRST)
    run_through(made, 0, FIRST)
    run_through(made, 1, SECOND)
    false = (BlockHash(b"?" * 16), *keys[1:])
    assert made.look_up_prompt(false, len(FIRST)).hit_blocks == 0
