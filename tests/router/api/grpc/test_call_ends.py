"""Deadlines and cancels of InferenceService over a real socket: statuses, spans and what workers are told."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc import aio

from common.contracts.clock import ManualClock
from common.contracts.types import FinishReason
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2
from router.api.shared.call_context import Calls
from tests.support.deadlines import TooSlow, with_enough_time
from tests.support.router.callers import OneCaller
from tests.support.router.fake_worker import PATIENCE_S, FakeWorker
from tests.support.router.served_router import Service, generate, served


async def test_the_calls_deadline_reaches_the_worker() -> None:
    async def attempt(seconds: float) -> None:
        worker = FakeWorker()
        async with served(worker) as service:
            call = service.stub.GenerateUnary(pb.GenerateUnaryRequest(request=generate()), timeout=seconds)
            await service.harness.until(lambda: bool(worker.submits) or call.done())
            if not worker.submits:
                raise TooSlow
            assert 0.0 < worker.submits[0].timeout_seconds <= 1.05 * seconds  # on the wire it is rounded up
            with pytest.raises(aio.AioRpcError) as late:
                await call
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await worker.until(lambda: bool(worker.cancels))
            assert worker.cancels[0].reason == types_pb2.FinishReason.FINISH_REASON_DEADLINE

    await with_enough_time(attempt, 0.4)


async def ended(service: Service, timeout: float, unary: bool) -> grpc.StatusCode:
    """Return the status of a call of which the worker draws one token, and wait until its span has ended."""
    if unary:
        call = service.stub.GenerateUnary(pb.GenerateUnaryRequest(request=generate()), timeout=timeout)
        with pytest.raises(aio.AioRpcError) as late:
            await call
    else:
        with pytest.raises(aio.AioRpcError) as late:
            async for _ in service.stub.Generate(generate(), timeout=timeout):
                pass
    spans = service.harness.spans
    name = "quire.inference.v1.InferenceService/" + ("GenerateUnary" if unary else "Generate")
    await service.harness.until(lambda: any(span.name == name for span in spans.ended()))
    return late.value.code()


# gRPC sends 1.01 s to the server for 1.001: there the client's timer is first for certain.
@pytest.mark.parametrize("timeout", [0.2, 1.001])
@pytest.mark.parametrize("unary", [False, True])
async def test_every_span_and_the_worker_agree_that_the_deadline_was_it(timeout: float, unary: bool) -> None:
    async def attempt(seconds: float) -> None:
        worker = FakeWorker()
        async with served(worker) as service:
            task = asyncio.create_task(ended(service, seconds, unary))
            await service.harness.until(lambda: bool(worker.submits) or task.done())
            worker.step({1: [100]}, admitted={1: 0})
            assert await task is grpc.StatusCode.DEADLINE_EXCEEDED
            if not worker.submits:
                raise TooSlow
            harness = service.harness
            rpc_span = next(span.name for span in harness.spans.ended() if "InferenceService" in span.name)
            if harness.failure(rpc_span) != "DEADLINE_EXCEEDED":
                raise TooSlow  # the server began to count late, so that the client's end came first
            assert [harness.failure(name) for name in ("inference", "stream")] == ["deadline exceeded"] * 2
            finished = [event for event in harness.span("stream").events if event.name == "finished"]
            assert [(event.attributes or {})["quire.finish_reason"] for event in finished] == ["deadline"]
            await worker.until(lambda: bool(worker.cancels))
            assert worker.cancels[0].reason == types_pb2.FinishReason.FINISH_REASON_DEADLINE

    await with_enough_time(attempt, timeout)


async def test_a_client_gets_what_there_is_before_its_own_timer_ends_the_call() -> None:
    async def attempt(seconds: float) -> None:
        worker = FakeWorker()
        async with served(worker) as service:
            call = service.stub.Generate(generate(), timeout=seconds)
            await service.harness.until(lambda: bool(worker.submits) or call.done())
            worker.step({1: [100]}, admitted={1: 0})
            found: list[pb.GenerateResponse] = []

            async def read() -> None:
                async for response in call:
                    found.append(response)  # noqa: PERF401 - what came before the error counts

            with pytest.raises(aio.AioRpcError) as late:
                await read()
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if not found or not found[-1].HasField("finished"):
                raise TooSlow
            assert found[-1].finished.reason == types_pb2.FinishReason.FINISH_REASON_DEADLINE

    await with_enough_time(attempt, 0.4)


async def test_what_a_worker_ended_at_the_deadline_is_no_ok() -> None:
    worker = FakeWorker()
    async with served(worker) as service:
        call = service.stub.Generate(generate(), timeout=PATIENCE_S)
        await worker.until(lambda: bool(worker.submits))
        worker.step({1: [100]}, admitted={1: 0}, finished={1: FinishReason.DEADLINE})
        responses = [await call.read() for _ in range(4)]
        kinds = [each.WhichOneof("event") for each in responses if isinstance(each, pb.GenerateResponse)]
        assert kinds == ["admitted", "tokens", "tokens", "finished"]
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert service.harness.failure("inference") == "deadline exceeded"


async def test_a_call_without_a_deadline_has_none_at_the_worker() -> None:
    worker = FakeWorker()
    async with served(worker) as service:
        call = service.stub.Generate(generate())
        await worker.until(lambda: bool(worker.submits))
        assert not worker.submits[0].HasField("timeout_seconds")
        call.cancel()


async def test_a_cancelled_call_is_cancelled_at_the_worker() -> None:
    worker = FakeWorker()
    async with served(worker) as service:
        call = service.stub.Generate(generate(), timeout=PATIENCE_S)
        await worker.until(lambda: bool(worker.submits))
        worker.step({1: [100]}, admitted={1: 0})
        async for response in call:
            if response.HasField("tokens"):
                break
        call.cancel()
        await worker.until(lambda: bool(worker.cancels))
        assert worker.cancels[0].reason == types_pb2.FinishReason.FINISH_REASON_CANCELLED
        await service.harness.until(lambda: service.harness.admission.running == 0)


@dataclass
class TimedContext:
    """A call whose client waits for so many seconds from now on; None: without a deadline."""

    left: float | None

    def time_remaining(self) -> float | None:
        return self.left

    def invocation_metadata(self) -> None:
        return None

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5000"


@pytest.mark.parametrize(
    ("left", "deadline"), [(2.0, 5.0 + 1.9), (10.0, 5.0 + 9.5), (100.0, 5.0 + 99.5), (None, None), (1e9, None)]
)
def test_a_call_ends_a_twentieth_of_its_time_before_its_client_does(left: float | None, deadline: float | None) -> None:
    context: Any = TimedContext(left)
    assert Calls(ManualClock(5.0), OneCaller()).context(context).deadline == deadline
