"""The events for the index, and how the index repairs a gap."""

from __future__ import annotations

import random

import pytest

from kvmanager.contracts.index_events import Cleared, Removed, Stored
from tests.support.kvmanager.index_replica import IndexReplica
from tests.support.kvmanager.ledgers import admit, depths, hashes, make_ledger, play, prompt, reserve, run_through, seal


def test_reset_is_refused_while_a_block_is_in_use() -> None:
    ledger = make_ledger(6)
    run_through(ledger, 1, prompt(33))
    admit(ledger, reserve(2, prompt(5, start=90)))
    ledger.drain_index_events()
    assert not ledger.reset()
    assert ledger.pool_counts().cached == 2
    assert ledger.drain_index_events() == ()


def test_reset_clears_everything_with_one_event() -> None:
    ledger = make_ledger(6)
    run_through(ledger, 1, prompt(33))
    run_through(ledger, 2, prompt(96, start=500))  # evicts the first
    ledger.drain_index_events()
    assert ledger.reset()
    assert [type(event) for event in ledger.drain_index_events()] == [Cleared]
    assert (ledger.pool_counts().free, ledger.pool_counts().cached, ledger.index_snapshot().entries) == (6, 0, ())
    assert ledger.look_up_prompt(hashes(prompt(33)), 33).miss_reason.value == "never_seen"
    ledger.check_invariants()


def test_events_are_drained_once_in_the_order_of_the_changes() -> None:
    ledger = make_ledger(2)
    run_through(ledger, 1, prompt(32))
    block_hashes = hashes(prompt(32))
    assert ledger.drain_index_events() == (Stored(1, block_hashes[0], 0), Stored(2, block_hashes[1], 1))
    assert ledger.drain_index_events() == ()
    run_through(ledger, 2, prompt(17, start=90))
    other = hashes(prompt(17, start=90))
    expected = (Removed(3, block_hashes[1], 1), Removed(4, block_hashes[0], 0), Stored(5, other[0], 0))
    assert ledger.drain_index_events() == expected


def test_removed_stands_before_stored_of_the_same_hash() -> None:
    ledger = make_ledger(2)
    run_through(ledger, 1, prompt(32))
    ledger.drain_index_events()
    run_through(ledger, 2, prompt(32, start=90))
    run_through(ledger, 1, prompt(32))
    mine = [event for event in ledger.drain_index_events() if event.hash == hashes(prompt(32))[0]]  # type: ignore[union-attr]
    assert [type(event) for event in mine] == [Removed, Stored]


@pytest.mark.searches
def test_replaying_all_events_gives_the_pools_map() -> None:
    ledger = make_ledger(12, 4)
    replica, pick = IndexReplica(), random.Random(16)
    for number in range(300):
        tokens = [pick.randrange(2) for _ in range(pick.randrange(4, 30))]
        run_through(ledger, number, tokens, block_size=4)
        if number % 100 == 50:
            assert ledger.reset()
        if number % 7 == 0:
            assert replica.apply(ledger.drain_index_events())
            assert replica.depths == depths(ledger)
    assert ledger.pool_counts().totals.evictions > 100


def test_a_lost_event_is_seen_by_the_gap_and_repaired_by_a_snapshot() -> None:
    ledger, replica = make_ledger(12, 4), IndexReplica()
    run_through(ledger, 1, prompt(12), block_size=4)
    first, _lost, third = ledger.drain_index_events()
    assert not replica.apply((first, third))
    assert replica.number == 1
    replica.load(ledger.index_snapshot())
    assert replica.depths == dict(ledger.index_snapshot().entries)
    run_through(ledger, 2, prompt(12, start=90), block_size=4)
    assert replica.apply(ledger.drain_index_events())
    assert replica.depths == dict(ledger.index_snapshot().entries)


def test_events_that_a_snapshot_contains_are_skipped() -> None:
    ledger, replica = make_ledger(12, 4), IndexReplica()
    run_through(ledger, 1, prompt(12), block_size=4)
    replica.load(ledger.index_snapshot())
    assert replica.apply(ledger.drain_index_events())
    assert len(replica.depths) == 3


def test_a_snapshot_lists_parents_first() -> None:
    ledger = make_ledger(12, 4)
    run_through(ledger, 1, prompt(12), block_size=4)
    run_through(ledger, 2, prompt(4) + prompt(8, start=90), block_size=4)
    assert [depth for _, depth in ledger.index_snapshot().entries] == [0, 1, 1, 2, 2]


def test_a_block_shared_by_all_is_stored_once() -> None:
    ledger = make_ledger(12, 4)
    admit(ledger, *(reserve(number, prompt(9), block_size=4) for number in range(3)))
    seal(ledger, 0, hashes(prompt(9), 4))
    play(ledger)
    assert len(ledger.drain_index_events()) == 2
