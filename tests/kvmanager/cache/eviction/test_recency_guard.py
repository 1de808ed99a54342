"""What LRU would have found, and when age decides."""

from __future__ import annotations

from unittest import mock

import pytest

from bench.cache_replay.replay import pool_of, replay
from bench.cache_replay.workloads import by_recency
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
    guard.note_released(content(1))
    for _ in range(times):
        guard.note_missed(content(1))


def find(guard: RecencyGuard, times: int = 1) -> None:
    guard.note_released(content(2))
    for _ in range(times):
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


def test_lru_has_the_last_contents_that_were_released() -> None:
    """The shadow has room for two; what is released again is the newest, and what was dropped is nobody's loss."""
    guard = RecencyGuard(2)
    for number in (1, 2, 1, 3):
        guard.note_released(content(number))
    guard.note_dropped(content(3))
    for number, misses in ((1, 1), (2, 1), (3, 1)):
        guard.note_missed(content(number))
        assert guard._lru_found == misses
    guard.empty()
    guard.note_missed(content(1))
    assert guard._lru_found == 1


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
    blocks = Blocks(4)
    order = PredictedUtility(blocks, {})
    for number in range(2):
        blocks.hash[BlockId(number)] = content(number)
        order.note_registered(BlockId(number), None, ())
        order.add_block(BlockId(number))
    assert order.reason == "least likely to be used again soon, leaves first"
    order._guard.by_age = True
    assert order.pop_block() == 0
    assert order.reason == "the oldest of some leaves: in the last windows LRU would have found more"
