"""What may enter the router, with the numbers of what may not."""

from __future__ import annotations

import pytest

from common.contracts.errors import AlreadyExists, DeadlineExceeded, Overloaded, QueueExpired, QuotaViolation
from router.placement.admission import AdmissionLimiter, AdmissionLimits, check_deadline
from router.placement.first_tokens import Prediction
from router.tenants.tenancy import ANYONE, Tenant, TenantLimits


def test_a_request_is_queued_then_runs_then_is_gone() -> None:
    limiter = AdmissionLimiter(AdmissionLimits())
    limiter.admit_request("r", 10, ANYONE.tenant, now=0.0)
    assert (limiter.queued, limiter.running, limiter.tokens_in_flight) == (1, 0, 10)
    limiter.start_request("r", now=0.0)
    assert (limiter.queued, limiter.running, limiter.tokens_in_flight) == (0, 1, 10)
    limiter.release_request("r")
    assert (limiter.queued, limiter.running, limiter.tokens_in_flight) == (0, 0, 0)


def test_a_full_queue_refuses_with_its_numbers() -> None:
    limiter = AdmissionLimiter(AdmissionLimits(max_queued=2))
    for name in ("a", "b"):
        limiter.admit_request(name, 1, ANYONE.tenant, now=0.0)
    with pytest.raises(Overloaded) as refused:
        limiter.admit_request("c", 1, ANYONE.tenant, now=0.0)
    assert refused.value.violation == QuotaViolation("router.queue", "2 requests wait; at most 2")
    assert refused.value.retry_after_s == 1.0
    assert limiter.queued == 2


def test_running_requests_leave_room_in_the_queue() -> None:
    limiter = AdmissionLimiter(AdmissionLimits(max_queued=1))
    limiter.admit_request("a", 1, ANYONE.tenant, now=0.0)
    limiter.start_request("a", now=0.0)
    limiter.admit_request("b", 1, ANYONE.tenant, now=0.0)
    assert (limiter.queued, limiter.running) == (1, 1)


def test_tokens_in_flight_are_bounded() -> None:
    limiter = AdmissionLimiter(AdmissionLimits(max_tokens_in_flight=100))
    limiter.admit_request("a", 60, ANYONE.tenant, now=0.0)
    with pytest.raises(Overloaded, match="60 tokens in flight and 41 more requested; at most 100"):
        limiter.admit_request("b", 41, ANYONE.tenant, now=0.0)
    limiter.admit_request("c", 40, ANYONE.tenant, now=0.0)
    assert limiter.tokens_in_flight == 100


def test_an_id_in_use_is_refused_until_its_request_left() -> None:
    limiter = AdmissionLimiter(AdmissionLimits())
    limiter.admit_request("r", 1, ANYONE.tenant, now=0.0)
    with pytest.raises(AlreadyExists):
        limiter.admit_request("r", 1, ANYONE.tenant, now=0.0)
    limiter.release_request("r")
    limiter.admit_request("r", 1, ANYONE.tenant, now=0.0)


def test_retry_after_is_the_mean_gap_between_starts() -> None:
    limiter = AdmissionLimiter(AdmissionLimits(max_queued=0 + 3))
    for at, name in ((0.0, "a"), (4.0, "b")):
        limiter.admit_request(name, 1, ANYONE.tenant, now=at)
        limiter.start_request(name, now=at)
    assert limiter.retry_after(now=5.0) == 4.0
    assert limiter.retry_after(now=10.0) == 6.0
    assert limiter.retry_after(now=1000.0) == 30.0


def test_a_request_that_lost_its_worker_comes_back_into_a_full_queue() -> None:
    limiter = AdmissionLimiter(AdmissionLimits(max_queued=1))
    limiter.admit_request("a", 1, ANYONE.tenant, now=0.0)
    limiter.start_request("a", now=0.0)
    limiter.admit_request("b", 1, ANYONE.tenant, now=0.0)
    limiter.requeue("a")
    assert (limiter.queued, limiter.running) == (2, 0)


def test_a_tenant_at_its_limit_does_not_stop_another() -> None:
    limiter = AdmissionLimiter(AdmissionLimits())
    red, blue = (Tenant(name, limits=TenantLimits(sequences=2)) for name in ("red", "blue"))
    limiter.admit_request("a", 40, red, now=0.0, sequences=2)
    with pytest.raises(Overloaded, match=r"tenant red\.sequences: 2 sequences are open and 1 more wanted; at most 2"):
        limiter.admit_request("b", 20, red, now=0.0)
    assert (limiter.queued, limiter.tokens_in_flight) == (1, 40)
    limiter.admit_request("c", 20, blue, now=0.0)
    limiter.release_request("a", "red")
    limiter.admit_request("d", 20, red, now=0.0)


def test_ids_of_one_tenant_are_no_matter_of_another() -> None:
    limiter = AdmissionLimiter(AdmissionLimits())
    for name in ("red", "blue"):
        limiter.admit_request("same", 1, Tenant(name), now=0.0)
    with pytest.raises(AlreadyExists, match="request same is running, sent with the same request_id"):
        limiter.admit_request("same", 1, Tenant("red"), now=0.0)
    limiter.start_request("same", 0.0, "red")
    limiter.release_request("same", "red")
    assert (limiter.queued, limiter.running) == (1, 0)


def test_a_queue_that_one_tenant_filled_has_room_for_another() -> None:
    limiter = AdmissionLimiter(AdmissionLimits(max_queued=4))
    red, blue = Tenant("red"), Tenant("blue")
    for number in range(4):
        limiter.admit_request(f"red {number}", 1, red, now=0.0)
    for number in range(2):
        limiter.admit_request(f"blue {number}", 1, blue, now=0.0)
    for tenant in (red, blue):
        with pytest.raises(Overloaded, match="6 requests wait; at most 4"):
            limiter.admit_request("late", 1, tenant, now=0.0)
    limiter.start_request("blue 0", now=0.0, tenant="blue")
    limiter.admit_request("blue 2", 1, blue, now=0.0)


def test_many_tenants_queue_twice_the_bound_at_most() -> None:
    limiter = AdmissionLimiter(AdmissionLimits(max_queued=4))
    for number in range(4):
        limiter.admit_request(f"red {number}", 1, Tenant("red"), now=0.0)
    entered = 4
    for number in range(20):
        try:
            limiter.admit_request(f"{number}", 1, Tenant(f"other {number}"), now=0.0)
            entered += 1
        except Overloaded:
            pass
    assert entered <= 8


def test_a_request_is_charged_for_the_tokens_that_it_used() -> None:
    limiter = AdmissionLimiter(AdmissionLimits())
    tenant = Tenant("red", limits=TenantLimits(tokens_per_minute=100))
    limiter.admit_request("a", 100, tenant, now=0.0)
    limiter.release_request("a", "red", used_tokens=30)
    limiter.admit_request("b", 70, tenant, now=0.0)
    limiter.release_request("b", "red")
    with pytest.raises(Overloaded, match=r"tenant red\.tokens_per_minute: 10 tokens wanted; at most 100") as refused:
        limiter.admit_request("c", 10, tenant, now=0.0)
    assert refused.value.retry_after_s == pytest.approx(6.0)


def asks(limiter: AdmissionLimiter, session: str, count: int, tenant: Tenant = ANYONE.tenant) -> int:
    """Let a session ask for so many places; return how many it gets."""
    got = 0
    for number in range(count):
        try:
            limiter.admit_request(f"{tenant.name} {session} {number}", 1, tenant, now=0.0, session=session)
        except Overloaded:
            break
        got += 1
    return got


def test_a_session_cannot_fill_the_queue_for_those_of_its_tenant() -> None:
    """Another one gets its part of what the tenant has, up to 5/4 of the bound, and so do requests without one."""
    limiter = AdmissionLimiter(AdmissionLimits(max_queued=8))
    assert asks(limiter, "a", 20) == 8
    assert asks(limiter, "b", 20) == 2
    assert limiter.queued == 10
    assert asks(limiter, "", 20) == asks(limiter, "c", 20) == 0
    with pytest.raises(Overloaded, match="10 requests wait; at most 8"):
        limiter.check_room(1, ANYONE.tenant, now=0.0, session="c")
    for number in range(4):
        limiter.start_request(f"{ANYONE.tenant.name} a {number}", 0.0, ANYONE.tenant.name)
    limiter.check_room(1, ANYONE.tenant, now=0.0, session="c")


def test_requests_without_a_session_are_refused_as_ever_and_find_room_beside_one() -> None:
    limiter = AdmissionLimiter(AdmissionLimits(max_queued=8))
    assert asks(limiter, "", 20) == 8
    beside = AdmissionLimiter(AdmissionLimits(max_queued=8))
    assert (asks(beside, "a", 20), asks(beside, "", 20)) == (8, 2)


def test_new_ids_leave_the_places_of_other_tenants() -> None:
    """A tenant that sends a new id each time gets no more than with one, and nothing of it stays."""
    limiter, red, blue = AdmissionLimiter(AdmissionLimits(max_queued=8)), Tenant("red"), Tenant("blue")
    assert [asks(limiter, f"new{number}", 1, red) for number in range(12)] == [1] * 8 + [0] * 4
    assert asks(limiter, "b", 20, blue) == 4
    for number in range(8):
        limiter.release_request(f"red new{number} 0", "red")
    for number in range(4):
        limiter.release_request(f"blue b {number}", "blue")
    assert (limiter.queued, limiter._queued_by) == (0, {})


def test_no_deadline_is_always_met() -> None:
    check_deadline(now=5.0, deadline=None, first_token=Prediction(1e9, 1e9))


def test_a_deadline_that_has_passed_is_refused() -> None:
    with pytest.raises(QueueExpired, match=r"passed 1\.000 s ago"):
        check_deadline(now=5.0, deadline=4.0, first_token=Prediction(0.0, 0.0))


def test_a_first_token_after_the_deadline_is_refused_with_both_figures() -> None:
    with pytest.raises(
        DeadlineExceeded, match=r"2\.000 s are left.*predicted in 2\.500 s \(no such prediction was measured\)"
    ):
        check_deadline(now=5.0, deadline=7.0, first_token=Prediction(2.5, 2.5))
    check_deadline(now=5.0, deadline=7.0, first_token=Prediction(1.9, 1.9))
