"""Which slot a registration gets, which of two groups keeps a worker, and which writes count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmanager.contracts.slots import NoSlot, Registration, may_follow, registered, writable

W0 = Registration("w0", "life-1", 3, "a", 10)
W1 = Registration("w1", "life-9", 1, "b", 20)
BOTH = {0: W0, 1: W1}
ALL = frozenset((0, 1))


def test_slots_of_all_groups_are_numbered_together() -> None:
    assert registered({}, frozenset(), W0, 8) == 0
    assert registered({0: W0}, frozenset((0,)), W1, 8) == 1
    assert registered(BOTH, ALL, replace(W0, worker_id="w2", group="b"), 8) == 2


def test_a_slot_whose_worker_is_gone_is_used_by_any_group() -> None:
    assert registered(BOTH, frozenset((1,)), replace(W1, worker_id="w2"), 8) == 0


def test_there_is_none_when_live_workers_of_any_group_hold_all() -> None:
    assert registered(BOTH, ALL, replace(W0, worker_id="w2"), 2) is NoSlot.FULL
    assert registered(BOTH, ALL, W0, 2) == 0


@pytest.mark.parametrize("alive", [True, False])
def test_of_one_life_of_a_worker_the_later_session_counts_whatever_the_group(alive: bool) -> None:
    assert may_follow(W0, alive, replace(W0, session=4, group="b"))
    assert may_follow(W0, alive, replace(W0, generation=11))
    assert not may_follow(W0, alive, replace(W0, session=2, group="b"))
    assert not may_follow(W0, alive, replace(W0, session=2))


def test_another_life_waits_only_for_another_group_that_renews() -> None:
    other = replace(W0, incarnation="life-2", session=1)
    assert may_follow(W0, True, other)
    assert may_follow(W0, False, replace(other, group="b"))
    assert not may_follow(W0, True, replace(other, group="b"))
    alive = frozenset((0,))
    assert registered({0: W0}, alive, replace(other, group="b"), 8) is NoSlot.ELSEWHERE


def test_only_the_generation_of_a_slot_writes_there() -> None:
    assert writable(BOTH, 0, 10)
    assert not writable(BOTH, 0, 20)
    assert not writable(BOTH, 2, 10)
