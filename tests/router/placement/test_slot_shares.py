"""Which tenants hold more slots than their share."""

from __future__ import annotations

from common.contracts.clock import ManualClock
from router.placement.fair_queue import FairQueue, Flow, Ticket
from router.placement.slot_shares import SlotShares

RED, BLUE = Flow("red"), Flow("blue")


def ticket(flow: Flow, sequences: int = 1) -> Ticket:
    return FairQueue[str](ManualClock()).ticket(0, flow, sequences)


def test_a_tenant_alone_may_hold_every_slot() -> None:
    counts = SlotShares()
    for _ in range(7):
        counts.take_slot(RED)
    assert not counts.among(8, [RED]).exceeded_by(ticket(RED))
    counts.take_slot(RED)
    assert counts.among(8, [RED]).exceeded_by(ticket(RED))


def test_a_tenant_that_waits_halves_the_share_of_another() -> None:
    counts = SlotShares()
    for _ in range(4):
        counts.take_slot(RED)
    shares = counts.among(8, [BLUE])
    assert shares.exceeded_by(ticket(RED))
    assert not shares.exceeded_by(ticket(BLUE))


def test_weights_divide_the_slots() -> None:
    counts = SlotShares()
    heavy = Flow("heavy", 3.0)
    for _ in range(5):
        counts.take_slot(heavy)
        counts.take_slot(RED)
    shares = counts.among(8, [])
    assert not shares.exceeded_by(ticket(heavy))
    assert shares.exceeded_by(ticket(heavy, 2))
    assert shares.exceeded_by(ticket(RED))


def test_the_first_slot_is_always_in_the_share() -> None:
    counts = SlotShares()
    for _ in range(100):
        counts.take_slot(RED)
    assert not counts.among(8, [BLUE]).exceeded_by(ticket(BLUE, 64))


def test_a_tenant_beside_one_that_holds_more_than_its_share() -> None:
    counts, heavy = SlotShares(), Flow("heavy", 3.0)
    for _ in range(5):
        counts.take_slot(RED)
    assert counts.among(8, [BLUE]).exceeded_beside(BLUE)
    assert not counts.among(8, [BLUE]).exceeded_beside(RED), "it is the one"
    assert not counts.among(10, [BLUE]).exceeded_beside(BLUE), "five are the half"
    assert not counts.among(5, []).exceeded_beside(RED), "alone"
    for _ in range(5):
        counts.take_slot(heavy)
    assert counts.among(10, []).exceeded_beside(heavy), "five of the 2.5 that are red's"
    assert not counts.among(10, []).exceeded_beside(RED)


def test_released_slots_count_no_longer() -> None:
    counts = SlotShares()
    counts.take_slot(RED)
    counts.release_slot(RED)
    assert counts.used(RED) == 0
    counts.take_slot(BLUE)
    assert not counts.among(2, []).exceeded_by(ticket(BLUE))


def test_others_go_first_beyond_the_share_the_largest_request_and_a_slot() -> None:
    counts, shares = SlotShares(), [RED, BLUE]
    for _ in range(9):
        counts.take_slot(RED)
    assert [counts.among(16, shares).is_over(RED, largest) for largest in (1, 2)] == [False, False]
    counts.take_slot(RED)
    assert [counts.among(16, shares).is_over(RED, largest) for largest in (1, 2)] == [True, False], "10 are 8 + 1 + 1"
    assert not counts.among(16, shares).is_over(BLUE, 1)


def test_a_tenant_that_holds_both_slots_is_over_its_share_of_one() -> None:
    counts = SlotShares()
    for _ in range(2):
        counts.take_slot(RED)
    assert counts.among(2, [BLUE]).is_over(RED, 1)


def test_a_load_is_what_a_tenant_holds_over_its_share() -> None:
    counts, heavy = SlotShares(), Flow("heavy", 3.0)
    for _ in range(6):
        counts.take_slot(heavy)
    counts.take_slot(RED)
    shares = counts.among(8, [BLUE])
    assert [shares.load(each) for each in (heavy, RED, BLUE)] == [6 / (8 * 3 / 5), 1 / (8 / 5), 0.0]


def test_fractions_that_miss_a_whole_number_count_as_it() -> None:
    """Seven weights of 0.1 are a bit less or more than 0.7."""
    counts, flows = SlotShares(), [Flow(str(number), 0.1) for number in range(7)]
    for flow in flows:
        for _ in range(2):
            counts.take_slot(flow)
    shares = counts.among(21, [])
    assert not any(shares.exceeded_by(ticket(flow)) for flow in flows), "the third of three"
    assert all(shares.exceeded_by(ticket(flow, 2)) for flow in flows)
