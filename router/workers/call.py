"""Reads and writes of a call to a worker, and what its errors mean."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from grpc import StatusCode, aio

from common.errors import Unavailable
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from router.workers.outbox import Outbox

WorkerCall = aio.StreamStreamCall[pb.StreamRequest, pb.StreamResponse]


def is_refused(error: aio.AioRpcError) -> bool:
    """Return whether a call failed because no process listens at its address: a worker there has ended."""
    return "Connection refused" in (error.details() or "")


def found_silent(error: aio.AioRpcError) -> bool:
    """Return whether a worker ended a stream because nothing came from this router: no request is to blame."""
    return error.code() is StatusCode.DEADLINE_EXCEEDED


async def read(call: WorkerCall) -> pb.StreamResponse | None:
    """Return the next message, None at the end of the stream."""
    response = await call.read()
    return response if isinstance(response, pb.StreamResponse) else None


async def write_first(call: WorkerCall, message: pb.StreamRequest) -> None:
    """Write the first message of a stream. Raises Unavailable when nothing answers.

    A write to a call that has just ended makes grpc.aio report an internal error of its own, and the reason is lost.
    """
    try:
        await call.write(message)
    except asyncio.InvalidStateError:
        pass  # the call has ended, and the next read raises the reason
    except aio.AioRpcError as error:
        if error.code() is not StatusCode.INTERNAL:
            raise
        raise Unavailable("nothing answers at its address") from error


async def write(call: WorkerCall, outbox: Outbox) -> None:
    """The one writer of a stream; a broken stream ends it, and the reader gets the error."""
    with suppress(aio.AioRpcError, asyncio.InvalidStateError):
        while (message := await outbox.take()) is not None:
            await call.write(message)
        await call.done_writing()
