"""The common part of the clients for threads and for asyncio: the state of a stream, and the limits of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from quire.client.folding import Fold
from quire.client.results import Completion
from quire.client.retry import Attempts, Retry, RetryBudget, unfinished
from quire.client.setup import Metadata

_CallT = TypeVar("_CallT")


class BaseStream(Generic[_CallT]):
    """The current call of one request, its attempts, and its output so far."""

    def __init__(self, start: Callable[[float | None], _CallT], attempts: Attempts, sequences: int) -> None:
        """`start` begins a call with a timeout in seconds; `sequences` is the n of the request."""
        self._start, self._attempts, self._fold = start, attempts, Fold(sequences)
        self._call = start(attempts.time_left())
        self._closed = False

    @property
    def completion(self) -> Completion:
        """The output so far; all of it once the stream has ended."""
        return self._fold.completion()

    def _end(self) -> None:
        """End the stream. Raises Interrupted when the server ended it before every output had ended."""
        if not self._closed and not self._fold.complete:
            raise unfinished(self._fold)
        self._closed = True
        self._attempts.succeeded()


class BaseClient:
    """The limits of a client's calls: timeout in seconds, retries, and the metadata of every call."""

    def __init__(self, timeout: float | None, retry: Retry, metadata: Metadata) -> None:
        self._timeout, self._retry, self._budget, self._metadata = timeout, retry, RetryBudget(retry), metadata

    def _attempts(self, timeout: float | None) -> Attempts:
        return Attempts(self._retry, self._budget, self._timeout if timeout is None else timeout)
