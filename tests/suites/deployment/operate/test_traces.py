"""Beside a collector of the operator `quire trace` still has the spans of every service, each once."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

import grpc
import pytest

from quire.decision.v1 import decision_pb2
from tests.suites.deployment.operate.tee import Tee
from tests.support.load import prompts
from tests.support.spans import called
from tests.support.suite import Suite, greedy

pytestmark = pytest.mark.asyncio(loop_scope="session")
ALL = {"quire-router", "quire-kvmanager", "quire-gpuworker"}


async def test_every_service_sends_its_spans_to_the_collector(suite: Suite, tee: Tee) -> None:
    await suite.generate(greedy(prompts(1)[0], 4))
    async with asyncio.timeout(60.0):
        while set(tee.batches) < ALL:
            tee.came.clear()
            await tee.came.wait()
    assert set(tee.batches) == ALL


async def test_the_router_answers_for_the_spans_of_every_service(suite: Suite) -> None:
    outcome = await suite.generate(greedy(prompts(1)[0], 4))
    assert outcome.admitted is not None
    stub = suite.decisions
    request = decision_pb2.GetTraceRequest(trace_id=outcome.admitted.trace_id)
    expected = {"inference", "queue", "stream", "sequence", "reserve", "kvmanager.reserve", "decode"}
    seen: Counter[str] = Counter()
    try:
        async with asyncio.timeout(60.0):
            while not expected <= set(seen):
                with suppress(grpc.aio.AioRpcError):  # the trace has not arrived yet
                    seen = Counter(called(span) for span in (await stub.GetTrace(request, timeout=5.0)).spans)
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"missing: {expected - set(seen)}") from None
    assert seen["inference"] == seen["sequence"] == 1


async def test_what_other_systems_keep_in_a_trace_reaches_every_service(suite: Suite, tee: Tee) -> None:
    parent = ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    call = suite.inference.Generate(greedy(prompts(1)[0], 4), metadata=(parent, ("tracestate", "vendor=a:1")))
    async for _ in call:
        pass
    async with asyncio.timeout(60.0):
        while not tee.states["vendor=a:1"] >= {"stream", "sequence", "reserve", "kvmanager.reserve"}:
            tee.came.clear()
            await tee.came.wait()
