"""What LRU would have found, and when age decides."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from bench.cache_replay.replay import pool_of, replay
from bench.cache_replay.workloads import by_recency, documents
from common.contracts.types import BlockHash, BlockId
from kvmanager.cache.eviction.recency_guard import RecencyGuard
from kvmanager.cache.eviction.utility import PredictedUtility
from kvmanager.contracts.block import Blocks

WINDOW = 2048
"""Of a pool that has fewer blocks."""


def content(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def lose(guard: RecencyGuard, times: int = 1) -> None:
    """Miss contents that LRU would have had."""
    for _ in range(times):
        guard.note_released(content(1), 4)
        guard.note_missed(content(1))


def find(guard: RecencyGuard, times: int = 1) -> None:
    for _ in range(times):
        guard.note_released(content(2), 4)
        guard.note_found(content(2))


def test_age_decides_after_two_windows_that_lost() -> None:
    guard, decided = RecencyGuard(4), []
    for window in range(2, 14):
        lose(guard)
        guard.judge(window * WINDOW)
        decided.append(guard.by_age)
    # Two windows lose, age decides for four; two lose, age decides for eight.
    assert decided == [False, True, True, True, True, False, False, True, True, True, True, True]


def test_a_window_ends_when_as_many_blocks_were_released() -> None:
    guard = RecencyGuard(4)
    lose(guard)
    for now in (0, 2 * WINDOW - 1, 2 * WINDOW, 3 * WINDOW - 1):
        guard.judge(now)
        assert not guard.by_age
    guard.judge(3 * WINDOW)
    assert guard.by_age


@pytest.mark.parametrize(("missed", "by_age"), [(1, False), (2, True)])
def test_one_hit_in_a_hundred_is_no_loss(missed: int, by_age: bool) -> None:
    guard = RecencyGuard(4)
    find(guard, 100)
    lose(guard, missed)
    guard.judge(2 * WINDOW)
    guard.judge(3 * WINDOW)
    assert guard.by_age is by_age


def test_a_window_that_did_not_lose_begins_the_count_anew() -> None:
    guard = RecencyGuard(4)
    lose(guard)
    guard.judge(2 * WINDOW)
    find(guard, 200)
    guard.judge(3 * WINDOW)
    lose(guard, 200)
    guard.judge(4 * WINDOW)
    assert not guard.by_age


def lru_hits(guard: RecencyGuard, number: int) -> float:
    """Return how many hits of LRU a miss of a content is."""
    before = guard._lru_found
    guard.note_missed(content(number))
    return guard._lru_found - before


def test_lru_has_the_last_contents_that_were_released() -> None:
    """Two are cached. What was released again is the newest, what was dropped is no loss, and a hit counts once."""
    guard = RecencyGuard(2)
    for number in (1, 2, 1, 3):
        guard.note_released(content(number), 2)
    guard.note_dropped(content(3))
    assert [lru_hits(guard, number) for number in (1, 2, 3, 1)] == [1, 0, 0, 0]
    guard.note_released(content(1), 2)
    guard.empty()
    assert lru_hits(guard, 1) == 0


def test_lru_has_no_more_than_is_cached_now() -> None:
    """Of a pool of eight blocks, sequences take six."""
    guard = RecencyGuard(8)
    for number in range(8):
        guard.note_released(content(number), number + 1)
    guard.note_released(content(8), 2)
    assert [number for number in range(9) if lru_hits(guard, number)] == [7, 8]


def policy_of(num_blocks: int) -> tuple[PredictedUtility, Blocks, dict[BlockHash, BlockId]]:
    """Return a policy and what it looks at; block n has content n, and was released."""
    blocks, entries = Blocks(num_blocks), dict[BlockHash, BlockId]()
    order = PredictedUtility(blocks, entries)
    for block in map(BlockId, range(num_blocks)):
        blocks.hash[block] = content(block)
        entries[content(block)] = block
        order.note_registered(block, None, ())
        order.add_block(block)
    return order, blocks, entries


def test_what_a_block_table_holds_is_a_hit_of_neither() -> None:
    order, _, _ = policy_of(2)
    order.reuse_block(BlockId(0))
    for _ in range(100):
        order.note_used(BlockId(0))
    assert (order._guard._found, order._guard._lru_found) == (1, 1)
    assert list(order._guard._shadow) == [content(1)]


def test_a_copy_of_what_is_there_is_no_miss() -> None:
    """A request that takes no hits computes what is cached; its block replaces the cached one."""
    order, blocks, _ = policy_of(2)
    blocks.hash[1] = content(0)
    order.note_registered(BlockId(1), None, ())
    assert order._guard._lru_found == 0
    order.replace_block(BlockId(0), BlockId(1))
    assert content(0) not in order._guard._shadow


@pytest.mark.parametrize(("num_blocks", "watched"), [(1, 256), (1024, 256), (4096, 64), (1 << 20, 4)])
def test_of_a_large_pool_some_contents_stand_for_all(num_blocks: int, watched: int) -> None:
    guard = RecencyGuard(num_blocks)
    for number in range(256):
        guard.note_found(content(number))
    assert guard._found == watched


@pytest.mark.searches
def test_little_is_lost_where_lru_is_the_best_policy() -> None:
    """Seeds are fixed, so this is exact."""
    requests = by_recency(2, 6000)
    best = replay(pool_of(2000, "lru"), requests).found
    guarded = replay(pool_of(2000, "utility"), requests).found
    with mock.patch.object(RecencyGuard, "judge", return_value=None):
        alone = replay(pool_of(2000, "utility"), requests).found
    assert guarded / best > 0.99 > alone / best


def test_the_record_says_that_age_decided() -> None:
    order, _, _ = policy_of(2)
    assert order.reason == "least likely to be used again soon, leaves first"
    order._guard.by_age = True
    assert order.pop_block() == 0
    assert order.reason == "the oldest of some leaves: in the last windows LRU would have found more"


@pytest.mark.searches
def test_age_is_no_remedy_where_sequences_hold_most_of_the_pool() -> None:
    """They hold 70 % of it. LRU would find more in all of the pool; in what is left it finds half of it.

    Seeds are fixed, so this is exact.
    """
    requests = [replace(each, at=float(at), lasts=12.0) for at, each in enumerate(documents(1, 2500), 1)]
    lru = replay(pool_of(1574, "lru"), requests).found
    assert replay(pool_of(1574, "utility"), requests).found > 1.9 * lru
