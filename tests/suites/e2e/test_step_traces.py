"""A worker that traces its steps: a request leads to the steps that it was in, and a step to its requests."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from pathlib import Path

import grpc

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from quire.decision.v1 import decision_pb2
from tests.support.suite import PATIENCE, Suite, greedy, running_suite

OUTPUT = 6


async def trace_with(suite: Suite, trace_id: str, name: str) -> decision_pb2.Span:
    """Return a span of a trace, once it has come."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with suppress(grpc.aio.AioRpcError):
                found = await suite.decisions.GetTrace(
                    decision_pb2.GetTraceRequest(trace_id=trace_id), timeout=PATIENCE
                )
                for span in found.spans:
                    if span.name == name:
                        return span
            await asyncio.sleep(0.05)


async def test_a_request_leads_to_its_steps_and_a_step_to_its_requests(tmp_path: Path) -> None:
    flags = ("--kv-blocks", "256", "--simulate", "base=4ms", "--trace-step-ratio", "1")
    options = StackOptions(model=CHECKPOINT, worker_flags=flags, router_flags=("--trace-sample-ratio", "0"))
    async with running_suite(tmp_path, options) as suite:
        trace_id, request = secrets.token_hex(16), greedy(range(100, 132), OUTPUT)
        request.traceparent = f"00-{trace_id}-{secrets.token_hex(8)}-01"
        async for _ in suite.inference.Generate(request, timeout=PATIENCE):
            pass
        sequence = await trace_with(suite, trace_id, "sequence")
        steps = [link.partition(":")[::2] for link in sequence.links]
        assert len(steps) == OUTPUT  # one for the prompt, which gives the first token
        found = [await trace_with(suite, step_trace, "step") for step_trace, _ in steps]
        assert [step.span_id for step in found] == [span_id for _, span_id in steps]
        assert {step.service for step in found} == {"quire-gpuworker"}
        assert all(list(step.links) == [f"{trace_id}:{sequence.span_id}"] for step in found)
        counts = [(step.attributes["quire.prefill_tokens"], step.attributes["quire.decodes"]) for step in found]
        assert counts == [("32", "0"), *[("0", "1")] * (OUTPUT - 1)]
        numbers = [int(step.attributes["quire.step"]) for step in found]
        assert numbers == sorted(set(numbers))
