"""Tail rules on a real suite whose sampling is off: bad requests have a trace and a verdict, ordinary ones no trace."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

import grpc
import httpx
import pytest
import pytest_asyncio
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from cli.demo_model import CHECKPOINT
from cli.suite.programs import metrics_addresses
from cli.suite.stack import StackOptions
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from quire.inference.v1 import inference_pb2 as pb
from tests.support.load import manager_stopped
from tests.support.spans import called
from tests.support.suite import PATIENCE, Outcome, Suite, greedy, running_suite
from tests.support.waiting import until
from tests.support.why import quire_trace, quire_why, until_placed

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Sequences that the router sends to the worker at once: twice its `--max-num-seqs`.
PLACES, QUEUE = 8, 1
# No request of these tests is as slow by itself on any machine; a stopped manager makes one.
SLO_S = 20.0
OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}
names = (f"kept-{number:04}" for number in itertools.count())
_random = random.Random(23)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    """One simulated worker of 256 blocks; nothing is sampled, and the rings of router and manager are small."""
    worker = ("--kv-blocks", "256", "--max-num-seqs", "4", "--simulate", "base=4ms,prefill=400us")
    router = ("--max-queued-requests", str(QUEUE), "--trace-sample-ratio", "0", "--slo-ttft", str(SLO_S))
    ring = ("--decision-ring", "60")
    options = StackOptions(model=CHECKPOINT, worker_flags=worker, router_flags=(*router, *ring), manager_flags=ring)
    async with running_suite(tmp_path_factory.mktemp("kept"), options) as running:
        yield running


def named(tokens: int, max_tokens: int = 2) -> pb.GenerateRequest:
    """Return a request with a prompt that no other one has."""
    request = greedy(_random.choices(range(100, 400), k=tokens), max_tokens)
    request.request_id = next(names)
    return request


async def trace_of(suite: Suite, request: pb.GenerateRequest) -> Mapping[str, decision_pb2.Span]:
    """Return the spans of a request by name, once it has a trace."""
    wanted = decision_pb2.GetTraceRequest(request_id=request.request_id)
    async with asyncio.timeout(PATIENCE):
        while True:
            with suppress(grpc.aio.AioRpcError):
                found = await suite.decisions.GetTrace(wanted, timeout=PATIENCE)
                return {called(span): span for span in found.spans}
            await asyncio.sleep(0.05)


def decided(span: decision_pb2.Span) -> list[str]:
    return [event.attributes["quire.decision.kind"] for event in span.events]


async def refused(suite: Suite) -> pb.GenerateRequest:
    """Fill the router's queue; return a request that it refused."""
    calls = []
    try:
        for _ in range(PLACES):
            runs = named(20, 3000)
            calls.append(suite.inference.Generate(runs, timeout=PATIENCE))
            await until_placed(suite, runs)
        calls.append(suite.inference.Generate(named(20), timeout=PATIENCE))
        await until(suite.status, lambda status: status.queued_requests == QUEUE, seconds=PATIENCE)
        request = named(20)
        with pytest.raises(grpc.aio.AioRpcError):
            await suite.generate(request)
    finally:
        for call in calls:
            call.cancel()
    await suite.until_all_free(1)
    return request


async def preempted(suite: Suite) -> pb.GenerateRequest:
    """Return a request whose blocks went to another one; it ended by itself."""
    for output in itertools.chain((60, 120, 240), itertools.repeat(480)):
        victim, urgent, first = named(3000, output), named(2000, 400), asyncio.Event()
        victim.priority = -5
        task = asyncio.create_task(suite.generate(victim, first_token=first))
        async with asyncio.timeout(PATIENCE):
            await first.wait()
        await suite.generate(urgent)
        outcome = await task
        assert outcome.finished is not None
        if outcome.finished.usage.preemptions:
            return victim
    raise AssertionError


async def slow(suite: Suite) -> pb.GenerateRequest:
    """Return a request that waited for its blocks longer than the SLO, because the manager stood still."""
    request, done = named(2000), asyncio.Event()
    async with manager_stopped(suite):
        task = asyncio.create_task(suite.generate(request))
        task.add_done_callback(lambda _: done.set())
        with suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), SLO_S + 1.0)
        assert not task.done(), "the worker's leases held a prompt of 125 blocks"
    await task
    return request


async def ordinary(suite: Suite) -> tuple[pb.GenerateRequest, Outcome]:
    request = named(40)
    return request, await suite.generate(request)


async def known(suite: Suite, request: pb.GenerateRequest) -> bool:
    """Return whether a ring has a record of a request."""
    wanted = decision_pb2.ListDecisionsRequest(request_id=request.request_id)
    found = list((await suite.decisions.ListDecisions(wanted, timeout=PATIENCE)).decisions)
    wanted.from_manager = True
    return bool([*found, *(await suite.decisions.ListDecisions(wanted, timeout=PATIENCE)).decisions])


async def exemplars_of(suite: Suite, name: str, request: pb.GenerateRequest) -> list[float]:
    """Return the values of the exemplars of a histogram that lead to a request's trace."""
    wanted = decision_pb2.GetTraceRequest(request_id=request.request_id)
    trace_id = (await suite.decisions.GetTrace(wanted, timeout=PATIENCE)).trace_id
    (address,) = metrics_addresses(suite.stack.options)
    async with httpx.AsyncClient(timeout=PATIENCE) as http:
        answer = await http.get(f"http://{address}/metrics", headers=OPENMETRICS)
    families = text_string_to_metric_families(answer.text)  # type: ignore[no-untyped-call]
    samples = [sample for family in families if family.name == name for sample in family.samples]
    found = [each.exemplar for each in samples if each.exemplar is not None]
    return [each.value for each in found if each.labels == {"trace_id": trace_id}]


async def test_a_refused_request_is_kept(suite: Suite) -> None:
    request = await refused(suite)
    spans = await trace_of(suite, request)
    assert set(spans) == {"inference"}
    (whole,) = spans.values()
    assert (whole.attributes["quire.kept"], whole.status) == ("refused", "error")
    assert decided(whole) == ["rejection"]
    status, out, _ = await quire_trace(suite, request.request_id)
    assert status == 0
    assert "router.queue" in out


async def test_a_preempted_request_is_kept_with_what_the_manager_decided(suite: Suite) -> None:
    request = await preempted(suite)
    spans = await trace_of(suite, request)
    assert {"inference", "queue", "reserve", "prefill", "decode", "preempted"} <= set(spans)
    assert "preempted" in spans["inference"].attributes["quire.kept"]
    assert {"preemption", "grant"} <= set(decided(spans["reserve"]))
    assert spans["reserve"].service == "quire-kvmanager"
    assert spans["inference"].start_unix_nano <= spans["preempted"].start_unix_nano < spans["inference"].end_unix_nano
    status, out, _ = await quire_trace(suite, request.request_id)
    assert status == 0
    assert "preemption" in out


async def test_a_slow_request_is_kept_and_an_ordinary_one_is_not(suite: Suite) -> None:
    usual, outcome = await ordinary(suite)
    assert outcome.admitted is not None
    assert outcome.admitted.trace_id == ""
    request = await slow(suite)
    spans = await trace_of(suite, request)
    assert spans["inference"].attributes["quire.kept"] == "slow"
    (seconds,) = await exemplars_of(suite, "quire:time_to_first_token_seconds", request)
    assert seconds > SLO_S
    waited = spans["without manager"]
    assert waited.end_unix_nano - waited.start_unix_nano > SLO_S * 0.9e9
    # The ordinary one ended before the slow one, whose trace is here.
    with pytest.raises(grpc.aio.AioRpcError) as missing:
        await suite.decisions.GetTrace(decision_pb2.GetTraceRequest(request_id=usual.request_id), timeout=PATIENCE)
    assert missing.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_kept_request_is_explained_when_its_records_have_left_the_rings(suite: Suite) -> None:
    victim = await preempted(suite)
    await trace_of(suite, victim)
    usual, _ = await ordinary(suite)
    while await known(suite, usual):
        await ordinary(suite)
    status, out, err = await quire_why(suite, victim.request_id)
    assert (status, err) == (0, "")
    assert "it was preempted: its " in "\n".join(out.splitlines()[:3])
    assert "(kept: preempted)" in out
    status, _, err = await quire_why(suite, usual.request_id)
    assert status != 0
    assert "newer records took the place of its own" in err


async def test_kept_records_need_the_id_of_a_request(suite: Suite) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await suite.decisions.ListDecisions(decision_pb2.ListDecisionsRequest(kept=True), timeout=PATIENCE)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "expected the id of the request" in (refusal.value.details() or "")


async def test_the_public_port_answers_with_the_routers_own_records_alone(suite: Suite) -> None:
    victim = await preempted(suite)
    await trace_of(suite, victim)
    public = decision_pb2_grpc.DecisionServiceStub(suite.channel)
    wanted = decision_pb2.ListDecisionsRequest(request_id=victim.request_id, kept=True)
    found = (await public.ListDecisions(wanted, timeout=PATIENCE)).decisions
    assert {each.kind for each in found} <= {"admission", "routing", "queued", "outcome"}
    spans = (await public.GetTrace(decision_pb2.GetTraceRequest(request_id=victim.request_id), timeout=PATIENCE)).spans
    named_in = {value for span in spans for event in span.events for value in event.attributes.values()}
    assert not {name for name in named_in if name.startswith("kept-")} - {victim.request_id}
