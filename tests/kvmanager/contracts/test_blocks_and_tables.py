"""Which blocks a prompt gets, shares, gives back and grows into."""

from __future__ import annotations

import pytest

from common.contracts.errors import ProtocolViolation
from common.contracts.types import BlockHash, MissReason, SequenceId
from kvmanager.contracts.block import BlockState
from kvmanager.contracts.index_events import Removed
from tests.support.kvmanager.ledgers import (
    admit,
    block_table,
    finish,
    free_order,
    hashes,
    make_ledger,
    play,
    prompt,
    reserve,
    run_through,
    seal,
)


def test_55_tokens_take_four_blocks_of_which_three_get_hashes() -> None:
    ledger = make_ledger(10)
    (granted,) = admit(ledger, reserve(1, prompt(55)))
    assert (granted.block_table, granted.n_shared, granted.cached_tokens) == ((0, 1, 2, 3), 0, 0)
    assert [ledger.state.store.blocks.hash[block] for block in range(4)] == [None] * 4
    seal(ledger, 1, hashes(prompt(55)))
    assert [ledger.state.store.blocks.hash[block] for block in range(4)] == [*hashes(prompt(55)), None]


def test_a_shared_prefix_of_48_tokens_is_three_hits_and_one_new_block() -> None:
    ledger = make_ledger(10)
    admit(ledger, reserve(1, prompt(55)))
    seal(ledger, 1, hashes(prompt(55)))
    (granted,) = admit(ledger, reserve(2, prompt(48) + prompt(7, start=900)))
    assert (granted.block_table, granted.n_shared, granted.cached_tokens) == ((0, 1, 2, 4), 3, 48)
    assert [ledger.state.store.blocks.refs[block] for block in range(5)] == [2, 2, 2, 1, 1]


def test_blocks_without_hash_are_reused_first_then_cached_ones_tail_first() -> None:
    ledger = make_ledger(10)
    admit(ledger, reserve(1, prompt(55)))
    seal(ledger, 1, hashes(prompt(55)))
    admit(ledger, reserve(2, prompt(48) + prompt(7, start=900)))
    finish(ledger, 1)
    finish(ledger, 2)
    assert free_order(ledger) == [5, 6, 7, 8, 9, 3, 4, 2, 1, 0]


def test_a_hit_leaves_the_middle_of_the_eviction_order() -> None:
    ledger = make_ledger(10)
    run_through(ledger, 1, prompt(33))
    run_through(ledger, 2, prompt(33, start=500))
    assert list(ledger.state.store.pool.cached) == [1, 0, 4, 3]
    (granted,) = admit(ledger, reserve(3, prompt(17)))
    assert granted.block_table[0] == 0
    assert list(ledger.state.store.pool.cached) == [1, 4, 3]
    assert (len(ledger.state.store.pool.cached), ledger.pool_counts().cached) == (3, 3)


def test_160_fresh_tokens_evict_a_full_pool_in_queue_order() -> None:
    ledger = make_ledger(10)
    run_through(ledger, 1, prompt(80))
    run_through(ledger, 2, prompt(80, start=500))
    old = {1: hashes(prompt(80)), 2: hashes(prompt(80, start=500))}
    ledger.drain_index_events()
    (granted,) = admit(ledger, reserve(3, prompt(160, start=1000)))
    assert granted.block_table == (4, 3, 2, 1, 0, 9, 8, 7, 6, 5)
    removed = [event.hash for event in ledger.drain_index_events() if isinstance(event, Removed)]
    assert removed == [*reversed(old[1]), *reversed(old[2])]
    seal(ledger, 3, hashes(prompt(160, start=1000)))
    assert set(ledger.state.store.cache.entries) == set(hashes(prompt(160, start=1000)))


@pytest.mark.parametrize(
    ("length", "cached", "reason"),
    [(32, 16, MissReason.CAPPED), (33, 32, MissReason.FULL_HIT), (16, 0, MissReason.CAPPED)],
)
def test_the_last_token_is_always_computed(length: int, cached: int, reason: MissReason) -> None:
    ledger = make_ledger(10)
    run_through(ledger, 1, prompt(64))
    (granted,) = admit(ledger, reserve(2, prompt(length)))
    assert (granted.cached_tokens, granted.miss_reason) == (cached, reason)


def test_a_requests_own_hits_are_not_evicted_for_it() -> None:
    ledger = make_ledger(4)
    run_through(ledger, 1, prompt(33))
    run_through(ledger, 2, prompt(16, start=500))
    assert free_order(ledger) == [2, 1, 0, 3]
    (granted,) = admit(ledger, reserve(3, prompt(64)))
    assert granted.block_table == (0, 1, 2, 3)
    assert granted.n_shared == 2


def test_hits_do_not_count_as_room_for_the_rest() -> None:
    ledger = make_ledger(4)
    run_through(ledger, 1, prompt(33))
    admit(ledger, reserve(2, prompt(16, start=500)))
    assert admit(ledger, reserve(3, prompt(64))) == ()
    assert list(ledger.state.store.pool.cached) == [1, 0]
    batch = finish(ledger, 2)
    assert batch is not None
    assert batch.admit[0].n_shared == 2


def test_a_reused_block_sheds_its_key() -> None:
    ledger = make_ledger(4)
    run_through(ledger, 1, prompt(17))
    run_through(ledger, 2, prompt(64, start=500))
    assert ledger.state.store.blocks.hash[0] == hashes(prompt(64, start=500))[3]
    assert ledger.look_up_prompt(hashes(prompt(17)), 17).miss_reason is MissReason.EVICTED


def test_older_than_the_ghost_list_it_was_never_seen() -> None:
    ledger = make_ledger(2, ghosts=2)
    for number in range(4):
        run_through(ledger, number, prompt(32, start=1000 * number))
    assert ledger.look_up_prompt(hashes(prompt(32, start=2000)), 32).miss_reason is MissReason.EVICTED
    assert ledger.look_up_prompt(hashes(prompt(32, start=1000)), 32).miss_reason is MissReason.NEVER_SEEN


def test_decode_grows_by_a_block_when_one_is_full() -> None:
    ledger = make_ledger(10)
    tokens = prompt(75)
    admit(ledger, reserve(1, tokens[:55], max_len=100))
    batch = play(ledger, lease_want=1)
    assert batch is not None
    assert batch.lease == (4,)
    play(ledger, seal=tuple(zip((0, 1, 2), hashes(tokens), strict=False)), lease_want=1)
    assert block_table(ledger, 1) == (0, 1, 2, 3)  # 55 + 4: still four blocks
    play(ledger, bind=((1, 4),), lease_want=1)
    assert block_table(ledger, 1) == (0, 1, 2, 3, 4)  # 55 + 19 = 74: one more
    assert ledger.state.store.blocks.hash[3] is None  # full, and not sealed before the step that filled it is done
    play(ledger, seal=((3, hashes(tokens)[3]),), lease_want=1)
    assert ledger.state.store.blocks.hash[3] == hashes(tokens)[3]


def test_generated_blocks_are_hits_for_the_next_turn() -> None:
    ledger = make_ledger(10)
    tokens = prompt(75)
    admit(ledger, reserve(1, tokens[:55], max_len=100))
    play(ledger, lease_want=1)
    play(ledger, bind=((1, 4),), seal=tuple(zip((0, 1, 2, 3), hashes(tokens), strict=True)))
    finish(ledger, 1)
    assert admit(ledger, reserve(2, tokens))[0].block_table[:4] == (0, 1, 2, 3)


@pytest.mark.parametrize(
    "columns",
    [
        {"bind": ((1, 7),)},
        {"bind": ((9, 2),)},
        {"bind": ((1, 99),)},
        {"returned": (0,)},
        {"returned": (2, 2)},
        {"seal": ((0, b"another hash 16b"),)},
        {"trim": ((1, 5),)},
        {"preempted": ((1, 0),)},
        {"preempted": ((1, 101),)},
        {"reserve": (reserve(2, [], max_len=9),)},
        {"reserve": (reserve(2, prompt(9), max_len=8),)},
    ],
    ids=str,
)
def test_a_report_that_cannot_be_true_is_a_violation(columns: dict[str, tuple[tuple[int, int], ...]]) -> None:
    ledger = make_ledger(10)
    admit(ledger, reserve(1, prompt(20), max_len=100))
    batch = play(ledger, lease_want=1)
    assert batch is not None
    assert batch.lease == (2,)
    with pytest.raises(ProtocolViolation):
        play(ledger, **columns)


def test_a_row_never_grows_beyond_its_longest_length() -> None:
    ledger = make_ledger(10)
    admit(ledger, reserve(1, prompt(20), max_len=32), reserve(2, prompt(20, start=90), max_len=64))
    play(ledger, lease_want=2)
    with pytest.raises(ProtocolViolation, match="grew beyond 2 blocks"):
        play(ledger, bind=((1, 4),))


@pytest.mark.parametrize("block", [1, 5])
def test_a_seal_without_a_sealed_parent_or_without_a_row_is_counted_and_ignored(block: int) -> None:
    ledger = make_ledger(10)
    admit(ledger, reserve(1, prompt(40)))
    play(ledger, seal=((block, hashes(prompt(40))[1]),))
    assert ledger.pool_counts().totals.ignored_seals == 1
    assert not ledger.state.store.cache.entries


def test_block_states_partition_the_pool() -> None:
    ledger = make_ledger(10)
    run_through(ledger, 1, prompt(17))
    admit(ledger, reserve(2, prompt(20, start=90), max_len=60))
    play(ledger, lease_want=2)
    states = ledger.state.store.blocks.state
    pool = ledger.pool_counts()
    assert (pool.free, pool.leased, pool.in_use, pool.cached, pool.pinned) == (5, 2, 2, 1, 0)
    assert [states.count(state) for state in BlockState] == [5, 2, 2, 1, 0]


def test_block_table_shows_a_row() -> None:
    ledger = make_ledger(10)
    admit(ledger, reserve(1, prompt(40)))
    seal(ledger, 1, hashes(prompt(40)))
    admit(ledger, reserve(2, prompt(40)))
    table = ledger.block_table(SequenceId(2))
    assert table is not None
    assert (table.request_id, table.block_ids, table.n_shared, table.sealed_blocks) == ("r2", (0, 1, 3), 2, 2)
    assert ledger.block_table(SequenceId(3)) is None
    assert [each.sequence for each in ledger.block_tables()] == [1, 2]


def test_one_hash_may_have_several_copies_and_leaves_with_the_last() -> None:
    ledger = make_ledger(6)
    block_hashes = hashes(prompt(32))
    admit(ledger, reserve(1, prompt(16)), reserve(2, prompt(16), block_hashes=block_hashes[:1]))
    assert (block_table(ledger, 1), block_table(ledger, 2)) == ((0,), (1,))
    play(ledger, seal=((0, block_hashes[0]), (1, block_hashes[0])))
    assert ledger.state.store.cache.copies_of(block_hashes[0]) == [0, 1]
    finish(ledger, 1)
    finish(ledger, 2)
    ledger.drain_index_events()
    admit(ledger, reserve(3, prompt(80, start=700)))
    assert ledger.drain_index_events() == ()
    admit(ledger, reserve(4, prompt(16, start=5000)))
    assert [type(event) for event in ledger.drain_index_events()] == [Removed]


def test_the_caller_may_not_ask_for_a_hash_that_is_no_hash() -> None:
    ledger = make_ledger(4)
    assert ledger.look_up_prompt((BlockHash(b"0" * 16),), 20).miss_reason is MissReason.NEVER_SEEN
