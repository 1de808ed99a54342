"""What a client sends and gets is in neither logs nor traces: a router process that logs everything, and its spans."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import pytest
from grpc import aio

from common.contracts.types import FinishReason
from common.rpc.server import open_channel
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from quire.types.v1 import types_pb2
from tests.router.test_process import DEMO, planes_in, router
from tests.support.router.fake_worker import PATIENCE_S, FakeWorker, prompt_of, running
from tests.support.spans import called

SECRET = "Zyxquorvil"
TEXT = pb.Prompt(text=f"The river runs past {SECRET}.")
CHAT = pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=SECRET)]))


def request(prompt: pb.Prompt, **sampling: Any) -> pb.GenerateUnaryRequest:
    params = types_pb2.SamplingParams(**{"max_tokens": 40} | sampling)
    return pb.GenerateUnaryRequest(request=pb.GenerateRequest(prompt=prompt, sampling=params))


async def test_text_of_prompts_and_outputs_is_in_no_log_line_and_in_no_span() -> None:
    worker = FakeWorker(identity=DEMO)
    verbose = ("--log-format", "json", "--log-level", "debug")
    async with running(worker), router("--worker", worker.address, *verbose) as process:
        public, admin = await planes_in(process.stdout)
        async with open_channel(public) as channel, open_channel(admin) as operator:
            inference = rpc.InferenceServiceStub(channel)
            call = inference.GenerateUnary(request(TEXT, stop=[f"not {SECRET}"]), timeout=PATIENCE_S)
            await worker.until(lambda: len(worker.submits) == 1)
            worker.step({1: prompt_of(worker.submits[0])}, admitted={1: 0}, finished={1: FinishReason.LENGTH})
            answer = await call
            assert SECRET in answer.outputs[0].text
            for prompt, wrong in ((TEXT, {"top_p": 2.0}), (CHAT, {"max_tokens": 10**6}), (TEXT, {"stop": [""]})):
                with pytest.raises(aio.AioRpcError, match="INVALID_ARGUMENT"):
                    await inference.GenerateUnary(request(prompt, **wrong), timeout=PATIENCE_S)
            traces = decision_pb2_grpc.DecisionServiceStub(operator)
            trace_id = answer.admitted.trace_id
            trace = await traces.GetTrace(decision_pb2.GetTraceRequest(trace_id=trace_id))
            decisions = await traces.ListDecisions(decision_pb2.ListDecisionsRequest())
        process.send_signal(signal.SIGTERM)
        _, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    lines = [json.loads(line) for line in err.decode().splitlines()]
    routed = [line for line in lines if line["msg"] == "routing: w0"]
    assert [(line["level"], line["trace_id"]) for line in routed] == [("debug", trace_id)]
    assert {called(span) for span in trace.spans} >= {"inference", "queue", "stream"}
    assert [each.kind for each in decisions.decisions] == ["admission", "routing", "outcome", *["rejection"] * 3]
    for text in (err.decode(), str(trace), str(decisions)):
        assert SECRET.lower() not in text.lower()
