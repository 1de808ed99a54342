"""Two Redis servers behind one address, and a failover from one to the other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from redis.asyncio import Redis

from common.process.local_redis import LocalRedis
from tests.support.relay import Relay, running_relay


@dataclass
class Pair:
    """A port leads to the first server until `fail_over` makes the second one the master."""

    first: LocalRedis
    second: LocalRedis
    relay: Relay

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.relay.port}/0"

    async def fail_over(self) -> None:
        """Make the first a replica, which keeps its connections, and lead new ones to the second."""
        async with Redis.from_url(self.first.url) as old:
            await old.replicaof("127.0.0.1", self.second.port)
        self.relay.target = lambda: self.second.port


@asynccontextmanager
async def running_pair() -> AsyncIterator[Pair]:
    with LocalRedis() as first, LocalRedis() as second:
        async with running_relay(lambda: first.port) as relay:
            yield Pair(first, second, relay)
