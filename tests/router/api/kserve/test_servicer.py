"""The Open Inference Protocol over a real socket, with a scripted frontend behind it: what is served, whole answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
import pytest_asyncio
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.contracts.adapters import AdapterRef, AdapterShare
from common.contracts.errors import DeadlineExceeded, PermissionDenied, Unauthenticated
from common.contracts.types import FinishReason
from quire.kserve.v2 import kserve_pb2 as pb
from router.api.kserve.servicer import KSERVE_SERVICE, KserveServicer
from router.contracts.ports import NoAdapters
from router.contracts.session_ids import session_name
from router.tenants.tenancy import AdapterOwners, Caller, Tenant
from tests.support.router.fake_frontend import TRACE_ID, Step, admitted, finished, tokens
from tests.support.router.kserve_harness import ARRIVED, PATIENCE_S, Api, served_api, two_sequences
from tests.support.router.kserve_messages import infer, is_final, outputs_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Api]:
    async with served_api() as running:
        yield running


@pytest.fixture
def api(served: Api) -> Api:
    """The service with its script as at first."""
    return served.reset()


async def test_a_session_comes_by_metadata(api: Api) -> None:
    await api.stub.ModelInfer(
        infer(input_ids=[1]), metadata=(("x-claude-code-session-id", "talk"),), timeout=PATIENCE_S
    )
    assert api.frontend.requests[0].session == session_name("", "talk")


# ------------------------------------------------------------ what is served


async def test_live_and_ready(api: Api) -> None:
    assert (await api.stub.ServerLive(pb.ServerLiveRequest())).live
    assert (await api.stub.ServerReady(pb.ServerReadyRequest())).ready
    assert (await api.stub.ModelReady(pb.ModelReadyRequest(name="demo"))).ready
    assert (await api.stub.ModelReady(pb.ModelReadyRequest(name="demo", version="1"))).ready
    assert (await api.stub.ModelReady(pb.ModelReadyRequest(name="alias"))).ready


async def test_nothing_is_ready_while_the_router_is_not(api: Api) -> None:
    api.is_ready = False
    assert (await api.stub.ServerLive(pb.ServerLiveRequest())).live
    assert not (await api.stub.ServerReady(pb.ServerReadyRequest())).ready
    assert not (await api.stub.ModelReady(pb.ModelReadyRequest(name="demo"))).ready


@pytest.mark.parametrize(("name", "version"), [("other", ""), ("demo", "2"), ("", "")])
async def test_another_model_is_not_ready(api: Api, name: str, version: str) -> None:
    assert not (await api.stub.ModelReady(pb.ModelReadyRequest(name=name, version=version))).ready


class OwnAdapter(NoAdapters):
    """The tenant acme has one adapter of its own."""

    owners = AdapterOwners([AdapterShare("acme", ("acme-*",))])

    def find_adapter(self, name: str) -> AdapterRef | None:
        return AdapterRef(name, "a" * 64) if name == "acme-sql" else None

    def caller(self, context: object) -> Caller:
        if context is None:
            raise Unauthenticated("a key is missing")
        return Caller(Tenant(str(context), owners=self.owners))


async def test_an_adapter_of_a_tenants_own_is_shown_to_that_tenant_alone(api: Api) -> None:
    adapters = OwnAdapter()
    validator, card = cast("Any", None), cast("Any", SimpleNamespace(name="demo", names=("demo",)))
    service = KserveServicer(api.frontend, validator, card, lambda: True, cast("Any", adapters), adapters)

    async def is_ready(name: str, context: Any) -> bool:
        return (await service.ModelReady(pb.ModelReadyRequest(name=name), context)).ready

    own, other, stranger = cast("Any", "acme"), cast("Any", "other"), cast("Any", None)
    assert await is_ready("demo", stranger)  # a probe has no key
    assert await is_ready("acme-sql", own)
    assert not await is_ready("acme-sql", other)
    for name in ("acme-sql", "unknown"):
        with pytest.raises(Unauthenticated):
            await is_ready(name, stranger)
    metadata, config = pb.ModelMetadataRequest(name="acme-sql"), pb.ModelConfigRequest(name="acme-sql")
    await service.ModelMetadata(metadata, own)
    await service.ModelConfig(config, own)
    with pytest.raises(PermissionDenied, match="tenant other may not use model 'acme-sql'"):
        await service.ModelMetadata(metadata, other)
    with pytest.raises(PermissionDenied):
        await service.ModelConfig(config, other)


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
    answer = await health.Check(health_pb2.HealthCheckRequest(service=KSERVE_SERVICE))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(api.channel)
    question = reflection_pb2.ServerReflectionRequest(file_containing_symbol=KSERVE_SERVICE)
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
    assert served.deadline == pytest.approx(ARRIVED + PATIENCE_S, abs=PATIENCE_S / 2)
    assert served.request_id is None  # ids of this protocol need not be unique


async def test_the_prompt_comes_before_the_answer_as_with_tritons_vllm_backend(api: Api) -> None:
    assert outputs_of(await api.infer(infer(text_input="Lyon is "))) == {"text_output": ["Lyon is Hello world"]}


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


async def test_a_prompt_that_is_too_long_is_reported_in_the_protocols_words(api: Api) -> None:
    code, details = await api.refused(infer(input_ids=[1] * 5000))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("input_ids: This model's maximum context length is 4096 tokens. However, ")


async def test_a_deadline_that_cut_the_answer_short_is_the_status(api: Api) -> None:
    late: list[Step] = [tokens("He"), finished(1, reason=FinishReason.DEADLINE), DeadlineExceeded("deadline exceeded")]
    api.frontend.script = lambda request: [admitted(request), *late]
    code, _ = await api.refused(infer(input_ids=[1], parameters={"timeout": 1_000_000}))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert api.frontend.requests[0].deadline == ARRIVED + 1.0


async def test_of_two_deadlines_the_earlier_one_counts(api: Api) -> None:
    await api.infer(infer(input_ids=[1], parameters={"timeout": 600_000_000}))
    assert api.frontend.requests[0].deadline == pytest.approx(ARRIVED + PATIENCE_S, abs=PATIENCE_S / 2)


async def test_a_cancelled_call_closes_its_events(api: Api) -> None:
    api.frontend.script = lambda request: [admitted(request), asyncio.Event()]
    call = api.stub.ModelInfer(infer(input_ids=[1]), timeout=PATIENCE_S)
    await asyncio.wait_for(api.frontend.reached.wait(), PATIENCE_S)
    call.cancel()
    await asyncio.wait_for(api.frontend.closed.wait(), PATIENCE_S)
