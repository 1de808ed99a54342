"""Server interceptors as context managers around a handler of any kind; and the one that maps errors to statuses.

gRPC has four kinds of handler, and those that stream responses come in two forms: they yield, or they call `write`. An
`Around` runs around all of them: it is entered before the handler and sees the exception that left it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from types import TracebackType
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from common.contracts.errors import MALFORMED, FieldViolation, InvalidRequest, QuireError
from common.contracts.limits import MALFORMED_LINE_SECONDS
from common.rpc.gone_clients import client_gone
from common.rpc.status import abort, no_memory
from common.untrusted.rare_lines import RareLines
from quire.api.status import error_from_rpc

log = logging.getLogger(__name__)

Context: TypeAlias = "aio.ServicerContext[Any, Any]"
_WHAT: Final = FieldViolation("message", "cannot be decoded; expected the protobuf message of this method", MALFORMED)


# What protobuf's decoder says where memory was refused; else its error means that the bytes are not a message.
_NO_MEMORY: Final = "alloc failed"


# Messages that cannot be decoded: the caller gets INVALID_ARGUMENT, and the log a line now and then.
# gRPC itself answers UNKNOWN, and writes a traceback for each such message. Here a failed decoding returns
# `Malformed`, which becomes an error inside the handler's interceptors. Streams check each message. A message for
# which there was no memory is not its caller's mistake: it becomes a MemoryError.
class Malformed:
    """Replaces a message that could not be decoded."""


class NotDecoded:
    """Replaces a message for which there was no memory."""


class TolerantDecoder:
    """A deserialiser that returns `Malformed` or `NotDecoded` where the decoder of the message fails."""

    def __init__(self, decode: Callable[[bytes], Any]) -> None:
        self._decode = decode

    def __call__(self, data: bytes) -> Any:
        try:
            return self._decode(data)
        except MemoryError:
            return NotDecoded()
        except DecodeError as error:
            return NotDecoded() if _NO_MEMORY in str(error) else Malformed()


class MessageCheck:
    """Refuses the malformed messages of one method."""

    def __init__(self, method: str, streamed: bool) -> None:
        self._method, self._streamed = method, streamed
        self._lines = RareLines(MALFORMED_LINE_SECONDS)

    def __call__(self, request: Any, context: Context) -> Any:
        """Return the request of a call, or its stream of requests.

        Raises InvalidRequest when it is malformed, MemoryError when there was no memory to decode it.
        """
        if self._streamed:
            return _CheckedStream(request, self, context)
        return self.checked(request, context)

    def checked(self, message: Any, context: Context) -> Any:
        if isinstance(message, NotDecoded):
            raise MemoryError
        if not isinstance(message, Malformed):
            return message
        held_back = self._lines.next()
        if held_back is not None:
            extra = {"method": self._method, "peer": context.peer(), "held_back": held_back}
            log.warning("refused a message that cannot be decoded", extra=extra)
        raise InvalidRequest(_WHAT)


class _CheckedStream:
    """The messages of a stream. gRPC's own iterator begins with the first message: a handler may read none."""

    def __init__(self, messages: AsyncIterable[Any], check: MessageCheck, context: Context) -> None:
        self._messages, self._check, self._context = messages, check, context
        self._begun: AsyncIterator[Any] | None = None

    def __aiter__(self) -> _CheckedStream:
        return self

    async def __anext__(self) -> Any:
        if self._begun is None:
            self._begun = aiter(self._messages)
        return self._check.checked(await anext(self._begun), self._context)


# (full method name, context of the RPC) -> what runs around its handler
Around = Callable[[str, Context], AbstractAsyncContextManager[object]]
# (request or stream of requests, context of the RPC) -> the same, or InvalidRequest
Check = Callable[[Any, Context], Any]
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class AroundInterceptor(aio.ServerInterceptor):
    """Runs an `Around` around every handler of one server; another server needs an interceptor of its own."""

    def __init__(self, around: Around) -> None:
        self._around = around
        # By method: every call of a method of this server has the same handler.
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        method = handler_call_details.method
        if method in self._wrapped:
            return self._wrapped[method]
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        self._wrapped[method] = _wrap(handler, self._around, method)
        return self._wrapped[method]


class ErrorsToStatuses:
    """Around a handler: QuireErrors become statuses with details, bugs become INTERNAL without a word of their text.

    A request for which no memory is left becomes UNAVAILABLE: the caller may send it again, and the others go on.
    Cancellation, and an RPC that the handler aborted by itself, pass untouched.

    An error that became a status loses its frames. They have what the handler has, and often the error as well: that
    of a future, or of a message from elsewhere. Such a cycle would keep the request until the collector comes.
    """

    def __init__(self, method: str, context: Context) -> None:
        self._method, self._context = method, context

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, aio.AbortError | asyncio.CancelledError | GeneratorExit):
            return
        try:
            await abort(self._context, self._status_of(error))
        finally:
            error.__traceback__ = None

    def _status_of(self, error: BaseException) -> QuireError:
        if isinstance(error, aio.AioRpcError):
            return error_from_rpc(error)
        if isinstance(error, MemoryError):
            return no_memory()
        if isinstance(error, QuireError):
            return error
        log.error("unexpected error in %s", self._method, exc_info=error)
        return QuireError("internal error; the server's log has the details")


async def send(context: Context, response: Any) -> None:
    """Write a response. Raises CancelledError when the client is gone: gRPC cancels the call only a moment later."""
    try:
        await context.write(response)
    except aio.InternalError:
        raise client_gone() from None


def _wrap(handler: grpc.RpcMethodHandler[Any, Any], around: Around, method: str) -> grpc.RpcMethodHandler[Any, Any]:
    kind = next(name for name in _KINDS if getattr(handler, name))
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    check, decode = _message_check(handler, method, streamed=kind.startswith("stream"))
    wrapped: grpc.RpcMethodHandler[Any, Any] = make(
        _around_behaviour(getattr(handler, kind), around, method, check),
        request_deserializer=decode,
        response_serializer=handler.response_serializer,
    )
    return wrapped


def _message_check(
    handler: grpc.RpcMethodHandler[Any, Any], method: str, streamed: bool
) -> tuple[Check, Callable[[bytes], Any] | None]:
    """Return the check of a method's messages, and their decoder. Of several interceptors the innermost one checks."""
    decode = handler.request_deserializer
    if decode is None or isinstance(decode, TolerantDecoder):
        return _unchecked, decode
    return MessageCheck(method, streamed), TolerantDecoder(decode)


def _unchecked(request: Any, _: Context) -> Any:
    return request


def _around_behaviour(behaviour: Callable[..., Any], around: Around, method: str, check: Check) -> Callable[..., Any]:
    """Return `behaviour` with `around` around it, as a coroutine in either case.

    A coroutine receives a cancellation while it sends a response. The handler then releases at once what it holds
    (a request's place, its blocks). A generator would be dropped there, and closed by its finaliser.
    """

    async def call(request: Any, context: Context) -> Any:
        async with around(method, context):
            return await behaviour(check(request, context), context)

    async def write(request: Any, context: Context) -> None:
        async with around(method, context), aclosing(behaviour(check(request, context), context)) as responses:
            async for response in responses:
                await send(context, response)

    return write if inspect.isasyncgenfunction(behaviour) else call
