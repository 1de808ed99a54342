"""A router whose queue is never served although a worker is idle: health says so, and is well again by itself."""

from __future__ import annotations

import asyncio

import pytest

from common.rpc.server import open_channel
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from quire.types.v1 import types_pb2
from router import main
from router.config import RouterSettings
from router.requests.dispatcher import Dispatcher
from tests.router.test_process import CHECKPOINT, DEMO, healthy
from tests.support.router.fake_worker import PATIENCE_S, FakeWorker, running


async def test_a_queue_that_stands_beside_an_idle_worker_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    serve, works = Dispatcher._serve_queue, asyncio.Event()

    def faulty(self: Dispatcher) -> None:
        if works.is_set():
            serve(self)

    monkeypatch.setattr(Dispatcher, "_serve_queue", faulty)
    worker = FakeWorker(identity=DEMO, automatic=True)
    async with running(worker):
        settings = RouterSettings(
            model=CHECKPOINT, block_size=4, port=0, grpc_port=0, worker=(worker.address,), stall_timeout=0.1
        )
        process = main.RouterProcess(settings)
        address = (await process.start()).partition(",")[0]
        try:
            async with open_channel(address) as channel:
                await healthy(channel, wanted=True)
                sampling = types_pb2.SamplingParams(max_tokens=2, ignore_eos=True)
                asked = pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[5, 6])), sampling=sampling)
                stub = rpc.InferenceServiceStub(channel)
                call = stub.GenerateUnary(pb.GenerateUnaryRequest(request=asked), timeout=PATIENCE_S)
                await healthy(channel, wanted=False)
                reason = process._why_not_ready()
                assert reason.startswith("1 requests wait for a worker, and 1 workers have room for the next one")
                works.set()
                worker.heartbeat()
                await call
                await healthy(channel, wanted=True)
                assert process._why_not_ready() == ""
        finally:
            await process.stop()
