"""What is noted of a call while it is handled: its ids, which its trailers and status carry, and how it was refused."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from google.rpc import error_details_pb2
from grpc import aio

from common.contracts.errors import AlreadyExists, QuireError

Context: TypeAlias = "aio.ServicerContext[Any, Any]"


@dataclass(slots=True)
class CallNotes:
    """`call_id` is the service's own id of the call. `client_id` is the client's name for it, "" for none.

    `report` takes these notes and an error, with the id of the request that it ends.
    """

    call_id: str
    report: Callable[[CallNotes, QuireError, str], None]
    client_id: str = ""
    # The client's name for the request, where records may have it.
    recorded_id: str = ""
    # The id that the request's message gives; "" for none.
    chosen_id: str = ""
    # The tenant where a key showed it.
    owner: str = ""
    error: QuireError | None = None

    @property
    def request_id(self) -> str:
        """The id under which the call is recorded. One that another request has is that one's."""
        return self.call_id if isinstance(self.error, AlreadyExists) else self.chosen_id or self.call_id

    @property
    def shown_id(self) -> str:
        return self.chosen_id or self.client_id or self.call_id

    def refused_within(self, error: QuireError, request_id: str) -> None:
        """Report a request of a stream that ends with an error, while the stream goes on."""
        self.report(self, error, request_id)

    def request_info(self) -> error_details_pb2.RequestInfo:
        return error_details_pb2.RequestInfo(request_id=self.shown_id, serving_data=self.request_id)

    def trailers(self, context: Context) -> tuple[tuple[str, str | bytes], ...]:
        """Return the trailers that a handler has set so far, and the ids under the names that HTTP answers have."""
        ids = {"x-request-id": self.shown_id, "x-quire-request-id": self.request_id}
        return (*(each for each in context.trailing_metadata() if each[0] not in ids), *ids.items())


NOTES: Final[ContextVar[CallNotes | None]] = ContextVar("notes of the call", default=None)
"""The notes of the call that is handled here; None where nobody takes any."""
