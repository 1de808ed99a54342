"""Which failed calls are retried, and when. A call whose output the caller has seen never begins anew.

A stream whose connection broke after its first event is resumed instead, at the next address: a router that takes over
sends what the caller lacks. Attempts to resume have a bound of their own, which begins anew with each event.

Unary calls, and streams before their first event, are retried in three cases. UNAVAILABLE is retried.
RESOURCE_EXHAUSTED is retried when the server sent RetryInfo. CANCELLED is retried when gRPC itself sent it, as it does
when a router has just begun to drain; where no attempt is left, that is Unavailable to the caller.

The wait is what the server asked for, plus a random part of a limit that doubles with each retry ("full jitter":
refused clients do not return all at once). All calls of a client share one budget, so that retries stay a small part of
an overloaded server's load.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Final

import grpc
from google.rpc import status_pb2

from quire.api.errors import DeadlineExceeded, QuireError, Unavailable
from quire.api.status import RpcFailure, error_from_status, retry_after, status_from_rpc
from quire.client.errors import interrupted
from quire.client.folding import Fold

# Statuses of gRPC itself when a connection breaks; the server's own have details.
_LOST: Final = frozenset(
    code.value[0] for code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL)
)
# gRPC takes a timeout that is infinite, or does not fit its clock, for one that has passed; this one is 31 years.
_LONGEST_S: Final = 1e9
# After these a stream may be resumed a moment later: the first router's death may be news to a worker.
_RESUMED_AGAIN: Final = _LOST | {
    grpc.StatusCode.ALREADY_EXISTS.value[0],
    grpc.StatusCode.RESOURCE_EXHAUSTED.value[0],
}


def is_lost(status: status_pb2.Status) -> bool:
    """Return whether the connection broke, and no server ended the call."""
    return status.code in _LOST and not status.details


def _ended_by_grpc(status: status_pb2.Status) -> bool:
    """Return whether gRPC itself says that a call was cancelled, as a server that stops makes it."""
    return status.code == grpc.StatusCode.CANCELLED.value[0] and not status.details


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and how long calls are retried. `attempts` counts the first; 1 means no retry.

    Retry number k (from 0) waits up to `first_backoff` * 2^k seconds, at most `max_backoff`, beyond what the server
    asks for. Each takes 1 from the client's `budget`; each call that succeeds gives back `refund`. A stream that broke
    is resumed up to `resumes` times before another piece of its output comes; 0 raises Interrupted at once.
    """

    attempts: int = 4
    first_backoff: float = 0.1
    max_backoff: float = 5.0
    budget: float = 10.0
    refund: float = 0.1
    resumes: int = 8

    def __post_init__(self) -> None:
        if self.attempts < 1 or min(self.first_backoff, self.max_backoff, self.budget, self.refund, self.resumes) < 0:
            raise ValueError(f"{self}: expected attempts of 1 or more, and nothing below 0")


class RetryBudget:
    """The retries that a client may still make; threads may share it."""

    def __init__(self, retry: Retry) -> None:
        self._retry, self._left, self._lock = retry, retry.budget, Lock()

    def take(self) -> bool:
        with self._lock:
            if self._left < 1.0:
                return False
            self._left -= 1.0
            return True

    def end(self) -> None:
        """Allow no more retries: the client is closed."""
        with self._lock:
            self._left = -math.inf

    @property
    def ended(self) -> bool:
        """Whether the client is closed."""
        with self._lock:
            return self._left == -math.inf

    def give_back(self) -> None:
        """Refund part of a retry: a call has succeeded."""
        with self._lock:
            self._left = min(self._retry.budget, self._left + self._retry.refund)


class Attempts:
    """The attempts of one call, until its deadline `timeout` seconds from now (None: no deadline)."""

    def __init__(
        self,
        retry: Retry,
        budget: RetryBudget,
        timeout: float | None,
        now: Callable[[], float] = time.monotonic,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        """`now` returns seconds, `uniform` a number from 0 to 1."""
        self._retry, self._budget, self._now, self._uniform = retry, budget, now, uniform
        self._deadline = None if timeout is None else now() + timeout
        self._failed = self._resumed = 0
        # Why the stream broke, until it goes on.
        self._broken: QuireError | None = None

    def time_left(self) -> float | None:
        """Return the timeout of the next attempt in seconds."""
        return None if self._deadline is None else min(max(0.0, self._deadline - self._now()), _LONGEST_S)

    def succeeded(self) -> None:
        self._budget.give_back()

    def goes_on(self) -> None:
        """Note that the stream has put out more."""
        self._resumed, self._broken = 0, None

    def wait_after(self, failure: RpcFailure, fold: Fold | None = None) -> float:
        """Return the seconds to wait before the next attempt.

        Without another attempt it raises the error of the failure, or Interrupted when `fold` has events.
        """
        status = status_from_rpc(failure)
        meant = self._meant(status)
        if fold is not None and fold.begun:
            wait = self._wait_to_resume(status, meant)
            if wait is None:
                if self._broken is not None and not isinstance(meant, DeadlineExceeded):
                    meant = self._broken
                raise interrupted(meant, fold.completion()) from meant
            return wait
        wait = self._wait(status)
        if wait is None:
            raise meant
        self._failed += 1
        return wait

    def _meant(self, status: status_pb2.Status) -> QuireError:
        """Return the error of a status. The caller did not cancel a call that gRPC ended while the client is open."""
        if _ended_by_grpc(status) and not self._budget.ended:
            return Unavailable(f"the router ended the connection of the call: {status.message}")
        return error_from_status(status)

    def _wait_to_resume(self, status: status_pb2.Status, meant: QuireError) -> float | None:
        """Return the seconds until the stream is resumed; None where that has no prospect."""
        if self._broken is None:
            if not is_lost(status):
                return None
            self._broken = meant
        elif status.code not in _RESUMED_AGAIN:
            return None
        if self._resumed >= self._retry.resumes or self._budget.ended:
            return None
        self._resumed += 1
        limit = min(self._retry.max_backoff, self._retry.first_backoff * 2.0 ** (self._resumed - 1))
        wait = limit * self._uniform()
        left = self.time_left()
        return None if left is not None and wait >= left else wait

    def _wait(self, status: status_pb2.Status) -> float | None:
        asked = retry_after(status)
        again = (
            status.code == grpc.StatusCode.UNAVAILABLE.value[0]
            or (status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0] and asked is not None)
            or _ended_by_grpc(status)
        )
        if not again or self._failed + 1 >= self._retry.attempts:
            return None
        limit = min(self._retry.max_backoff, self._retry.first_backoff * 2.0**self._failed)
        wait = (asked or 0.0) + limit * self._uniform()
        left = self.time_left()
        if (left is not None and wait >= left) or not self._budget.take():
            return None
        return wait


def unfinished(fold: Fold) -> QuireError:
    """Return the error of a stream that ended with OK before every output had ended."""
    return interrupted(QuireError("the server ended the stream before every output had ended"), fold.completion())
