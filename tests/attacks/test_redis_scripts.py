"""A script without end, by the user of a router gone bad: Redis runs one at a time, and nobody else is answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from redis.exceptions import NoPermissionError, RedisError

from common.process.local_redis import LocalRedis
from common.process.redis_client import QuireRedis, open_redis
from common.process.redis_users import RedisUsers
from kvmanager.contracts.ports import IndexUnavailable
from kvmanager.index.store import RedisIndexStore
from tests.support.waiting import PATIENCE_S, until

ENDLESS = "while true do end"


class ImpatientRedis(LocalRedis):
    """It says after a tenth of a second, in place of five, that a script takes long; before that it says nothing."""

    def argv(self) -> list[str]:
        return [*super().argv(), "--lua-time-limit", "100"]


@dataclass(frozen=True)
class Attacked:
    """A Redis whose rules are those of a suite; a script runs in it for the router."""

    redis: ImpatientRedis
    script: asyncio.Future[Any]
    operator: QuireRedis


@pytest_asyncio.fixture
async def attacked(tmp_path: Path) -> AsyncIterator[Attacked]:
    users = RedisUsers()
    with ImpatientRedis(users=users, acl_file=users.write_acl(tmp_path / "users.acl")) as redis:
        async with (
            open_redis(redis.urls.router, 600.0) as router,
            open_redis(redis.urls.operator, PATIENCE_S) as operator,
        ):
            script = asyncio.ensure_future(router.eval_ro(ENDLESS, 0))
            yield Attacked(redis, script, operator)
            with suppress(RedisError):
                await operator.execute_command("SCRIPT", "KILL")
            with suppress(RedisError):
                await script


async def test_the_index_is_unavailable_until_an_operator_ends_the_script(attacked: Attacked) -> None:
    operator = attacked.operator
    await until(partial(says, operator, "PING"), lambda said: said.startswith("BUSY"))
    async with open_redis(attacked.redis.urls.manager, PATIENCE_S) as manager:
        store = RedisIndexStore(manager, "{quire:m:t:16}", 60.0, 5.0, lambda: 0)
        with pytest.raises(IndexUnavailable, match=r"^BUSY"):
            await store.acquire(1, 0)
        assert await says(operator, "SCRIPT", "KILL") == ""
        with pytest.raises(RedisError, match="killed by user"):
            await attacked.script  # Redis answers the operator first, and refuses others until the script has ended
        assert await store.acquire(1, 0) == 1


async def test_no_service_ends_scripts_of_others(attacked: Attacked) -> None:
    """On a Redis that others use too, it would end theirs."""
    for url in (attacked.redis.urls.manager, attacked.redis.urls.router):
        async with open_redis(url, PATIENCE_S) as redis:
            with pytest.raises(NoPermissionError):
                await redis.execute_command("SCRIPT", "KILL")


async def says(redis: QuireRedis, *command: str) -> str:
    """Return Redis's error; "" without one."""
    try:
        await redis.execute_command(*command)
    except RedisError as error:
        return str(error)
    return ""
