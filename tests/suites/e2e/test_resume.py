"""A router dies by kill -9 or stands still, and its clients go on elsewhere: real processes, every token compared."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc
import httpx
import pytest
import pytest_asyncio

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions, free_ports
from common.rpc.server import open_channel
from quire.client import AsyncClient, AsyncStream, Chunk, Client, Retry
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc
from tests.support.load import kill, prompts
from tests.support.routers import ALONE, connections, killed, own_id
from tests.support.simulated import expected, seeded
from tests.support.suite import PATIENCE, Outcome, Suite, running_suite, stream

COUNT = 768
WORKERS = ("worker-0", "worker-1")
ROUTERS = ("router-0", "router-1")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    """Two routers that share their ports, and two simulated workers."""
    flags = ("--kv-blocks", "1024", "--simulate", "base=4ms,prefill=10us", "--orphan-grace", "60")
    options = StackOptions(model=CHECKPOINT, workers=2, worker_flags=flags, own_ports=tuple(free_ports(2)))
    async with running_suite(tmp_path_factory.mktemp("resume"), options) as running:
        yield running


@dataclass
class Broken:
    """Streams of a router that was killed amid them: what was asked, and what their clients have."""

    asked: list[pb.GenerateRequest]
    seen: list[Outcome]

    def resumes(self) -> list[pb.GenerateRequest]:
        return [resume_of(outcome) for outcome in self.seen]


def resume_of(outcome: Outcome) -> pb.GenerateRequest:
    assert outcome.admitted is not None
    received = [len(outcome.tokens)]
    return pb.GenerateRequest(resume=pb.Resume(request_id=outcome.admitted.request_id, output_tokens_received=received))


async def broken(suite: Suite, requests: list[pb.GenerateRequest]) -> Broken:
    """Start streams at one router, and kill it when each has a token. The workers stand still meanwhile."""
    found = Broken(requests, [Outcome() for _ in requests])
    async with AsyncExitStack() as stack:
        shares = await connections(suite, stack, 2, len(requests))
        victim = await own_id(suite, "router-1")
        channels = [channel for owner, channel in shares if owner == victim]
        firsts = [asyncio.Event() for _ in requests]
        tasks = [
            asyncio.create_task(stream(channel, request, first_token=first, outcome=outcome))
            for channel, request, first, outcome in zip(channels, requests, firsts, found.seen, strict=True)
        ]
        await asyncio.gather(*(first.wait() for first in firsts))
        async with stopped(suite):
            await killed(suite, "router-1")
            errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, grpc.aio.AioRpcError) for error in errors), "a stream ended before its router"
    return found


async def test_streams_go_on_at_the_other_router_with_every_token_right(suite: Suite) -> None:
    asked = prompts(3, seed=71)
    left = await broken(suite, [seeded(prompt, COUNT, seed) for seed, prompt in enumerate(asked)])
    async with open_channel(suite.stack.address) as channel:
        rests = [
            stream(channel, request, PATIENCE, outcome=outcome)
            for request, outcome in zip(left.resumes(), left.seen, strict=True)
        ]
        await asyncio.gather(*rests)
        for seed, (outcome, prompt) in enumerate(zip(left.seen, asked, strict=True)):
            assert outcome.tokens == expected(prompt, COUNT, seed)
            assert outcome.finished is not None
            assert outcome.finished.usage.output_tokens == COUNT
        assert outcome.admitted is not None
        named = decision_pb2.ListDecisionsRequest(request_id=outcome.admitted.request_id)
        records = (
            await decision_pb2_grpc.DecisionServiceStub(channel).ListDecisions(named, timeout=PATIENCE)
        ).decisions
        assert [record.kind for record in records if record.kind != "admission"][:1] == ["migration"]
    await until_whole(suite)


async def test_a_worker_that_dies_after_the_resume_takes_nothing_along(suite: Suite) -> None:
    prompt = prompts(1, seed=5)[0]
    left = await broken(suite, [seeded(prompt, COUNT)])
    outcome = left.seen[0]
    assert outcome.admitted is not None
    worker, before = outcome.admitted.worker_id, len(outcome.tokens)
    more = asyncio.Event()
    async with open_channel(suite.stack.address) as channel:
        task = asyncio.create_task(stream(channel, left.resumes()[0], PATIENCE, first_token=more, outcome=outcome))
        await more.wait()
        kill(suite, worker)
        await task
    assert len(outcome.tokens) > before
    assert outcome.tokens == expected(prompt, COUNT)
    await until_whole(suite)


async def own_status(suite: Suite, name: str) -> pb.GetStatusResponse:
    """Return what one router says of itself, once it is there."""
    async with open_channel(suite.stack.children[name].program.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        asked = pb.GetStatusRequest()
        return await stub.GetStatus(asked, timeout=PATIENCE, metadata=ALONE, wait_for_ready=True)


async def router_in_use(suite: Suite) -> str:
    """Return the name of the one router that has a request."""
    async with asyncio.timeout(PATIENCE):
        while True:
            for name in ROUTERS:
                if (await own_status(suite, name)).running_requests:
                    return name


async def until_whole(suite: Suite) -> None:
    """Wait until both routers serve again and every block is free."""
    async with asyncio.timeout(PATIENCE):
        for name in ROUTERS:
            while True:
                if [each.state for each in (await own_status(suite, name)).workers] == ["connected"] * len(WORKERS):
                    break
                await asyncio.sleep(0.05)
    await suite.until_all_free(len(WORKERS))


@asynccontextmanager
async def stopped(suite: Suite) -> AsyncIterator[None]:
    """Stop the workers: what runs goes on afterwards."""
    for name in WORKERS:
        kill(suite, name, signal.SIGSTOP)
    try:
        yield
    finally:
        for name in WORKERS:
            kill(suite, name, signal.SIGCONT)


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
async def test_the_client_goes_on_by_itself(suite: Suite, kind: str) -> None:
    prompt = prompts(1, seed=9)[0]
    address = [suite.stack.address, suite.stack.address]
    async with AsyncExitStack() as stack:
        client = AsyncClient(address) if kind == "asyncio" else Client(address)
        stack.callback(client.close) if isinstance(client, Client) else stack.push_async_callback(client.aclose)
        running = client.stream(prompt, max_tokens=COUNT, ignore_eos=True, temperature=0.0, seed=3)

        async def next_chunk() -> Chunk | None:
            if isinstance(running, AsyncStream):
                return await anext(running, None)
            return await asyncio.to_thread(next, running, None)

        chunks = [await next_chunk()]
        async with stopped(suite):
            await killed(suite, await router_in_use(suite))
        while (chunk := await next_chunk()) is not None:
            chunks.append(chunk)
        whole = running.completion
    assert list(whole.token_ids) == expected(prompt, COUNT, 3)
    assert [token for chunk in chunks if chunk is not None for token in chunk.token_ids] == list(whole.token_ids)
    await until_whole(suite)


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
async def test_the_client_goes_on_although_its_router_stands_still(suite: Suite, kind: str) -> None:
    """The router's kernel still acknowledges packets. It runs again afterwards, and has lost nothing else."""
    prompt = prompts(1, seed=10)[0]
    # The kernel still gives each other connection to the router that stands still. Each of these is tried anew.
    addresses = [suite.stack.address] * 16
    async with AsyncExitStack() as stack:
        retry = Retry(resumes=64)
        client = AsyncClient(addresses, retry=retry) if kind == "asyncio" else Client(addresses, retry=retry)
        stack.callback(client.close) if isinstance(client, Client) else stack.push_async_callback(client.aclose)
        running = client.stream(prompt, max_tokens=COUNT, ignore_eos=True, temperature=0.0, seed=3)

        async def next_chunk() -> Chunk | None:
            if isinstance(running, AsyncStream):
                return await anext(running, None)
            return await asyncio.to_thread(next, running, None)

        await next_chunk()
        async with stopped(suite):
            still = await router_in_use(suite)
            kill(suite, still, signal.SIGSTOP)
        try:
            while await next_chunk() is not None:
                pass
        finally:
            kill(suite, still, signal.SIGCONT)
        assert list(running.completion.token_ids) == expected(prompt, COUNT, 3)
    await until_whole(suite)


async def test_events_over_http_go_on_after_the_last_one(suite: Suite) -> None:
    options = suite.stack.options
    url = f"http://{options.host}:{options.port}/v1/chat/completions"
    messages = [{"role": "user", "content": "Tell me of the sea."}]
    body = {"messages": messages, "stream": True, "max_tokens": COUNT, "ignore_eos": True, "seed": 5}
    body["stream_options"] = {"event_ids": True}
    reference = [data async for _, data in events(url, body)]
    seen = await until_broken(suite, url, body)
    last = [mark for mark, _ in seen if mark][-1]
    rest = [data async for _, data in events(url, body, {"Last-Event-ID": last})]
    assert text_of([data for _, data in seen] + rest) == text_of(reference)
    assert rest[-1] == "[DONE]"
    await until_whole(suite)


async def until_broken(suite: Suite, url: str, body: dict[str, object]) -> list[tuple[str, str]]:
    """Kill the router of a stream when three of its events have come; return what its client has."""
    seen: list[tuple[str, str]] = []
    try:
        async for event in events(url, body):
            seen.append(event)
            if len([mark for mark, _ in seen if mark]) == 3:
                async with stopped(suite):
                    await killed(suite, await router_in_use(suite))
    except httpx.HTTPError:
        return seen
    raise AssertionError("the stream ended before its router")


async def events(
    url: str, body: dict[str, object], headers: dict[str, str] | None = None
) -> AsyncIterator[tuple[str, str]]:
    """Yield the (id, data) of each event."""
    async with (
        httpx.AsyncClient(timeout=PATIENCE) as client,
        client.stream("POST", url, json=body, headers=headers) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        mark = ""
        async for line in answer.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                mark = value
            elif name == "data":
                yield mark, value
                mark = ""


def text_of(lines: list[str]) -> str:
    chunks = [json.loads(data) for data in lines if data != "[DONE]"]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
