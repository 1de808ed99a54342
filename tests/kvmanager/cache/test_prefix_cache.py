"""What is published, shared and trimmed in a prefix cache, and every reason for a miss."""

from __future__ import annotations

import pytest

from common.contracts.hashing import narrowed_domain, root_digest
from common.contracts.types import TRIMMED, MissReason
from kvmanager.cache.prefix_cache import PrefixMatch
from tests.support.kvmanager.ledgers import (
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
    seal,
)


def test_what_the_worker_did_not_seal_is_never_published() -> None:
    ledger = make_ledger(10)
    admit(ledger, reserve(1, prompt(20), max_len=100))
    play(ledger, lease_want=2)
    play(ledger, bind=((1, 2), (1, 3)))  # blocks for draft tokens, rejected afterwards
    finish(ledger, 1)
    assert ledger.drain_index_events() == ()
    assert not ledger.state.store.cache.entries
    assert not ledger.state.store.cache.pending


def test_trimmed_blocks_are_free_before_capacity_is_checked() -> None:
    ledger = make_ledger(6, 4, window=8)
    tokens = prompt(16)
    admit(ledger, reserve(1, tokens, max_len=20, block_size=4))
    batch = play(ledger, trim=((1, 2),), reserve=(reserve(2, prompt(12, start=90), block_size=4),))
    assert batch is not None
    assert [granted.block_table for granted in batch.admit] == [(4, 5, 0)]  # the last of them has just been trimmed
    assert block_table(ledger, 1) == (TRIMMED, TRIMMED, 2, 3)


def test_trims_are_totals_so_repeating_one_changes_nothing() -> None:
    ledger = make_ledger(6, 4, window=8)
    admit(ledger, reserve(1, prompt(16), max_len=20, block_size=4))
    play(ledger, trim=((1, 1),))
    play(ledger, trim=((1, 1), (7, 1)))
    play(ledger, trim=((1, 2),))
    assert list(ledger.state.store.pool.free) == [4, 5, 0, 1]


@pytest.mark.parametrize(
    ("first", "second", "hits"),
    [
        ({"cache_domain": narrowed_domain(b"a", "salt1")}, {"cache_domain": narrowed_domain(b"a", "salt1")}, 2),
        ({"cache_domain": narrowed_domain(b"a", "salt1")}, {"cache_domain": narrowed_domain(b"a", "salt2")}, 0),
        ({"cache_domain": narrowed_domain(b"a", "salt1")}, {"cache_domain": narrowed_domain(b"b", "salt1")}, 0),
        ({"cache_domain": b"foo"}, {"extra_keys": (("adapter", "foo"),)}, 0),
        ({"extra_keys": (("adapter", "a@1"),)}, {"extra_keys": (("adapter", "a@2"),)}, 0),
    ],
    ids=["same salt", "other salt", "other domain", "salt is no adapter", "adapter reloaded"],
)
def test_a_domain_hits_only_itself(first: dict[str, object], second: dict[str, object], hits: int) -> None:
    ledger, tokens = make_ledger(10), prompt(40)
    chains = [hashes(tokens, root=root_digest("model", "tokenizer", 16, **each)) for each in (first, second)]  # type: ignore[arg-type]
    admit(ledger, reserve(1, tokens, block_hashes=chains[0]))
    seal(ledger, 1, chains[0])
    (granted,) = admit(ledger, reserve(2, tokens, block_hashes=chains[1]))
    assert granted.n_shared == hits


def test_identical_blocks_of_one_sequence_are_two_entries() -> None:
    ledger, tokens = make_ledger(10), [5] * 33
    admit(ledger, reserve(1, tokens))
    seal(ledger, 1, hashes(tokens))
    assert len(set(hashes(tokens))) == 2
    assert copies(ledger) == dict(zip(hashes(tokens), ([0], [1]), strict=True))


def test_released_before_its_prefill_ran_it_publishes_nothing() -> None:
    ledger = make_ledger(10)
    admit(ledger, reserve(1, prompt(40)))
    finish(ledger, 1)
    assert ledger.drain_index_events() == ()
    assert ledger.look_up_prompt(hashes(prompt(40)), 40) == PrefixMatch(0, MissReason.NEVER_SEEN)
    assert list(ledger.state.store.pool.free) == [3, 4, 5, 6, 7, 8, 9, 2, 1, 0]


def test_lookup_explains_each_miss() -> None:
    ledger = make_ledger(4)
    run_through(ledger, 1, prompt(48))
    block_hashes = hashes(prompt(96))
    assert ledger.look_up_prompt((), 15) == PrefixMatch(0, MissReason.BELOW_BLOCK)
    assert ledger.look_up_prompt((), 40) == PrefixMatch(0, MissReason.DISABLED)
    assert ledger.look_up_prompt(block_hashes[:3], 48) == PrefixMatch(2, MissReason.CAPPED)
    assert ledger.look_up_prompt(block_hashes[:3], 49) == PrefixMatch(3, MissReason.FULL_HIT)
    assert ledger.look_up_prompt(block_hashes, 96) == PrefixMatch(3, MissReason.DIVERGED_AT, 3)
    other = hashes(prompt(16) + prompt(32, start=700))
    assert ledger.look_up_prompt(other, 48) == PrefixMatch(1, MissReason.DIVERGED_AT, 1)
    assert ledger.look_up_prompt(hashes(prompt(48, start=700)), 48) == PrefixMatch(0, MissReason.NEVER_SEEN)
    run_through(ledger, 2, prompt(32, start=900))
    assert ledger.look_up_prompt(block_hashes[:3], 48) == PrefixMatch(2, MissReason.EVICTED)


def test_an_unseen_last_block_is_no_cap() -> None:
    ledger = make_ledger(4)
    run_through(ledger, 1, prompt(17))
    assert ledger.look_up_prompt(hashes(prompt(32)), 32) == PrefixMatch(1, MissReason.DIVERGED_AT, 1)
    assert ledger.look_up_prompt(hashes(prompt(16, start=90)), 16) == PrefixMatch(0, MissReason.NEVER_SEEN)


def test_a_ghost_that_comes_back_is_no_ghost() -> None:
    ledger = make_ledger(2)
    run_through(ledger, 1, prompt(17))
    run_through(ledger, 2, prompt(32, start=90))
    assert ledger.look_up_prompt(hashes(prompt(17)), 17).miss_reason is MissReason.EVICTED
    run_through(ledger, 3, prompt(17))
    assert ledger.look_up_prompt(hashes(prompt(17)), 17).miss_reason is MissReason.FULL_HIT


def test_caching_switched_off_for_the_pool() -> None:
    ledger = make_ledger(10, prefix_caching=False)
    run_through(ledger, 1, prompt(40))
    (granted,) = admit(ledger, reserve(2, prompt(40)))
    assert (granted.n_shared, granted.miss_reason) == (0, MissReason.DISABLED)
    assert ledger.pool_counts().cached == 0
    assert ledger.drain_index_events() == ()


def test_caching_switched_off_for_a_request() -> None:
    ledger = make_ledger(10)
    run_through(ledger, 1, prompt(40))
    (granted,) = admit(ledger, reserve(2, prompt(40), block_hashes=()))
    assert (granted.n_shared, granted.miss_reason) == (0, MissReason.DISABLED)
    assert block_table(ledger, 2) == (3, 4, 5)


def test_a_burst_shares_blocks_that_are_still_being_filled() -> None:
    ledger = make_ledger(64)
    burst = [reserve(number, prompt(48) + prompt(5, start=100 * number)) for number in range(1, 5)]
    granted = admit(ledger, *burst)
    assert [each.block_table for each in granted] == [(0, 1, 2, 3), (0, 1, 2, 4), (0, 1, 2, 5), (0, 1, 2, 6)]
    assert [each.n_shared for each in granted] == [0, 3, 3, 3]


@pytest.mark.parametrize("aborted", [1, 2, 3])
def test_whoever_leaves_the_others_keep_the_blocks(aborted: int) -> None:
    ledger = make_ledger(64)
    burst = [reserve(number, prompt(32) + prompt(5, start=100 * number)) for number in range(1, 4)]
    admit(ledger, *burst)
    finish(ledger, aborted)
    assert [ledger.state.store.blocks.refs[block] for block in (0, 1)] == [2, 2]
    assert set(ledger.state.store.cache.pending) == set(hashes(prompt(32)))
    for number in {1, 2, 3} - {aborted}:
        seal(ledger, number, hashes(prompt(32)))
        finish(ledger, number)
    assert ledger.pool_counts().cached == 2


def test_a_pending_block_that_was_freed_is_no_hit() -> None:
    ledger = make_ledger(10)
    admit(ledger, reserve(1, prompt(40)))
    finish(ledger, 1)
    assert not ledger.state.store.cache.pending
    assert admit(ledger, reserve(2, prompt(40)))[0].n_shared == 0


def test_the_block_of_the_last_known_token_is_not_shared_before_it_is_sealed() -> None:
    """A longer prompt that filled its last slot would leave the shorter one nothing to compute logits with."""
    ledger = make_ledger(10)
    granted = admit(ledger, reserve(1, prompt(32)), reserve(2, prompt(48)))
    assert [each.block_table for each in granted] == [(0, 1), (0, 2, 3)]
    seal(ledger, 1, hashes(prompt(32)))
    assert admit(ledger, reserve(3, prompt(48)))[0].block_table[:2] == (0, 1)


def test_hits_prefer_a_copy_that_a_row_holds() -> None:
    ledger = make_ledger(6)
    block_hashes = hashes(prompt(16))
    admit(ledger, reserve(1, prompt(16)), reserve(2, prompt(16)))
    play(ledger, seal=((0, block_hashes[0]), (1, block_hashes[0])))
    finish(ledger, 1)
    (granted,) = admit(ledger, reserve(3, prompt(17)))
    assert granted.block_table[0] == 1
