"""The text of clients and the model's answers appear in no log line, even at debug level, and in no trace."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator

import grpc
import openai
import pytest
import pytest_asyncio
from google.protobuf.message import Message

from cli.demo_model import CHECKPOINT
from cli.demo_model.prompts import questions, system_text
from cli.suite.stack import StackOptions
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from tests.support.spans import called
from tests.support.suite import PATIENCE, Outcome, Suite, chat, running_suite

PROCESSES = {"kvmanager", "worker-0", "router"}
SPANS = {"inference", "queue", "stream", "sequence", "reserve", "decode", "kvmanager.reserve"}
SECRET = "Zebedeeson"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    """Every service at debug level."""
    debug = ("--log-level", "debug")
    options = StackOptions(
        model=CHECKPOINT,
        worker_flags=("--kv-blocks", "256", "--dtype", "float32", *debug),
        router_flags=debug,
        manager_flags=debug,
        log_format="json",
    )
    async with running_suite(tmp_path_factory.mktemp("suite"), options) as running:
        yield running


def traceparent(sampled: bool) -> tuple[str, str]:
    """Return a trace id and what a client sends to have its request be part of it."""
    trace_id = secrets.token_hex(16)
    return trace_id, f"00-{trace_id}-{secrets.token_hex(8)}-{sampled:02x}"


async def spans_of(suite: Suite, trace_id: str, wanted: set[str]) -> list[decision_pb2.Span]:
    """Return the spans of a trace once these have arrived."""
    stub = suite.decisions
    async with asyncio.timeout(PATIENCE):
        while True:
            spans = await spans_now(stub, trace_id)
            if wanted <= {called(span) for span in spans}:
                return spans
            await asyncio.sleep(0.05)


async def spans_now(stub: decision_pb2_grpc.DecisionServiceStub, trace_id: str) -> list[decision_pb2.Span]:
    """Return the spans of a trace that have arrived so far."""
    try:
        return list((await stub.GetTrace(decision_pb2.GetTraceRequest(trace_id=trace_id), timeout=PATIENCE)).spans)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise
        return []


def assert_said_nowhere(suite: Suite, messages: list[Message], *texts: str) -> None:
    """Search all lines of all processes, and protos of any kind, for each text."""
    assert {line.partition(":")[0] for line in suite.lines} >= PROCESSES, "nobody said anything"
    assert any('"level": "debug"' in line for line in suite.lines)
    everything = [*suite.lines, *map(str, messages)]
    for text in texts:
        assert text
        assert not [line for line in everything if text in line]


async def ask(suite: Suite, parent: str) -> Outcome:
    """Send a request that contains a secret."""
    request = chat(f"Where does {SECRET} live?", system_text(), max_tokens=24)
    request.traceparent = parent
    return await suite.generate(request)


async def test_neither_prompt_nor_output_is_in_lines_spans_or_decisions(suite: Suite) -> None:
    trace_id, parent = traceparent(sampled=True)
    outcome = await ask(suite, parent)
    assert len(outcome.text.split()) > 3
    spans = await spans_of(suite, trace_id, SPANS)
    stub = suite.decisions
    decisions = await stub.ListDecisions(decision_pb2.ListDecisionsRequest(), timeout=PATIENCE)
    assert decisions.decisions
    words = [word for word in outcome.text.split() if len(word) > 4]
    fact = questions(1)[0].answer
    assert_said_nowhere(suite, [*spans, decisions], SECRET, "Where does", outcome.text, *words, fact)
    ids = str(outcome.tokens[:4]).strip("[]")
    assert_said_nowhere(suite, [*spans, decisions], ids, ids.replace(" ", ""))


async def test_a_refused_request_is_not_quoted_either(suite: Suite) -> None:
    trace_id, parent = traceparent(sampled=True)
    request = chat(f"Where does {SECRET} live?")
    request.traceparent = parent
    request.sampling.temperature = -1.0
    request.sampling.stop.append(SECRET)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await suite.generate(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    too_long = chat(SECRET * 2000)
    too_long.traceparent = parent
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await suite.generate(too_long)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    after, parent = traceparent(sampled=True)
    await ask(suite, parent)
    spans = await spans_of(suite, after, SPANS)
    stub = suite.decisions
    decisions = await stub.ListDecisions(decision_pb2.ListDecisionsRequest(), timeout=PATIENCE)
    assert_said_nowhere(suite, [*await spans_now(stub, trace_id), *spans, decisions], SECRET)


async def test_requests_over_http_are_not_quoted_either(suite: Suite) -> None:
    """A random answer may have a word such as "found", which lines have of themselves: greedy ones have not."""
    async with openai.AsyncOpenAI(base_url=suite.stack.http_url + "/v1", api_key="none", max_retries=0) as client:
        (model,) = [each.id async for each in client.models.list()]
        answer = await client.completions.create(model=model, prompt=f"{SECRET} lives in", max_tokens=16, temperature=0)
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model=model, prompt=SECRET, max_tokens=16, temperature=-1)
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model=model, prompt=[[7, -7]], max_tokens=16, suffix=SECRET)
    text = answer.choices[0].text
    assert_said_nowhere(suite, [], SECRET, *(word for word in text.split() if len(word) > 4))


async def test_a_request_that_is_not_sampled_leaves_no_spans(suite: Suite) -> None:
    """A later one that is sampled has all its spans: what the first would have left is there by then."""
    unsampled, parent = traceparent(sampled=False)
    outcome = await ask(suite, parent)
    assert outcome.admitted is not None
    sampled, parent = traceparent(sampled=True)
    await ask(suite, parent)
    await spans_of(suite, sampled, SPANS)
    stub = suite.decisions
    for query in (
        decision_pb2.GetTraceRequest(trace_id=unsampled),
        decision_pb2.GetTraceRequest(request_id=outcome.admitted.request_id),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetTrace(query, timeout=PATIENCE)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
