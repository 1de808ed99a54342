"""The limits that every Quire server and channel share, over a real socket: message size both ways, and keepalive."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import aio

from common.contracts.limits import MAX_PUBLIC_MESSAGE_BYTES
from common.rpc.options import CLIENTS, server_options
from common.rpc.server import RpcServer, open_channel
from common.rpc.silence import SILENCE_S, pulse_seconds
from gpuworker.config import GpuWorkerSettings
from quire.api.channel import KEEPALIVE_MS, MAX_MESSAGE_BYTES, channel_options
from quire.client.setup import client_options

# Counted without the five bytes of framing.
LARGEST = MAX_MESSAGE_BYTES


class Sizes(grpc.GenericRpcHandler):
    """Answers a request, whose text is a number, with so many bytes; any other with its length in words."""

    async def answer(self, request: bytes, context: Any) -> bytes:
        return bytes(int(request)) if len(request) < 20 else str(len(request)).encode()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        return grpc.unary_unary_rpc_method_handler(self.answer)


@pytest.fixture
async def call() -> AsyncIterator[Any]:
    server = RpcServer(["test.Sizes"])
    server.server.add_generic_rpc_handlers((Sizes(),))
    await server.start("127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel.unary_unary("/test.Sizes/Answer")
    await server.stop(0)


async def test_the_largest_message_passes_both_ways(call: Any) -> None:
    assert await call(bytes(LARGEST)) == str(LARGEST).encode()
    assert len(await call(str(LARGEST).encode())) == LARGEST


async def test_a_larger_request_is_resource_exhausted_with_both_sizes(call: Any) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await call(bytes(LARGEST + 1))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    numbers = re.findall(r"\d+", str(caught.value.details()))
    assert numbers == [str(LARGEST + 1), str(LARGEST)]


async def test_a_larger_answer_is_refused_and_the_channel_serves_on(call: Any) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await call(str(LARGEST + 1).encode())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await call(b"3") == bytes(3)


def test_a_server_bears_the_pings_that_channels_send() -> None:
    server, channel = dict(server_options()), dict(channel_options())
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < channel["grpc.keepalive_time_ms"] == KEEPALIVE_MS
    assert server["grpc.keepalive_permit_without_calls"] == channel["grpc.keepalive_permit_without_calls"] == 1


def test_a_client_and_its_router_bear_a_longer_silence_than_services() -> None:
    """Whoever gives up first costs the client its requests, although both processes run."""
    router, service, client = (
        dict(server_options(callers=CLIENTS)),
        dict(server_options()),
        dict(client_options("router:50051")),
    )
    patience = "grpc.keepalive_timeout_ms"
    assert router[patience] == client[patience] == 3 * service[patience]
    assert dict(channel_options())[patience] == service[patience]
    assert router["grpc.max_receive_message_length"] == MAX_PUBLIC_MESSAGE_BYTES
    assert len(router) == len(server_options(callers=CLIENTS))


def test_a_client_asks_another_router_before_the_lost_ones_requests_end() -> None:
    """The worker notices that the router's host is gone, and keeps the requests; the client notices later."""
    client, service = dict(client_options("router:50051")), dict(server_options())
    worker_notices = service["grpc.keepalive_timeout_ms"] / 1000  # it sends tokens all the time
    client_notices = (client["grpc.keepalive_time_ms"] + client["grpc.keepalive_timeout_ms"]) / 1000
    grace = float(GpuWorkerSettings.model_fields["orphan_grace"].default)
    assert worker_notices + grace >= client_notices + client["grpc.max_reconnect_backoff_ms"] / 1000


def test_a_process_that_stands_still_is_noticed_by_its_workers_first_and_then_by_its_clients() -> None:
    """gRPC's own default is a minute. A worker that noticed later than a client would still hold its request."""
    router, service, client = (
        dict(server_options(callers=CLIENTS)),
        dict(server_options()),
        dict(client_options("router:50051")),
    )
    patience = "grpc.http2.ping_timeout_ms"
    assert service[patience] == dict(channel_options())[patience] == 1000 * SILENCE_S
    every = pulse_seconds(SILENCE_S)
    assert every is not None
    assert 1000 * (SILENCE_S + every) < client[patience] < router[patience]
    # gRPC pings when nothing came for a while, and a client that gives up resumes while the worker keeps its request.
    client_notices = (client["grpc.keepalive_time_ms"] + client[patience]) / 1000
    grace = float(GpuWorkerSettings.model_fields["orphan_grace"].default)
    assert SILENCE_S + grace > client_notices + client["grpc.max_reconnect_backoff_ms"] / 1000


async def test_a_call_to_a_process_that_is_stopped_ends_although_its_kernel_answers() -> None:
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", _ENDLESS, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        port = int(await server.stdout.readline())
        options = dict(client_options("router:50051")) | {"grpc.http2.ping_timeout_ms": 1_000}
        async with (
            asyncio.timeout(300.0),
            aio.insecure_channel(f"127.0.0.1:{port}", options=list(options.items())) as channel,
        ):
            method: aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/t.T/Endless")
            call = method(b"")
            assert await call.read() == b"x"
            server.send_signal(signal.SIGSTOP)
            with pytest.raises(aio.AioRpcError, match="ping timeout") as ended:
                await _until_end(call)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        server.kill()
        await server.wait()


async def _until_end(call: Any) -> None:
    while await call.read() is not aio.EOF:
        pass


_ENDLESS = """
import asyncio, grpc
from grpc import aio

async def endless(request, context):
    while True:
        yield b"x"
        await asyncio.sleep(0.05)

async def main():
    server = aio.server()
    method = grpc.unary_stream_rpc_method_handler(endless)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Endless": method}),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""
