"""A server's health, reflection, limits and port over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from common.contracts.errors import InvalidConfig, Unavailable
from common.rpc.health import LIVE, WORK, wait_until_serving
from common.rpc.server import RpcServer, open_channel

SERVICE = "quire.inference.v1.InferenceService"
STATUS = health_pb2.HealthCheckResponse


@pytest.fixture
async def rpc() -> AsyncIterator[RpcServer]:
    server = RpcServer([SERVICE])
    await server.start("127.0.0.1", 0)
    yield server
    await server.stop(0)


@pytest.fixture
async def channel(rpc: RpcServer) -> AsyncIterator[aio.Channel]:
    async with open_channel(f"127.0.0.1:{rpc.port}") as opened:
        yield opened


async def health(channel: aio.Channel, service: str = "") -> int:
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)


async def test_a_server_is_not_serving_until_it_is_ready(rpc: RpcServer, channel: aio.Channel) -> None:
    assert [await health(channel), await health(channel, SERVICE)] == [STATUS.NOT_SERVING] * 2
    await rpc.ready()
    assert [await health(channel), await health(channel, SERVICE)] == [STATUS.SERVING] * 2


async def test_a_server_that_is_not_ready_is_alive(rpc: RpcServer, channel: aio.Channel) -> None:
    assert await health(channel, LIVE) == STATUS.SERVING
    await rpc.ready()
    await rpc.health.not_ready()
    assert [await health(channel), await health(channel, LIVE)] == [STATUS.NOT_SERVING, STATUS.SERVING]


async def test_a_server_whose_background_task_fails_does_not_serve_until_it_runs_again(
    rpc: RpcServer, channel: aio.Channel
) -> None:
    await rpc.ready()
    await rpc.health.failing(("watch",))
    assert [await health(channel), await health(channel, LIVE)] == [STATUS.NOT_SERVING, STATUS.SERVING]
    await rpc.ready()
    assert await health(channel) == STATUS.NOT_SERVING
    await rpc.health.failing(())
    assert await health(channel) == STATUS.SERVING


async def test_a_draining_server_says_so_while_it_finishes_what_runs(rpc: RpcServer, channel: aio.Channel) -> None:
    await rpc.ready()
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    assert (await watch.read()).status == STATUS.SERVING
    stopping = asyncio.create_task(rpc.stop(5))
    assert (await watch.read()).status == STATUS.NOT_SERVING
    watch.cancel()
    await stopping


async def test_waiting_ends_when_the_server_becomes_ready(rpc: RpcServer, channel: aio.Channel) -> None:
    waiting = asyncio.create_task(wait_until_serving(channel, timeout=120))
    await health(channel)
    assert not waiting.done()
    await rpc.ready()
    await waiting


async def test_waiting_gives_up_in_time(channel: aio.Channel) -> None:
    with pytest.raises(Unavailable, match=r"not serving after 0\.2 s"):
        await wait_until_serving(channel, timeout=0.2)


async def test_the_status_of_all_services_is_listed(rpc: RpcServer, channel: aio.Channel) -> None:
    await rpc.ready()
    answer = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
    found = {name: each.status for name, each in answer.statuses.items()}
    assert found == dict.fromkeys(("", SERVICE, LIVE, WORK), STATUS.SERVING)


@pytest.mark.parametrize("serves_on", [False, True])
async def test_work_that_stands_still_shows_and_a_service_that_serves_on_stays_serving(
    rpc: RpcServer, channel: aio.Channel, serves_on: bool
) -> None:
    stub = health_pb2_grpc.HealthStub(channel)

    async def found() -> dict[str, int]:
        answer = await stub.List(health_pb2.HealthListRequest())
        return {name: each.status for name, each in answer.statuses.items()}

    await rpc.ready()
    await rpc.health.stalled("one waits", serves_on)
    others = STATUS.SERVING if serves_on else STATUS.NOT_SERVING
    assert await found() == {"": others, SERVICE: others, LIVE: STATUS.SERVING, WORK: STATUS.NOT_SERVING}
    await rpc.health.failing(("a task",))
    assert (await found())[""] == STATUS.NOT_SERVING
    await rpc.health.failing(())
    await rpc.health.stalled("", serves_on)
    assert set((await found()).values()) == {STATUS.SERVING}


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_describes_the_services(channel: aio.Channel, version: str) -> None:
    ask = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    ours = [f"grpc.reflection.{each}.ServerReflection" for each in ("v1", "v1alpha")]
    asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
    asked += [reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in ours]
    call: aio.StreamStreamCall[Any, Any] = ask(iter(asked))
    listed, *described = list[Any]([await call.read() for _ in asked])
    names = {each.name for each in listed.list_services_response.service}
    files = [each.file_descriptor_response.file_descriptor_proto[0] for each in described]
    call.cancel()
    assert names == {SERVICE, "grpc.health.v1.Health", *ours}
    assert [descriptor_pb2.FileDescriptorProto.FromString(file).package for file in files] == [
        "grpc.reflection.v1",
        "grpc.reflection.v1alpha",
    ]


async def test_a_port_that_is_taken_is_refused_by_name(rpc: RpcServer) -> None:
    second = RpcServer([SERVICE])
    with pytest.raises(InvalidConfig, match=f"cannot listen on 127.0.0.1:{rpc.port}"):
        await second.start("127.0.0.1", rpc.port)


async def test_two_processes_worth_of_servers_may_share_a_port() -> None:
    first, second = RpcServer([SERVICE], reuse_port=True), RpcServer([SERVICE], reuse_port=True)
    port = await first.start("127.0.0.1", 0)
    assert await second.start("127.0.0.1", port) == port
    await first.stop(0)
    await second.stop(0)


async def test_a_burst_of_streams_loses_none(rpc: RpcServer) -> None:
    """gRPC's own limit on pending requests drops about a tenth of these."""
    async with AsyncExitStack() as stack:
        address = f"127.0.0.1:{rpc.port}"
        stubs = [health_pb2_grpc.HealthStub(await stack.enter_async_context(open_channel(address))) for _ in range(4)]
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        watches = [stub.Watch(request) for stub in stubs for _ in range(500)]
        answers = await asyncio.gather(*(watch.read() for watch in watches))
        assert [answer.status for answer in answers] == [STATUS.NOT_SERVING] * 2000
        for watch in watches:
            watch.cancel()
