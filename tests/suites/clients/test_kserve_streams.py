"""Streams of the Open Inference Protocol at a whole suite: random cancels, many requests at once, a trace for each."""

from __future__ import annotations

import asyncio
import random

import grpc

from common.rpc.roles import Role
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from quire.kserve.v2 import kserve_pb2 as pb
from quire.kserve.v2 import kserve_pb2_grpc as rpc
from tests.suites.clients.served import Served
from tests.support.router.kserve_messages import infer, is_final, outputs_of
from tests.support.spans import called
from tests.support.suite import PATIENCE, operator_channel


def wanted(served: Served, name: str, max_tokens: int, sequences: int = 1) -> pb.ModelInferRequest:
    """Return a request whose prompt ends with the number in its id."""
    sampling = {"max_tokens": max_tokens, "ignore_eos": True, "n": sequences}
    outputs = ("num_output_tokens",)
    return infer(
        served.model, name, outputs, input_ids=[5, 6, 7 + int(name)], stream=True, sampling_parameters=sampling
    )


async def cancelled_somewhere(served: Served, stub: rpc.GRPCInferenceServiceStub, rng: random.Random) -> None:
    """Send up to five requests on one stream, and cancel it after so many responses, or after the last one."""
    call = stub.ModelStreamInfer(timeout=PATIENCE)
    running = rng.randrange(1, 6)
    for number in range(running):
        await call.write(wanted(served, str(number), 200, rng.choice([1, 1, 3])))
    left = rng.randrange(60)
    while left and running:  # on a busy machine one response has many tokens
        response = await call.read()
        assert isinstance(response, pb.ModelStreamInferResponse)
        assert not response.error_message
        left, running = left - 1, running - is_final(response.infer_response)
    call.cancel()
    assert await call.code() is grpc.StatusCode.CANCELLED


async def test_streams_cancelled_anywhere_disturb_nobody_and_leave_nothing(served: Served) -> None:
    rng, before = random.Random(3), len(served.suite.lines)
    async with grpc.aio.insecure_channel(served.address) as channel:
        stub = rpc.GRPCInferenceServiceStub(channel)
        await asyncio.gather(*(cancelled_somewhere(served, stub, rng) for _ in range(100)))
    await asyncio.to_thread(served.until_all_free)
    said = served.suite.lines[before:]
    # A worker that is lost and found again would serve all of them as well, at some cost.
    assert [line for line in said if "unexpected error" in line or "is not connected" in line] == []


async def test_hundreds_of_requests_on_one_stream_are_all_served_each_with_its_own_trace(served: Served) -> None:
    names = [str(number) for number in range(300)]
    counts, traces = dict.fromkeys(names, 0), dict[str, str]()
    async with grpc.aio.insecure_channel(served.address) as channel:
        requests = (wanted(served, name, 4) for name in names)
        async for response in rpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(requests, timeout=PATIENCE):
            answer = response.infer_response
            assert not response.error_message
            counts[answer.id] += outputs_of(answer)["num_output_tokens"][0]
            if is_final(answer):
                traces[answer.id] = answer.parameters["trace_id"].string_param
        assert counts == dict.fromkeys(names, 4)
        assert len(set(traces.values())) == 300
    stack = served.suite.stack
    async with operator_channel(stack.options, stack.admin_address, Role.ROUTER) as channel:
        decisions = decision_pb2_grpc.DecisionServiceStub(channel)
        trace = await decisions.GetTrace(decision_pb2.GetTraceRequest(trace_id=traces["299"]), timeout=PATIENCE)
    assert "inference" in {called(span) for span in trace.spans}
