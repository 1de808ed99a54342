"""The users of Redis: the rules load in real servers, and the services' own code gets along with them.

The servers are the bundled one, and Debian's in plain text and over TLS.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from common.contracts.clock import SystemClock
from common.contracts.index_format import pack_entry, prefix_key_root
from common.contracts.types import BlockHash, KvGeometry, PoolIdentity
from common.process.local_redis import LocalRedis
from common.process.redis_client import open_redis, redis_tls
from common.process.redis_users import RedisUrls, RedisUsers, write_secrets
from kvmanager.contracts.ports import IndexCall, IndexUnavailable, WorkerEntry
from kvmanager.index.store import TIMEOUT_S, RedisIndexStore
from router.api.openai.responses.store import RedisStore, StoreLimits
from router.placement.shared_load import SharedLoad
from router.requests.redis_prefix_index import RedisPrefixIndex
from router.workers.load_sharing import LoadSharing, load_key
from tests.support.debian_redis import INSTALLED, NOT_INSTALLED, DebianRedis, redis_leaf
from tests.support.router.known_router import KnownRouter

IDENTITY = PoolIdentity("m" * 32, "t" * 32, 16, KvGeometry(2, 1, 8, 8, "float32"))
HASH = BlockHash(bytes(16))
PATIENCE_S = 60.0
REFUSED = r"(?i)no permissions|not allowed|can.t run this command|can.t access at least one of the keys"


needs_debians = pytest.mark.skipif(INSTALLED is None, reason=NOT_INSTALLED)
SERVERS = ["bundled", pytest.param("Debian", marks=needs_debians), pytest.param("Debian over TLS", marks=needs_debians)]


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRedis]:
    users, folder = RedisUsers(), tmp_path_factory.mktemp("redis")
    made: dict[str, Callable[[], LocalRedis]] = {
        "bundled": lambda: LocalRedis(users=users, acl_file=users.write_acl(folder / "redis.acl")),
        "Debian": lambda: DebianRedis(folder, users),
        "Debian over TLS": lambda: DebianRedis(folder, users, redis_leaf(folder)),
    }
    with made[request.param]() as running:
        yield running


def ca_of(server: LocalRedis) -> Path | None:
    return server.ca if isinstance(server, DebianRedis) else None


async def test_each_service_can_do_its_work(server: LocalRedis) -> None:
    store = RedisIndexStore(open_redis(server.urls.manager, TIMEOUT_S, ca_of(server)), IDENTITY.namespace, 60.0, 5.0)
    client = open_redis(server.urls.router, PATIENCE_S, ca_of(server))
    index = RedisPrefixIndex(client, KnownRouter(IDENTITY), SystemClock(), PATIENCE_S)
    try:
        epoch = await store.acquire(1, 0)
        slot = await store.register(epoch, WorkerEntry("w0", "00", "127.0.0.1:1", 7))
        assert slot == 0
        await store.update(epoch, slot, 7, IndexCall((), (HASH,)))
        await store.renew(epoch, {slot: 7}, {"w0": "{}"})
        assert (await index.lookup([HASH])).hits == {"w0": 1}
        await store.update(epoch, slot, 7, IndexCall((HASH,), ()))
        await store.retire(epoch, slot, 7, "w0")
        await store.write_pins(epoch, b"pins")
        found = await store.read_pins(100)
        assert (found and found.value, await store.has_pins()) == (b"pins", True)
        await store.write_pins(epoch, b"")
        assert await store.read_pins(100) is None
    finally:
        await store.close()
        await client.aclose()


async def test_the_router_keeps_responses(server: LocalRedis) -> None:
    client = open_redis(server.urls.router, PATIENCE_S, ca_of(server))
    try:
        store = RedisStore(client, StoreLimits(entries=2, entries_of_tenant=1), SystemClock())
        for tenant in ("a", "b", "c"):
            for name in ("first", "second"):
                await store.put(tenant, name, b"kept")
        assert await store.get("c", "second") == b"kept"
        assert await store.get("c", "first") is None
        async with Redis.from_url(server.urls.manager, **redis_tls(ca_of(server))) as manager:
            with pytest.raises(NoPermissionError):
                await manager.get("quire-responses:held")
        assert await store.delete("c", "second")
    finally:
        await client.aclose()


async def test_routers_tell_each_other_of_their_load(server: LocalRedis) -> None:
    client, clock = open_redis(server.urls.router, PATIENCE_S, ca_of(server)), SystemClock()
    pool = KnownRouter(replace(IDENTITY, arithmetic="a", pooling="none"))
    first, second = SharedLoad(b"a" * 8), SharedLoad(b"b" * 8)
    try:
        first.join("w0", b"i").set_own(3, 120)
        await LoadSharing(client, pool, first, clock).exchange()
        await LoadSharing(client, pool, second, clock).exchange()
        assert second.join("w0", b"i").sequences == 3
        async with Redis.from_url(server.urls.manager, **redis_tls(ca_of(server))) as manager:
            with pytest.raises(NoPermissionError):
                await manager.xadd(load_key(pool.identity.namespace), {"n": b"forged"})
    finally:
        await client.aclose()


async def test_no_service_can_write_for_another(server: LocalRedis) -> None:
    async with Redis.from_url(server.urls.router, **redis_tls(ca_of(server))) as router:
        with pytest.raises(NoPermissionError):
            await router.set(prefix_key_root(IDENTITY.namespace) + HASH, pack_entry(0, 7))
        for script in ("return redis.call('KEYS', '*')", "return redis.call('SET', 'quire:a', 'b')"):
            with pytest.raises(redis.ResponseError, match=REFUSED):
                await router.eval_ro(script, 0)
            with pytest.raises(redis.ResponseError, match=REFUSED):
                await router.eval(script, 0)
    stranger = RedisIndexStore(open_redis(server.urls.router, TIMEOUT_S, ca_of(server)), IDENTITY.namespace, 60.0, 5.0)
    try:
        with pytest.raises(IndexUnavailable):
            await stranger.acquire(1, 0)
    finally:
        await stranger.close()


def test_who_has_no_password_can_ping_and_nothing_else(server: LocalRedis) -> None:
    tls = redis_tls(ca_of(server))
    with redis.Redis.from_url(server.url, **tls) as nobody:
        assert nobody.ping()
        for command in ("INFO", "CONFIG GET *", "KEYS *", "GET quire:discovery:workers"):
            with pytest.raises(NoPermissionError):
                nobody.execute_command(*command.split())
    with pytest.raises(redis.AuthenticationError), redis.Redis.from_url(server.url, username="manager", **tls) as guess:
        guess.ping()


def test_secrets_are_written_once_and_for_their_owner_alone(tmp_path: Path) -> None:
    assert write_secrets(tmp_path, "redis:6379")
    files = {str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*") if path.is_file()}
    assert sorted(files) == [
        "manager/pool-key", "manager/redis-url", "operator/redis-url", "redis/users.acl", "router/pool-key",
        "router/redis-url",
    ]  # fmt: skip
    before = {name: path.read_text() for name, path in files.items()}
    assert before["manager/pool-key"] == before["router/pool-key"]
    assert before["manager/redis-url"].startswith("redis://manager:")
    assert before["manager/redis-url"].endswith("@redis:6379/0")
    for name, path in files.items():
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        password = before["manager/redis-url"].split(":")[2].partition("@")[0]
        assert (password in before[name]) == (name == "manager/redis-url")
    assert not write_secrets(tmp_path, "redis:6379")
    assert {name: path.read_text() for name, path in files.items()} == before


def test_passwords_do_not_show_when_they_are_printed() -> None:
    users = RedisUsers()
    assert not [word for word in users.passwords.values() if word in repr(users)]
    urls = RedisUrls.of(users, "127.0.0.1:6379")
    assert not [word for word in users.passwords.values() if word in repr(urls)]
