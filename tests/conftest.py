"""Fixtures for every test: a real Redis, and an environment without the options of whoever runs the tests."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import pytest
import redis
from redis.asyncio import Redis

from common.process.local_redis import LocalRedis

# Whether a client that is not installed is a failure (.ci/run) or a reason to skip: see tests/suites/clients/served.py.
if "QUIRE_ALL_CLIENTS" in os.environ:
    os.environ["PYTEST_ALL_CLIENTS"] = os.environ["QUIRE_ALL_CLIENTS"]
for _name in [name for name in os.environ if name == "REDIS_URL" or name.startswith(("QUIRE_", "OTEL_"))]:
    del os.environ[_name]


@pytest.fixture(scope="session")
def redis_server() -> Iterator[LocalRedis]:
    """One server for the whole run of this process; a test that kills it must start it again."""
    with LocalRedis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: LocalRedis) -> str:
    """The URL of a Redis that is empty when the test starts."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
async def redis_client(redis_url: str) -> AsyncIterator[Redis]:
    """A client of an empty Redis; values are bytes."""
    async with Redis.from_url(redis_url) as client:
        yield client
