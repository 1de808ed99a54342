"""Two contents with one block hash: the second is a miss, and nothing is wrong afterwards."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from common.contracts.lease import CachedBlock, Inventory, InventorySequence, Reserve
from common.contracts.types import BlockHash, BlockId, SequenceId, SequencePhase
from kvmanager.ledger.ledger import Ledger
from tests.support.kvmanager.index_replica import IndexReplica
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
    assert ledger.look_up_prompt((A, SAME), 33).hit_blocks == 2


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
    assert set(ledger.state.store.cache.entries) == {A, SAME, B}
    assert ledger.pool_counts().totals.ignored_seals == 2
    assert SAME not in ledger.state.store.cache.pending
    finish(ledger, 1)
    finish(ledger, 2)
    assert (ledger.pool_counts().cached, ledger.pool_counts().free) == (3, 5)
    run_through(ledger, 3, prompt(16 * 7, start=5000))
    ledger.check_invariants()


def test_a_block_does_not_follow_the_block_of_another_sequence_that_has_its_parents_hash() -> None:
    """Its own parent was left out. The other one may be evicted while the child is in use."""
    ledger = make_ledger(12)
    admit(ledger, chained(1, B, A, B), chained(2, B, D))
    first, second = block_table(ledger, 1), block_table(ledger, 2)
    play(ledger, seal=((first[0], B), (first[1], A)))
    admit(ledger, chained(3, B, A, C))
    third = block_table(ledger, 3)
    play(ledger, seal=((first[2], B), (third[2], C)))
    assert (ledger.state.store.cache.ambiguous, set(ledger.state.store.cache.entries)) == ({B}, {A, B, C}), (
        "it shares its parent"
    )
    play(ledger, seal=((second[1], D),))
    finish(ledger, 1)
    admit(ledger, chained(4, B, A, SAME))
    fourth = block_table(ledger, 4)
    play(ledger, seal=tuple(zip(fourth, (B, A, SAME), strict=False)))
    assert set(ledger.state.store.cache.entries) == {A, B, C}, "it has blocks of its own"


def shared_hash(ledger: Ledger) -> None:
    """Let A SAME C be registered, and then B SAME be sealed."""
    admit(ledger, chained(1, A, SAME, C))
    play(ledger, seal=((0, A), (1, SAME), (2, C)))
    admit(ledger, chained(2, B, SAME))
    table = block_table(ledger, 2)
    play(ledger, seal=((table[0], B), (table[1], SAME)))


def test_a_hash_that_two_contents_have_is_a_hit_for_neither() -> None:
    ledger = make_ledger(16)
    shared_hash(ledger)
    before = ledger.pool_counts().totals.prefix_hit_blocks
    for number, keys in enumerate(((A, SAME, C), (B, SAME, D)), start=3):
        assert ledger.look_up_prompt(keys, 49).hit_blocks == ledger.leading_blocks(keys) == 1
        (granted,) = admit(ledger, chained(number, *keys))
        assert (granted.n_shared, granted.cached_tokens) == (1, 16)
    assert ledger.pool_counts().totals.prefix_hit_blocks - before == 2
    assert ledger.pool_counts().totals.ignored_seals == 1


def test_a_first_block_is_no_hit_where_a_later_one_has_its_hash() -> None:
    ledger = make_ledger(16)
    admit(ledger, chained(1, A, SAME))
    play(ledger, seal=((0, A), (1, SAME)))
    assert ledger.look_up_prompt((SAME, C), 33).hit_blocks == ledger.leading_blocks((SAME, C)) == 0
    admit(ledger, chained(2, SAME, C))
    first = block_table(ledger, 2)[0]
    play(ledger, seal=((first, SAME),))
    for keys, hits in (((SAME, C), 0), ((A, SAME), 1)):
        assert ledger.look_up_prompt(keys, 33).hit_blocks == ledger.leading_blocks(keys) == hits


def test_blocks_are_counted_from_any_place_on() -> None:
    ledger = make_ledger(16)
    admit(ledger, chained(1, A, C, SAME), chained(2, B))
    play(ledger, seal=((0, A), (1, C), (2, SAME), (block_table(ledger, 2)[0], B)))
    assert ledger.leading_blocks((A, C, SAME, D)) == 3
    assert [ledger.leading_blocks((A, C, SAME, D), first, first + 2) for first in range(4)] == [2, 2, 1, 0]
    assert ledger.leading_blocks((B, C, SAME)) == 1
    assert ledger.leading_blocks((B, C, SAME), 1, 3) == 0


def test_a_content_that_a_frame_has_is_compared_too() -> None:
    ledger, replica = make_ledger(3, host_frames=8), IndexReplica()
    admit(ledger, chained(1, A, SAME))
    play(ledger, seal=((0, A), (1, SAME)))
    finish(ledger, 1)
    admit(ledger, chained(2, B, SAME))
    assert ledger.look_up_prompt((A, SAME), 33).hit_blocks == 2, "both are in frames"
    table = block_table(ledger, 2)
    play(ledger, seal=((table[0], B), (table[1], SAME)))
    assert [ledger.look_up_prompt(keys, 33).hit_blocks for keys in ((A, SAME), (B, SAME))] == [1, 1]
    assert replica.apply(ledger.drain_index_events())
    assert replica.depths == {A: 0, B: 0} == dict(ledger.index_snapshot().entries)
    finish(ledger, 2)
    run_through(ledger, 3, prompt(40, start=5000))
    assert ledger.look_up_prompt((A, SAME), 33).hit_blocks == 1
    assert replica.apply(ledger.drain_index_events())
    assert replica.depths == dict(ledger.index_snapshot().entries)


def test_a_hash_that_two_contents_have_leaves_the_index() -> None:
    ledger, replica = make_ledger(16), IndexReplica()
    shared_hash(ledger)
    assert replica.apply(ledger.drain_index_events())
    assert replica.depths == {A: 0, C: 2, B: 0} == dict(ledger.index_snapshot().entries)
    finish(ledger, 1)
    finish(ledger, 2)
    run_through(ledger, 3, prompt(16 * 16, start=5000))
    assert replica.apply(ledger.drain_index_events())
    assert replica.depths == dict(ledger.index_snapshot().entries)
    assert not {A, SAME, C, B} & replica.depths.keys()
    admit(ledger, chained(4, A, SAME))
    table = block_table(ledger, 4)
    play(ledger, seal=((table[0], A), (table[1], SAME)))
    assert replica.apply(ledger.drain_index_events())
    assert A in replica.depths
    assert SAME not in replica.depths


def test_a_match_is_made_anew_once_another_content_has_one_of_its_hashes() -> None:
    ledger = make_ledger(7)
    admit(ledger, chained(1, A, SAME), chained(2, B, SAME))
    first, second = block_table(ledger, 1), block_table(ledger, 2)
    play(ledger, seal=((first[0], A), (first[1], SAME), (second[0], B)))
    assert admit(ledger, chained(3, A, SAME, C)) == (), "two hits, and one block of two"
    play(ledger, seal=((second[1], SAME),))
    finish(ledger, 2)
    assert ledger.state.sequences.live[SequenceId(3)].n_shared == 1


PROMPTS = st.lists(
    st.tuples(st.lists(st.sampled_from([A, B, SAME]), min_size=1, max_size=4), st.booleans()), max_size=24
)


@example([([B, A], True), ([SAME], False), ([SAME, A, SAME], False), ([A], True)], 10)
@example([([A], False), ([B, A, B], False), ([B, A, SAME], True)], 10)
@given(PROMPTS, st.sampled_from([10, 12, 16]))
def test_a_hit_always_has_the_whole_prefix_of_its_prompt(
    prompts: list[tuple[list[BlockHash], bool]], size: int
) -> None:
    """Three hashes for all contents: nearly each one is another content's somewhere. At most two sequences run."""
    ledger, replica = make_ledger(size), IndexReplica()
    prefixes, live = dict[BlockId, tuple[BlockHash, ...]](), dict[int, tuple[tuple[BlockId, BlockHash], ...]]()
    for number, (keys, seals_at_once) in enumerate(prompts, start=1):
        expected = ledger.look_up_prompt(keys, 16 * len(keys) + 1).hit_blocks
        assert ledger.leading_blocks(keys) <= expected, "a look-up has blocks that are still to be filled, too"
        (admitted,) = admit(ledger, chained(number, *keys))
        assert admitted.n_shared == expected
        for place, (block, _) in enumerate(zip(admitted.block_table, keys, strict=False)):
            if place < expected:
                assert prefixes[block] == tuple(keys[: place + 1])
            prefixes[block] = tuple(keys[: place + 1])
        live[number] = tuple(zip(admitted.block_table[expected:], keys[expected:], strict=False))
        if seals_at_once:
            for each in live:
                play(ledger, seal=live[each])
                live[each] = ()
        assert replica.apply(ledger.drain_index_events())
        assert replica.depths == dict(ledger.index_snapshot().entries)
        if len(live) == 2:
            finish(ledger, min(live))
            del live[min(live)]


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
