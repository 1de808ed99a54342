"""Which tenants hold more places than their share."""

from __future__ import annotations

from router.core.fair_queue import FairQueue, Flow, Ticket
from router.core.place_shares import PlaceShares

RED, BLUE = Flow("red"), Flow("blue")


def ticket(flow: Flow, sequences: int = 1) -> Ticket:
    return FairQueue[str]().ticket(0, flow, sequences)


def test_a_tenant_alone_may_hold_every_place() -> None:
    counts = PlaceShares()
    for _ in range(7):
        counts.take(RED)
    assert not counts.among(8, [RED]).exceeded_by(ticket(RED))
    counts.take(RED)
    assert counts.among(8, [RED]).exceeded_by(ticket(RED))


def test_a_tenant_that_waits_halves_the_share_of_another() -> None:
    counts = PlaceShares()
    for _ in range(4):
        counts.take(RED)
    shares = counts.among(8, [BLUE])
    assert shares.exceeded_by(ticket(RED))
    assert not shares.exceeded_by(ticket(BLUE))


def test_weights_divide_the_places() -> None:
    counts = PlaceShares()
    heavy = Flow("heavy", 3.0)
    for _ in range(5):
        counts.take(heavy)
        counts.take(RED)
    shares = counts.among(8, [])
    assert not shares.exceeded_by(ticket(heavy))
    assert shares.exceeded_by(ticket(heavy, 2))
    assert shares.exceeded_by(ticket(RED))


def test_the_first_place_is_always_in_the_share() -> None:
    counts = PlaceShares()
    for _ in range(100):
        counts.take(RED)
    assert not counts.among(8, [BLUE]).exceeded_by(ticket(BLUE, 64))


def test_a_tenant_beside_one_that_holds_more_than_its_share() -> None:
    counts, heavy = PlaceShares(), Flow("heavy", 3.0)
    for _ in range(5):
        counts.take(RED)
    assert counts.among(8, [BLUE]).exceeded_beside(BLUE)
    assert not counts.among(8, [BLUE]).exceeded_beside(RED), "it is the one"
    assert not counts.among(10, [BLUE]).exceeded_beside(BLUE), "five are the half"
    assert not counts.among(5, []).exceeded_beside(RED), "alone"
    for _ in range(5):
        counts.take(heavy)
    assert counts.among(10, []).exceeded_beside(heavy), "five of the 2.5 that are red's"
    assert not counts.among(10, []).exceeded_beside(RED)


def test_released_places_count_no_longer() -> None:
    counts = PlaceShares()
    counts.take(RED)
    counts.release(RED)
    assert counts.used(RED) == 0
    counts.take(BLUE)
    assert not counts.among(2, []).exceeded_by(ticket(BLUE))
