"""Writes to a stream that the server has ended: its messages stay readable, and reads raise its reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import pytest
from grpc import aio

from common.rpc.stream_writes import write
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.gpuworker.v1 import gpuworker_pb2_grpc as rpc
from tests.support.waiting import PATIENCE_S

MESSAGES: Final = 5
PULSE: Final = pb.StreamRequest(pulse=pb.Pulse())


class Ends(rpc.GpuWorkerServiceServicer):
    """Sends some messages after the first one that comes, then ends the stream."""

    async def Stream(
        self, request_iterator: AsyncIterator[pb.StreamRequest], context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.StreamResponse]:
        await anext(request_iterator)
        for seq in range(MESSAGES):
            yield pb.StreamResponse(outputs=pb.StepOutputs(seq=seq))
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "nothing came")

    async def GetWorker(
        self, request: pb.GetWorkerRequest, context: aio.ServicerContext[Any, Any]
    ) -> pb.GetWorkerResponse:
        raise NotImplementedError


@asynccontextmanager
async def channel() -> AsyncIterator[aio.Channel]:
    server = aio.server()
    rpc.add_GpuWorkerServiceServicer_to_server(Ends(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as opened:
            yield opened
    finally:
        await server.stop(None)


async def until_it_has_ended(call: Any) -> None:
    """Write until gRPC takes no more."""
    async with asyncio.timeout(PATIENCE_S):
        while await write(call, PULSE):  # noqa: ASYNC110 - it has a deadline
            await asyncio.sleep(0.01)


async def read(call: Any) -> int:
    seq: int = (await call.read()).outputs.seq
    return seq


async def test_what_came_before_the_end_is_read_and_then_the_reason() -> None:
    async with channel() as opened:
        call = rpc.GpuWorkerServiceStub(opened).Stream()
        await until_it_has_ended(call)
        assert [await read(call) for _ in range(MESSAGES)] == list(range(MESSAGES))
        assert not await write(call, PULSE)
        with pytest.raises(aio.AioRpcError) as raised:
            await call.read()
        assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.DEADLINE_EXCEEDED, "nothing came")
        assert not await write(call, PULSE)


async def test_the_first_write_where_nothing_listens_leaves_the_reason() -> None:
    async with aio.insecure_channel("127.0.0.1:1") as opened:
        call = rpc.GpuWorkerServiceStub(opened).Stream()
        await until_it_has_ended(call)
        with pytest.raises(aio.AioRpcError) as raised:
            await call.read()
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "Connection refused" in (raised.value.details() or "")
