"""Messages that cannot be decoded: the caller gets INVALID_ARGUMENT, and the log a line now and then.

gRPC itself answers UNKNOWN, and writes a traceback for each such message. Here a failed decoding returns `Malformed`,
which becomes an error inside the handler's interceptors. Streams check each message. A message for which there was no
memory is no mistake of its caller: it becomes a MemoryError.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any, Final, TypeAlias

from google.protobuf.message import DecodeError
from grpc import aio

from common.contracts.errors import MALFORMED, FieldViolation, InvalidRequest
from common.contracts.limits import MALFORMED_LINE_SECONDS
from common.untrusted.rare_lines import RareLines

log = logging.getLogger(__name__)

Context: TypeAlias = "aio.ServicerContext[Any, Any]"
_WHAT: Final = FieldViolation("message", "cannot be decoded; expected the protobuf message of this method", MALFORMED)


# What protobuf's decoder says where memory was refused; its error is that of a message which is no message.
_NO_MEMORY: Final = "alloc failed"


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
