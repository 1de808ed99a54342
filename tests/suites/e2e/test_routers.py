"""Three routers on one port, two workers: all serve, each reports the metrics and traces of all, one is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import grpc
import pytest
import pytest_asyncio

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions, free_ports
from common.rpc.server import open_channel
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from quire.inference.v1 import inference_pb2 as pb
from tests.support.load import kill, prompts
from tests.support.reference import assert_greedy
from tests.support.suite import PATIENCE, Outcome, Suite, greedy, running_suite, stream

ROUTERS, WORKERS, CHANNELS, COUNT = 3, 2, 2, 768

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    """Three routers that share their ports."""
    flags = ("--kv-blocks", "1024", "--dtype", "float32")
    options = StackOptions(model=CHECKPOINT, workers=WORKERS, worker_flags=flags, own_ports=tuple(free_ports(ROUTERS)))
    async with running_suite(tmp_path_factory.mktemp("routers"), options) as running:
        yield running


def router_of(outcome: Outcome) -> str:
    """Return the id of the router that served a request: its decisions are named after it."""
    assert outcome.admitted is not None
    return outcome.admitted.decision_id.rpartition("-")[0]


async def connections(suite: Suite, stack: AsyncExitStack) -> list[tuple[str, grpc.aio.Channel]]:
    """Connect to the shared port until every router has CHANNELS connections; return so many of each, with its id.

    The kernel gives each new connection to one of the listeners, by a hash of its ports.
    """
    found: dict[str, list[grpc.aio.Channel]] = {}
    async with asyncio.timeout(PATIENCE):
        while len(found) < ROUTERS or min(map(len, found.values())) < CHANNELS:
            channel = await stack.enter_async_context(open_channel(suite.stack.address))
            found.setdefault(router_of(await stream(channel, greedy([1, 2, 3], 1))), []).append(channel)
    return [(owner, channel) for owner, channels in found.items() for channel in channels[:CHANNELS]]


async def own_id(suite: Suite, name: str) -> str:
    """Return the id of one router, asked on its own port."""
    async with open_channel(suite.stack.children[name].program.address) as channel:
        return router_of(await stream(channel, greedy([1, 2, 3], 1)))


async def killed(suite: Suite, name: str) -> None:
    """Kill a process and wait until it is gone: a connection that reaches it while it dies is reset."""
    pid = suite.stack.children[name].pid
    kill(suite, name)
    async with asyncio.timeout(PATIENCE):
        while suite.stack.children[name].pid == pid:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def assert_whole_trace(decisions: decision_pb2_grpc.DecisionServiceStub, request_id: str) -> None:
    """Wait until the spans of router, worker and manager are all there; workers send theirs every half second."""
    wanted, found = {"quire-router", "quire-gpuworker", "quire-kvmanager"}, set[str]()
    async with asyncio.timeout(PATIENCE):
        while not wanted <= found:
            request = decision_pb2.GetTraceRequest(request_id=request_id)
            found = {span.service for span in (await decisions.GetTrace(request, timeout=PATIENCE)).spans}
            await asyncio.sleep(0.05)


async def test_every_router_serves_and_any_of_them_knows_what_all_decided(suite: Suite) -> None:
    async with AsyncExitStack() as stack:
        shares = await connections(suite, stack)
        asked = prompts(len(shares), seed=61)
        streams = [stream(channel, greedy(each, 16)) for (_, channel), each in zip(shares, asked, strict=True)]
        outcomes = await asyncio.gather(*streams)
        assert [router_of(outcome) for outcome in outcomes] == [owner for owner, _ in shares]
        assert_greedy(asked, [outcome.tokens for outcome in outcomes], 16)
        decisions = decision_pb2_grpc.DecisionServiceStub(shares[0][1])
        for outcome in outcomes:
            assert outcome.admitted is not None
            named = decision_pb2.ListDecisionsRequest(request_id=outcome.admitted.request_id)
            records = (await decisions.ListDecisions(named, timeout=PATIENCE)).decisions
            assert [record.kind for record in records] == ["admission", "routing"]
            await assert_whole_trace(decisions, outcome.admitted.request_id)


async def test_streams_of_the_others_outlive_a_killed_router(suite: Suite) -> None:
    """Bit for bit; the blocks of the dead one's sequences come back, and new connections are served meanwhile."""
    victim = await own_id(suite, "router-1")
    async with AsyncExitStack() as stack:
        shares = await connections(suite, stack)
        asked = prompts(len(shares), seed=71)
        firsts = [asyncio.Event() for _ in asked]
        tasks = [
            asyncio.create_task(stream(channel, greedy(prompt, COUNT), first_token=first))
            for (_, channel), prompt, first in zip(shares, asked, firsts, strict=True)
        ]
        await asyncio.gather(*(first.wait() for first in firsts))
        status = await suite.inference.GetStatus(pb.GetStatusRequest(), timeout=PATIENCE)
        await killed(suite, "router-1")
        async with open_channel(suite.stack.address) as channel:
            again = await stream(channel, greedy(asked[0], 16))
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert status.running_requests == ROUTERS * CHANNELS
        assert_greedy(asked[:1], [again.tokens], 16)
        for (owner, _), prompt, outcome in zip(shares, asked, outcomes, strict=True):
            if owner == victim:
                assert isinstance(outcome, grpc.aio.AioRpcError)
                assert outcome.code() is grpc.StatusCode.UNAVAILABLE
            else:
                assert isinstance(outcome, Outcome)
                assert_greedy([prompt], [outcome.tokens], COUNT)
        assert sum(owner == victim for owner, _ in shares) == CHANNELS
    await suite.until_all_free(WORKERS)
