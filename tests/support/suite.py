"""A whole suite for tests: real processes on free ports, and a client that gathers the events of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from cli.suite.programs import leaf_of
from cli.suite.stack import Stack, StackOptions
from common.rpc.roles import Role
from common.rpc.server import open_channel
from quire.decision.v1 import decision_pb2_grpc
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc
from quire.types.v1 import types_pb2 as types
from tests.support.waiting import until

# Bounds a hang; nothing that a test asserts depends on it.
PATIENCE = 180.0


@dataclass
class Outcome:
    """The events of one request's stream."""

    admitted: pb.Admitted | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finished: pb.Finished | None = None
    prompt_logprobs: list[types.TokenLogprobs] = field(default_factory=list)
    # By the number of the sequence in its request; `tokens` has those of all as they came.
    sequences: dict[int, list[int]] = field(default_factory=dict)
    logprobs: list[types.TokenLogprobs] = field(default_factory=list)


async def stream(
    channel: grpc.aio.Channel,
    request: pb.GenerateRequest,
    timeout: float = PATIENCE,
    first_token: asyncio.Event | None = None,
    outcome: Outcome | None = None,
) -> Outcome:
    """Stream one request over a channel to its end; `first_token` is set when its first token comes.

    A given `outcome` shows what has come so far.
    """
    outcome = outcome or Outcome()
    async for event in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=timeout):
        match event.WhichOneof("event"):
            case "admitted":
                outcome.admitted = event.admitted
            case "tokens":
                outcome.tokens.extend(event.tokens.token_ids)
                outcome.sequences.setdefault(event.tokens.index, []).extend(event.tokens.token_ids)
                outcome.logprobs.extend(event.tokens.logprobs)
                outcome.text += event.tokens.text
                if first_token is not None:
                    first_token.set()
            case "finished":
                outcome.finished = event.finished
            case "prompt_logprobs":
                outcome.prompt_logprobs.extend(event.prompt_logprobs.logprobs)
    return outcome


class Suite:
    """A running suite, its lines, and clients of the router, of its admin plane and of the KV manager."""

    def __init__(
        self,
        stack: Stack,
        lines: list[str],
        router: grpc.aio.Channel,
        admin: grpc.aio.Channel,
        manager: grpc.aio.Channel,
        standbys: Sequence[grpc.aio.Channel] = (),
    ) -> None:
        self.stack, self.lines = stack, lines
        self.channel, self.admin = router, admin
        self.decisions = decision_pb2_grpc.DecisionServiceStub(admin)
        self.inference = inference_pb2_grpc.InferenceServiceStub(router)
        self.manager = kvmanager_pb2_grpc.KvManagerServiceStub(manager)
        self.managers = {"kvmanager": self.manager}
        for number, channel in enumerate(standbys, 1):
            self.managers[f"kvmanager-{number}"] = kvmanager_pb2_grpc.KvManagerServiceStub(channel)

    async def generate(
        self,
        request: pb.GenerateRequest,
        timeout: float = PATIENCE,
        first_token: asyncio.Event | None = None,
        outcome: Outcome | None = None,
    ) -> Outcome:
        return await stream(self.channel, request, timeout, first_token, outcome)

    async def status(self) -> pb.GetStatusResponse:
        """Return the router's status from its admin plane: on the public port it may need a key."""
        operators = inference_pb2_grpc.InferenceServiceStub(self.admin)
        return await operators.GetStatus(pb.GetStatusRequest(), timeout=PATIENCE)

    async def pools(self) -> list[kvmanager_pb2.Pool]:
        """Return every worker's pool, as the KV manager counts it."""
        return list((await self.manager.GetPool(kvmanager_pb2.GetPoolRequest(), timeout=PATIENCE)).pools)

    async def until_connected(self, workers: int) -> None:
        """Wait until the router may use so many workers."""
        wanted = ["connected"] * workers
        await until(
            self.status, lambda status: [each.state for each in status.workers] == wanted, every=0.05, seconds=PATIENCE
        )

    async def until_all_free(self, workers: int) -> None:
        """Wait until the router has no request, and no worker a block in a block table or leased.

        Fails with the counts if that never comes. Blocks may be free before the router has seen the end of a request.
        """
        found: list[object] = []
        try:
            async with asyncio.timeout(PATIENCE):
                while True:
                    pools, tables, status = await self.pools(), await self._tables(), await self.status()
                    requests = status.queued_requests + status.running_requests
                    if not requests and not tables and len(pools) == workers and all(map(_is_idle, pools)):
                        return
                    found = [pools, tables, status]
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"not everything was released: {found}") from None

    async def _tables(self) -> Sequence[kvmanager_pb2.BlockTable]:
        request = kvmanager_pb2.GetBlockTableRequest()
        return (await self.manager.GetBlockTable(request, timeout=PATIENCE)).tables


def _is_idle(pool: kvmanager_pb2.Pool) -> bool:
    held = pool.in_use + pool.leased + pool.pinned + pool.running + pool.waiting
    return held == 0 and pool.free + pool.cached == pool.num_blocks


@asynccontextmanager
async def running_suite(state_dir: Path, options: StackOptions) -> AsyncIterator[Suite]:
    """Run a suite on free ports; `options` names the model, the workers and the flags."""
    free = replace(options, port=0, grpc_port=0, manager_port=0, worker_ports=(0,) * options.workers)
    free = replace(free, standby_ports=(0,) * len(options.standby_ports))
    options = replace(free, state_dir=state_dir, threads=1, ready_seconds=PATIENCE)
    lines: list[str] = []
    async with AsyncExitStack() as stop:
        stack = await stop.enter_async_context(Stack(options, lambda name, line: lines.append(f"{name}: {line}")))
        router = await stop.enter_async_context(grpc.aio.insecure_channel(stack.address))
        admin = await stop.enter_async_context(operator_channel(stack.options, stack.admin_address, Role.ROUTER))
        manager_address = f"127.0.0.1:{stack.options.manager_port}"
        manager = await stop.enter_async_context(operator_channel(stack.options, manager_address, Role.MANAGER))
        standbys = [
            await stop.enter_async_context(operator_channel(stack.options, f"127.0.0.1:{port}", Role.MANAGER))
            for port in stack.options.standby_ports
        ]
        yield Suite(stack, lines, router, admin, manager, standbys)


def operator_channel(options: StackOptions, address: str, role: Role) -> grpc.aio.Channel:
    """Return a channel to a service, with the operator's certificate where the suite has TLS."""
    leaf = leaf_of(options, Role.OPERATOR)
    identity = None if leaf is None else leaf.identity()
    return open_channel(address, identity=identity, role=role)


def greedy(prompt: Sequence[int], max_tokens: int, name: str = "") -> pb.GenerateRequest:
    """Return a greedy request for token ids that runs to its length; without a name the router names it."""
    sampling = types.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    prompt_ids = pb.Prompt(token_ids=pb.TokenIds(ids=prompt))
    return pb.GenerateRequest(prompt=prompt_ids, sampling=sampling, request_id=name)


def cached_tokens(outcome: Outcome) -> int:
    """Return how many tokens of its prompt a request that finished did not compute."""
    assert outcome.finished is not None
    return outcome.finished.usage.cached_tokens


def chat(question: str, system: str = "", max_tokens: int = 32) -> pb.GenerateRequest:
    """Return a greedy chat request."""
    messages = [pb.ChatMessage(role="user", content=question)]
    if system:
        messages.insert(0, pb.ChatMessage(role="system", content=system))
    sampling = types.SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return pb.GenerateRequest(prompt=pb.Prompt(chat=pb.Chat(messages=messages)), sampling=sampling)
