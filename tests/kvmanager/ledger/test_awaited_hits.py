"""A hit on a block that is still to be filled counts once it is sealed, and not for the sequence that filled it."""

from __future__ import annotations

from tests.support.kvmanager.ledgers import admit, block_table, finish, hashes, make_ledger, play, prompt, reserve, seal


def test_hits_on_blocks_that_are_being_filled_count_when_they_are_sealed() -> None:
    ledger = make_ledger(10)
    admit(ledger, reserve(1, prompt(33)), reserve(2, prompt(33)), reserve(3, prompt(33)))
    assert ledger.pool_counts().totals.prefix_hit_blocks == 0
    seal(ledger, 1, hashes(prompt(32)))
    assert ledger.pool_counts().totals.prefix_hit_blocks == 4


def test_the_sequence_that_computes_a_block_after_all_had_no_hit() -> None:
    ledger = make_ledger(10)
    admit(ledger, reserve(1, prompt(33)), reserve(2, prompt(33)), reserve(3, prompt(33)))
    finish(ledger, 1)
    seal(ledger, 2, hashes(prompt(32)))
    assert ledger.pool_counts().totals.prefix_hit_blocks == 2, "of two sequences, one has computed both blocks"


def test_a_block_that_is_never_filled_was_no_hit() -> None:
    ledger = make_ledger(10)
    admit(ledger, reserve(1, prompt(33)), reserve(2, prompt(33)))
    finish(ledger, 1)
    finish(ledger, 2)
    admit(ledger, reserve(3, prompt(33)))
    play(ledger, seal=tuple(zip(block_table(ledger, 3), hashes(prompt(32)), strict=False)))
    assert ledger.pool_counts().totals.prefix_hit_blocks == 0
