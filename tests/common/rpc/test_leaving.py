"""A server that leaves its clients to other processes on its port: which connections end when, and what calls get."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc import aio

from common.contracts.errors import Unavailable
from tests.common.rpc.test_connections import LINUX, dialled, method, served
from tests.support.waiting import until

LONG = 60.0


async def refused(channel: aio.Channel) -> aio.AioRpcError:
    with pytest.raises(aio.AioRpcError) as caught:
        await method(channel)(b"")
    return caught.value


@LINUX
async def test_a_connection_without_a_call_ends_at_once_and_nobody_can_connect() -> None:
    rpc, _ = await served()
    async with dialled(rpc) as channel:
        assert await method(channel)(b"") == b"answer"
        await until(lambda: not rpc._calls.by_port)
        await rpc.leave_to_others(LONG)  # it returns because no connection is left
        assert (await refused(channel)).code() is grpc.StatusCode.UNAVAILABLE
    await rpc.stop(0.0)


@LINUX
async def test_a_connection_with_a_call_is_served_until_the_call_ends() -> None:
    rpc, handler = await served()
    handler.go_on.clear()
    async with dialled(rpc) as channel:
        first = asyncio.ensure_future(method(channel)(b""))
        await until(lambda: handler.inside == 1)
        leaving = asyncio.create_task(rpc.leave_to_others(LONG))
        second = asyncio.ensure_future(method(channel)(b""))
        await until(lambda: handler.inside == 2)
        assert sum(rpc._calls.by_port.values()) == 2
        handler.go_on.set()
        assert (await first, await second) == (b"answer", b"answer")
        await leaving
        assert not rpc._calls.by_port
    await rpc.stop(0.0)


@LINUX
async def test_what_the_wait_is_too_short_for_stays() -> None:
    rpc, handler = await served()
    handler.go_on.clear()
    async with dialled(rpc) as channel:
        running = asyncio.ensure_future(method(channel)(b""))
        await until(lambda: handler.inside == 1)
        await rpc.leave_to_others(0.0)
        handler.go_on.set()
        assert await running == b"answer"
    await rpc.stop(0.0)


async def test_a_call_that_comes_just_before_goaway_is_refused_and_not_cancelled() -> None:
    rpc, handler = await served()
    handler.go_on.clear()
    async with dialled(rpc) as channel:
        running = asyncio.ensure_future(method(channel)(b""))
        await until(lambda: handler.inside == 1)
        handler.draining = True
        rpc._calls.hold()  # as `send_away` does first
        held = asyncio.ensure_future(refused(channel))
        await until(lambda: sum(rpc._calls.by_port.values()) == 2)
        assert not held.done()
        away = asyncio.create_task(rpc.send_away(LONG, 0.0))
        error = await held
        assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "draining")
        handler.go_on.set()
        assert await running == b"answer"
        await away
        assert handler.inside == 1


async def test_a_server_that_goes_on_after_all_holds_no_call() -> None:
    rpc, _ = await served()
    stopped = asyncio.Event()

    async def fails(grace: float) -> None:
        stopped.set()
        raise Unavailable("health cannot be told")

    rpc.stop = fails  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await rpc.send_away(LONG, 0.0)
    assert stopped.is_set()
    async with dialled(rpc) as channel:
        assert await method(channel)(b"") == b"answer"
    await rpc.server.stop(0.0)
