"""InferenceService over a real socket: streams, statuses with their details, model and status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import replace

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from common.group.leader_watch import ManagerState
from quire.api.status import DETAILS_KEY
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2
from router.contracts.session_ids import session_name
from router.placement.admission import AdmissionLimits
from tests.support.router.fake_worker import IDENTITY, PATIENCE_S, FakeWorker
from tests.support.router.served_router import Service, generate, served, whole


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
        service.known.states = states
        assert not (await service.stub.GetStatus(pb.GetStatusRequest())).managers  # clients see no addresses
        leader, lost = service.status.status().managers
        assert (leader.address, leader.reachable, leader.leads, leader.term) == ("a:1", True, True, 7)
        assert (leader.group, lost.group) == ("g", "")
        assert 1e6 <= leader.state_seconds <= 1e6 + time.monotonic() - now
        assert (lost.address, lost.reachable, lost.state_seconds) == ("b:1", False, 0.0)


async def test_the_session_of_a_request_is_in_its_records_by_field_and_by_metadata() -> None:
    """The tenant's name is part of it where a key shows one."""
    async with served(FakeWorker(automatic=True)) as service:
        await whole(service.stub, generate(request_id="r1", session_id="talk"))
        call = service.stub.Generate(generate(request_id="r2"), metadata=(("x-session-id", "talk"),))
        assert [each async for each in call]
        found = {each.request_id: each.session for each in service.harness.decisions.find() if each.session}
        assert found == dict.fromkeys(("r1", "r2"), session_name("", "talk"))


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
        assert "priority: cannot be combined with resume" in (error.details() or "")


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
        service.harness.pool.add_worker(other.address)
        await service.harness.until(lambda: any("block_size" in m.reason for m in service.harness.pool.members()))
        row = next(row for row in service.status.status().workers if row.address == other.address)
        assert row.state == "mismatched"
        assert "block_size: here 4, there 8 (change it with --block-size)" in row.reason
        await other.kill()


async def test_a_second_worker_of_one_name_is_not_used() -> None:
    first, second = FakeWorker("w0"), FakeWorker("w0")
    async with served(first) as service:
        await second.start()
        service.harness.pool.add_worker(second.address)
        await second.until(lambda: second.streams >= 2)
        assert [model.worker_id for model in service.harness.pool.models()] == ["w0"]
        await second.kill()


async def test_many_streams_at_once_are_all_served() -> None:
    worker = FakeWorker(automatic=True, max_num_seqs=16, num_blocks=4096)
    async with served(worker) as service:
        answers = await asyncio.gather(*(whole(service.stub, generate(request_id=f"r{n}")) for n in range(80)))
        assert all(answer[-1].HasField("finished") for answer in answers)
        assert len({answer[0].admitted.request_id for answer in answers}) == 80
        assert (service.harness.admission.running, service.harness.admission.queued) == (0, 0)
