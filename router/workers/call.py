"""Reads and writes of a call to a worker, and what its errors mean."""

from __future__ import annotations

from grpc import StatusCode, aio

from common.rpc import stream_writes
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


async def write(call: WorkerCall, outbox: Outbox) -> None:
    """The one writer of a stream; the end of the stream ends it, and the reader gets the reason."""
    while (message := await outbox.take()) is not None:
        if not await stream_writes.write(call, message):
            return
    await call.done_writing()
