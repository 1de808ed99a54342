"""What is kept of workers that have left: their counters, of few by name, of all in sum."""

from __future__ import annotations

from common.contracts.types import MissReason
from kvmanager.contracts.counts import Totals
from kvmanager.ledger.past_totals import DEPARTED, PastTotals, added


def counted(blocks: int, **misses: int) -> Totals:
    totals = Totals(transfer_ends={"DONE": blocks})
    totals.prefix_query_blocks = blocks
    totals.misses_by_reason = {MissReason(reason): count for reason, count in misses.items()}
    return totals


def blocks_of(past: PastTotals) -> dict[str, int]:
    return {worker: totals.prefix_query_blocks for worker, totals in past.accounts().items()}


def test_a_sum_has_every_count_and_leaves_its_parts_as_they_were() -> None:
    first, second = counted(3, evicted=1), counted(4, evicted=2, capped=5)
    total = added(first, second)
    assert total.prefix_query_blocks == 7
    assert total.misses_by_reason == {MissReason.EVICTED: 3, MissReason.CAPPED: 5}
    assert total.transfer_ends == {"DONE": 7}
    assert (first.prefix_query_blocks, first.misses_by_reason) == (3, {MissReason.EVICTED: 1})


def test_a_worker_that_left_twice_has_one_account() -> None:
    past = PastTotals()
    past.add("a", counted(3))
    past.add("a", counted(4))
    assert blocks_of(past) == {"a": 7}


def test_of_many_workers_those_that_left_first_are_one_sum() -> None:
    past = PastTotals(most=2)
    for blocks, worker in enumerate(("a", "b", "a", "c", "d"), start=1):
        past.add(worker, counted(blocks))
    assert blocks_of(past) == {"c": 4, "d": 5, DEPARTED: 2 + 1 + 3}
