"""Three routers on one port, two simulated workers: all serve, each reports the traces of all, one is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress

import grpc
import httpx
import pytest
import pytest_asyncio

from cli.demo_model import CHECKPOINT
from cli.suite.programs import metrics_addresses
from cli.suite.stack import StackOptions
from common.rpc.server import open_channel
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc
from tests.support.load import prompts
from tests.support.routers import connections, killed, own_id, router_of
from tests.support.simulated import expected, seeded
from tests.support.suite import PATIENCE, Outcome, Suite, running_suite, stream
from tests.support.waiting import until

ROUTERS, WORKERS, CHANNELS = 3, 2, 2
# Tokens that a test reads of a stream after a kill, and those of the stream: 15 s of them.
COUNT, LONG = 96, 3800

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    """Three routers that share their ports."""
    flags = ("--kv-blocks", "1024", "--simulate", "base=4ms,prefill=10us", "--orphan-grace", "0.5")
    options = StackOptions(model=CHECKPOINT, workers=WORKERS, worker_flags=flags, own_ports=(0,) * ROUTERS)
    async with running_suite(tmp_path_factory.mktemp("routers"), options) as running:
        yield running


async def assert_whole_trace(decisions: decision_pb2_grpc.DecisionServiceStub, request_id: str) -> None:
    """Wait until the spans of router, worker and manager are all there; workers send theirs every half second."""
    wanted, found = {"quire-router", "quire-gpuworker", "quire-kvmanager"}, set[str]()
    async with asyncio.timeout(PATIENCE):
        while not wanted <= found:
            request = decision_pb2.GetTraceRequest(request_id=request_id)
            with suppress(grpc.aio.AioRpcError):  # a router that does not answer is left out
                found = {span.service for span in (await decisions.GetTrace(request, timeout=PATIENCE)).spans}
            await asyncio.sleep(0.05)


async def records_of(
    decisions: decision_pb2_grpc.DecisionServiceStub, request_id: str
) -> Sequence[decision_pb2.DecisionRecord]:
    """Return the records of a request, once there are any: a router that does not answer is left out."""
    named = decision_pb2.ListDecisionsRequest(request_id=request_id)

    async def found() -> Sequence[decision_pb2.DecisionRecord]:
        return (await decisions.ListDecisions(named, timeout=PATIENCE)).decisions

    return await until(found, every=0.05, seconds=PATIENCE)


async def test_every_router_serves_and_any_of_them_knows_what_all_decided(suite: Suite) -> None:
    async with AsyncExitStack() as stack:
        shares = await connections(suite, stack, ROUTERS, CHANNELS)
        asked = prompts(len(shares), seed=61)
        streams = [stream(channel, seeded(each, 16)) for (_, channel), each in zip(shares, asked, strict=True)]
        outcomes = await asyncio.gather(*streams)
        assert [router_of(outcome) for outcome in outcomes] == [owner for owner, _ in shares]
        assert [outcome.tokens for outcome in outcomes] == [expected(each, 16) for each in asked]
        # The public port of one router answers about a request of any of them that is named.
        decisions = decision_pb2_grpc.DecisionServiceStub(shares[0][1])
        for outcome in outcomes:
            assert outcome.admitted is not None
            records = await records_of(decisions, outcome.admitted.request_id)
            assert [record.kind for record in records] == ["admission", "routing", "outcome"]
            await assert_whole_trace(decisions, outcome.admitted.request_id)


async def notices_of(address: str) -> dict[str, float]:
    """Return how many routers one router hears, and what became of their notices."""
    async with httpx.AsyncClient() as client:
        page = (await client.get(f"http://{address}/metrics", timeout=PATIENCE)).text
    found = (
        line.split() for line in page.splitlines() if line.startswith(("quire:other_routers", "quire:load_notices_t"))
    )
    return {name: float(value) for name, value in found}


async def test_every_router_hears_of_the_load_of_the_others(suite: Suite) -> None:
    addresses = metrics_addresses(suite.stack.options)
    assert len(addresses) == ROUTERS

    async def heard() -> list[dict[str, float]]:
        return [await notices_of(each) for each in addresses]

    def all_hear(found: list[dict[str, float]]) -> bool:
        taken = [each['quire:load_notices_total{outcome="taken"}'] for each in found]
        return [each["quire:other_routers"] for each in found] == [ROUTERS - 1] * ROUTERS and min(taken) > 0

    found = await until(heard, all_hear, every=0.05, seconds=PATIENCE)
    wrong = [each[f'quire:load_notices_total{{outcome="{name}"}}'] for each in found for name in ("refused", "failed")]
    assert wrong == [0.0] * len(wrong)


async def read(channel: grpc.aio.Channel, request: pb.GenerateRequest, outcome: Outcome, go: asyncio.Event) -> None:
    """Read a stream until it has brought COUNT tokens more than it had when `go` was set; cancel it then."""
    call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=PATIENCE)
    wanted = LONG
    async for event in call:
        outcome.tokens.extend(event.tokens.token_ids)
        if go.is_set() and wanted == LONG:
            wanted = min(LONG, len(outcome.tokens) + COUNT)
        if len(outcome.tokens) >= wanted:
            call.cancel()
            return
    assert len(outcome.tokens) == LONG


async def test_streams_of_the_others_outlive_a_killed_router(suite: Suite) -> None:
    """Bit for bit; new connections are served meanwhile. The dead one's sequences have their grace and free all."""
    async with AsyncExitStack() as stack:
        shares = await connections(suite, stack, ROUTERS, CHANNELS)
        victim = await own_id(suite, "router-1")
        asked = prompts(len(shares), seed=71)
        outcomes, goals = [Outcome() for _ in asked], [asyncio.Event() for _ in asked]
        tasks = [
            asyncio.create_task(read(channel, seeded(prompt, LONG), outcome, goal))
            for (_, channel), prompt, outcome, goal in zip(shares, asked, outcomes, goals, strict=True)
        ]
        await until(lambda: all(outcome.tokens for outcome in outcomes), seconds=PATIENCE)
        # A router that does not answer is left out.
        everything = ROUTERS * CHANNELS
        await until(suite.status, lambda status: status.running_requests == everything, every=0.05, seconds=PATIENCE)
        await killed(suite, "router-1")
        async with open_channel(suite.stack.address) as channel:
            again = await stream(channel, seeded(asked[0], 16))
        for goal in goals:
            goal.set()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert again.tokens == expected(asked[0], 16)
        for (owner, _), prompt, outcome, end in zip(shares, asked, outcomes, ends, strict=True):
            if owner == victim:
                assert isinstance(end, grpc.aio.AioRpcError)
                assert end.code() is grpc.StatusCode.UNAVAILABLE
            else:
                assert end is None
                assert outcome.tokens == expected(prompt, LONG)[: len(outcome.tokens)]
        assert sum(owner == victim for owner, _ in shares) == CHANNELS
    await suite.until_all_free(WORKERS)
