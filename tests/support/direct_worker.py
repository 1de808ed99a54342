"""Sequences that a test submits to a worker of its choice, over the worker's own stream: no router chooses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from cli.suite.programs import leaf_of
from common.contracts.hashing import little_endian_int32
from common.contracts.types import PoolIdentity
from common.rpc.roles import Role
from common.rpc.server import open_channel
from quire.decision.v1 import decision_pb2
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.gpuworker.v1 import gpuworker_pb2_grpc as rpc
from quire.types.v1 import types_pb2 as types
from tests.support.gpuworker.worker_harness import RouterEnd, chain_of
from tests.support.suite import PATIENCE, Suite


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of a sequence, and how many of its prompt it did not compute."""

    tokens: list[int]
    cached_tokens: int


def submit(prompt: Sequence[int], count: int, name: str, identity: PoolIdentity) -> pb.StreamRequest:
    """Return a greedy sequence of `count` tokens."""
    sampling = types.SamplingParams(
        temperature=0.0, top_p=1.0, repetition_penalty=1.0, max_tokens=count, ignore_eos=True
    )
    message = pb.Submit(
        handle=1, request_id=name, prompt_token_ids=little_endian_int32(prompt), sampling=sampling, timeout_seconds=600
    )
    message.block_hashes, message.parent_digest = chain_of(prompt, identity)
    return pb.StreamRequest(submit=message)


@asynccontextmanager
async def stream_to(suite: Suite, worker_id: str) -> AsyncIterator[RouterEnd]:
    """Open a stream to a worker as a router does."""
    leaf = leaf_of(suite.stack.options, Role.ROUTER)
    address = suite.stack.children[worker_id].program.address
    identity = None if leaf is None else leaf.identity()
    async with open_channel(address, identity=identity, role=Role.WORKER) as channel:
        router = RouterEnd(rpc.GpuWorkerServiceStub(channel).Stream(wait_for_ready=True))
        await router.send(pb.StreamRequest(hello=pb.Hello(router_id=f"test-{worker_id}")))
        await router.until("hello")
        yield router


async def answer_of(
    suite: Suite, worker_id: str, prompt: Sequence[int], count: int, name: str, identity: PoolIdentity
) -> Answer:
    """Let a worker answer a prompt; no other one may."""
    async with stream_to(suite, worker_id) as router:
        await router.send(submit(prompt, count, name, identity))
        await router.until_finished(1)
        return Answer(router.tokens[1], router.admitted[1].cached_tokens)


async def records_of(suite: Suite, name: str, kind: str) -> Sequence[decision_pb2.DecisionRecord]:
    """Return the manager's records of a kind about a request, the newest first."""
    wanted = decision_pb2.ListDecisionsRequest(request_id=name, kind=kind, from_manager=True)
    return (await suite.decisions.ListDecisions(wanted, timeout=PATIENCE)).decisions
