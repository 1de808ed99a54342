"""A server that ends: calls that come at that moment are UNAVAILABLE, never CANCELLED."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable

import grpc
import pytest
from grpc import aio

from common.errors import Unavailable
from common.rpc.connections import shut_down
from common.rpc.server import RpcServer

# A channel of its own for each client: channels to one address share a connection otherwise.
_CHANNELS = 4
_CALLS_AT_ONCE = 8


class Refuses(grpc.GenericRpcHandler):
    """Answers each method; refuses once it drains; holds what it has while `go_on` is clear."""

    def __init__(self) -> None:
        self.draining = False
        self.inside = 0
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def answer(self, request: bytes, context: object) -> bytes:
        if self.draining:
            raise Unavailable("draining")
        self.inside += 1
        await self.go_on.wait()
        return b"answer"

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        return grpc.unary_unary_rpc_method_handler(self.answer)


async def served() -> tuple[RpcServer, Refuses]:
    handler, rpc = Refuses(), RpcServer([])
    rpc.server.add_generic_rpc_handlers([handler])
    await rpc.start("127.0.0.1", 0)
    return rpc, handler


def dialled(rpc: RpcServer, number: int = 0) -> aio.Channel:
    return aio.insecure_channel(f"127.0.0.1:{rpc.port}", options=[("grpc.enable_retries", 0), ("number", number)])


def method(channel: aio.Channel) -> aio.UnaryUnaryMultiCallable[bytes, bytes]:
    found: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/any/method")
    return found


async def until(happened: Callable[[], bool]) -> None:
    while not happened():  # noqa: ASYNC110 - the calls run beside
        await asyncio.sleep(0.001)


async def storm(end_connections: bool) -> Counter[str]:
    """Return the statuses of calls without a pause, before, at and after the end of a server."""
    rpc, handler = await served()
    channels, seen, ended = [dialled(rpc, number) for number in range(_CHANNELS)], Counter[str](), asyncio.Event()

    async def calls(channel: aio.Channel) -> None:
        call = method(channel)
        while not ended.is_set():
            try:
                await call(b"")
                seen["OK"] += 1
            except aio.AioRpcError as error:
                seen[error.code().name] += 1
                if "connect" in (error.details() or ""):
                    return

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for channel in channels * _CALLS_AT_ONCE:
            tasks.create_task(calls(channel))
        await until(lambda: seen["OK"] >= 200)
        handler.draining = True
        await until(lambda: seen["UNAVAILABLE"] >= 50)
        if end_connections:
            await rpc.end_connections(0.1)
        await rpc.stop(0.1)
        ended.set()
    for channel in channels:
        await channel.close()
    return seen


async def test_no_call_is_cancelled_by_the_end_of_a_server() -> None:
    for _ in range(5):
        seen = await storm(end_connections=True)
        assert seen.keys() == {"OK", "UNAVAILABLE"}, seen


async def test_running_calls_end_before_their_connections() -> None:
    rpc, handler = await served()
    handler.go_on.clear()
    async with dialled(rpc) as channel:
        running = asyncio.ensure_future(method(channel)(b""))
        async with asyncio.timeout(60):
            await until(lambda: handler.inside > 0)
            handler.draining = True
            ending = asyncio.create_task(rpc.end_connections(60.0))
            with pytest.raises(aio.AioRpcError, match="draining"):
                await method(channel)(b"")
            assert not ending.done()
            handler.go_on.set()
            assert await running == b"answer"
            await ending
    await rpc.stop(0.0)


async def test_a_call_that_does_not_end_is_waited_for_a_bounded_time() -> None:
    rpc, handler = await served()
    handler.go_on.clear()
    async with dialled(rpc) as channel:
        running = asyncio.ensure_future(method(channel)(b""))
        async with asyncio.timeout(60):
            await until(lambda: handler.inside > 0)
            await rpc.end_connections(0.01)
            with pytest.raises(aio.AioRpcError) as ended:
                await running
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    await rpc.stop(0.0)


def test_only_the_sockets_of_the_named_ports_are_shut_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port = one.getsockname()[1]
        with (
            socket.create_connection(other.getsockname()) as stays,
            socket.create_connection(one.getsockname()) as goes,
        ):
            accepted, kept = one.accept()[0], other.accept()[0]
            with accepted, kept:
                assert shut_down({port}) == 2
                assert goes.recv(1) == b""
                kept.sendall(b"x")
                assert stays.recv(1) == b"x"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    assert shut_down({port}) == 0
