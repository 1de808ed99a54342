"""gRPC's wake-ups are taken in bulk, whatever else is watched."""

from __future__ import annotations

import asyncio
import socket

import pytest
from google.protobuf import empty_pb2
from grpc import aio

from common.rpc import event_loop
from common.rpc.server import RpcServer, open_channel

CALLS = 200


async def _echoes() -> int:
    """Answer many calls at once, over real gRPC; return how many were answered."""
    server = RpcServer([])
    port = await server.start("127.0.0.1", 0)
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/none/None", empty_pb2.Empty.SerializeToString, empty_pb2.Empty.FromString)
            answers = await asyncio.gather(*(call(empty_pb2.Empty()) for _ in range(CALLS)), return_exceptions=True)
    finally:
        await server.stop(0.0)
    return sum(isinstance(answer, aio.AioRpcError) for answer in answers)


def test_the_installed_grpc_is_recognised_and_left_with_one_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a router under load turns its loop in vain: then this file is to be looked at again."""
    readings = 0
    plain = event_loop._take_all_but_one

    def counted(*arguments: object) -> None:
        nonlocal readings
        readings += 1
        plain(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(event_loop, "_take_all_but_one", counted)
    assert event_loop.run(_echoes()) == CALLS
    assert readings > 0


def test_all_wakes_but_one_are_taken() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.send(b"1" * 100)
        left = []
        event_loop._take_all_but_one(ours, lambda: left.append(ours.recv(100)))
        assert left == [b"1"]


def test_another_reader_is_left_alone() -> None:
    async def body() -> bytes:
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            loop.add_reader(ours, readable.set)
            theirs.send(b"abc")
            await readable.wait()
            loop.remove_reader(ours)
            return ours.recv(100)

    assert event_loop.run(body()) == b"abc"
