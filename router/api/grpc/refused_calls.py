"""Gives each call of the public gRPC port its ids, and sees the calls that end with another status than OK.

gRPC itself refuses a message above its limit, before any handler is called: a call without a handler's work is taken
for one of these. Of a stream of requests it tells nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Any, Final

import grpc
from grpc import aio

from common.contracts.errors import QuireError, Unsupported
from common.rpc.call_notes import NOTES, CallNotes
from common.rpc.interceptor import AroundInterceptor, Context
from common.rpc.status import abort, code_of
from common.telemetry.server_spans import ended_with
from router.api.shared.call_context import metadata_of
from router.contracts.ports import RefusalWatch
from router.contracts.refusals import FAULTS, Refusal, fault_of, fault_words
from router.requests.request_ids import automatic_id, correlation_id, recorded_id

# Names of APIs by the package of a method.
_APIS: Final[Mapping[str, str]] = {"inference.": "kserve", "vllm.": "vllm"}
# Of callers that ask whether the service is well: their calls are counted alone.
_PROBES: Final = "grpc.health."
# The method of calls to a name that no method has: what a client calls must not become a label.
_NO_METHOD: Final = "unknown"
# Of statuses that no error of Quire stands behind: health answers so, and clients that leave end calls so.
_FAULT_OF_CODE: Final[Mapping[grpc.StatusCode, str]] = {
    grpc.StatusCode.INVALID_ARGUMENT: "INVALID_FIELD",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "OVERLOADED",
    grpc.StatusCode.UNIMPLEMENTED: "UNSUPPORTED",
}


def _api_of(method: str) -> str:
    return next((api for package, api in _APIS.items() if method.startswith(package)), "grpc")


class _UnknownMethodError(Unsupported):
    reason = "UNKNOWN_PATH"


class RefusedCalls(aio.ServerInterceptor):
    """Stands around all other interceptors: those keep the handler of a method, and look it up no second time."""

    def __init__(self, refusals: RefusalWatch) -> None:
        self._refusals = refusals
        self._around = AroundInterceptor(lambda method, context: _Seen(refusals, method.lstrip("/"), context))
        # As a method with two streams it answers callers of any kind.
        self._unknown: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(self._no_method)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await self._around.intercept_service(continuation, handler_call_details)
        if handler is None:
            return self._unknown
        task = asyncio.current_task()
        if task is not None and not handler.request_streaming:
            arrival = _Arrival(self._refusals, handler_call_details)
            _ARRIVAL.set(arrival)
            task.add_done_callback(arrival.over)
        return handler

    async def _no_method(self, requests: object, context: Context) -> None:
        async with _Seen(self._refusals, _NO_METHOD, context):
            await abort(context, _UnknownMethodError("there is no such method here; reflection lists all"))


class _Arrival:
    """A call whose request is to come: gRPC calls the handler in the task that looked it up, or ends that task."""

    def __init__(self, refusals: RefusalWatch, details: grpc.HandlerCallDetails) -> None:
        self._refusals, self._details, self._since_ns = refusals, details, refusals.now_ns()
        self.came = False

    def over(self, _: object) -> None:
        if self.came:
            return
        sent = dict(self._details.invocation_metadata or ()).get("x-request-id", "")
        client_id = recorded_id(correlation_id(sent)) if isinstance(sent, str) else ""
        method = self._details.method.lstrip("/")
        code = grpc.StatusCode.RESOURCE_EXHAUSTED.name
        refusal = Refusal(_api_of(method), method, code, "NOT_RECEIVED", automatic_id(), client_id)
        self._refusals.note_refusal(refusal, self._since_ns)


_ARRIVAL: Final[ContextVar[_Arrival | None]] = ContextVar("arrival of a request", default=None)


class _Seen:
    """Around the handler of one call. The notes do not know it: a cycle would keep the call for the collector."""

    def __init__(self, refusals: RefusalWatch, method: str, context: Context) -> None:
        self._context, self._report = context, partial(_report, refusals, method, refusals.now_ns())
        self._timeout: float | None = context.time_remaining()
        client_id = correlation_id(metadata_of(context, "x-request-id"))
        self._notes = CallNotes(automatic_id(), self._report, client_id, recorded_id(client_id))

    async def __aenter__(self) -> None:
        NOTES.set(self._notes)
        # Libraries make statuses without a word to anybody, such as that of health.
        self._context.set_trailing_metadata(self._notes.trailers(self._context))
        if (arrival := _ARRIVAL.get()) is not None:
            arrival.came = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        code = ended_with(self._context, error, self._timeout)
        if code is grpc.StatusCode.OK:
            self._context.set_trailing_metadata(self._notes.trailers(self._context))
        else:
            self._report(self._notes, self._notes.error or code, self._notes.request_id)


def _report(
    refusals: RefusalWatch,
    method: str,
    since_ns: int,
    notes: CallNotes,
    error: QuireError | grpc.StatusCode,
    request_id: str,
) -> None:
    """Report an error, or a status that no error of Quire stands behind."""
    if isinstance(error, QuireError):
        code, reason, words = code_of(error), fault_of(error), fault_words(error)
    else:
        code, words = error, ()
        reason = _FAULT_OF_CODE.get(code, code.name if code.name in FAULTS else "INTERNAL")
    ids = request_id, notes.recorded_id, notes.owner
    refusal = Refusal(_api_of(method), method, code.name, reason, *ids, words)
    if method.startswith(_PROBES):
        refusals.count_refusal(refusal)
    else:
        refusals.note_refusal(refusal, since_ns)
