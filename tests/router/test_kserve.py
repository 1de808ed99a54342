"""The Open Inference Protocol over a real socket, with a scripted frontend behind it: answers, errors, streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.clock import ManualClock
from common.errors import DeadlineExceeded, Overloaded, QuotaViolation, Unavailable
from common.rpc.server import RpcServer, open_channel
from common.types import FinishReason, KvGeometry, PoolIdentity, TokenLogprobs
from quire.kserve.v2 import kserve_pb2 as pb
from quire.kserve.v2 import kserve_pb2_grpc as rpc
from router.checkpoint import read_checkpoint
from router.core.events import ValidatedRequest
from router.kserve_servicer import SERVICE, KserveServicer
from router.ports import ModelCard
from router.text import CheckpointText
from router.validate import Validator
from tests.router.frontend_double import TRACE_ID, ScriptedFrontend, Step, admitted, finished, tokens
from tests.router.kserve_messages import infer, is_final, outputs_of

DEMO = Path(__file__).parents[2] / "gpuworker" / "demo_model" / "checkpoint"
FACTS = read_checkpoint(DEMO)
PATIENCE_S = 10.0
ARRIVED = 3.0

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Api:
    """The service, what is behind it, and stubs."""

    channel: aio.Channel
    stub: rpc.GRPCInferenceServiceStub
    frontend: ScriptedFrontend
    is_ready: bool = True

    async def infer(self, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        return await self.stub.ModelInfer(request, timeout=PATIENCE_S)

    async def refused(self, request: pb.ModelInferRequest) -> tuple[grpc.StatusCode, str]:
        """Return the status of a request that fails."""
        with pytest.raises(aio.AioRpcError) as error:
            await self.infer(request)
        return error.value.code(), error.value.details() or ""

    async def stream(
        self, *requests: pb.ModelInferRequest, metadata: Sequence[tuple[str, str]] = ()
    ) -> list[pb.ModelStreamInferResponse]:
        """Send requests on one stream, half-close it, and return all responses."""
        call = self.stub.ModelStreamInfer(iter(requests), timeout=PATIENCE_S, metadata=metadata)
        return [response async for response in call]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Api]:
    text, frontend = CheckpointText.load(DEMO, FACTS.max_model_len), ScriptedFrontend()
    identity = PoolIdentity("m", FACTS.tokenizer_fingerprint, 16, KvGeometry(4, 2, 64, 64, "float32"))
    card = ModelCard("demo", identity, FACTS.max_model_len, FACTS.vocab_size, FACTS.eos_token_ids, True)
    server = RpcServer([SERVICE])
    port = await server.start("127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        api = Api(channel, rpc.GRPCInferenceServiceStub(channel), frontend)
        validator = Validator(text, FACTS, draw_seed=lambda: 11)
        service = KserveServicer(frontend, validator, card, lambda: api.is_ready, ManualClock(ARRIVED))
        rpc.add_GRPCInferenceServiceServicer_to_server(service, server.server)
        await server.ready()
        yield api
    await server.server.stop(None)
    text.close()


@pytest.fixture
def api(served: Api) -> Api:
    """The service with its script as at first."""
    served.frontend.reset()
    served.is_ready = True
    return served


# ------------------------------------------------------------ what is served


async def test_live_and_ready(api: Api) -> None:
    assert (await api.stub.ServerLive(pb.ServerLiveRequest())).live
    assert (await api.stub.ServerReady(pb.ServerReadyRequest())).ready
    assert (await api.stub.ModelReady(pb.ModelReadyRequest(name="demo"))).ready
    assert (await api.stub.ModelReady(pb.ModelReadyRequest(name="demo", version="1"))).ready


async def test_nothing_is_ready_while_the_router_is_not(api: Api) -> None:
    api.is_ready = False
    assert (await api.stub.ServerLive(pb.ServerLiveRequest())).live
    assert not (await api.stub.ServerReady(pb.ServerReadyRequest())).ready
    assert not (await api.stub.ModelReady(pb.ModelReadyRequest(name="demo"))).ready


@pytest.mark.parametrize(("name", "version"), [("other", ""), ("demo", "2"), ("", "")])
async def test_another_model_is_not_ready(api: Api, name: str, version: str) -> None:
    assert not (await api.stub.ModelReady(pb.ModelReadyRequest(name=name, version=version))).ready


async def test_the_metadata_have_every_tensor(api: Api) -> None:
    model = await api.stub.ModelMetadata(pb.ModelMetadataRequest(name="demo"))
    assert (model.name, list(model.versions), model.platform) == ("demo", ["1"], "quire")
    assert [(each.name, each.datatype, list(each.shape)) for each in model.inputs] == [
        ("text_input", "BYTES", [1]),
        ("input_ids", "INT32", [-1]),
        ("stream", "BOOL", [1]),
        ("sampling_parameters", "BYTES", [1]),
        ("exclude_input_in_output", "BOOL", [1]),
        ("return_finish_reason", "BOOL", [1]),
        ("return_cumulative_logprob", "BOOL", [1]),
        ("return_logprobs", "BOOL", [1]),
        ("return_num_input_tokens", "BOOL", [1]),
        ("return_num_output_tokens", "BOOL", [1]),
        ("return_output_ids", "BOOL", [1]),
    ]
    assert [(each.name, each.datatype, list(each.shape)) for each in model.outputs] == [
        ("text_output", "BYTES", [-1]),
        ("finish_reason", "BYTES", [-1]),
        ("cumulative_logprob", "FP32", [-1]),
        ("logprobs", "BYTES", [-1]),
        ("num_input_tokens", "UINT32", [1]),
        ("num_output_tokens", "UINT32", [-1]),
        ("output_ids", "INT32", [-1]),
    ]


async def test_the_configuration_says_that_a_request_may_have_several_responses(api: Api) -> None:
    config = (await api.stub.ModelConfig(pb.ModelConfigRequest(name="demo"))).config
    assert config.model_transaction_policy.decoupled
    assert config.max_batch_size == 0
    assert [(each.name, each.data_type) for each in config.input][:2] == [
        ("text_input", pb.TYPE_STRING),
        ("input_ids", pb.TYPE_INT32),
    ]
    assert [list(each.dims) for each in config.output] == [[-1], [-1], [-1], [-1], [1], [-1], [-1]]


async def test_the_server_says_what_it_is(api: Api) -> None:
    server = await api.stub.ServerMetadata(pb.ServerMetadataRequest())
    assert (server.name, list(server.extensions)) == ("quire", ["model_configuration", "parameters"])


async def test_health_and_reflection_know_the_service(api: Api) -> None:
    health = health_pb2_grpc.HealthStub(api.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(api.channel)
    question = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
    async for found in reflection.ServerReflectionInfo(iter([question])):
        assert found.WhichOneof("message_response") == "file_descriptor_response"


# ------------------------------------------------------------ one request, one answer


async def test_a_whole_answer(api: Api) -> None:
    request = infer(name="7", text_input="Lyon is", exclude_input_in_output=True, sampling_parameters={"seed": 5})
    response = await api.infer(request)
    assert (response.model_name, response.model_version, response.id) == ("demo", "1", "7")
    assert outputs_of(response) == {"text_output": ["Hello world"]}
    assert is_final(response)
    assert response.parameters["trace_id"].string_param == TRACE_ID
    (served,) = api.frontend.requests
    assert (served.sampling.seed, served.arrived) == (5, ARRIVED)
    assert served.deadline == pytest.approx(ARRIVED + PATIENCE_S, abs=1)
    assert served.request_id is None  # ids of this protocol need not be unique


async def test_the_prompt_comes_before_the_answer_as_with_tritons_vllm_backend(api: Api) -> None:
    assert outputs_of(await api.infer(infer(text_input="Lyon is "))) == {"text_output": ["Lyon is Hello world"]}


def two_sequences(request: ValidatedRequest) -> list[Step]:
    entry = TokenLogprobs(5, -0.5, ((6, -0.25), (5, -0.5)))
    return [
        admitted(request, cached=2),
        tokens("a", 5, 6, index=1, logprobs=(entry, entry)),
        tokens("b", 5, index=0, logprobs=(entry,)),
        finished(2, index=1, reason=FinishReason.LENGTH),
        tokens("c", 8, index=0, logprobs=(TokenLogprobs(8, -1.0),)),
        finished(2, index=0),
    ]


async def test_everything_that_can_be_asked_for(api: Api) -> None:
    api.frontend.script = two_sequences
    asked = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens", "output_ids")
    flags: dict[str, Any] = {f"return_{name}": True for name in asked}
    response = await api.infer(infer(input_ids=[1, 2, 3], sampling_parameters={"n": 2}, **flags))
    found = outputs_of(response)
    first = {"5": {"logprob": -0.5, "rank": 2}, "6": {"logprob": -0.25, "rank": 1}}
    assert [json.loads(each) for each in found.pop("logprobs")] == [[first, {"8": {"logprob": -1.0}}], [first, first]]
    assert found == {
        "text_output": ["bc", "a"],
        "finish_reason": ["stop", "length"],
        "cumulative_logprob": [-1.5, -1.0],
        "num_input_tokens": [3],
        "num_output_tokens": [2, 2],
        "output_ids": [5, 8, 5, 6],
    }
    assert response.parameters["cached_tokens"].int64_param == 2


async def test_typed_contents_are_answered_by_typed_contents(api: Api) -> None:
    response = await api.infer(infer(typed=True, input_ids=[1], outputs=("text_output", "output_ids")))
    assert list(response.raw_output_contents) == []
    text, ids = response.outputs
    assert list(text.contents.bytes_contents) == [b"Hello world"]
    assert list(ids.contents.int_contents) == [7, 7]


async def test_an_unknown_model_is_not_found_and_the_served_one_is_named(api: Api) -> None:
    what = "model 'gpt' is not served here; 'demo', version '1', is"
    assert await api.refused(infer(model="gpt", input_ids=[1])) == (grpc.StatusCode.NOT_FOUND, what)
    with pytest.raises(aio.AioRpcError) as error:
        await api.stub.ModelMetadata(pb.ModelMetadataRequest(name="demo", version="3"))
    assert error.value.details() == "model 'demo', version '3', is not served here; 'demo', version '1', is"


async def test_wrong_tensors_parameters_and_sampling_are_all_named_at_once(api: Api) -> None:
    request = infer(
        input_ids=[1, 99_999],
        speed=True,
        parameters={"priority": 300, "top_p": 2.0},
        sampling_parameters={"temperature": -1, "min_p": 3, "beam": 1},
    )
    code, details = await api.refused(request)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert [part.partition(":")[0] for part in details.split("; ") if ": is " in part] == [
        *("inputs[1].name", "sampling_parameters.beam", "parameters.priority", "sampling_parameters.temperature"),
        *("parameters.top_p", "sampling_parameters.min_p", "input_ids[1]"),
    ]


async def test_a_request_without_a_prompt_says_so_once(api: Api) -> None:
    code, details = await api.refused(infer(return_output_ids=True))
    assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "text_input: is missing; expected it or input_ids")


async def test_a_prompt_that_is_too_long_is_told_in_the_protocols_words(api: Api) -> None:
    code, details = await api.refused(infer(input_ids=[1] * 5000))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("input_ids: has 5000 tokens; the context is 4096")


async def test_a_deadline_that_cut_the_answer_short_is_the_status(api: Api) -> None:
    late: list[Step] = [tokens("He"), finished(1, reason=FinishReason.DEADLINE), DeadlineExceeded("deadline exceeded")]
    api.frontend.script = lambda request: [admitted(request), *late]
    code, _ = await api.refused(infer(input_ids=[1], parameters={"timeout": 1_000_000}))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert api.frontend.requests[0].deadline == ARRIVED + 1.0


async def test_a_cancelled_call_closes_its_events(api: Api) -> None:
    api.frontend.script = lambda request: [admitted(request), asyncio.Event()]
    call = api.stub.ModelInfer(infer(input_ids=[1]), timeout=PATIENCE_S)
    await asyncio.wait_for(api.frontend.reached.wait(), PATIENCE_S)
    call.cancel()
    await asyncio.wait_for(api.frontend.closed.wait(), PATIENCE_S)


# ------------------------------------------------------------ streams


async def test_a_stream_has_a_response_a_delta_and_one_final_one(api: Api) -> None:
    wanted = infer(name="a", input_ids=[1], stream=True, return_finish_reason=True, return_num_output_tokens=True)
    responses = await api.stream(wanted)
    assert {response.error_message for response in responses} == {""}
    answers = [response.infer_response for response in responses]
    assert [outputs_of(each)["text_output"] for each in answers] == [["Hello"], [" world"], [""]]
    assert [outputs_of(each)["finish_reason"] for each in answers] == [["None"], ["None"], ["stop"]]
    assert [outputs_of(each)["num_output_tokens"] for each in answers] == [[1], [1], [0]]
    assert [is_final(each) for each in answers] == [False, False, True]
    assert {each.id for each in answers} == {"a"}


async def test_without_stream_a_stream_answers_once(api: Api) -> None:
    (response,) = await api.stream(infer(name="a", text_input="x ", stream=False))
    assert outputs_of(response.infer_response) == {"text_output": ["x Hello world"]}
    assert is_final(response.infer_response)


async def test_deltas_of_several_sequences_keep_their_places(api: Api) -> None:
    api.frontend.script = two_sequences
    wanted = infer(input_ids=[1], stream=True, sampling_parameters={"n": 2}, return_finish_reason=True)
    answers = [outputs_of(each.infer_response) for each in await api.stream(wanted)]
    assert [each["text_output"] for each in answers] == [["", "a"], ["b", ""], ["c", ""], ["", ""]]
    assert [each["finish_reason"] for each in answers][1:] == [["None", "None"], ["None", "length"], ["stop", "length"]]


async def test_an_empty_final_response_when_that_is_enough(api: Api) -> None:
    parameters = {"triton_enable_empty_final_response": True}
    *_, last = await api.stream(infer(input_ids=[1], stream=True, parameters=parameters))
    assert list(last.infer_response.outputs) == []
    assert is_final(last.infer_response)
    *_, last = await api.stream(infer(input_ids=[1], stream=True, parameters=parameters, return_finish_reason=True))
    assert outputs_of(last.infer_response) == {"text_output": [""], "finish_reason": ["stop"]}


async def test_requests_of_one_stream_are_answered_as_they_go(api: Api) -> None:
    first, second = asyncio.Event(), asyncio.Event()

    def script(request: ValidatedRequest) -> list[Step]:
        if request.prompt == (1,):
            return [admitted(request), tokens("slow"), first, tokens("er"), finished(2)]
        return [admitted(request), tokens("quick"), second, finished(1)]

    api.frontend.script = script
    call = api.stub.ModelStreamInfer(timeout=PATIENCE_S)
    seen = []

    async def see() -> None:
        response = await call.read()
        assert isinstance(response, pb.ModelStreamInferResponse)
        answer = response.infer_response
        seen.append((answer.id, *outputs_of(answer)["text_output"], is_final(answer)))

    await call.write(infer(name="a", input_ids=[1], stream=True))
    await see()
    await call.write(infer(name="b", input_ids=[2], stream=True))
    await see()
    second.set()
    await see()
    await call.done_writing()  # what is under way goes on
    first.set()
    await see()
    await see()
    assert seen == [
        *(("a", "slow", False), ("b", "quick", False), ("b", "", True)),
        *(("a", "er", False), ("a", "", True)),
    ]
    assert await call.read() is aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_an_error_is_told_under_its_id_and_the_stream_goes_on(api: Api) -> None:
    api.frontend.script = lambda request: (
        [Overloaded(QuotaViolation("router.queue", "8 of 8"), 1.0)]
        if request.prompt == (1,)
        else [admitted(request), tokens("fine"), finished(1)]
    )
    requests = [infer(name="full", input_ids=[1]), infer(name="good", input_ids=[2]), infer(name="gone", model="x")]
    by_id = {each.infer_response.id: each for each in await api.stream(*requests)}
    assert by_id["full"].error_message == "request full: router.queue: 8 of 8; try again in 1.0 s"
    assert by_id["full"].infer_response.parameters["reason"].string_param == "OVERLOADED"
    assert by_id["gone"].error_message.startswith("request gone: model 'x' is not served here")
    assert outputs_of(by_id["good"].infer_response) == {"text_output": ["fine"]}
    assert all(is_final(each.infer_response) for each in by_id.values())


async def test_a_stream_that_fails_late_has_no_other_final_response(api: Api) -> None:
    late: list[Step] = [tokens("He"), finished(1, reason=FinishReason.DEADLINE), DeadlineExceeded("deadline exceeded")]
    api.frontend.script = lambda request: [admitted(request), *late]
    responses = await api.stream(infer(input_ids=[1], stream=True))
    assert [(each.error_message, is_final(each.infer_response)) for each in responses] == [
        ("", False),
        ("deadline exceeded", True),
    ]


async def test_clients_may_ask_for_a_status_in_place_of_the_message(api: Api) -> None:
    api.frontend.script = lambda _: [Unavailable("no worker")]
    with pytest.raises(aio.AioRpcError) as error:
        await api.stream(infer(input_ids=[1]), metadata=[("triton_grpc_error", "true")])
    assert (error.value.code(), error.value.details()) == (grpc.StatusCode.UNAVAILABLE, "no worker")


async def test_cancelling_the_stream_closes_every_request_on_it(api: Api) -> None:
    api.frontend.script = lambda request: [admitted(request), tokens("x"), asyncio.Event()]
    call = api.stub.ModelStreamInfer(timeout=PATIENCE_S)
    for number in range(3):
        await call.write(infer(name=str(number), input_ids=[1], stream=True))
        assert await call.read() is not aio.EOF
    call.cancel()
    async with asyncio.timeout(PATIENCE_S):
        while api.frontend.ended < 3:
            api.frontend.closed.clear()
            await api.frontend.closed.wait()


async def test_the_streams_deadline_and_trace_are_those_of_its_requests(api: Api) -> None:
    parent, own = f"00-{'a' * 32}-{'b' * 16}-01", f"00-{'c' * 32}-{'d' * 16}-01"
    requests = [infer(name="1", input_ids=[1]), infer(name="2", input_ids=[2], parameters={"traceparent": own})]
    await api.stream(*requests, metadata=[("traceparent", parent)])
    traces = {request.prompt[0]: request.traceparent for request in api.frontend.requests}
    assert traces == {1: parent, 2: own}
    assert all(request.deadline == pytest.approx(ARRIVED + PATIENCE_S, abs=1) for request in api.frontend.requests)
