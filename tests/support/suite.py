"""A whole suite for tests: real processes on free ports, and a client that gathers the events of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from cli.suite.stack import Stack, StackOptions, free_ports
from common.errors import Unavailable
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc
from quire.types.v1 import types_pb2 as types

# Bounds a hang; nothing that a test asserts depends on it.
PATIENCE = 180.0


@dataclass
class Outcome:
    """The events of one request's stream."""

    admitted: pb.Admitted | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finished: pb.Finished | None = None


async def stream(
    channel: grpc.aio.Channel,
    request: pb.GenerateRequest,
    timeout: float = PATIENCE,
    first_token: asyncio.Event | None = None,
) -> Outcome:
    """Stream one request over a channel to its end; `first_token` is set when its first token comes."""
    outcome = Outcome()
    async for event in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=timeout):
        match event.WhichOneof("event"):
            case "admitted":
                outcome.admitted = event.admitted
            case "tokens":
                outcome.tokens.extend(event.tokens.token_ids)
                outcome.text += event.tokens.text
                if first_token is not None:
                    first_token.set()
            case "finished":
                outcome.finished = event.finished
    return outcome


class Suite:
    """A running suite, its lines, and clients of the router and the KV manager."""

    def __init__(self, stack: Stack, lines: list[str], router: grpc.aio.Channel, manager: grpc.aio.Channel) -> None:
        self.stack, self.lines = stack, lines
        self.channel = router
        self.inference = inference_pb2_grpc.InferenceServiceStub(router)
        self.manager = kvmanager_pb2_grpc.KvManagerServiceStub(manager)

    async def generate(
        self, request: pb.GenerateRequest, timeout: float = PATIENCE, first_token: asyncio.Event | None = None
    ) -> Outcome:
        return await stream(self.channel, request, timeout, first_token)

    async def pools(self) -> list[kvmanager_pb2.Pool]:
        """Return every worker's pool, as the KV manager counts it."""
        return list((await self.manager.GetPool(kvmanager_pb2.GetPoolRequest(), timeout=PATIENCE)).pools)

    async def until_all_free(self, workers: int) -> None:
        """Wait until no worker has a block in a block table or leased; fail with the counts if that never comes."""
        pools: list[kvmanager_pb2.Pool] = []
        try:
            async with asyncio.timeout(PATIENCE):
                while True:
                    pools = await self.pools()
                    if len(pools) == workers and all(map(_is_idle, pools)):
                        break
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"not everything was released: {pools}") from None
        tables = (await self.manager.GetBlockTable(kvmanager_pb2.GetBlockTableRequest(), timeout=PATIENCE)).tables
        assert not tables
        status = await self.inference.GetStatus(pb.GetStatusRequest(), timeout=PATIENCE)
        assert (status.queued_requests, status.running_requests) == (0, 0), status


def _is_idle(pool: kvmanager_pb2.Pool) -> bool:
    held = pool.in_use + pool.leased + pool.pinned + pool.running + pool.waiting
    return held == 0 and pool.free + pool.cached == pool.num_blocks


async def _started(stop: AsyncExitStack, options: StackOptions, lines: list[str]) -> Stack:
    """Return a suite on free ports. Another process may take a port before the suite binds it: others are tried."""
    for last in (False, False, False, True):
        port, http_port, manager_port, *worker_ports = free_ports(3 + options.workers)
        ports = replace(
            options, port=port, http_port=http_port, manager_port=manager_port, worker_ports=tuple(worker_ports)
        )
        try:
            return await stop.enter_async_context(Stack(ports, lambda name, line: lines.append(f"{name}: {line}")))
        except Unavailable as error:
            if last or "address already in use" not in str(error):
                raise
    raise AssertionError("unreachable")


@asynccontextmanager
async def running_suite(state_dir: Path, options: StackOptions) -> AsyncIterator[Suite]:
    """Run a suite on free ports; `options` names the model, the workers and the flags."""
    options = replace(options, state_dir=state_dir, threads=1, ready_seconds=PATIENCE)
    lines: list[str] = []
    async with AsyncExitStack() as stop:
        stack = await _started(stop, options, lines)
        router = await stop.enter_async_context(grpc.aio.insecure_channel(stack.address))
        manager = await stop.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{stack.options.manager_port}"))
        yield Suite(stack, lines, router, manager)


def greedy(prompt: Sequence[int], max_tokens: int) -> pb.GenerateRequest:
    """Return a greedy request for token ids that runs to its length."""
    sampling = types.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=prompt)), sampling=sampling)


def chat(question: str, system: str = "", max_tokens: int = 32) -> pb.GenerateRequest:
    """Return a greedy chat request."""
    messages = [pb.ChatMessage(role="user", content=question)]
    if system:
        messages.insert(0, pb.ChatMessage(role="system", content=system))
    sampling = types.SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return pb.GenerateRequest(prompt=pb.Prompt(chat=pb.Chat(messages=messages)), sampling=sampling)
