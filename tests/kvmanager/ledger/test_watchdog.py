"""Which sequences should have blocks, and what explains that they have none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from common.contracts.types import KvGroup, KvGroupKind
from kvmanager.contracts.counts import GroupCounts, PoolCounts, Totals
from kvmanager.ledger.watchdog import waits_for_a_grant

STALLED = PoolCounts(
    num_blocks=8, free=3, leased=0, in_use=0, cached=5, pinned=0, running=0, waiting=2, preempting=0, lease_target=0,
    deferred=2, capacity=0, totals=Totals(),
)  # fmt: skip


def test_waiting_beside_free_blocks_with_nothing_running_is_a_stall() -> None:
    words = "2 sequences wait, none runs, 8 of 8 blocks are free and none was granted"
    assert waits_for_a_grant(STALLED) == words


def test_a_pool_with_groups_of_layers_counts_pages() -> None:
    paged = replace(STALLED, groups=(GroupCounts(KvGroup(KvGroupKind.FULL, 0, 2, (0,)), 0, 1),))
    assert waits_for_a_grant(paged).endswith("8 of 8 pages are free and none was granted")


def test_running_beside_free_blocks_without_being_able_to_compute_is_a_stall() -> None:
    words = "2 sequences wait, 1 run and lack blocks, 8 of 8 blocks are free and none was granted"
    assert waits_for_a_grant(replace(STALLED, running=1, lacking=1)) == words
    alone = replace(STALLED, waiting=0, running=1, lacking=1, free=0, cached=0)
    assert waits_for_a_grant(alone).startswith("0 sequences wait, 1 run and lack blocks, 0 of 8")


def test_what_explains_a_wait() -> None:
    explained: tuple[dict[str, Any], ...] = (
        {"waiting": 0},
        {"running": 1},
        {"running": 2, "lacking": 1},
        {"preempting": 1},
        {"leased": 1},
        {"free": 0, "cached": 0},
    )
    for fields in explained:
        assert waits_for_a_grant(replace(STALLED, **fields)) == ""
