"""The client of Redis: each lost connection is one kind of error, and many calls share few connections."""

from __future__ import annotations

import asyncio

import pytest
import uvloop
from redis.exceptions import ConnectionError as RedisConnectionError

from common.process.redis_client import CALLS_AT_ONCE, open_redis
from tests.support.turns import until_blocked


def test_a_connection_that_the_event_loop_has_closed_is_a_lost_one(redis_url: str) -> None:
    async def lose() -> None:
        async with open_redis(redis_url, 60.0) as client:
            await client.set("key", "value")
            (connection,) = client.connection_pool._available_connections
            assert connection._writer is not None
            connection._writer.transport.abort()  # what a keepalive does when the other host is beyond reach
            with pytest.raises(RedisConnectionError, match="lost"):
                await client.get("key")
            assert await client.get("key") == b"value"

    uvloop.run(lose())


async def test_more_calls_at_once_than_connections_wait_for_their_turn() -> None:
    """Each connection is another file descriptor of Redis, and a refused call would count as a Redis that is down."""
    answer, connections, asked = asyncio.Event(), 0, asyncio.Semaphore(0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while head := await reader.readline():
            words = [(await reader.readline(), await reader.readline())[1] for _ in range(int(head[1:]))]
            if words[0].upper() == b"GET\r\n":
                asked.release()
                await answer.wait()
            writer.write(b"+OK\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with asyncio.timeout(60.0), open_redis(f"redis://127.0.0.1:{port}/0?protocol=2", 60.0) as client:
        calls = [asyncio.ensure_future(client.get("key")) for _ in range(300)]
        for _ in range(CALLS_AT_ONCE):
            await asked.acquire()
        answer.set()
        assert await asyncio.gather(*calls) == [b"OK"] * 300
    assert connections <= CALLS_AT_ONCE
    server.close()


async def test_a_call_that_is_cancelled_while_it_waits_takes_no_turn(redis_url: str) -> None:
    async with asyncio.timeout(60.0), open_redis(redis_url, 60.0) as client:
        for _ in range(3):
            calls = [asyncio.ensure_future(client.get("key")) for _ in range(4 * CALLS_AT_ONCE)]
            await until_blocked(*calls)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        assert (
            await asyncio.gather(*(client.get("key") for _ in range(4 * CALLS_AT_ONCE))) == [None] * 4 * CALLS_AT_ONCE
        )
