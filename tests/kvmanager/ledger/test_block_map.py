"""What operators see of a worker's blocks: the use of each, and everything about one; exact block ids."""

from __future__ import annotations

import pytest

from common.contracts.types import BlockId, SequencePhase
from kvmanager.ledger.block_map import BlockUse, SequenceUse
from kvmanager.ledger.ledger import Ledger
from tests.support.kvmanager.ledgers import admit, finish, hashes, make_ledger, play, prompt, reserve, run_through, seal

EVERY = 1 << 16
FREE, LEASED, FILLING, PENDING, SEALED, SHARED, CACHED = BlockUse


def uses(ledger: Ledger) -> list[BlockUse]:
    return [BlockUse(each) for each in ledger.block_map(0, EVERY, 8).uses]


def test_a_new_pool_is_free() -> None:
    found = make_ledger(3).block_map(0, EVERY, 8)
    assert (found.num_blocks, found.block_size, found.first_block, found.uses) == (3, 16, 0, bytes([FREE] * 3))
    assert (found.sequences, found.num_sequences) == ((), 0)


def test_each_use_has_its_number() -> None:
    ledger, tokens = make_ledger(8), prompt(40)
    admit(ledger, reserve(1, tokens, 64))
    assert uses(ledger) == [PENDING, PENDING, FILLING, *[FREE] * 5]
    seal(ledger, 1, hashes(tokens)[:1])
    assert uses(ledger)[:3] == [SEALED, PENDING, FILLING]
    seal(ledger, 1, hashes(tokens))
    admit(ledger, reserve(2, tokens[:33], 40))
    assert uses(ledger) == [SHARED, SHARED, FILLING, FILLING, *[FREE] * 4]
    play(ledger, lease_want=2)
    assert uses(ledger).count(LEASED) == ledger.pool_counts().leased > 0
    finish(ledger, 1, 2)
    assert uses(ledger)[:4] == [CACHED, CACHED, FREE, FREE]


def test_uses_agree_with_the_pool() -> None:
    ledger = make_ledger(16)
    run_through(ledger, 1, prompt(48))
    admit(ledger, reserve(2, prompt(40, 1000), 64), reserve(3, prompt(20, 2000), 64))
    play(ledger, lease_want=3)
    found, pool = uses(ledger), ledger.pool_counts()
    assert (found.count(FREE), found.count(LEASED), found.count(CACHED)) == (pool.free, pool.leased, pool.cached)
    assert sum(found.count(each) for each in (FILLING, PENDING, SEALED, SHARED)) == pool.in_use


def test_a_page_of_the_map() -> None:
    ledger = make_ledger(8)
    admit(ledger, reserve(1, prompt(40), 64))
    assert ledger.block_map(1, 3, 8).uses == bytes([PENDING, FILLING, FREE])
    assert ledger.block_map(7, 3, 8).uses == bytes([FREE])
    assert ledger.block_map(8, 3, 8).uses == b""


def test_sequences_with_the_most_blocks_come_first_and_are_bounded() -> None:
    ledger = make_ledger(16)
    admit(
        ledger,
        reserve(1, prompt(16), 32),
        reserve(2, prompt(48, 1000), 64, tenant="blue"),
        reserve(3, prompt(16, 2000), 16),
    )
    found = ledger.block_map(0, EVERY, 2)
    assert found.num_sequences == 3
    assert found.sequences == (
        SequenceUse(2, "r2", "blue", SequencePhase.RUNNING, 3, 0, 4),
        SequenceUse(1, "r1", "", SequencePhase.RUNNING, 1, 0, 2),
    )


def test_a_shared_block_names_who_holds_it() -> None:
    ledger, tokens = make_ledger(8), prompt(40)
    admit(ledger, reserve(1, tokens, 64))
    seal(ledger, 1, hashes(tokens))
    admit(ledger, reserve(2, tokens[:33], 40), reserve(3, tokens[:33], 40))
    found = ledger.block_view(BlockId(1), 2)
    assert found is not None
    assert (found.use, found.references, found.index, found.hash) == (SHARED, 3, 1, hashes(tokens)[1])
    assert [each.request_id for each in found.holders] == ["r1", "r2"]
    assert found.figures == ()


@pytest.mark.parametrize(
    ("eviction", "older", "newer"),
    [
        ("lru", {"released_since": 1.0}, {"released_since": 0.0}),
        ("utility", {"released_since": 1.0, "uses": 1.0}, {"released_since": 0.0, "uses": 1.0}),
        ("frequency", {"uses": 0.0, "main_queue": 0.0}, {"uses": 0.0, "main_queue": 0.0}),
    ],
)
def test_a_cached_block_says_what_the_policy_knows(
    eviction: str, older: dict[str, float], newer: dict[str, float]
) -> None:
    ledger = make_ledger(8, eviction=eviction)
    first = run_through(ledger, 1, prompt(16)).block_table[0]
    second = run_through(ledger, 2, prompt(16, 1000)).block_table[0]
    found = [ledger.block_view(each, 2) for each in (first, second)]
    assert [each and each.use for each in found] == [CACHED, CACHED]
    assert [each and each.holders for each in found] == [(), ()]
    assert [dict(each.figures) for each in found if each] == [older, newer]


@pytest.mark.parametrize("block", [-1, 8, 1 << 31])
def test_a_block_that_the_pool_has_not(block: int) -> None:
    assert make_ledger(8).block_view(BlockId(block), 2) is None
