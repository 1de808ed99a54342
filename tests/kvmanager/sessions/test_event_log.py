"""The latest events of a session, from a number on."""

from __future__ import annotations

from common.contracts.types import BlockHash
from kvmanager.contracts.index_events import Cleared, Stored
from kvmanager.sessions.event_log import EventLog


def stored(number: int) -> Stored:
    return Stored(number, BlockHash(number.to_bytes(16, "big")), 0)


def test_events_after_a_number_are_returned_in_order() -> None:
    log = EventLog()
    log.add([stored(1), stored(2), Cleared(3)])
    assert log.since(0) == (stored(1), stored(2), Cleared(3))
    assert log.since(2) == (Cleared(3),)
    assert log.since(3) == ()


def test_a_number_that_is_too_old_or_was_never_given_is_a_gap() -> None:
    log = EventLog(most=2)
    log.add([stored(1), stored(2), stored(3)])
    assert log.since(0) is None
    assert log.since(1) == (stored(2), stored(3))
    assert log.since(4) is None


def test_events_that_are_passed_over_are_a_gap() -> None:
    log = EventLog()
    log.add([stored(1)])
    log.pass_over(3)
    log.add([stored(4)])
    assert (log.since(0), log.since(3)) == (None, (stored(4),))


def test_events_from_before_the_log_are_passed_over() -> None:
    log = EventLog(number=2)
    log.add([stored(1), stored(2), stored(3)])
    assert log.since(2) == (stored(3),)
    assert log.since(1) is None
