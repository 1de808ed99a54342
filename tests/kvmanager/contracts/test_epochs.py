"""The rules by which a manager takes an epoch, one by one."""

from __future__ import annotations

import pytest

from kvmanager.contracts.epochs import acquired, is_replaced, must_rise, next_epoch


@pytest.mark.parametrize(
    ("numbers", "epoch"),
    [
        ({"counter": 7}, 8),
        ({"stored": 9}, 10),
        ({"own": 5, "counter": 1, "stored": 2, "seen": 30}, 31),
        ({"own": 5}, 6),
        ({}, 1),
    ],
)
def test_the_next_epoch_is_one_more_than_the_highest_of_all(numbers: dict[str, int], epoch: int) -> None:
    assert next_epoch(**numbers) == epoch


@pytest.mark.parametrize(
    ("own", "seen", "answered", "rises"),
    [
        (0, 0, False, True),
        (3, 2, False, False),
        (3, 3, True, False),
        (3, 3, False, True),
        (3, 4, True, True),
    ],
    ids=["none yet", "lower", "equal, from us", "equal, from a predecessor", "higher"],
)
def test_a_worker_gets_only_an_epoch_that_it_accepts(own: int, seen: int, answered: bool, rises: bool) -> None:
    assert must_rise(own, seen, answered) is rises


@pytest.mark.parametrize(
    ("least", "counter", "fence", "epoch"),
    [(4, 2, 2, 4), (4, 7, 2, 8), (4, 2, 9, 10), (4, None, None, 504), (1, None, 9, 510), (4, 2, None, 4)],
)
def test_redis_gives_no_epoch_twice_and_jumps_without_a_counter(
    least: int, counter: int | None, fence: int | None, epoch: int
) -> None:
    assert acquired(least, counter, fence, jump=500) == epoch


@pytest.mark.parametrize(
    ("held", "fence", "replaced"), [(0, 9, False), (3, None, False), (3, 2, False), (3, 3, False), (3, 4, True)]
)
def test_a_manager_is_replaced_once_a_higher_fence_stands_where_its_own_was(
    held: int, fence: int | None, replaced: bool
) -> None:
    assert is_replaced(held, fence) is replaced
