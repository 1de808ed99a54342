"""Routers of a worker that die, and those that go on with what they left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from google.rpc import status_pb2

from quire.gpuworker.v1 import gpuworker_pb2 as pb
from tests.support.gpuworker.fake_engine_ports import ManualRunner
from tests.support.gpuworker.worker_harness import RouterEnd, Served, submit

FIRST, SECOND = b"a" * 16, b"b" * 16
LONG = 3600.0  # a grace that no test waits for


def resumable(handle: int, count: int, prompt: tuple[int, ...] = (1, 2, 3), **fields: object) -> pb.StreamRequest:
    message = submit(handle, prompt, count, request_id="r1", tenant="t1", **fields)
    message.submit.continuation.skip_special_tokens = True
    return message


async def found(router: RouterEnd, request_id: str = "r1", tenant: str = "t1") -> pb.Found:
    find = pb.Find(query=7, request_id=request_id, tenant=tenant)
    await router.send(pb.StreamRequest(find=find))
    answer = (await router.until("found")).found
    assert answer.query == 7
    return answer


async def adopt(router: RouterEnd, handle: int, sequence: int, **fields: float) -> None:
    await router.send(pb.StreamRequest(adopt=pb.Adopt(handle=handle, sequence=sequence, **fields)))


async def refusal(router: RouterEnd) -> tuple[int, int]:
    """Return the handle and the status code of the next refusal."""
    refused = (await router.until("refused")).refused
    return refused.handle, status_pb2.Status.FromString(refused.status).code


@asynccontextmanager
async def router_of(worker: Served, incarnation: bytes, **hello: Any) -> AsyncIterator[RouterEnd]:
    async with worker.stub() as stub:
        router = RouterEnd(stub.Stream())
        await router.send(pb.StreamRequest(hello=pb.Hello(router_id="r", incarnation=incarnation, **hello)))
        await router.until("hello")
        yield router


async def lost(worker: Served, runner: ManualRunner, *requests: pb.StreamRequest, steps: int = 2) -> None:
    """Let a router send sequences and die when they have tokens."""
    async with router_of(worker, FIRST) as router:
        await router.send(*requests)
        handles = [request.submit.handle for request in requests]
        await worker.until(lambda: len(runner.num_tokens) == len(handles))
        for _ in range(steps):
            await asyncio.to_thread(runner.step)
        if steps:
            await router.until_sampled(*handles)
        router.call.cancel()
        await worker.until(lambda: len(worker.servicer.orphans) == len(handles))
