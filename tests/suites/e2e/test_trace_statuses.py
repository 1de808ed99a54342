"""How requests end in their traces, and the trace's id in the log lines of a real suite."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Collection

import grpc
import pytest
import pytest_asyncio

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from quire.decision.v1 import decision_pb2
from quire.inference.v1 import inference_pb2 as pb
from tests.support.deadlines import TooSlow, with_enough_time
from tests.support.spans import called
from tests.support.suite import PATIENCE, Suite, greedy, running_suite

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    """One simulated worker; router and manager log everything, as JSON."""
    debug = ("--log-level", "debug")
    # 3,800 tokens take longer than any deadline below on any machine.
    flags = ("--kv-blocks", "256", "--simulate", "base=20ms")
    options = StackOptions(
        model=CHECKPOINT, worker_flags=flags, router_flags=debug, manager_flags=debug, log_format="json"
    )
    async with running_suite(tmp_path_factory.mktemp("suite"), options) as running:
        yield running


def traced(max_tokens: int) -> tuple[str, pb.GenerateRequest]:
    """Return a trace id, and a request in that trace which takes some milliseconds a token."""
    trace_id, request = secrets.token_hex(16), greedy(range(100, 132), max_tokens)
    request.traceparent = f"00-{trace_id}-{secrets.token_hex(8)}-01"
    return trace_id, request


async def statuses(suite: Suite, trace_id: str, wanted: Collection[str]) -> dict[str, tuple[str, str]]:
    """Return status and message of these spans of a trace once all have come."""
    stub = suite.decisions
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                trace = await stub.GetTrace(decision_pb2.GetTraceRequest(trace_id=trace_id), timeout=PATIENCE)
                found = {
                    called(span): (span.status, span.status_message) for span in trace.spans if called(span) in wanted
                }
                if set(wanted) <= set(found):
                    return found
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
            await asyncio.sleep(0.05)


# gRPC sends 1.005 s as 1.01: then the client's end reaches the router before its own timer fires.
@pytest.mark.parametrize("first", [0.3, 0.31, 0.32, 1.005])
async def test_an_expired_request_is_expired_in_every_span(suite: Suite, first: float) -> None:
    async def attempt(seconds: float) -> None:
        trace_id, request = traced(max_tokens=3800)
        begun = asyncio.Event()
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await suite.generate(request, timeout=seconds, first_token=begun)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if not begun.is_set():
            raise TooSlow
        found = await statuses(suite, trace_id, {"inference", "stream", "sequence"})
        if found["inference"] != ("error", "deadline exceeded"):
            raise TooSlow  # the router began to count late, so that the client's end came first
        assert found == {
            "inference": ("error", "deadline exceeded"),
            "stream": ("error", "deadline exceeded"),
            "sequence": ("error", "deadline exceeded"),
        }

    await with_enough_time(attempt, first)


async def test_a_cancelled_request_is_cancelled_in_every_span(suite: Suite) -> None:
    trace_id, request = traced(max_tokens=900)
    call = suite.inference.Generate(request, timeout=PATIENCE)
    async for event in call:
        if event.HasField("tokens"):
            break
    call.cancel()
    assert await statuses(suite, trace_id, {"inference", "stream", "sequence"}) == {
        "inference": ("error", "the client went away"),
        "stream": ("error", "the client went away"),
        "sequence": ("unset", ""),
    }


async def test_the_decisions_on_a_request_are_logged_with_its_trace_by_router_and_manager(suite: Suite) -> None:
    trace_id, request = traced(max_tokens=2)
    await suite.generate(request)
    wanted = {("router", "admission"), ("router", "routing"), ("kvmanager", "grant")}
    found: set[tuple[str, str]] = set()
    async with asyncio.timeout(PATIENCE):
        while not wanted <= found:
            await asyncio.sleep(0.05)
            lines = [json.loads(line.partition(": ")[2]) for line in suite.lines if trace_id in line]
            found = {(line["service"], line["msg"].partition(":")[0]) for line in lines if line["trace_id"] == trace_id}
