"""The client of Redis tells of a lost connection in one way, whatever the event loop makes of it."""

from __future__ import annotations

import pytest
import uvloop
from redis.exceptions import ConnectionError as RedisConnectionError

from common.process.redis_client import open_redis


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
