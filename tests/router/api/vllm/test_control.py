"""vLLM's own `Control` service over a real socket; and ends of requests, which both control services offer."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.contracts.types import KvGeometry, KvGroup, KvGroupKind, PoolIdentity
from common.version import quire_version
from quire.types.v1 import types_pb2
from quire.vllm.v1 import control_pb2 as pb
from quire.vllm.v1 import engine_pb2
from router.api.vllm.control_servicer import CONTROL
from router.api.vllm.engine_servicer import ENGINE
from router.api.vllm.facts import Totals
from router.api.vllm.inference_servicer import INFERENCE
from router.contracts.ports import ModelCard
from tests.support.router.vllm_harness import ADMIN_PLANE, KEYED, OPERATOR, STRANGER, Api, Status, mistakes_in, refused

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVED = {"GetServerInfo", "GetModelInfo", "Abort", "GetKvEventSources", "IsPaused", "IsSleeping"}
METHODS = pb.DESCRIPTOR.services_by_name["Control"].methods
REFUSED = [each for each in METHODS if each.name not in SERVED]


async def test_facts_of_the_server_are_those_of_all_workers_that_serve(api: Api) -> None:
    assert await api.control.GetServerInfo(pb.GetServerInfoRequest()) == pb.ServerInfo(
        engine_version=f"quire {quire_version()}",
        api_version="vllm",
        instance_id="router-1",
        parallelism=pb.ParallelismInfo(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            world_size=1,
            data_parallel_size_local=1,
        ),
        max_model_len=4096,
        kv_block_size=16,
        total_kv_blocks=20,
        max_running_requests=16,
        rl_capabilities=pb.RlCapabilities(),
        proto_version="0.6.0",
        effective_attention_block_size=16,
    )


async def test_blocks_are_those_of_a_prompt_where_workers_count_pages() -> None:
    groups = (KvGroup(KvGroupKind.FULL, 0, 1, (0,)), KvGroup(KvGroupKind.WINDOW, 64, 2, (1,)))
    geometry = KvGeometry(2, 2, 64, 64, "float32", groups=groups)
    card = ModelCard("demo", PoolIdentity("m", "t", 16, geometry), 4096, 2027, (5,), has_chat_template=True)
    totals = Totals.of(Status(card).status(), card, STRANGER)
    assert (totals.blocks, totals.unheld_blocks) == (3 + 3, 2 + 3)


async def test_facts_of_the_model(api: Api) -> None:
    assert await api.control.GetModelInfo(pb.GetModelInfoRequest()) == pb.ModelInfo(
        model_id="demo",
        served_model_name="demo",
        served_model_aliases=["alias"],
        supports_text_input=True,
        supports_token_ids_input=True,
        supports_lora=True,
    )


async def test_events_have_a_source_for_operators_alone(api: Api) -> None:
    for caller in (api.callers.now, KEYED):
        api.callers.now = caller
        assert not (await api.control.GetKvEventSources(pb.GetKvEventSourcesRequest())).sources
    api.callers.now = OPERATOR
    assert list((await api.control.GetKvEventSources(pb.GetKvEventSourcesRequest())).sources) == [
        pb.KvEventSource(
            transport="grpc",
            endpoint=ADMIN_PLANE,
            topic="quire.kvmanager.v1.KvManagerService/SubscribeKvEvents",
            encoding="protobuf",
            schema_version=1,
        )
    ]


async def test_workers_that_publish_events_are_sources_in_the_form_of_vllm(api: Api) -> None:
    api.callers.now = OPERATOR
    events = types_pb2.KvEventSource(
        endpoint="tcp://10.0.0.2:5557", replay_endpoint="tcp://10.0.0.2:5558", topic="kv", buffer_steps=10, hwm=20,
        max_queue_size=30,
    )  # fmt: skip
    api.status.kv_events = events
    found = list((await api.control.GetKvEventSources(pb.GetKvEventSourcesRequest())).sources)
    assert [each.transport for each in found] == ["zmq", "grpc"]
    assert found[0] == pb.KvEventSource(
        transport="zmq",
        endpoint="tcp://10.0.0.2:5557",
        topic="kv",
        replay_endpoint="tcp://10.0.0.2:5558",
        data_parallel_rank=0,
        encoding="msgpack",
        schema_version=1,
        buffer_steps=10,
        hwm=20,
        max_queue_size=30,
    )
    api.callers.now = KEYED
    assert not (await api.control.GetKvEventSources(pb.GetKvEventSourcesRequest())).sources
    api.status.kv_events = None


async def test_nothing_pauses_or_sleeps(api: Api) -> None:
    assert not (await api.control.IsPaused(pb.IsPausedRequest())).paused
    assert not (await api.control.IsSleeping(pb.IsSleepingRequest())).sleeping


@pytest.mark.parametrize("method", REFUSED, ids=lambda method: method.name)
async def test_what_has_no_meaning_here_is_refused_by_name(api: Api, method: Any) -> None:
    request = getattr(pb, method.input_type.name)()
    code, details = await refused(getattr(api.control, method.name)(request))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert details.startswith(f"{method.name} is not offered: ")
    assert len(details) > len(method.name) + 30


async def test_health_knows_each_service(api: Api) -> None:
    stub = health_pb2_grpc.HealthStub(api.channel)
    for service in (INFERENCE, CONTROL, ENGINE):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


# ------------------------------------------------------------ ends of requests


def by(api: Api, service: str, ids: list[str]) -> Any:
    if service == "control":
        return api.control.Abort(pb.AbortRequest(request_ids=ids))
    return api.engine.Abort(engine_pb2.AbortRequest(request_ids=ids))


@pytest.mark.parametrize("service", ["control", "engine"])
async def test_a_tenant_ends_its_own_requests_and_those_that_are_gone_are_passed_over(api: Api, service: str) -> None:
    await by(api, service, ["a", "gone-b", "c"])
    assert api.aborts.asked == [("a", "test"), ("gone-b", "test"), ("c", "test")]
    await by(api, service, [])
    api.callers.now = OPERATOR
    await by(api, service, ["d"])
    assert api.aborts.asked[3:] == [("d", "")]


@pytest.mark.parametrize("service", ["control", "engine"])
async def test_a_wrong_id_ends_nothing(api: Api, service: str) -> None:
    found = await mistakes_in(by(api, service, ["a", "", "with space"]))
    assert list(found) == ["request_ids[1]", "request_ids[2]"]
    assert not api.aborts.asked


@pytest.mark.parametrize("service", ["control", "engine"])
async def test_ids_of_one_call_are_bounded(api: Api, service: str) -> None:
    await by(api, service, ["a"] * 128)
    assert len(api.aborts.asked) == 128
    assert await mistakes_in(by(api, service, ["a"] * 129)) == {
        "request_ids": "has 129 ids; expected at most 128; send several calls"
    }
