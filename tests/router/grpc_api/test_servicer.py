"""InferenceService over a real socket: streams, statuses with their details, deadlines, cancels, model and status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from common.clock import SystemClock
from common.group.leader_watch import ManagerState
from common.rpc.server import RpcServer, open_channel
from common.telemetry.server_spans import server_spans
from common.types import FinishReason
from quire.api.status import DETAILS_KEY
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from quire.types.v1 import types_pb2
from router.constraints.checker import ConstraintChecker
from router.core.admission import AdmissionLimits
from router.grpc_api.servicer import InferenceServicer, Routers
from router.observe.siblings import Siblings
from router.observe.status import RouterStatus
from router.ports import ModelCard
from router.requests.resumer import RequestResumer
from router.requests.resumption import Resumption
from router.requests.validate import Validator
from router.serving.call_context import Calls
from router.text.assembler import CheckpointText
from router.text.checkpoint import read_checkpoint
from router.text.tokenizer_files import TokenizerFiles
from tests.support.deadlines import TooSlow, with_enough_time
from tests.support.router.callers import OneCaller
from tests.support.router.fake_worker import IDENTITY, PATIENCE_S, FakeWorker
from tests.support.router.frontend_harness import Harness, frontend_over

CHECKPOINT = Path(__file__).resolve().parents[3] / "cli" / "demo_model" / "checkpoint"


@dataclass
class Service:
    """A served router, and a stub to call it by."""

    harness: Harness
    stub: rpc.InferenceServiceStub
    status: RouterStatus


@asynccontextmanager
async def served(*workers: FakeWorker, limits: AdmissionLimits | None = None) -> AsyncIterator[Service]:
    """Serve the frontend over these workers."""
    clock, checkpoint = SystemClock(), read_checkpoint(CHECKPOINT)
    text = CheckpointText.load(CHECKPOINT, checkpoint.max_model_len)
    async with frontend_over(*workers, limits=limits, patience=0.1) as harness:
        card = ModelCard("demo", harness.pool.identity, 4096, checkpoint.vocab_size, checkpoint.eos_token_ids, True)
        status = RouterStatus(
            card, harness.pool, harness.admission, lambda: False, lambda: harness.frontend.draining, clock
        )
        constraints = ConstraintChecker.load(CHECKPOINT, checkpoint.eos_token_ids)
        validator = Validator(text, checkpoint, constraints=constraints)
        resumer = RequestResumer(Resumption(harness.pool, clock, search_seconds=0.5), harness.frontend)
        routers, files = Routers(harness.frontend.abort, Siblings(), resumer), TokenizerFiles(CHECKPOINT)
        calls = Calls(clock, OneCaller())
        servicer = InferenceServicer(harness.frontend, validator, text, status, calls, routers, files)
        server = RpcServer(["quire.inference.v1.InferenceService"], [server_spans(harness.tracer)])
        rpc.add_InferenceServiceServicer_to_server(servicer, server.server)
        port = await server.start("127.0.0.1", 0)
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield Service(harness, rpc.InferenceServiceStub(channel), status)
        await server.server.stop(None)
        text.close()
        if constraints is not None:
            await constraints.aclose()


def generate(ids: tuple[int, ...] = (1, 2, 3, 4, 5), **fields: object) -> pb.GenerateRequest:
    """Return a request for three tokens after these ids."""
    sampling = fields.pop("sampling", None) or types_pb2.SamplingParams(max_tokens=3)
    prompt = pb.Prompt(token_ids=pb.TokenIds(ids=ids))
    return pb.GenerateRequest(prompt=prompt, sampling=sampling, **fields)  # type: ignore[arg-type]


async def whole(stub: rpc.InferenceServiceStub, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in stub.Generate(request, timeout=PATIENCE_S)]


def detail(error: aio.AioRpcError, kind: type) -> object:
    """Return one of the google.rpc details of a status."""
    trailers = dict(error.trailing_metadata() or ())
    packed = trailers[DETAILS_KEY]
    assert isinstance(packed, bytes)
    for each in status_pb2.Status.FromString(packed).details:
        found = kind()
        if each.Unpack(found):
            return found
    raise AssertionError(f"no {kind.__name__} in the details")


# ------------------------------------------------------------ answers


async def test_the_status_names_the_managers_of_a_group_and_since_when() -> None:
    async with served(FakeWorker()) as service:
        now = time.monotonic()
        first = ManagerState("a:1", True, leads=True, term=7, since=now - 1e6, group="g")
        states = first, ManagerState("b:1", since=now + 1e6)
        service.status.managers = lambda: states
        assert not (await service.stub.GetStatus(pb.GetStatusRequest())).managers  # clients see no addresses
        leader, lost = service.status.status().managers
        assert (leader.address, leader.reachable, leader.leads, leader.term) == ("a:1", True, True, 7)
        assert (leader.group, lost.group) == ("g", "")
        assert 1e6 <= leader.state_seconds <= 1e6 + time.monotonic() - now
        assert (lost.address, lost.reachable, lost.state_seconds) == ("b:1", False, 0.0)


async def test_a_stream_is_one_admitted_then_tokens_then_one_finished() -> None:
    async with served(FakeWorker(automatic=True)) as service:
        responses = await whole(service.stub, generate(request_id="r1"))
        kinds = [response.WhichOneof("event") for response in responses]
        # Tokens that come while the stream is busy leave in one message.
        assert (kinds[0], set(kinds[1:-1]), kinds[-1]) == ("admitted", {"tokens"}, "finished")
        assert (responses[0].admitted.request_id, responses[0].admitted.prompt_tokens) == ("r1", 5)
        assert responses[0].admitted.miss_reason == types_pb2.MissReason.MISS_REASON_NEVER_SEEN
        assert [token for response in responses for token in response.tokens.token_ids] == [100, 101, 102]
        assert responses[-1].finished.reason == types_pb2.FinishReason.FINISH_REASON_LENGTH
        assert responses[-1].finished.WhichOneof("stopped_by") is None


async def test_a_unary_answer_holds_every_sequence_by_its_index() -> None:
    async with served(FakeWorker(automatic=True)) as service:
        request = generate(sampling=types_pb2.SamplingParams(max_tokens=2, n=2, seed=9))
        answer = await service.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request), timeout=PATIENCE_S)
        assert answer.admitted.seed == 9
        assert [(output.index, output.text) for output in answer.outputs] == [(0, "<100><101>."), (1, "<100><101>.")]
        assert [list(output.token_ids) for output in answer.outputs] == [[100, 101], [100, 101]]
        assert all(output.finished.usage.output_tokens == 2 for output in answer.outputs)


async def test_a_stop_string_is_named() -> None:
    async with served(FakeWorker(automatic=True)) as service:
        request = generate(sampling=types_pb2.SamplingParams(max_tokens=5, stop=["<101>"]))
        finished = (await whole(service.stub, request))[-1].finished
        assert (finished.reason, finished.stop_string) == (types_pb2.FinishReason.FINISH_REASON_STOP, "<101>")


async def test_tokenize_and_detokenize_are_inverse() -> None:
    async with served() as service:
        text = "The river runs past the old mill."
        tokens = await service.stub.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text=text)))
        back = await service.stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))
        assert len(tokens.token_ids) > 3
        assert back.text == text


@pytest.mark.parametrize("method", ["Detokenize", "Generate"])
async def test_ids_that_are_no_tokens_are_each_named(method: str) -> None:
    ids, path = (5, 10**6, 7, -3), "token_ids" if method == "Detokenize" else "prompt.token_ids.ids"
    async with served(FakeWorker()) as service:
        if method == "Detokenize":
            call: Awaitable[object] = service.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))
        else:
            call = service.stub.GenerateUnary(pb.GenerateUnaryRequest(request=generate(ids)))
        with pytest.raises(aio.AioRpcError) as refused:
            await call
        bad = detail(refused.value, error_details_pb2.BadRequest)
        assert isinstance(bad, error_details_pb2.BadRequest)
        assert [each.field for each in bad.field_violations] == [f"{path}[1]", f"{path}[3]"]
        assert "is 1000000; expected a token id, 0 to " in bad.field_violations[0].description


# ------------------------------------------------------------ statuses


async def code_of(service: Service, request: pb.GenerateRequest) -> aio.AioRpcError:
    with pytest.raises(aio.AioRpcError) as refused:
        await whole(service.stub, request)
    return refused.value


async def test_every_wrong_field_is_named_at_once() -> None:
    async with served(FakeWorker()) as service:
        wrong = types_pb2.SamplingParams(top_p=2.0, temperature=-1.0, max_tokens=3)
        error = await code_of(service, generate(sampling=wrong))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        bad = detail(error, error_details_pb2.BadRequest)
        assert isinstance(bad, error_details_pb2.BadRequest)
        assert {each.field for each in bad.field_violations} == {"sampling.top_p", "sampling.temperature"}


async def test_a_full_queue_is_resource_exhausted_with_quota_and_retry() -> None:
    worker = FakeWorker()
    async with served(worker, limits=AdmissionLimits(max_tokens_in_flight=10)) as service:
        error = await code_of(service, generate(ids=tuple(range(1, 21))))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        quota = detail(error, error_details_pb2.QuotaFailure)
        assert isinstance(quota, error_details_pb2.QuotaFailure)
        assert quota.violations[0].subject == "router.tokens_in_flight"
        retry = detail(error, error_details_pb2.RetryInfo)
        assert isinstance(retry, error_details_pb2.RetryInfo)
        assert retry.retry_delay.ToTimedelta().total_seconds() == 1.0


async def test_no_worker_is_unavailable_with_retry() -> None:
    async with served() as service:
        error = await code_of(service, generate())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert isinstance(detail(error, error_details_pb2.RetryInfo), error_details_pb2.RetryInfo)


async def test_an_id_in_use_already_exists() -> None:
    worker = FakeWorker()
    async with served(worker) as service:
        running = service.stub.Generate(generate(request_id="r1"), timeout=PATIENCE_S)
        await worker.until(lambda: bool(worker.submits))
        assert (await code_of(service, generate(request_id="r1"))).code() is grpc.StatusCode.ALREADY_EXISTS
        running.cancel()


async def test_nothing_is_left_of_an_unknown_request() -> None:
    async with served(FakeWorker()) as service:
        request = pb.GenerateRequest(resume=pb.Resume(request_id="r1", output_tokens_received=[3]))
        error = await code_of(service, request)
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert "send it again" in (error.details() or "")
        with pytest.raises(aio.AioRpcError) as caught:
            await service.stub.GenerateUnary(pb.GenerateUnaryRequest(request=request), timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_resume_beside_a_new_request_names_the_fields() -> None:
    async with served(FakeWorker()) as service:
        request = pb.GenerateRequest(resume=pb.Resume(), priority=3)
        error = await code_of(service, request)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "resume.request_id" in (error.details() or "")
        assert "priority: stands beside resume" in (error.details() or "")


async def test_a_constraint_reaches_the_worker() -> None:
    worker = FakeWorker()
    async with served(worker) as service:
        running = service.stub.Generate(generate(regex="[0-9]+"), timeout=PATIENCE_S)
        await worker.until(lambda: bool(worker.submits))
        assert (worker.submits[0].WhichOneof("constraint"), worker.submits[0].regex) == ("regex", "[0-9]+")
        running.cancel()


async def test_a_constraint_that_cannot_be_enforced_is_named_as_a_wrong_field() -> None:
    async with served(FakeWorker()) as service:
        error = await code_of(service, generate(json_schema='{"not": {}}'))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        bad = detail(error, error_details_pb2.BadRequest)
        assert isinstance(bad, error_details_pb2.BadRequest)
        assert [(each.field, each.description) for each in bad.field_violations] == [
            ("json_schema", 'uses keywords that cannot be enforced: "not"; leave them out')
        ]


# ------------------------------------------------------------ deadlines and cancels


async def test_the_calls_deadline_reaches_the_worker() -> None:
    async def attempt(seconds: float) -> None:
        worker = FakeWorker()
        async with served(worker) as service:
            call = service.stub.GenerateUnary(pb.GenerateUnaryRequest(request=generate()), timeout=seconds)
            await service.harness.until(lambda: bool(worker.submits) or call.done())
            if not worker.submits:
                raise TooSlow
            assert 0.0 < worker.submits[0].timeout_seconds <= 1.05 * seconds  # on the wire it is rounded up
            with pytest.raises(aio.AioRpcError) as late:
                await call
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await worker.until(lambda: bool(worker.cancels))
            assert worker.cancels[0].reason == types_pb2.FinishReason.FINISH_REASON_DEADLINE

    await with_enough_time(attempt, 0.4)


async def ended(service: Service, timeout: float, unary: bool) -> grpc.StatusCode:
    """Return the status of a call of which the worker draws one token, and wait until its span has ended."""
    if unary:
        call = service.stub.GenerateUnary(pb.GenerateUnaryRequest(request=generate()), timeout=timeout)
        with pytest.raises(aio.AioRpcError) as late:
            await call
    else:
        with pytest.raises(aio.AioRpcError) as late:
            async for _ in service.stub.Generate(generate(), timeout=timeout):
                pass
    spans = service.harness.spans
    name = "quire.inference.v1.InferenceService/" + ("GenerateUnary" if unary else "Generate")
    await service.harness.until(lambda: any(span.name == name for span in spans.ended()))
    return late.value.code()


# gRPC sends 1.01 s to the server for 1.001: there the client's timer is first for certain.
@pytest.mark.parametrize("timeout", [0.2, 1.001])
@pytest.mark.parametrize("unary", [False, True])
async def test_every_span_and_the_worker_agree_that_the_deadline_was_it(timeout: float, unary: bool) -> None:
    async def attempt(seconds: float) -> None:
        worker = FakeWorker()
        async with served(worker) as service:
            task = asyncio.create_task(ended(service, seconds, unary))
            await service.harness.until(lambda: bool(worker.submits) or task.done())
            worker.step({1: [100]}, admitted={1: 0})
            assert await task is grpc.StatusCode.DEADLINE_EXCEEDED
            if not worker.submits:
                raise TooSlow
            harness = service.harness
            rpc_span = next(span.name for span in harness.spans.ended() if "InferenceService" in span.name)
            assert harness.failure(rpc_span) == "DEADLINE_EXCEEDED"
            assert [harness.failure(name) for name in ("request", "stream")] == ["deadline exceeded"] * 2
            finished = [event for event in harness.span("stream").events if event.name == "finished"]
            assert [(event.attributes or {})["quire.finish_reason"] for event in finished] == ["deadline"]
            await worker.until(lambda: bool(worker.cancels))
            assert worker.cancels[0].reason == types_pb2.FinishReason.FINISH_REASON_DEADLINE

    await with_enough_time(attempt, timeout)


async def test_what_a_worker_ended_at_the_deadline_is_no_ok() -> None:
    worker = FakeWorker()
    async with served(worker) as service:
        call = service.stub.Generate(generate(), timeout=PATIENCE_S)
        await worker.until(lambda: bool(worker.submits))
        worker.step({1: [100]}, admitted={1: 0}, finished={1: FinishReason.DEADLINE})
        responses = [await call.read() for _ in range(4)]
        kinds = [each.WhichOneof("event") for each in responses if isinstance(each, pb.GenerateResponse)]
        assert kinds == ["admitted", "tokens", "tokens", "finished"]
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert service.harness.failure("request") == "deadline exceeded"


async def test_a_call_without_a_deadline_has_none_at_the_worker() -> None:
    worker = FakeWorker()
    async with served(worker) as service:
        call = service.stub.Generate(generate())
        await worker.until(lambda: bool(worker.submits))
        assert not worker.submits[0].HasField("timeout_seconds")
        call.cancel()


async def test_a_cancelled_call_is_cancelled_at_the_worker() -> None:
    worker = FakeWorker()
    async with served(worker) as service:
        call = service.stub.Generate(generate(), timeout=PATIENCE_S)
        await worker.until(lambda: bool(worker.submits))
        worker.step({1: [100]}, admitted={1: 0})
        async for response in call:
            if response.HasField("tokens"):
                break
        call.cancel()
        await worker.until(lambda: bool(worker.cancels))
        assert worker.cancels[0].reason == types_pb2.FinishReason.FINISH_REASON_CANCELLED
        await service.harness.until(lambda: service.harness.admission.running == 0)


# ------------------------------------------------------------ model and status


async def test_the_model_is_reported_with_what_its_workers_know() -> None:
    async with served(FakeWorker(max_model_len=256)) as service:
        model = await service.stub.GetModel(pb.GetModelRequest(), timeout=PATIENCE_S)
        assert (model.model, model.max_model_len, model.has_chat_template) == ("demo", 256, True)
        assert model.identity.model_fingerprint == IDENTITY.model_fingerprint
        assert model.identity.kv_geometry.dtype == "float32"


async def test_the_status_shows_load_and_rates_of_each_worker() -> None:
    worker = FakeWorker()
    async with served(worker) as service:
        worker.heartbeat(
            running=3, waiting=2, unheld_blocks=20, decode_step_seconds=0.01, prefill_seconds_per_token=0.001
        )
        await service.harness.until(lambda: service.harness.pool.models()[0].load.running == 3)
        status = await service.stub.GetStatus(pb.GetStatusRequest(), timeout=PATIENCE_S)
        (row,) = status.workers
        assert (row.worker_id, row.address, row.state) == ("w0", "", "connected")
        assert service.status.status().workers[0].address == worker.address  # for operators
        assert (row.running_sequences, row.waiting_sequences, row.num_blocks, row.unheld_blocks) == (3, 2, 64, 20)
        assert row.prefill_tokens_per_second == pytest.approx(1000)
        assert row.manager_attached
        assert (status.queued_requests, status.running_requests, status.draining) == (0, 0, False)


async def test_a_worker_of_another_pool_is_shown_with_both_values() -> None:
    ours, other = FakeWorker("w0"), FakeWorker("w1", identity=replace(IDENTITY, block_size=8))
    async with served(ours) as service:
        await other.start()
        service.harness.pool.add(other.address)
        await service.harness.until(lambda: any("block_size" in m.reason for m in service.harness.pool.members()))
        row = next(row for row in service.status.status().workers if row.address == other.address)
        assert row.state == "mismatched"
        assert "block_size: here 4, there 8 (change it with --block-size)" in row.reason
        await other.kill()


async def test_a_second_worker_of_one_name_is_not_used() -> None:
    first, second = FakeWorker("w0"), FakeWorker("w0")
    async with served(first) as service:
        await second.start()
        service.harness.pool.add(second.address)
        await second.until(lambda: second.streams >= 2)
        assert [model.worker_id for model in service.harness.pool.models()] == ["w0"]
        await second.kill()


async def test_many_streams_at_once_are_all_served() -> None:
    worker = FakeWorker(automatic=True, max_num_seqs=16, num_blocks=4096)
    async with served(worker) as service:
        answers = await asyncio.gather(*(whole(service.stub, generate(request_id=f"r{n}")) for n in range(200)))
        assert all(answer[-1].HasField("finished") for answer in answers)
        assert len({answer[0].admitted.request_id for answer in answers}) == 200
        assert (service.harness.admission.running, service.harness.admission.queued) == (0, 0)
