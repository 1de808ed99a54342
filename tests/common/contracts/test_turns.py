"""Who goes by age: the rule itself, and that the router's queue and the KV manager's keep the same one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.contracts.clock import ManualClock
from common.contracts.turns import choose_by_age, is_old
from common.contracts.types import FinishReason, SequenceId
from router.placement.fair_queue import FairQueue
from tests.support.kvmanager.ledgers import make_ledger, play, prompt, reserve


@dataclass(frozen=True)
class Waits:
    arrival: int
    waited: float
    load: float


def chosen(*oldest: Waits) -> int | None:
    found = choose_by_age(oldest, lambda each: is_old(each.waited, 30.0), lambda each: each.load)
    return None if found is None else found.arrival


def test_the_least_load_goes_first_then_the_first_arrival() -> None:
    assert chosen(Waits(1, 31.0, 0.5), Waits(2, 30.0, 0.25), Waits(3, 30.0, 0.25)) == 2


def test_who_is_not_old_has_no_turn() -> None:
    assert chosen(Waits(1, 29.9, 0.0), Waits(2, 30.0, 0.9)) == 2
    assert chosen(Waits(1, 29.9, 0.0)) is None


def test_a_tenant_at_its_share_has_no_turn_while_others_wait() -> None:
    assert chosen(Waits(1, 99.0, 1.0), Waits(2, 1.0, 0.0)) is None
    assert chosen(Waits(1, 99.0, 5.0)) == 1


@pytest.mark.parametrize(("waited", "max_wait", "old"), [(30.0, 30.0, True), (29.9, 30.0, False), (1e9, 0.0, False)])
def test_old_is_who_has_waited_for_so_long(waited: float, max_wait: float, old: bool) -> None:
    assert is_old(waited, max_wait) is old


arrivals = st.lists(st.integers(-2, 2), max_size=3)


@given(st.lists(st.tuples(st.floats(0.0, 9.0), arrivals), max_size=60))
@example([(1.0, [0, -1])] + [(9.0, [1])] * 30)
def test_both_queues_serve_one_tenant_in_the_same_order(steps: list[tuple[float, list[int]]]) -> None:
    """One place, and a pool for one prompt: each step ends what runs, and serves one of those that wait."""
    clock = ManualClock()
    ledger = make_ledger(4, clock=clock, max_wait=30.0, backfill=False, chunked_grants=False)
    queue, runs, number = FairQueue[int](clock, max_wait=30.0), 0, 0
    for seconds, priorities in steps:
        clock.advance(seconds)
        reserves = []
        for priority in priorities:
            number += 1
            reserves.append(reserve(number, prompt(60, start=100 * number), priority=priority))
            queue.join_queue(queue.ticket(priority), number)
        ended = ((SequenceId(runs), FinishReason.STOP),) if runs else ()
        batch = play(ledger, reserve=tuple(reserves), finished=ended)
        served = [each.sequence for each in batch.admit] if batch else []
        assert len(served) == bool(queue)
        runs = served[0] if served else 0
        if queue:
            ticket, head = queue.head()
            queue.serve_ticket(ticket)
            assert head == runs
