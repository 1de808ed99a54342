"""When a service that keeps failing is not called, and for how long."""

from __future__ import annotations

from common.backoff import Backoff
from router.placement.breaker import CircuitBreaker

SECOND = Backoff(first=1.0, longest=10.0).pause


def test_it_opens_at_the_threshold() -> None:
    breaker = CircuitBreaker(SECOND, threshold=2)
    breaker.failed(now=0.0)
    assert breaker.allows(now=0.0)
    breaker.failed(now=0.0)
    assert not breaker.allows(now=0.9)


def test_a_success_starts_the_count_again() -> None:
    breaker = CircuitBreaker(SECOND, threshold=2)
    breaker.failed(now=0.0)
    breaker.succeeded()
    breaker.failed(now=0.0)
    assert breaker.allows(now=0.0)


def test_one_call_is_let_through_after_the_pause() -> None:
    breaker = CircuitBreaker(SECOND, threshold=1)
    breaker.failed(now=0.0)
    assert breaker.allows(now=1.0)
    assert not breaker.allows(now=1.0)


def test_its_success_closes_the_breaker() -> None:
    breaker = CircuitBreaker(SECOND, threshold=1)
    breaker.failed(now=0.0)
    breaker.allows(now=1.0)
    breaker.succeeded()
    assert breaker.allows(now=1.0)
    assert breaker.healthy


def test_each_pause_is_twice_as_long_up_to_the_longest() -> None:
    breaker = CircuitBreaker(Backoff(first=1.0, longest=3.0).pause, threshold=1)
    breaker.failed(now=0.0)
    breaker.failed(now=10.0)
    assert not breaker.allows(now=11.9)
    assert breaker.allows(now=12.0)
    breaker.failed(now=20.0)
    assert not breaker.allows(now=22.9)
    assert breaker.allows(now=23.0)
