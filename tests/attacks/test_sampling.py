"""Clients that ask for traces: the operator's ratio holds all the same."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from common.contracts.limits import CLIENT_TRACES_BURST, CLIENT_TRACES_PER_SECOND
from quire.inference.v1 import inference_pb2_grpc
from tests.support.suite import PATIENCE, Suite, greedy, running_suite

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED = 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    """A suite whose operator has turned traces off."""
    flags = ("--simulate", "base=1ms", "--kv-blocks", "256")
    options = StackOptions(model=CHECKPOINT, worker_flags=flags, router_flags=("--trace-sample-ratio", "0"))
    async with running_suite(tmp_path_factory.mktemp("sampling"), options) as running:
        yield running


async def traced(suite: Suite, in_metadata: bool) -> bool:
    """Ask for a trace, by metadata or in the message; return whether the request got one."""
    # The id has the low half that a ratio sampler takes at every ratio above 0.
    traceparent = f"00-{secrets.token_hex(8)}{0:016x}-{secrets.token_hex(8)}-01"
    request = greedy([1, 2, 3], 1)
    metadata = (("traceparent", traceparent),) if in_metadata else ()
    request.traceparent = "" if in_metadata else traceparent
    stub = inference_pb2_grpc.InferenceServiceStub(suite.channel)
    events = [event async for event in stub.Generate(request, timeout=PATIENCE, metadata=metadata)]
    assert events[-1].HasField("finished")
    return bool(events[0].admitted.trace_id)


async def test_the_flag_sampled_asks_and_does_not_decide(suite: Suite) -> None:
    began = time.monotonic()
    found: list[bool] = []
    for first in range(0, ASKED, 20):
        found += await asyncio.gather(*(traced(suite, number % 2 == 0) for number in range(first, first + 20)))
    most = CLIENT_TRACES_BURST + CLIENT_TRACES_PER_SECOND * (time.monotonic() - began) + 1
    assert 1 <= sum(found) <= most
