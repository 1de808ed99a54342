"""Gives each call of the public gRPC port its ids, and sees the calls that end with another status than OK.

gRPC itself refuses a message above its limit before any handler is called: such a call is not seen.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Final

import grpc
from grpc import aio

from common.errors import QuireError, Unsupported
from common.rpc.call_notes import NOTES, CallNotes
from common.rpc.interceptor import AroundInterceptor, Context, UnknownMethod
from common.rpc.status import abort, code_of
from common.telemetry.server_spans import ended_with
from router.core.refusals import FAULTS, Refusal, fault_of, fault_words
from router.ports import RefusalWatch
from router.requests.request_ids import automatic_id, correlation_id, recorded_id
from router.serving.call_context import metadata_of

_KSERVE: Final = "inference."
# The method of calls to a name that no method has: what a client calls is no label.
_NO_METHOD: Final = "unknown"
# Of statuses that no error of Quire stands behind: health answers so, and clients that leave end calls so.
_FAULT_OF_CODE: Final[Mapping[grpc.StatusCode, str]] = {
    grpc.StatusCode.INVALID_ARGUMENT: "INVALID_FIELD",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "OVERLOADED",
    grpc.StatusCode.UNIMPLEMENTED: "UNSUPPORTED",
}


class _UnknownMethodError(Unsupported):
    reason = "UNKNOWN_PATH"


class RefusedCalls(aio.ServerInterceptor):
    """Stands around the interceptors that make statuses of errors."""

    def __init__(self, refusals: RefusalWatch) -> None:
        self._refusals = refusals
        self._around = AroundInterceptor(lambda method, context: _Seen(refusals, method.lstrip("/"), context))
        self._unknown = UnknownMethod(self._no_method)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await self._around.intercept_service(continuation, handler_call_details)
        return self._unknown if handler is None else handler

    async def _no_method(self, requests: object, context: Context) -> None:
        async with _Seen(self._refusals, _NO_METHOD, context):
            await abort(context, _UnknownMethodError("there is no such method here; reflection lists all"))


class _Seen:
    """Around the handler of one call."""

    def __init__(self, refusals: RefusalWatch, method: str, context: Context) -> None:
        self._refusals, self._method, self._context = refusals, method, context
        self._timeout: float | None = context.time_remaining()
        self._since_ns = refusals.now_ns()
        client_id = correlation_id(metadata_of(context, "x-request-id"))
        self._notes = CallNotes(automatic_id(), self._refused_within, client_id, recorded_id(client_id))

    async def __aenter__(self) -> None:
        NOTES.set(self._notes)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        code = ended_with(self._context, error, self._timeout)
        if code is grpc.StatusCode.OK:
            self._context.set_trailing_metadata(self._notes.trailers(self._context))
            return
        refused = self._notes.error
        if refused is not None:
            reason, words = fault_of(refused), fault_words(refused)
        else:
            reason, words = _FAULT_OF_CODE.get(code, code.name if code.name in FAULTS else "INTERNAL"), ()
        self._saw(code, reason, words, self._notes.request_id)

    def _refused_within(self, error: QuireError, request_id: str) -> None:
        self._saw(code_of(error), fault_of(error), fault_words(error), request_id)

    def _saw(self, code: grpc.StatusCode, reason: str, words: tuple[str, ...], request_id: str) -> None:
        refusal = Refusal(
            api="kserve" if self._method.startswith(_KSERVE) else "grpc",
            method=self._method,
            code=code.name,
            reason=reason,
            request_id=request_id,
            client_id=self._notes.recorded_id,
            owner=self._notes.owner,
            words=words,
        )
        self._refusals.saw(refusal, self._since_ns)
