"""What a block is worth by its age, from uses that were counted."""

from __future__ import annotations

import pytest

from common.contracts.types import BlockId
from kvmanager.cache.eviction.utility import CLASSES, MOST_USES, LeafSet, Lifetimes, bucket_of, class_of


def learned(klass_ages: dict[int, list[int]], evicted: dict[int, int]) -> Lifetimes:
    lifetimes = Lifetimes(3)
    for klass, ages in klass_ages.items():
        for age in ages:
            lifetimes.reuse(klass, age)
    for klass, count in evicted.items():
        for _ in range(count):
            lifetimes.evicted[klass] += 1.0
    lifetimes.learn()
    return lifetimes


def test_a_bucket_is_half_an_octave() -> None:
    assert [bucket_of(age) for age in (0, 1, 2, 3, 4, 5, 6, 7, 8, 12)] == [1, 2, 4, 5, 6, 6, 7, 7, 8, 9]
    ages = range(5000)
    assert sorted(map(bucket_of, ages)) == [bucket_of(age) for age in ages], "older never stands in an earlier bucket"


def test_a_class_that_comes_back_is_worth_more_than_one_that_does_not() -> None:
    worth = learned({0: [100] * 500, 1: [100] * 50}, {0: 50, 1: 500}).worth
    assert worth[0][bucket_of(60)] > 5 * worth[1][bucket_of(60)]


def test_a_block_is_worth_most_shortly_before_its_use_is_due() -> None:
    """All come back at age 1000: a young one must wait longer for that, and an older one is late."""
    worth = learned({0: [1000] * 1000}, {0: 10}).worth[0]
    assert worth[bucket_of(10)] < worth[bucket_of(700)]
    assert worth[bucket_of(700)] > 20 * worth[bucket_of(5000)]


def test_a_regret_moves_an_eviction_to_the_uses() -> None:
    evicted, regretted = learned({}, {0: 400}), Lifetimes(3)
    for _ in range(400):
        regretted.evicted[0] += 1.0
        regretted.regret(0, 300)
    regretted.learn()
    assert regretted.worth[0][bucket_of(200)] > 5 * evicted.worth[0][bucket_of(200)]


def test_an_unseen_class_has_the_lifetimes_of_all() -> None:
    worth = learned({0: [64] * 1000}, {0: 100}).worth
    assert worth[2][bucket_of(50)] == pytest.approx(worth[0][bucket_of(50)], rel=0.2)


def test_what_was_counted_fades() -> None:
    lifetimes = learned({0: [100] * 1000}, {})
    before = lifetimes.worth[0][bucket_of(80)]
    for _ in range(60):
        for _ in range(100):
            lifetimes.evicted[0] += 1.0
        lifetimes.learn()
    assert lifetimes.worth[0][bucket_of(80)] < before / 10


def test_classes_are_apart() -> None:
    first = {class_of(1, origin, 0) for origin in (0, 1, 2, 3, 8, 9, MOST_USES)}
    later = {class_of(uses, 0, span) for uses in range(2, MOST_USES + 1) for span in (0, 10, 10**4, 10**7, 10**12)}
    assert len(first) == 4
    assert not first & later
    assert max(first | later) < CLASSES


def test_a_set_of_leaves_gives_each_block_a_chance() -> None:
    leaves = LeafSet(1000)
    for block in range(1000):
        leaves.add(BlockId(block))
    for block in range(0, 1000, 2):
        leaves.remove(BlockId(block))
    picked = {block for _ in range(400) for block in leaves.pick(16)}
    assert len(leaves) == 500
    assert picked == set(range(1, 1000, 2))
    assert all(block in leaves for block in picked)
