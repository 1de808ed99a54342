"""Which failed calls are retried, and when. A call whose output the caller has seen is never retried.

Unary calls, and streams before their first event, are retried in three cases. UNAVAILABLE is retried.
RESOURCE_EXHAUSTED is retried when the server sent RetryInfo. CANCELLED is retried when gRPC itself sent it, as it does
when a router has just begun to drain. The wait is what the server asked for, plus a random part of a limit that doubles
with each retry ("full jitter": refused clients do not return all at once). All calls of a client share one budget, so
that retries stay a small part of an overloaded server's load.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

import grpc
from google.rpc import status_pb2

from quire.api.errors import QuireError
from quire.api.status import RpcFailure, error_from_status, retry_after, status_from_rpc
from quire.client.errors import interrupted
from quire.client.folding import Fold


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and how long calls are retried. `attempts` counts the first; 1 means no retry.

    Retry number k (from 0) waits up to `first_backoff` * 2^k seconds, at most `max_backoff`, beyond what the server
    asks for. Each takes 1 from the client's `budget`; each call that succeeds gives back `refund`.
    """

    attempts: int = 4
    first_backoff: float = 0.1
    max_backoff: float = 5.0
    budget: float = 10.0
    refund: float = 0.1

    def __post_init__(self) -> None:
        if self.attempts < 1 or min(self.first_backoff, self.max_backoff, self.budget, self.refund) < 0:
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
        self._failed = 0

    def time_left(self) -> float | None:
        """Return the timeout of the next attempt in seconds."""
        return None if self._deadline is None else max(0.0, self._deadline - self._now())

    def succeeded(self) -> None:
        self._budget.give_back()

    def wait_after(self, failure: RpcFailure, fold: Fold | None = None) -> float:
        """Return the seconds to wait before the next attempt.

        Without another attempt it raises the error of the failure, or Interrupted when `fold` has events.
        """
        status = status_from_rpc(failure)
        meant = error_from_status(status)
        if fold is not None and fold.begun:
            raise interrupted(meant, fold.completion()) from meant
        wait = self._wait(status)
        if wait is None:
            raise meant
        self._failed += 1
        return wait

    def _wait(self, status: status_pb2.Status) -> float | None:
        asked = retry_after(status)
        again = (
            status.code == grpc.StatusCode.UNAVAILABLE.value[0]
            or (status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0] and asked is not None)
            or (status.code == grpc.StatusCode.CANCELLED.value[0] and not status.details)
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
