"""The common part of the clients for threads and for asyncio: the state of a stream, and the limits of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from quire.api.status import RpcFailure, status_from_rpc
from quire.client.folding import Fold
from quire.client.results import Completion
from quire.client.retry import Attempts, Retry, RetryBudget, is_lost, unfinished
from quire.client.setup import Metadata
from quire.inference.v1 import inference_pb2 as pb

_CallT = TypeVar("_CallT")
_StartedT_co = TypeVar("_StartedT_co", covariant=True)


class Start(Protocol[_StartedT_co]):
    """Begins a call at the address of a number."""

    def __call__(self, number: int, request: pb.GenerateRequest, timeout: float | None) -> _StartedT_co: ...


class Addresses:
    """The routers that a client may call, and the one that it calls now; threads may share it."""

    def __init__(self, given: str | Sequence[str]) -> None:
        """Raises ValueError without an address."""
        self.all = (given,) if isinstance(given, str) else tuple(given)
        if not self.all:
            raise ValueError("no address; expected HOST:PORT of a router, or several")
        self.current = 0

    def leave(self, number: int) -> None:
        """Call the next router from now on, unless another call has left that one already."""
        if self.current == number:
            self.current = (number + 1) % len(self.all)


class BaseStream(Generic[_CallT]):
    """The current call of one request, its attempts, and its output so far."""

    def __init__(
        self, start: Start[_CallT], request: pb.GenerateRequest, attempts: Attempts, addresses: Addresses
    ) -> None:
        self._start, self._request, self._attempts, self._addresses = start, request, attempts, addresses
        self._fold = Fold(request.sampling.n)
        self._number = addresses.current
        self._call = start(self._number, request, attempts.time_left())
        self._closed = False

    def _seconds_until_next(self, failure: RpcFailure) -> float | None:
        """Return the seconds until another attempt; None where nothing is missing. Raises the error without one."""
        if self._fold.complete and is_lost(status_from_rpc(failure)):
            return None
        wait = self._attempts.wait_after(failure, self._fold)
        self._addresses.leave(self._number)
        return wait

    def _start_again(self) -> None:
        """Begin the request again, or go on with it."""
        request = pb.GenerateRequest(resume=self._fold.resume()) if self._fold.begun else self._request
        self._number = self._addresses.current
        self._call = self._start(self._number, request, self._attempts.time_left())

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

    def __init__(self, address: str | Sequence[str], timeout: float | None, retry: Retry, metadata: Metadata) -> None:
        self._addresses = Addresses(address)
        self._timeout, self._retry, self._budget, self._metadata = timeout, retry, RetryBudget(retry), metadata

    def _attempts(self, timeout: float | None) -> Attempts:
        return Attempts(self._retry, self._budget, self._timeout if timeout is None else timeout)
