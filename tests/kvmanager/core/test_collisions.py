"""Two contents with one block hash: the second is a miss, and nothing is wrong afterwards."""

from __future__ import annotations

from common.lease import CachedBlock, Inventory, InventorySequence, Reserve
from common.types import BlockHash, BlockId, SequenceId, SequencePhase
from tests.support.kvmanager.ledgers import admit, block_table, copies, finish, make_ledger, play, prompt, run_through

A, B, C, D, SAME = (BlockHash(letter * 16) for letter in (b"a", b"b", b"c", b"d", b"="))
RUNNING = SequencePhase.RUNNING


def chained(number: int, *keys: BlockHash, max_len: int = 0) -> Reserve:
    """Return a prompt of blocks with these hashes, and one token more."""
    num_tokens = 16 * len(keys) + 1
    return Reserve(SequenceId(number), num_tokens, max_len or num_tokens, block_hashes=keys, request_id=f"r{number}")


def test_a_hash_with_another_parent_is_a_miss() -> None:
    ledger = make_ledger(12)
    admit(ledger, chained(1, A, SAME))
    play(ledger, seal=((0, A), (1, SAME)))
    admit(ledger, chained(2, B))
    play(ledger, seal=((3, B),))
    (granted,) = admit(ledger, chained(3, B, SAME))
    assert (granted.n_shared, granted.block_table[0]) == (1, 3)
    assert ledger.lookup((A, SAME), 33).hit_blocks == 2


def test_a_hash_at_another_depth_is_a_miss() -> None:
    ledger = make_ledger(12)
    admit(ledger, chained(1, A, SAME))
    play(ledger, seal=((0, A), (1, SAME)))
    (granted,) = admit(ledger, chained(2, SAME, C))
    assert granted.n_shared == 0


def test_a_block_that_is_still_being_filled_is_compared_too() -> None:
    ledger = make_ledger(12)
    granted = admit(ledger, chained(1, A, SAME), chained(2, SAME), chained(3, A, SAME))
    assert [each.n_shared for each in granted] == [0, 0, 2]


def test_nothing_is_registered_after_a_hash_that_another_content_has() -> None:
    """The child would count as one of the first content, and outlive it."""
    ledger = make_ledger(8)
    admit(ledger, chained(1, A, SAME))
    play(ledger, seal=((0, A), (1, SAME)))
    admit(ledger, chained(2, B, SAME, D))
    table = block_table(ledger, 2)
    play(ledger, seal=((table[0], B), (table[1], SAME), (table[2], D)))
    assert set(ledger.state.cache.entries) == {A, SAME, B}
    assert ledger.pool().totals.ignored_seals == 2
    assert SAME not in ledger.state.cache.pending
    finish(ledger, 1)
    finish(ledger, 2)
    assert (ledger.pool().cached, ledger.pool().free) == (3, 5)
    run_through(ledger, 3, prompt(16 * 7, start=5000))
    ledger.check_invariants()


def test_an_inventory_with_two_contents_of_one_hash_is_no_contradiction() -> None:
    ledger = make_ledger(12)
    sequences = (
        InventorySequence(chained(1, A, SAME), RUNNING, 0, tuple(map(BlockId, (0, 1, 2)))),
        InventorySequence(chained(2, SAME, D), RUNNING, 1, tuple(map(BlockId, (3, 4, 5)))),
    )
    claims = ((0, A, -1), (3, SAME, -1), (1, SAME, 0), (4, D, 1))
    cached = tuple(CachedBlock(BlockId(block), key, parent, 0) for block, key, parent in claims)
    ledger.rebuild(Inventory(sequences, cached_blocks=cached))
    ledger.check_invariants()
    assert copies(ledger) == {A: [0], SAME: [3]}
    (granted,) = admit(ledger, chained(3, A, SAME))
    assert granted.n_shared == 1
