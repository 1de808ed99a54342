"""Managers as real processes: READY, health, SIGTERM, kill -9 under a live worker, and the one that was replaced."""

from __future__ import annotations

import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.rpc.server import open_channel
from common.settings.config import PORT_TAKEN_STATUS
from kvmanager.main import REPLACED_STATUS
from tests.kvmanager.conftest import ChannelTo
from tests.kvmanager.index.test_end_to_end import indexed
from tests.support.kvmanager.fake_session import RawWorker, attach_of
from tests.support.kvmanager.manager_child import ManagerChild, manager_process
from tests.support.kvmanager.remote_fake_worker import DrivenWorker

ROOT = Path(__file__).parents[2]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


Launch = Callable[..., Awaitable[ManagerChild]]


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Launch]:
    """Return what starts a manager process with the given flags and waits until it is ready."""
    async with AsyncExitStack() as running:

        async def start(*flags: str, port: int = 0) -> ManagerChild:
            return await running.enter_async_context(manager_process(tmp_path / "state", *flags, port=port))

        yield start


async def health(channel: aio.Channel) -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    return int(answer.status)


async def test_ready_line_says_where_and_what(launch: Launch, tmp_path: Path) -> None:
    child = await launch("--redis-url", "")
    words = child.ready.split()
    assert words[0] == "READY"
    assert words[1].startswith("127.0.0.1:")
    assert "prefix index in none (no Redis)" in child.ready
    assert f"state in {tmp_path / 'state'}" in child.ready


async def test_password_of_redis_is_not_shown(launch: Launch) -> None:
    child = await launch("--redis-url", "redis://user:secret@127.0.0.1:1/0")
    assert "redis://127.0.0.1:1/0" in child.ready
    assert "secret" not in child.ready


async def test_health_and_reflection(launch: Launch) -> None:
    child = await launch("--redis-url", "")
    async with open_channel(child.address) as channel:
        assert await health(channel) == SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([request])):
            names = {each.name for each in answer.list_services_response.service}
            break
    assert {"quire.kvmanager.v1.KvManagerService", "quire.decision.v1.DecisionService"} <= names


async def test_sigterm_drains_workers_and_ends_with_zero(launch: Launch) -> None:
    child = await launch("--redis-url", "")
    async with open_channel(child.address) as channel:
        worker = RawWorker(channel, attach_of())
        await worker.attached()
        child.process.send_signal(signal.SIGTERM)
        assert (await worker.receive()).WhichOneof("message") == "drain"
        assert await health(channel) == NOT_SERVING
        worker.call.cancel()
    assert (await child.ended())[0] == 0


async def test_sigterm_flushes_the_index(launch: Launch, channel_to: ChannelTo, redis_url: str) -> None:
    child = await launch("--redis-url", redis_url)
    worker = DrivenWorker()
    await worker.attach(channel_to(child.address))
    for _ in range(10):
        await worker.turn()
    child.process.send_signal(signal.SIGTERM)
    assert worker.stream is not None
    assert (await worker.stream.receive()).WhichOneof("message") == "drain"
    worker.stream.call.cancel()
    assert (await child.ended())[0] == 0
    assert await indexed(redis_url)


async def test_killed_manager_comes_back_with_a_higher_epoch_and_the_worker_goes_on(
    launch: Launch, channel_to: ChannelTo
) -> None:
    """Killed (-9) twice between two turns; the worker checks the content of every slot that it reads, all along."""
    worker = DrivenWorker()
    for life in range(3):
        child = await launch("--redis-url", "")
        await worker.attach(channel_to(child.address))
        assert worker.epoch == life + 1
        for _ in range(20):
            await worker.turn()
        if life < 2:
            child.process.kill()
            assert (await child.ended())[0] == -signal.SIGKILL
            worker.fake.step()  # on its runway, without a manager
    await worker.finish()
    assert worker.fake.live == {}
    assert worker.fake.pool == []


async def test_replaced_manager_ends_with_a_status_and_words_of_its_own(launch: Launch, redis_url: str) -> None:
    first = await launch("--redis-url", redis_url, "--lease-ttl", "0.3")
    async with open_channel(first.address) as channel:
        await RawWorker(channel, attach_of("w0")).attached()
        second = await launch("--redis-url", redis_url)
        async with open_channel(second.address) as other:
            await RawWorker(other, attach_of("w1")).attached()
            status, said = await first.ended()
            assert await health(other) == SERVING
    assert status == REPLACED_STATUS
    words = re.search(r"quire-kvmanager: a manager of epoch (\d+) has taken over from this one, of epoch (\d+)", said)
    assert words is not None, said
    assert int(words[1]) == int(words[2]) + 1


async def test_taken_port_is_refused_before_anything_starts(launch: Launch) -> None:
    first = await launch("--redis-url", "")
    port = first.address.rpartition(":")[2]
    second = await launch("--redis-url", "", port=int(port))
    assert second.ready == ""
    status, said = await second.ended()
    assert status == PORT_TAKEN_STATUS
    assert f"cannot listen on 127.0.0.1:{port}" in said


async def test_unreadable_state_is_refused_before_anything_starts(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "epoch").write_text("nonsense")
    child = await launch("--redis-url", "")
    status, said = await child.ended()
    assert (child.ready, status) == ("", 2)
    assert "--state-dir" in said


@pytest.mark.parametrize("content", ['{"model_type": ', "[]"])
async def test_a_broken_configuration_is_refused_in_words(content: str, launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    child = await launch("--redis-url", "", "--model", str(tmp_path))
    status, said = await child.ended()
    assert (child.ready, status) == ("", 2)
    heading, line = said.splitlines()
    assert heading == "quire-kvmanager cannot start:"
    assert line.startswith(f"  --model: {tmp_path}/config.json ")


async def test_workers_of_a_manager_that_is_gone_see_it_at_once(launch: Launch) -> None:
    child = await launch("--redis-url", "")
    async with open_channel(child.address) as channel:
        worker = RawWorker(channel, attach_of())
        await worker.attached()
        child.process.kill()
        with pytest.raises(aio.AioRpcError) as caught:
            await worker.receive()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
