"""Two routers on one port, one of which drains under load: the other one serves every call. Real processes, SIGTERM."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path

import grpc
import httpx
from grpc import aio

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions, free_ports
from common.rpc.server import open_channel
from quire.client import AsyncClient, Retry
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc
from quire.types.v1 import types_pb2 as types
from tests.support.load import kill, until_restarted
from tests.support.routers import ALONE
from tests.support.suite import PATIENCE, Suite, running_suite
from tests.support.waiting import until

ROUTERS = ("router-0", "router-1")
PROMPT = [1, 2, 3]
# Calls of each kind that are answered between two drains: more than 200 in all.
BETWEEN = 25
AT_ONCE, CHANNELS = 4, 2


class Storm:
    """Calls of three kinds without a pause, and what became of each."""

    def __init__(self, suite: Suite) -> None:
        self._suite, self._address = suite, suite.stack.address
        self.over = False
        self.seen = {kind: Counter[str]() for kind in ("client", "http", "raw")}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._clients())
            tasks.create_task(self._http())
            for number in range(CHANNELS):
                tasks.create_task(self._raw(number))

    async def answered(self, more: int) -> None:
        """Wait until so many more calls of each kind were answered."""
        wanted = {kind: seen["OK"] + more for kind, seen in self.seen.items()}
        await until(lambda: all(seen["OK"] >= wanted[kind] for kind, seen in self.seen.items()), seconds=PATIENCE)

    async def _clients(self) -> None:
        # The bounds on retries are those of an overloaded server; here each call may need as many as the drain is long.
        async with (
            AsyncClient(self._address, retry=Retry(attempts=100, budget=1e6)) as client,
            asyncio.TaskGroup() as all_,
        ):
            for _ in range(AT_ONCE):
                all_.create_task(self._client(client))

    async def _client(self, client: AsyncClient) -> None:
        while not self.over:
            async for _ in client.stream(PROMPT, max_tokens=2, ignore_eos=True):
                pass
            self.seen["client"]["OK"] += 1

    async def _http(self) -> None:
        url = f"http://{self._suite.stack.options.host}:{self._suite.stack.options.port}/v1/completions"
        async with httpx.AsyncClient(timeout=PATIENCE) as client, asyncio.TaskGroup() as all_:
            for _ in range(AT_ONCE):
                all_.create_task(self._posts(client, url))

    async def _posts(self, client: httpx.AsyncClient, url: str) -> None:
        while not self.over:
            try:
                answer = await client.post(url, json={"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True})
            except httpx.TransportError:  # it met the end of an idle connection, as it may with any HTTP server
                self.seen["http"]["cut"] += 1
                continue
            self.seen["http"]["OK" if answer.status_code == 200 else answer.text] += 1

    async def _raw(self, number: int) -> None:
        """Short calls beside a long one, on one connection, which therefore never ends between two calls."""
        options = [("grpc.enable_retries", 0), ("number", number)]
        async with aio.insecure_channel(self._address, options=options) as channel, asyncio.TaskGroup() as all_:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            all_.create_task(self._calls(stub, 500))
            for _ in range(AT_ONCE):
                all_.create_task(self._calls(stub, 2))

    async def _calls(self, stub: inference_pb2_grpc.InferenceServiceStub, tokens: int) -> None:
        sampling = types.SamplingParams(max_tokens=tokens, ignore_eos=True)
        asked = pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=PROMPT)), sampling=sampling)
        while not self.over:
            begun = False
            try:
                async for _ in stub.Generate(asked, timeout=PATIENCE):
                    begun = True
                self.seen["raw"]["OK"] += 1
            except aio.AioRpcError as error:
                self.seen["raw"]["begun and lost" if begun else error.code().name] += 1
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    await asyncio.sleep(0.01)


async def test_no_call_fails_that_the_other_router_can_serve(tmp_path: Path) -> None:
    flags = ("--kv-blocks", "1024", "--simulate", "base=2ms,prefill=10us")
    options = StackOptions(model=CHECKPOINT, workers=1, worker_flags=flags, own_ports=tuple(free_ports(len(ROUTERS))))
    async with running_suite(tmp_path, options) as suite:
        storm = Storm(suite)
        running = asyncio.create_task(storm.run())
        for name in ROUTERS:
            await storm.answered(BETWEEN)
            await restarted(suite, name)
        await storm.answered(BETWEEN)
        storm.over = True
        await running
    assert storm.seen["client"].keys() == {"OK"}, storm.seen
    assert storm.seen["http"].keys() <= {"OK", "cut"}, storm.seen
    # gRPC itself answers CANCELLED where a call crosses its GOAWAY. A call that had begun is never lost.
    assert storm.seen["raw"].keys() <= {"OK", "UNAVAILABLE", "CANCELLED"}, storm.seen
    assert sum(seen.total() for seen in storm.seen.values()) > 200


async def restarted(suite: Suite, name: str) -> None:
    """Let a router drain, and return when the one after it serves."""
    pid = suite.stack.children[name].pid
    kill(suite, name, signal.SIGTERM)
    async with asyncio.timeout(PATIENCE):
        await until_restarted(suite, name, pid)
        async with open_channel(suite.stack.children[name].program.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            workers = list[str]()
            while workers != ["connected"]:
                answer = await stub.GetStatus(pb.GetStatusRequest(), metadata=ALONE, wait_for_ready=True)
                workers = [each.state for each in answer.workers]
