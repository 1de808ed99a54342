"""Which failures are tried again and after how long: exact figures from a clock and a die of our own."""

from __future__ import annotations

import math
from collections.abc import Iterable

import grpc
import pytest

from common.contracts.clock import ManualClock
from common.contracts.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    EngineFailure,
    FieldViolation,
    InvalidRequest,
    NotFound,
    Overloaded,
    QuireError,
    QuotaViolation,
    Unavailable,
)
from common.rpc.status import code_of, to_status
from quire.api.status import DETAILS_KEY
from quire.client import Interrupted, InterruptedByDeadline, Retry
from quire.client.folding import Fold
from quire.client.retry import Attempts, RetryBudget
from tests.support.fake_router import admitted, tokens

DEFAULT = Retry()
FULL = Overloaded(QuotaViolation("router.queue", "1 of 1 places are taken"), 2.0)


class Failure:
    """A failed RPC: of our own server with details, or (a code) of gRPC itself without."""

    def __init__(self, cause: QuireError | grpc.StatusCode, said: str = "") -> None:
        self._cause, self._said = cause, said

    def code(self) -> grpc.StatusCode:
        return code_of(self._cause) if isinstance(self._cause, QuireError) else self._cause

    def details(self) -> str:
        return self._said or str(self._cause)

    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        if isinstance(self._cause, QuireError):
            return ((DETAILS_KEY, to_status(self._cause).SerializeToString()),)
        return ()


LOST = Failure(grpc.StatusCode.UNAVAILABLE)
# Of a connection whose pings were not answered, while a process at its other end stood still.
GIVEN_UP = Failure(grpc.StatusCode.UNKNOWN, "Stream removed (ping timeout)")


def attempts(
    retry: Retry = DEFAULT, timeout: float | None = None, uniform: float = 1.0, budget: RetryBudget | None = None
) -> tuple[Attempts, ManualClock]:
    clock = ManualClock(100.0)
    return Attempts(retry, budget or RetryBudget(retry), timeout, clock.monotonic, lambda: uniform), clock


def test_the_limit_of_the_wait_doubles_up_to_the_most() -> None:
    tries, _ = attempts(Retry(attempts=6, first_backoff=0.5, max_backoff=3.0))
    assert [tries.wait_after(LOST) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_jitter_is_full() -> None:
    assert attempts(uniform=0.0)[0].wait_after(LOST) == 0.0
    assert attempts(Retry(first_backoff=0.5), uniform=0.25)[0].wait_after(LOST) == 0.125


def test_what_the_server_asks_for_comes_before_the_jitter() -> None:
    tries, _ = attempts(Retry(first_backoff=0.5), uniform=0.5)
    assert tries.wait_after(Failure(FULL)) == 2.25
    assert tries.wait_after(Failure(Unavailable("draining", 3.0))) == 3.5


def test_the_last_attempt_raises_what_was_meant() -> None:
    tries, _ = attempts(Retry(attempts=2))
    tries.wait_after(Failure(FULL))
    with pytest.raises(Overloaded) as error:
        tries.wait_after(Failure(FULL))
    assert (error.value.retry_after_s, error.value.violation.subject) == (2.0, "router.queue")


@pytest.mark.parametrize(
    "cause",
    [
        InvalidRequest(FieldViolation("prompt", "is missing")),
        EngineFailure("a step failed"),
        Cancelled("stopped by the operator"),
        DeadlineExceeded("too late"),
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.RESOURCE_EXHAUSTED,  # gRPC's own: a message over the limit, which stays too large
    ],
    ids=str,
)
def test_other_failures_are_final(cause: QuireError | grpc.StatusCode) -> None:
    tries, _ = attempts()
    with pytest.raises(QuireError) as error:
        tries.wait_after(Failure(cause))
    if isinstance(cause, QuireError):
        assert (type(error.value), str(error.value)) == (type(cause), str(cause))


def test_no_wait_goes_past_the_deadline() -> None:
    tries, clock = attempts(Retry(first_backoff=1.0), timeout=3.0)
    assert tries.time_left() == 3.0
    clock.advance(0.5)
    assert tries.time_left() == 2.5
    with pytest.raises(Overloaded):  # 2 s asked for and 1 s of jitter: the deadline comes first
        tries.wait_after(Failure(FULL))
    assert tries.wait_after(LOST) == 1.0


@pytest.mark.parametrize("timeout", [math.inf, 1e300])
def test_an_endless_timeout_is_one_that_grpc_can_count(timeout: float) -> None:
    """gRPC takes an infinite timeout for one that has passed."""
    assert attempts(timeout=timeout)[0].time_left() == 1e9


def test_the_time_left_never_falls_below_zero() -> None:
    tries, clock = attempts(timeout=1.0)
    clock.advance(2.0)
    assert tries.time_left() == 0.0
    assert attempts(timeout=None)[0].time_left() is None


def test_calls_share_a_budget_that_successes_fill_again() -> None:
    retry = Retry(attempts=100, budget=2.0, refund=0.5)
    budget = RetryBudget(retry)
    first, _ = attempts(retry, budget=budget)
    second, _ = attempts(retry, budget=budget)
    first.wait_after(LOST)
    second.wait_after(LOST)
    with pytest.raises(Unavailable):
        first.wait_after(LOST)
    second.succeeded()
    with pytest.raises(Unavailable):
        first.wait_after(LOST)
    second.succeeded()
    first.wait_after(LOST)


def test_what_a_draining_server_cut_off_unserved_is_tried_again() -> None:
    tries, _ = attempts(Retry(first_backoff=0.5))
    assert tries.wait_after(Failure(grpc.StatusCode.CANCELLED)) == 0.5


def test_what_gets_cut_off_to_the_last_attempt_was_not_cancelled_by_the_caller() -> None:
    """Callers do not retry CANCELLED."""
    with pytest.raises(Unavailable, match="the router ended the connection"):
        attempts(Retry(attempts=1))[0].wait_after(Failure(grpc.StatusCode.CANCELLED))
    tries, _ = attempts(Retry(resumes=0))
    with pytest.raises(Interrupted) as ended:
        tries.wait_after(Failure(grpc.StatusCode.CANCELLED), begun())
    assert isinstance(ended.value.__cause__, Unavailable)


def test_a_closed_client_tries_nothing_again() -> None:
    budget = RetryBudget(DEFAULT)
    budget.end()
    budget.give_back()
    with pytest.raises(Cancelled):
        attempts(budget=budget)[0].wait_after(Failure(grpc.StatusCode.CANCELLED))


def test_a_full_budget_takes_nothing_more() -> None:
    retry = Retry(attempts=100, budget=1.0, refund=1.0)
    budget = RetryBudget(retry)
    tries, _ = attempts(retry, budget=budget)
    tries.succeeded()
    tries.succeeded()
    assert (budget.take(), budget.take()) == (True, False)


@pytest.mark.parametrize(
    ("cause", "kind"), [(grpc.StatusCode.UNAVAILABLE, Interrupted), (DeadlineExceeded("late"), InterruptedByDeadline)]
)
def test_a_stream_that_had_begun_is_never_begun_again(cause: QuireError | grpc.StatusCode, kind: type) -> None:
    fold = Fold()
    fold.take(admitted())
    fold.take(tokens("Hel", 1, 2))
    tries, _ = attempts(Retry(resumes=0))
    with pytest.raises(Interrupted) as error:
        tries.wait_after(Failure(cause), fold)
    assert type(error.value) is kind
    assert isinstance(error.value, DeadlineExceeded) == (kind is InterruptedByDeadline)
    assert error.value.partial.token_ids == (1, 2)
    assert error.value.__cause__ is error.value.meant
    assert "(after 2 output tokens; trace 0af7651916cd43dd8448eb211c80319c)" in str(error.value)


def begun() -> Fold:
    fold = Fold()
    fold.take(admitted())
    return fold


def test_attempts_to_resume_are_bounded_until_the_stream_goes_on() -> None:
    tries, _ = attempts(Retry(resumes=2, first_backoff=0.5), budget=RetryBudget(Retry(budget=0.0)))
    fold = begun()
    lost, held = Failure(grpc.StatusCode.UNAVAILABLE), Failure(AlreadyExists("another stream has it"))
    assert (tries.wait_after(lost, fold), tries.wait_after(held, fold)) == (0.5, 1.0)
    tries.goes_on()
    assert (tries.wait_after(lost, fold), tries.wait_after(held, fold)) == (0.5, 1.0)
    with pytest.raises(Interrupted) as error:
        tries.wait_after(held, fold)
    assert isinstance(error.value.meant, Unavailable), "what broke the stream, not what kept it from going on"


def test_a_connection_that_grpc_gave_up_is_lost() -> None:
    tries, _ = attempts(Retry(first_backoff=0.5))
    assert tries.wait_after(GIVEN_UP, begun()) == 0.5
    assert tries.wait_after(GIVEN_UP) == 0.5, "before its first event a call is made again"


@pytest.mark.parametrize("end", [NotFound("r1"), InvalidRequest(FieldViolation("resume", "is wrong"))])
def test_a_stream_that_no_router_can_resume_raises_what_broke_it(end: QuireError) -> None:
    tries, _ = attempts()
    fold = begun()
    tries.wait_after(Failure(grpc.StatusCode.UNAVAILABLE), fold)
    with pytest.raises(Interrupted) as error:
        tries.wait_after(Failure(end), fold)
    assert isinstance(error.value.meant, Unavailable)


@pytest.mark.parametrize("end", [Unavailable("its worker is gone"), EngineFailure("a step failed")])
def test_an_error_of_the_server_is_no_lost_connection(end: QuireError) -> None:
    tries, _ = attempts()
    with pytest.raises(Interrupted):
        tries.wait_after(Failure(end), begun())


def test_a_closed_client_resumes_nothing() -> None:
    budget = RetryBudget(Retry())
    tries, _ = attempts(budget=budget)
    budget.end()
    with pytest.raises(Interrupted):
        tries.wait_after(Failure(grpc.StatusCode.CANCELLED), begun())


def test_figures_that_make_no_sense_are_refused() -> None:
    for wrong in ({"attempts": 0}, {"first_backoff": -1.0}, {"budget": -1.0}):
        with pytest.raises(ValueError, match="expected attempts of 1 or more"):
            Retry(**wrong)
