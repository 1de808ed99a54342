"""Where every layer has a window, a block stays cached when those before it are gone; exact values on tiny pools.

Blocks have 4 slots. With a window of 8, the token at 4 * n reads from 4 * n - 7 on: the two blocks before it.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contracts.clock import ManualClock
from common.contracts.lease import CachedBlock, Inventory, InventorySequence, RetainedBlocks, blocks_before_window
from common.contracts.types import TRIMMED, BlockHash, BlockId, MissReason, SequencePhase
from kvmanager.cache.prefix_cache import PrefixCache
from kvmanager.contracts.block import ROOT, Blocks
from kvmanager.ledger.grant_plan import match_prefix
from kvmanager.ledger.ledger import Ledger
from tests.support.kvmanager.ledgers import (
    admit,
    block_table,
    copies,
    finish,
    hashes,
    lived,
    make_ledger,
    play,
    prompt,
    reserve,
)

SIZE, WINDOW = 4, 8
LONG = prompt(24)
KEYS = hashes(LONG, SIZE)


@pytest.mark.parametrize(
    ("position", "window", "blocks"),
    [(0, 8, 0), (10, 8, 0), (11, 8, 1), (24, 8, 4), (24, 9, 4), (24, 10, 3), (24, 1, 6), (24, 0, 0)],
)
def test_blocks_that_no_later_token_reads(position: int, window: int, blocks: int) -> None:
    assert blocks_before_window(position, window, SIZE) == blocks


def windowed(num_blocks: int = 12, **options: Any) -> Ledger:
    return make_ledger(num_blocks, SIZE, **{"window": WINDOW, **options})


def test_a_prompt_of_which_the_window_is_cached_begins_behind_it() -> None:
    ledger = windowed()
    lived(ledger, 1, LONG)
    blocks = copies(ledger)
    assert list(blocks) == list(KEYS)
    (granted,) = admit(ledger, reserve(2, [*LONG, 99], block_size=SIZE))
    fourth, fifth = blocks[KEYS[4]][0], blocks[KEYS[5]][0]
    assert granted.block_table[:6] == (TRIMMED, TRIMMED, TRIMMED, TRIMMED, fourth, fifth)
    assert (granted.n_shared, granted.cached_tokens, len(granted.block_table)) == (6, 24, 7)
    assert granted.miss_reason is MissReason.FULL_HIT
    assert (ledger.pool_counts().in_use, ledger.pool_counts().totals.prefix_hit_blocks) == (3, 6)
    finish(ledger, 2)
    assert ledger.pool_counts().in_use == 0


def test_it_still_begins_there_when_the_first_blocks_were_evicted() -> None:
    """They left the window first, so they were released first, and are evicted first."""
    ledger = windowed(10)
    lived(ledger, 1, LONG)
    admit(ledger, *(reserve(n, prompt(28, start=300 * n), block_size=SIZE) for n in (2, 3)))
    assert list(copies(ledger)) == list(KEYS[4:])
    assert ledger.drain_index_events()[-1].hash == KEYS[3]  # type: ignore[union-attr]
    assert ledger.look_up_prompt(KEYS, 25).hit_blocks == 6
    assert ledger.look_up_prompt(KEYS, 24).hit_blocks == 0  # the last token is computed, and block 3 is gone
    assert ledger.look_up_prompt(KEYS[:5], 21).hit_blocks == 0


def evicted(ledger: Ledger, *places: int) -> None:
    """Evict blocks of the long prompt, whatever comes first in the order."""
    for place in places:
        block = ledger.state.store.cache.entries[KEYS[place]]
        ledger.state.store.pool.free_cached_block(block)
        ledger.state.store.cache.forget_block(block, "r9")
    ledger.check_invariants()


@pytest.mark.parametrize(
    ("gone", "num_tokens", "hits", "reason"),
    [
        ((), 25, 6, MissReason.FULL_HIT),
        ((), 24, 5, MissReason.CAPPED),
        ((0, 1, 2, 3), 25, 6, MissReason.FULL_HIT),
        ((0, 1, 2), 24, 5, MissReason.CAPPED),
        ((5,), 25, 5, MissReason.EVICTED),
        ((4,), 25, 4, MissReason.EVICTED),
        ((1, 4), 25, 4, MissReason.EVICTED),
        ((2, 4), 25, 2, MissReason.EVICTED),
        ((0, 2, 4), 25, 0, MissReason.EVICTED),
        ((1, 3, 5), 25, 1, MissReason.EVICTED),
        ((1, 2, 3, 4, 5), 25, 1, MissReason.EVICTED),
        ((0, 1, 2, 3, 4, 5), 25, 0, MissReason.EVICTED),
    ],
)
def test_the_deepest_run_that_the_window_covers(
    gone: tuple[int, ...], num_tokens: int, hits: int, reason: MissReason
) -> None:
    ledger = windowed()
    lived(ledger, 1, LONG)
    evicted(ledger, *gone)
    match = ledger.look_up_prompt(KEYS, num_tokens)
    assert (match.hit_blocks, match.miss_reason) == (hits, reason)


def test_a_prompt_that_goes_on_otherwise_has_hits_up_to_there() -> None:
    ledger = windowed()
    lived(ledger, 1, LONG)
    other = hashes([*LONG[:16], *prompt(8, start=500)], SIZE)
    match = ledger.look_up_prompt(other, 25)
    assert (match.hit_blocks, match.miss_reason, match.diverged_at) == (4, MissReason.DIVERGED_AT, 4)
    assert ledger.look_up_prompt(hashes(prompt(24, start=700), SIZE), 24).miss_reason is MissReason.NEVER_SEEN


def test_a_block_whose_eviction_is_forgotten_was_seen_all_the_same() -> None:
    ledger = windowed(ghosts=1)
    lived(ledger, 1, LONG)
    evicted(ledger, 0, 1, 4)
    assert ledger.look_up_prompt(KEYS, 25).miss_reason is MissReason.EVICTED
    match = ledger.look_up_prompt(KEYS[:3], 13)  # of block 0, nothing is known any more, but block 2 is cached
    assert (match.hit_blocks, match.miss_reason) == (0, MissReason.EVICTED)


def test_blocks_that_are_still_being_filled_are_shared_from_the_first_one_on() -> None:
    """A sequence with all blocks before a pending one can compute that block if its filler leaves."""
    ledger = windowed()
    first, second = admit(ledger, *(reserve(number, [*LONG, 99], block_size=SIZE) for number in (1, 2)))
    assert (first.n_shared, second.n_shared, second.miss_reason) == (0, 2, MissReason.WINDOWED)
    assert second.block_table[:2] == first.block_table[:2]


def test_a_hole_in_the_run_is_not_filled_by_a_pending_block() -> None:
    ledger = windowed(16)
    lived(ledger, 1, LONG)
    evicted(ledger, 0, 1, 2, 3, 4)
    admit(ledger, reserve(2, [*LONG[:20], 98], block_size=SIZE))
    table = block_table(ledger, 2)
    assert ledger.state.store.cache.pending[KEYS[0]] == table[0]
    play(ledger, seal=((table[0], KEYS[0]),))
    (granted,) = admit(ledger, reserve(3, [*LONG, 99], block_size=SIZE))
    assert granted.block_table[: granted.n_shared] == table[:2]


def test_a_match_is_made_anew_when_a_block_of_the_run_comes_or_goes() -> None:
    ledger = windowed(8)
    lived(ledger, 1, LONG)
    admit(ledger, reserve(2, prompt(9, start=300), block_size=SIZE), reserve(3, prompt(9, start=400), block_size=SIZE))
    assert admit(ledger, reserve(4, [*LONG, 99], block_size=SIZE)) == ()
    ledger.check_invariants()
    finish(ledger, 2)
    (table,) = (each.block_ids for each in ledger.block_tables() if each.sequence == 4)
    assert len(table) == 7


def test_a_seal_needs_no_registered_parent_and_compares_hash_parent_and_depth() -> None:
    a, b, c, same = (BlockHash(letter * 16) for letter in (b"a", b"b", b"c", b"="))
    ledger = windowed(16)
    admit(ledger, reserve(1, prompt(13), block_size=SIZE, block_hashes=(a, b, same)))
    table = block_table(ledger, 1)
    play(ledger, seal=((table[1], b), (table[2], same)))  # block 0 was never sealed
    assert set(copies(ledger)) == {b, same}
    for keys, hits in (((same,), 0), ((c, same), 0), ((a, c, same), 1), ((c, b, same), 0)):
        assert ledger.look_up_prompt(keys, SIZE * len(keys) + 1).hit_blocks == hits
    admit(ledger, reserve(9, prompt(9, start=900), block_size=SIZE, block_hashes=(c, same)))
    other = block_table(ledger, 9)
    play(ledger, seal=((other[0], c), (other[1], same)))
    assert copies(ledger)[same] == [table[2]]
    assert ledger.pool_counts().totals.ignored_seals == 1


def test_a_copy_of_a_cached_block_replaces_it() -> None:
    ledger = windowed()
    lived(ledger, 1, LONG)
    evicted(ledger, 4)
    lived(ledger, 2, LONG)
    assert {key: len(blocks) for key, blocks in copies(ledger).items()} == dict.fromkeys(KEYS, 1)
    assert ledger.pool_counts().free + ledger.pool_counts().cached == 12


def cached(block: int, place: int, last_used: int = 0) -> CachedBlock:
    return CachedBlock(BlockId(block), KEYS[place], -1, last_used, KEYS[place - 1], place)


def test_an_inventory_brings_back_blocks_without_their_ancestors() -> None:
    ledger = windowed()
    live = reserve(1, [*LONG, 99], max_len=40, block_size=SIZE)
    running = InventorySequence(
        live, SequencePhase.RUNNING, 0, tuple(map(BlockId, (TRIMMED, TRIMMED, TRIMMED, TRIMMED, 8, 9, 10)))
    )
    ledger.rebuild(Inventory((running,), cached_blocks=(cached(3, 2, 7), cached(5, 3, 4), cached(8, 4), cached(7, 5))))
    ledger.check_invariants()
    assert copies(ledger) == {KEYS[2]: [3], KEYS[3]: [5], KEYS[4]: [8], KEYS[5]: [7]}
    assert list(ledger.state.store.pool.cached) == [7, 5, 3]  # by their last use
    assert ledger.look_up_prompt(KEYS, 25).hit_blocks == 6
    assert ledger.look_up_prompt(KEYS[:5], 17).hit_blocks == 4
    play(ledger, seal=((9, KEYS[5]),))
    assert copies(ledger)[KEYS[5]] == [9]


def test_of_one_use_the_deepest_goes_first_and_any_depth_costs_the_same() -> None:
    """A worker may name any depth."""
    ledger, deepest = windowed(), 2**31 - 1
    far = CachedBlock(BlockId(4), BlockHash(b"f" * 16), -1, 3, BlockHash(b"e" * 16), deepest)
    ledger.rebuild(Inventory(cached_blocks=(cached(2, 1, 3), far, cached(3, 2, 3), cached(1, 5, 1))))
    ledger.check_invariants()
    assert list(ledger.state.store.pool.cached) == [1, 4, 3, 2]


def test_an_inventory_without_depths_is_refused() -> None:
    ledger = windowed()
    with pytest.raises(Exception, match="came without their depths"):
        ledger.rebuild(Inventory(cached_blocks=(CachedBlock(BlockId(0), KEYS[0], -1, 0),)))


def test_a_fork_takes_the_hits_of_the_window_when_its_parent_has_empty_places() -> None:
    ledger = windowed()
    lived(ledger, 1, LONG)
    tokens = [*LONG, 99, 98]
    first, second = admit(ledger, *(reserve(n, tokens, 40, SIZE, fork_of=None if n == 2 else 2) for n in (2, 3)))
    assert second.block_table[:6] == first.block_table[:6]
    assert second.block_table[6] != first.block_table[6]


def test_what_is_retained_stays_retained_when_it_leaves_the_window() -> None:
    clock = ManualClock()
    ledger = windowed(12, clock=clock)
    lived(ledger, 1, LONG, retention=(RetainedBlocks(0, 3, 80, 60.0),))
    assert ledger.pool_counts().retained == 3
    lived(ledger, 2, prompt(24, start=600))
    lived(ledger, 3, prompt(24, start=700))
    assert [key in copies(ledger) for key in KEYS] == [True] * 3 + [False] * 3


@pytest.mark.parametrize("eviction", ["lru", "frequency", "utility"])
def test_one_run_goes_before_another_one_loses_a_block(eviction: str) -> None:
    ledger = windowed(40, eviction=eviction)
    others = [prompt(24, start=1000 * n) for n in range(1, 5)]
    for number, tokens in enumerate(others, start=1):
        lived(ledger, number, tokens)
    lived(ledger, 9, prompt(24, start=9000))
    whole = [ledger.look_up_prompt(hashes(tokens, SIZE), 25).hit_blocks == 6 for tokens in others]
    assert sum(whole) >= 3, whole
    play(ledger, lease_want=24)
    whole = [ledger.look_up_prompt(hashes(tokens, SIZE), 25).hit_blocks == 6 for tokens in others]
    assert sum(whole) >= 1, whole


def test_the_page_counts_no_places_that_left_the_window_as_held_or_shared() -> None:
    ledger = windowed()
    lived(ledger, 1, LONG)
    admit(ledger, reserve(2, [*LONG, 99], block_size=SIZE))
    (use,) = ledger.block_map(0, 12, 8).sequences
    assert (use.blocks, use.n_shared) == (3, 2)


class _Counted(list[BlockHash]):
    """Block hashes that count how many of them are looked at."""

    looked_at = 0

    def __getitem__(self, key: Any) -> Any:
        self.looked_at += len(range(*key.indices(len(self)))) if isinstance(key, slice) else 1
        return super().__getitem__(key)


def test_a_look_up_looks_at_few_blocks_of_a_prompt_that_nobody_has() -> None:
    """A window covers 16 blocks, so one missing block in 16 decides."""
    ledger = windowed(40, window=64)
    keys = _Counted(hashes(prompt(4 * 512), SIZE))
    match_prefix(ledger.state.store, keys, 4 * 512, True)
    assert keys.looked_at < 512 // 16 + 2 * 18


def test_a_prompt_that_waits_watches_the_blocks_that_decide() -> None:
    """A seal of another block of the same prompt needs no new look-up."""
    ledger = windowed(20, window=64)
    tokens = prompt(4 * 512)
    admit(ledger, reserve(1, [*tokens, 7], block_size=SIZE))
    assert admit(ledger, reserve(2, [*tokens, 7], block_size=SIZE)) == ()
    state = ledger.state
    assert state.store.remembered is not None
    watched = state.store.cache.watched
    assert {at for at, key in enumerate(hashes(tokens, SIZE)) if key in watched and at >= 448} == {448, 464, 480, 496}
    assert len(watched) < 512 // 16 + 2 * 18 + 2
    ledger.check_invariants()


@given(st.data(), st.integers(1, 24), st.integers(0, 20))
def test_the_deepest_run_is_that_of_a_look_at_each_depth(data: st.DataObject, window: int, limit: int) -> None:
    held = data.draw(st.lists(st.booleans(), min_size=20, max_size=20))
    config = make_ledger(20, SIZE, window=window).state.config
    cache, keys = _holding(held)
    wanted = (0, list[BlockId]())
    for depth in range(1, limit + 1):
        begin = min(config.unread_blocks(depth), depth - 1)
        if all(held[begin:depth]):
            wanted = (begin, [BlockId(at) for at in range(begin, depth)])
    missing = list[int]()
    assert cache.find_deepest_run(keys, limit, config.unread_blocks, missing) == wanted
    assert not any(held[each] for each in missing)
    # As long as these are missing, and the blocks of the run are there, the others may change.
    kept = {*missing, *wanted[1]}
    other, _ = _holding([each if at in kept else data.draw(st.booleans()) for at, each in enumerate(held)])
    assert other.find_deepest_run(keys, limit, config.unread_blocks) == wanted


def _holding(held: list[bool]) -> tuple[PrefixCache, tuple[BlockHash, ...]]:
    """Return a cache of whose blocks those are registered that are held."""
    blocks, keys = Blocks(len(held)), hashes(prompt(SIZE * len(held)), SIZE)
    cache = PrefixCache(blocks, 4, linked=False)
    for at in (at for at, each in enumerate(held) if each):
        blocks.index[at] = at
        cache.register_block(BlockId(at), keys[at], keys[at - 1] if at else ROOT)
    return cache, keys
