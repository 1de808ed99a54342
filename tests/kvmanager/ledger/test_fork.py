"""Sequences of one prompt share full blocks; the partial last one is copied, or computed again."""

from __future__ import annotations

from typing import Any

from common.contracts.lease import Copy, GrantBatch
from common.contracts.types import SequenceId
from tests.support.kvmanager.ledgers import admit, block_table, finish, hashes, make_ledger, play, prompt, reserve, seal


def fork(number: int, length: int, max_len: int = 100, of: int = 1, **options: Any) -> Any:
    return reserve(number, prompt(length), max_len, fork_of=SequenceId(of), **options)


def forked(length: int, **options: Any) -> GrantBatch:
    """Admit a sequence over blocks 0.., seal its full blocks, and return the batch that admits its fork."""
    ledger = make_ledger(20)
    admit(ledger, reserve(1, prompt(length), 100))
    seal(ledger, 1, hashes(prompt(length)))
    batch = play(ledger, reserve=(fork(2, length, **options),))
    assert batch is not None
    return batch


def test_full_blocks_are_shared_and_the_partial_last_one_is_copied() -> None:
    batch = forked(55)
    assert batch.admit[0].block_table == (0, 1, 2, 4)
    assert batch.admit[0].n_shared == 3
    assert batch.copy == (Copy(src=3, dst=4, length=54),)  # type: ignore[arg-type]


def test_the_copy_never_holds_the_last_known_token() -> None:
    batch = forked(48)
    assert batch.admit[0].block_table == (0, 1, 3)
    assert batch.copy == (Copy(src=2, dst=3, length=47),)  # type: ignore[arg-type]


def test_a_last_block_with_only_the_last_token_is_not_copied() -> None:
    batch = forked(49)
    assert batch.admit[0].block_table == (0, 1, 2, 4)
    assert batch.copy == ()


def test_nothing_is_copied_from_a_block_of_the_same_batch() -> None:
    ledger = make_ledger(20)
    batch = play(ledger, reserve=(reserve(1, prompt(40), 100), fork(2, 40)))
    assert batch is not None
    assert [granted.block_table for granted in batch.admit] == [(0, 1, 2), (0, 1, 3)]
    assert batch.copy == ()


def test_a_fork_whose_parent_is_gone_is_an_ordinary_sequence() -> None:
    ledger = make_ledger(20)
    admit(ledger, reserve(1, prompt(40), 100))
    seal(ledger, 1, hashes(prompt(40)))
    finish(ledger, 1)
    batch = play(ledger, reserve=(fork(2, 40),))
    assert batch is not None
    assert (batch.copy, batch.admit[0].n_shared) == ((), 2)


def test_a_fork_of_an_uncached_sequence_shares_its_row() -> None:
    ledger = make_ledger(20)
    admit(ledger, reserve(1, prompt(40), 100, block_hashes=()))
    batch = play(ledger, reserve=(fork(2, 40, block_hashes=()),))
    assert batch is not None
    assert (batch.admit[0].block_table, batch.admit[0].n_shared) == ((0, 1, 3), 2)
    assert batch.copy == (Copy(src=2, dst=3, length=39),)  # type: ignore[arg-type]
    finish(ledger, 1)
    finish(ledger, 2)
    assert ledger.pool_counts().free == 20


def test_a_fork_that_was_preempted_has_own_tokens_and_copies_nothing() -> None:
    ledger = make_ledger(20)
    admit(ledger, reserve(1, prompt(40), 100))
    play(ledger, reserve=(fork(2, 40),))
    batch = play(ledger, preempted=((2, 41),))
    assert batch is not None
    assert (batch.copy, batch.admit[0].block_table[:2]) == ((), (0, 1))


def test_a_trimmed_parent_is_no_source() -> None:
    ledger = make_ledger(20, 4, window=4)
    admit(ledger, reserve(1, prompt(10), 60, block_size=4))
    batch = play(ledger, trim=((1, 1),), reserve=(fork(2, 10, 60, block_size=4),))
    assert batch is not None
    assert batch.admit[0].block_table == (3, 4, 5)
    assert (batch.copy, batch.admit[0].n_shared) == ((), 0)


def test_every_reference_returns_to_zero() -> None:
    ledger = make_ledger(20)
    admit(ledger, reserve(1, prompt(40), 100))
    play(ledger, reserve=(fork(2, 40), fork(3, 40)))
    assert [block_table(ledger, number)[:2] for number in (1, 2, 3)] == [(0, 1)] * 3
    for number in (2, 1, 3):
        finish(ledger, number)
    assert ledger.state.store.blocks.refs == [0] * 20
    assert ledger.pool_counts().free == 20
