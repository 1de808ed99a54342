"""A server that ends: calls that come at that moment are UNAVAILABLE, never CANCELLED."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import threading
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import grpc
import pytest
from grpc import aio

from common.contracts.errors import Unavailable
from common.rpc import connections
from common.rpc.connections import Calls, Ended, shut_down
from common.rpc.server import RpcServer
from tests.support.turns import until_blocked
from tests.support.waiting import until

# A channel of its own for each client: channels to one address share a connection otherwise.
_CHANNELS = 4
_CALLS_AT_ONCE = 8
_ENDED_CALLS = 60

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the sockets of a process are found on Linux alone")


class Refuses(grpc.GenericRpcHandler):
    """Answers each method; refuses once it drains; holds what it has while `go_on` is clear."""

    def __init__(self) -> None:
        self.draining = False
        self.inside = 0
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def answer(self, request: bytes, context: object) -> bytes:
        if self.draining:
            # The frame has its own error, as where an error comes from a future or in a message.
            error = Unavailable("draining")
            raise error
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


@LINUX
async def test_no_call_is_cancelled_by_the_end_of_a_server() -> None:
    for _ in range(5):
        seen = await storm(end_connections=True)
        assert seen.keys() == {"OK", "UNAVAILABLE"}, seen


async def test_running_calls_end_before_their_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever pause there is beside: a call counts until its status is written."""
    monkeypatch.setattr("common.rpc.connections._FLUSH_S", 0.0)
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


@contextmanager
def no_collector() -> Iterator[None]:
    """Run without the collector of cycles; what is gone meanwhile was in none."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def states() -> int:
    """Return how many calls are in memory: gRPC's own state of each, with its native call and its message."""
    return sum(type(each).__name__ == "RPCState" for each in gc.get_objects())


@pytest.mark.parametrize("refused", [False, True])
async def test_an_ended_call_leaves_nothing_to_the_collector(refused: bool) -> None:
    """A call that is old when it ends is in the oldest generation, and services do not walk that one for hours."""
    rpc, handler = await served()
    handler.draining = refused
    async with dialled(rpc) as channel, asyncio.timeout(60):
        await asyncio.gather(method(channel)(b""), return_exceptions=True)
        with no_collector():
            before = states()
            for _ in range(_ENDED_CALLS):
                await asyncio.gather(method(channel)(b""), return_exceptions=True)
            # The server has a few states for the next calls, and the last call may not be over yet.
            await until(lambda: states() < before + _ENDED_CALLS // 2)
    await rpc.stop(0.0)


@LINUX
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


@LINUX
async def test_only_the_sockets_of_the_named_ports_are_shut_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port = one.getsockname()[1]
        with (
            socket.create_connection(other.getsockname()) as stays,
            socket.create_connection(one.getsockname()) as goes,
        ):
            accepted, kept = one.accept()[0], other.accept()[0]
            with accepted, kept:
                assert await shut_down({port}, 0.0) == Ended(2, 0)
                assert goes.recv(1) == b""
                goes.sendall(b"x")
                assert accepted.recv(1) == b"x", "a client may still send, and no reset follows"
                kept.sendall(b"x")
                assert stays.recv(1) == b"x"
        assert not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN), "it listens no more"
    assert await shut_down({port}, 0.0) == Ended(0, 0)


@LINUX
async def test_a_connection_ends_when_its_client_has_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that reads slowly still gets everything: the kernel holds some of it for now."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        accepted = listener.accept()[0]
        with accepted:
            accepted.setblocking(False)
            sent = 0
            with suppress(BlockingIOError):
                while True:
                    sent += accepted.send(b"x" * 65536)
            looks, unsent = list[int](), connections._unsent

            def look(waiting: dict[int, int]) -> object:
                looks.append(len(waiting))
                return unsent(waiting)

            monkeypatch.setattr(connections, "_unsent", look)
            ending = asyncio.create_task(shut_down({listener.getsockname()[1]}, 60.0))
            await until(lambda: len(looks) >= 3)
            assert not ending.done(), "its client has not read anything yet"
            client.setblocking(False)
            loop, got = asyncio.get_running_loop(), 0
            async with asyncio.timeout(60):
                while read := await loop.sock_recv(client, 65536):
                    got += len(read)
                assert got == sent
                assert await ending == Ended(2, 0)


@LINUX
async def test_the_loop_looks_at_no_connection_and_a_thread_at_each_other_file_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A router may have 10,000 connections at its end, and still refuses late calls on its loop."""
    looks, socket_of, here = Counter[tuple[str, int]](), connections._socket_of, threading.get_ident()

    def looked_at(number: int) -> socket.socket | None:
        looks["loop" if threading.get_ident() == here else "thread", number] += 1
        return socket_of(number)

    monkeypatch.setattr(connections, "_socket_of", looked_at)
    monkeypatch.setattr(connections, "_FLUSH_S", 0.0)
    with ExitStack() as files:
        listener, other = (files.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        accepted = []
        for to in (listener, listener, other):
            client = files.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(to.getsockname())
            accepted.append(files.enter_context(to.accept()[0]))
        slow, idle, others = (each.fileno() for each in accepted)
        accepted[0].setblocking(False)
        with suppress(BlockingIOError):
            while True:
                accepted[0].send(b"x" * 65536)  # its client reads nothing
        ending = asyncio.create_task(shut_down({listener.getsockname()[1]}, 60.0))
        async with asyncio.timeout(60):
            await until(lambda: looks["thread", slow] + looks["loop", slow] >= 10)
        ending.cancel()
        assert {number for (where, number), _ in looks.items() if where == "loop"} == {listener.fileno()}
        assert looks["thread", others] == 2, "for the listeners, and for the connections"
        assert looks["thread", idle] == 3, "nothing is left to send"


@LINUX
async def test_a_server_ends_although_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert await shut_down({1}, 0.0) == Ended(failed=1)


FEW_DESCRIPTORS = """
import asyncio, os, resource, socket
from common.rpc.server import RpcServer

async def main():
    servers = [RpcServer([]) for _ in range(2)]
    for each in servers:
        await each.start("127.0.0.1", 0)
    clients = [await asyncio.open_connection("127.0.0.1", servers[number % 2].port) for number in range(60)]
    for reader, _ in clients:
        await reader.readexactly(9)  # the server's settings: it has accepted the connection
    most = int(os.environ["FREE"]) + max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    await asyncio.gather(*(each.end_connections(0.1) for each in servers))
    for _, writer in clients if os.environ["FREE"] != "0" else ():
        writer.close()
    if os.environ["FREE"] != "0":
        for reader, _ in clients:
            await reader.read()
    for each in servers:
        await each.stop(0.0)
    print("ended", flush=True)
    os._exit(0)

asyncio.run(main())
"""


@LINUX
@pytest.mark.parametrize("free", [0, 2])
async def test_servers_end_although_their_sockets_outnumber_the_free_descriptors(free: int) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FEW_DESCRIPTORS, env={**os.environ, "FREE": str(free)}, stdout=PIPE, stderr=PIPE
    )
    try:
        async with asyncio.timeout(60):
            out, err = await child.communicate()
            assert out.splitlines()[-1:] == [b"ended"]
            assert (b"connections could not be closed" in err) == (not free)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def test_a_cancellation_that_meets_the_end_of_the_last_call_is_not_lost() -> None:
    """Before Python 3.12 `asyncio.wait_for` swallows it, and what was cancelled goes on."""
    calls = Calls()
    calls._running = 1
    waiting = asyncio.create_task(calls.over(60.0))
    await until_blocked(waiting)
    calls._ended(1, 0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
