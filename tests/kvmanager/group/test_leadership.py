"""Who leads a group, to the exact moment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmanager.group.leadership import Attempt, Change, Leadership, Lease, granted

TTL, POLL = 3.0, 0.25
OTHER = Lease(7, "other", "h:1", "ns", 2)


def new(owner: str = "own") -> Leadership:
    return Leadership(owner, TTL, POLL)


def leader(term: int = 5, at: float = 0.0) -> Leadership:
    core = new()
    assert core.held(at, term) is Change.GAINED
    return core


# ------------------------------------------------------------ the lease in Redis


@pytest.mark.parametrize(
    ("lease", "counter", "attempt", "term"),
    [
        (None, None, Attempt(0, 0), 500),  # new: the first term is the time
        (None, 4, Attempt(0, 0), 5),
        (None, 4, Attempt(0, 9), 10),  # above what the caller has seen
        (None, 4, Attempt(4, 4), 4),  # removed, and nobody has taken it since
        (None, 5, Attempt(4, 4), 6),  # removed, and somebody has
        (None, None, Attempt(4, 4), 500),  # wiped
        (None, None, Attempt(4, 900), 901),  # wiped, and the clock is behind
        (OTHER, None, Attempt(0, 7, seize=(7, 2)), 500),  # the counter alone was lost
        (OTHER, 7, Attempt(0, 7), None),
        (OTHER, 7, Attempt(0, 7, seize=(6, 2)), None),  # another one has taken it meanwhile
        (OTHER, 7, Attempt(0, 7, seize=(7, 1)), None),  # it was renewed meanwhile
        (OTHER, 7, Attempt(0, 7, seize=(7, 2)), 8),
        (OTHER, 3, Attempt(0, 0, seize=(7, 2)), 8),  # a counter that was overwritten
        (Lease(7, "own", "h:2"), 7, Attempt(0, 0), 7),  # the answer to the attempt before was lost
    ],
)
def test_redis_gives_terms_that_only_rise(
    lease: Lease | None, counter: int | None, attempt: Attempt, term: int | None
) -> None:
    assert granted(lease, counter, "own", attempt, 500) == term


# ------------------------------------------------------------ one manager


def test_a_new_manager_tries_at_once_and_does_not_lead() -> None:
    core = new()
    assert (core.leads(0.0), core.next_attempt(0.0), core.attempt(0.0)) == (False, 0.0, Attempt(0, 0))


def test_a_leader_renews_after_a_third_and_ends_before_redis_does() -> None:
    core = leader(at=10.0)
    assert core.next_attempt(10.5) == pytest.approx(0.5)
    assert core.leads(12.6)
    assert not core.leads(12.8)
    assert core.held(11.0, 5) is Change.NONE
    assert core.leads(13.6)


def test_the_life_of_a_lease_counts_from_the_moment_before_the_attempt() -> None:
    core = leader(at=0.0)
    core.held(1.0, 5)  # whenever the answer came
    assert core.leads(3.6)
    assert not core.leads(3.8)


def test_a_standby_tries_again_after_a_poll_and_leads_never_meanwhile() -> None:
    core = new()
    assert core.refused(1.0, OTHER) is Change.NONE
    assert core.next_attempt(1.0) == POLL
    assert core.attempt(1.0) == Attempt(0, 7)
    assert not core.leads(1.0)


def test_a_lease_is_seized_only_in_the_term_whose_owner_has_ended() -> None:
    core = new()
    core.refused(0.0, OTHER)
    core.gone(6)
    assert core.attempt(0.1).seize is None
    core.gone(7)
    assert core.attempt(0.1).seize == OTHER.mark
    assert core.next_attempt(0.1) == 0.0
    last = replace(OTHER, renewal=3)  # the owner renewed once more before it ended
    core.refused(0.2, last)
    assert core.next_attempt(0.2) == 0.0
    assert core.attempt(0.2).seize == last.mark
    core.refused(0.3, Lease(8, "third", "h:3"))
    assert core.attempt(0.3) == Attempt(0, 8)


def test_a_lease_is_seized_early_once_in_each_life_of_a_lease() -> None:
    core = new()
    core.refused(0.0, OTHER)
    core.gone(7)
    assert core.held(1.0, 8) is Change.GAINED
    core.refused(1.5, Lease(9, "other", "h:1"))
    core.gone(9)
    core.refused(1.6, Lease(9, "other", "h:1", renewal=1))
    assert core.next_attempt(1.6) == POLL
    assert core.attempt(3.9).seize is None
    assert core.attempt(4.0).seize == (9, 1)


def test_a_standby_takes_a_lease_that_was_not_renewed_for_a_whole_life_on_its_own_clock() -> None:
    core = new()
    core.refused(10.0, OTHER)
    core.refused(12.9, OTHER)
    assert core.next_attempt(12.9) == pytest.approx(0.1)
    assert core.attempt(12.9).seize is None
    assert core.attempt(13.0).seize == OTHER.mark
    renewed = replace(OTHER, renewal=3)
    core.refused(13.0, renewed)
    assert core.attempt(15.9).seize is None
    assert core.attempt(16.0).seize == renewed.mark


def test_a_standby_watches_a_whole_life_again_after_a_failure_of_redis() -> None:
    core = new()
    core.refused(0.0, OTHER)
    core.unreachable(2.9)
    assert core.attempt(60.0).seize is None
    core.refused(60.0, OTHER)
    assert core.attempt(62.9).seize is None
    assert core.attempt(63.0).seize == OTHER.mark


def test_a_leader_that_another_one_replaced_stands_by() -> None:
    core = leader(5)
    assert core.refused(9.0, OTHER) is Change.LOST
    assert (core.term, core.leads(9.0), core.leader) == (0, False, OTHER)


def test_a_leader_with_another_term_has_lost_the_first() -> None:
    core = leader(5)
    assert core.held(1.0, 6) is Change.NEW_TERM


def test_a_leader_goes_on_while_redis_is_unreachable() -> None:
    core = leader(at=0.0)
    for failed_at in (1.5, 3.0, 4.5, 60.0 - 54.0):
        assert core.unreachable(failed_at) is Change.NONE
        assert core.leads(failed_at + 2.6)
    assert not core.leads(6.0 + 2.8)


def test_a_leader_that_stood_still_is_not_revived_by_a_failure() -> None:
    core = leader(at=0.0)
    assert core.unreachable(2.8) is Change.LOST
    assert not core.leads(2.8)


def test_a_leader_that_stood_still_goes_on_when_redis_confirms_it() -> None:
    core = leader(at=0.0)
    assert not core.leads(10.0)
    assert core.attempt(10.0) == Attempt(5, 5)
    assert core.held(10.0, 5) is Change.NONE
    assert core.leads(12.6)


def test_a_standby_never_leads_by_a_failure() -> None:
    core = new()
    core.refused(0.0, OTHER)
    assert core.unreachable(1.0) is Change.NONE
    assert not core.leads(1.0)


def test_a_leader_tries_soon_after_a_failure_and_a_standby_late() -> None:
    core = leader(at=0.0)
    core.unreachable(1.0)
    assert core.next_attempt(1.0) == POLL
    core = new()
    core.unreachable(1.0)
    assert core.next_attempt(1.0) == pytest.approx(TTL / 3)
    short = Leadership("own", 0.3, POLL)
    short.held(0.0, 5)
    short.unreachable(0.1)
    assert short.next_attempt(0.1) == pytest.approx(0.025)


def test_a_standby_takes_over_within_a_life_and_a_renewal_after_redis_is_back() -> None:
    core, now = new(), 0.0
    core.refused(now, OTHER)
    for _ in range(5):  # Redis is away
        now += core.next_attempt(now)
        core.unreachable(now)
    back = now  # at once after the last failure
    while core.attempt(now).seize is None:
        now += core.next_attempt(now)
        core.refused(now, OTHER)
    assert now - back <= TTL + TTL / 3 + 1e-9


def test_who_resigned_leads_no_more() -> None:
    core = leader(at=0.0)
    assert core.resigned(1.0) is Change.LOST
    assert not core.leads(1.0)
