"""A router that ends under load: no call is CANCELLED, which clients would not send again. Real processes, SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from pathlib import Path

import grpc
import pytest
from grpc import aio

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc
from quire.types.v1 import types_pb2 as types
from tests.support.load import kill, until_restarted
from tests.support.suite import PATIENCE, running_suite
from tests.support.waiting import until

RESTARTS, CHANNELS, CALLS_AT_ONCE = 3, 3, 4
# Calls that have to be answered between two restarts.
BETWEEN = 30

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(sys.platform != "linux", reason="the sockets of a process are found on Linux alone"),
]


class Storm:
    """Calls without a pause over connections of their own, whose statuses are counted. Nothing tries a call again."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.seen, self.over = Counter[str](), False

    async def run(self) -> None:
        options = [[("grpc.enable_retries", 0), ("number", number)] for number in range(CHANNELS)]
        channels = [aio.insecure_channel(f"127.0.0.1:{self._port}", options=each) for each in options]
        async with asyncio.TaskGroup() as tasks:
            for channel in channels * CALLS_AT_ONCE:
                tasks.create_task(self._calls(inference_pb2_grpc.InferenceServiceStub(channel)))
        for channel in channels:
            await channel.close()

    async def _calls(self, stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        sampling = types.SamplingParams(max_tokens=2, ignore_eos=True)
        asked = pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[1, 2, 3])), sampling=sampling)
        while not self.over:
            try:
                async for _ in stub.Generate(asked, timeout=PATIENCE):
                    pass
                self.seen["OK"] += 1
            except aio.AioRpcError as error:
                self.seen[error.code().name] += 1
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    await asyncio.sleep(0.01)  # the router is away: a loop of refusals would take all of a core

    async def answered(self, more: int) -> None:
        """Wait until so many more calls were answered."""
        wanted = self.seen["OK"] + more
        await until(lambda: self.seen["OK"] >= wanted, seconds=PATIENCE)


async def test_no_call_is_cancelled_at_the_end_of_a_drain(tmp_path: Path) -> None:
    flags = ("--kv-blocks", "256", "--simulate", "base=2ms,prefill=10us")
    async with running_suite(tmp_path, StackOptions(model=CHECKPOINT, workers=1, worker_flags=flags)) as suite:
        storm = Storm(suite.stack.options.grpc_port)
        running = asyncio.create_task(storm.run())
        try:
            for _ in range(RESTARTS):
                await storm.answered(BETWEEN)
                pid = suite.stack.children["router"].pid
                kill(suite, "router", signal.SIGTERM)
                await until_restarted(suite, "router", pid)
            await storm.answered(BETWEEN)
        finally:
            storm.over = True
            await running
    assert storm.seen.keys() == {"OK", "UNAVAILABLE"}, storm.seen
