"""A sequence that computes all its tokens takes no hit; others get its blocks once they are sealed, and not before."""

from __future__ import annotations

from dataclasses import replace

from common.contracts.lease import Inventory, InventorySequence
from common.contracts.types import BlockId, MissReason, SequencePhase
from tests.support.kvmanager.ledgers import admit, block_table, finish, hashes, make_ledger, play, prompt, reserve, seal


def test_it_takes_no_hit_of_cached_blocks() -> None:
    ledger = make_ledger(20)
    admit(ledger, reserve(1, prompt(40)))
    seal(ledger, 1, hashes(prompt(40)))
    finish(ledger, 1)
    (granted,) = admit(ledger, reserve(2, prompt(40), computes_all=True))
    assert (granted.n_shared, granted.cached_tokens, granted.miss_reason) == (0, 0, MissReason.DISABLED)
    assert set(granted.block_table).isdisjoint({0, 1})


def test_what_it_is_about_to_fill_is_not_shared_and_what_it_sealed_is() -> None:
    ledger = make_ledger(20)
    (own,) = admit(ledger, reserve(1, prompt(40), computes_all=True))
    (early,) = admit(ledger, reserve(2, prompt(40)))
    assert (early.n_shared, set(early.block_table) & set(own.block_table)) == (0, set())
    finish(ledger, 2)
    seal(ledger, 1, hashes(prompt(40)))
    (late,) = admit(ledger, reserve(3, prompt(40)))
    assert (late.n_shared, late.block_table[:2]) == (2, own.block_table[:2])


def test_another_sequence_of_its_request_shares_nothing_unsealed() -> None:
    ledger = make_ledger(20)
    (own,) = admit(ledger, reserve(1, prompt(40), 60, computes_all=True))
    batch = play(ledger, reserve=(reserve(2, prompt(40), 60, fork_of=own.sequence),))
    assert batch is not None
    assert (batch.admit[0].n_shared, batch.copy) == (0, ())


def test_a_manager_that_comes_anew_shares_nothing_unsealed_either() -> None:
    ledger = make_ledger(20)
    running = reserve(1, prompt(40), computes_all=True)
    tables = InventorySequence(running, SequencePhase.RUNNING, 0, (BlockId(3), BlockId(4), BlockId(5)))
    ledger.rebuild(Inventory((tables,)))
    ledger.check_invariants()
    (other,) = admit(ledger, reserve(2, prompt(40)))
    assert other.n_shared == 0
    ledger.rebuild(Inventory((replace(tables, reserve=replace(running, computes_all=False)),)))
    (other,) = admit(ledger, reserve(2, prompt(40)))
    assert other.block_table[:2] == (3, 4)
    assert block_table(ledger, 1)[:2] == (3, 4)
