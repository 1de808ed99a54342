"""The client of Redis: lost connections, many calls over few connections, failovers, Sentinels and clusters."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, RedisError, ResponseError

from common.contracts.errors import InvalidConfig
from common.process.local_redis import LocalRedis, find_server
from common.process.ports import free_ports
from common.process.redis_client import CALLS_AT_ONCE, open_redis, refuse_unfit
from tests.support.redis_pair import Pair, running_pair
from tests.support.relay import running_relay
from tests.support.turns import until_blocked
from tests.support.waiting import until

PATIENCE_S = 60.0
REAL_RESOLVE = socket.getaddrinfo


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


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with running_pair() as both:
        yield both


async def test_a_write_that_a_replica_refused_goes_to_the_new_master_next(pair: Pair) -> None:
    async with asyncio.timeout(PATIENCE_S), open_redis(pair.url, PATIENCE_S) as client:
        await client.set("a", "1")
        await pair.fail_over()
        with pytest.raises(ReadOnlyError):
            await client.set("b", "2")
        await client.set("b", "2")
        async with Redis.from_url(pair.second.url) as new:
            assert await new.get("b") == b"2"


async def test_a_script_that_a_replica_refused_goes_to_the_new_master_next(pair: Pair) -> None:
    async with asyncio.timeout(PATIENCE_S), open_redis(pair.url, PATIENCE_S) as client:
        script = client.register_script("return redis.call('SET', KEYS[1], ARGV[1])")
        await script(keys=["a"], args=["1"])
        await pair.fail_over()
        with pytest.raises(ResponseError, match="read only replica"):
            await script(keys=["b"], args=["2"])
        await script(keys=["b"], args=["2"])
        async with Redis.from_url(pair.second.url) as new:
            assert await new.get("b") == b"2"


async def test_a_connection_that_comes_back_while_the_others_end_is_not_used_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(PATIENCE_S), open_redis(redis_url, PATIENCE_S) as client:
        pool: Any = client.connection_pool
        connection, end = await pool.get_connection(), pool.disconnect

        async def disconnect(inuse_connections: bool) -> None:
            await end(inuse_connections=inuse_connections)
            await pool.release(connection)

        monkeypatch.setattr(pool, "disconnect", disconnect)
        await client._leave("is read-only")
        assert not connection.is_connected
        monkeypatch.undo()


async def test_who_only_reads_leaves_a_server_that_became_a_replica(pair: Pair) -> None:
    """Nothing fails there: a replica goes on answering, with what its master had."""
    async with asyncio.timeout(PATIENCE_S), open_redis(pair.url, PATIENCE_S) as client:
        await client.look()
        await pair.fail_over()
        before = pair.relay.connections
        while pair.relay.connections == before:
            await client.get("a")
            await asyncio.sleep(0.02)
        await client.set("b", "2")


async def test_a_server_that_stays_a_replica_is_left_each_time_and_named_once(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """Its name may lead to the new master much later."""
    async with asyncio.timeout(PATIENCE_S), open_redis(pair.url, PATIENCE_S) as client:
        await client.look()
        async with Redis.from_url(pair.first.url) as old:
            await old.replicaof("127.0.0.1", pair.second.port)
            for connections in range(2, 5):
                await client.look()
                assert pair.relay.connections == connections
            await old.replicaof("NO", "ONE")
            await client.look()
            await old.replicaof("127.0.0.1", pair.second.port)
            await client.look()
    assert caplog.messages == [f"the Redis at {pair.url} is a replica now: it is connected anew"] * 2


async def test_a_replica_that_is_read_from_on_purpose_keeps_its_connections(pair: Pair) -> None:
    async with Redis.from_url(pair.first.url) as old:
        await old.replicaof("127.0.0.1", pair.second.port)
    async with asyncio.timeout(PATIENCE_S), open_redis(pair.url, PATIENCE_S) as client:
        for _ in range(3):
            await client.look()
        assert pair.relay.connections == 1


async def test_a_name_that_leads_to_another_address_is_followed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server of before is alone and does not know: it is a master as before, and answers."""
    with LocalRedis() as first, LocalRedis() as second:
        relay = running_relay(lambda: second.port, "127.0.0.2", first.port)
        async with asyncio.timeout(PATIENCE_S), relay:
            now = "127.0.0.1"

            def resolve(host: str | bytes | None, *args: Any, **kwargs: Any) -> Any:
                return REAL_RESOLVE(now if host == "redis.test" else host, *args, **kwargs)

            monkeypatch.setattr(socket, "getaddrinfo", resolve)
            async with open_redis(f"redis://redis.test:{first.port}/0", PATIENCE_S) as client:
                await client.set("a", "1")
                await client.look()
                now = "127.0.0.2"
                await client.look()
                await client.set("b", "2")
        async with Redis.from_url(second.url) as new:
            assert await new.get("b") == b"2"
    assert caplog.messages == [
        f"the Redis at redis://redis.test:{first.port}/0 has another address now: it is connected anew"
    ]


async def test_a_call_that_waits_while_the_server_is_left_is_answered_there_and_none_after_it() -> None:
    asked, answer = asyncio.Event(), asyncio.Event()
    ended = asyncio.Semaphore(0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            words = [(await reader.readline(), await reader.readline())[1] for _ in range(int(head[1:]))]
            if words[0].upper() == b"GET\r\n":
                asked.set()
                await answer.wait()
            refused = words[0].upper() == b"SET\r\n"
            writer.write(b"-READONLY You can't write against a read only replica.\r\n" if refused else b"+OK\r\n")
        writer.close()
        ended.release()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with (
        asyncio.timeout(PATIENCE_S),
        open_redis(f"redis://127.0.0.1:{port}/0?protocol=2", PATIENCE_S) as client,
    ):
        waiting = asyncio.ensure_future(client.get("key"))
        await asked.wait()
        with pytest.raises(ReadOnlyError):
            await client.set("key", "value")
        answer.set()
        assert await waiting == b"OK"
        for _ in range(2):  # that of the write, and that of the call which waited
            await ended.acquire()
    server.close()


# ------------------------------------------------------------ Sentinels and clusters


@contextmanager
def sentinel_of(master: LocalRedis, folder: Path) -> Iterator[int]:
    """Run one Sentinel over a master; gives its port."""
    (port,) = free_ports(1)
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor quire 127.0.0.1 {master.port} 1\n"
        "sentinel down-after-milliseconds quire 500\nsentinel failover-timeout quire 2000\n"
    )
    process = subprocess.Popen([str(find_server()), str(config), "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.kill()
        process.wait()


async def test_sentinels_name_the_master_before_and_after_a_failover(tmp_path: Path) -> None:
    with LocalRedis() as first, LocalRedis() as second, sentinel_of(first, tmp_path) as port:
        async with Redis.from_url(second.url) as replica:
            await replica.replicaof("127.0.0.1", first.port)
        url = f"redis+sentinel://127.0.0.1:{port}/quire/0"
        async with asyncio.timeout(PATIENCE_S), open_redis(url, 5.0) as client:
            await until_written(client, "a")
            async with Redis(port=port) as sentinel:
                replicas = partial(sentinel.sentinel_slaves, "quire")
                await until(replicas, bool, every=0.05, seconds=PATIENCE_S)
            first.kill()
            await until_written(client, "b")
        async with Redis.from_url(second.url) as new:
            assert await new.get("b") == b"1"


async def until_written(client: Redis, key: str) -> None:
    """Write a key, again and again while no server takes it."""
    while True:
        with suppress(RedisError):
            await client.set(key, "1")
            return
        await asyncio.sleep(0.05)


@contextmanager
def cluster_node(folder: Path) -> Iterator[int]:
    port, bus = free_ports(2)
    options = ("--port", port, "--bind", "127.0.0.1", "--cluster-enabled", "yes", "--cluster-port", bus, "--save", "")
    command = [str(find_server()), *map(str, options), "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.kill()
        process.wait()


async def test_a_node_of_a_cluster_is_refused_in_words(tmp_path: Path) -> None:
    with cluster_node(tmp_path) as port:
        url = f"redis://127.0.0.1:{port}/0"
        async with asyncio.timeout(PATIENCE_S), open_redis(url, PATIENCE_S) as client:
            words = ""
            while not words:
                try:
                    await refuse_unfit(client)
                    await asyncio.sleep(0.05)
                except InvalidConfig as error:
                    words = str(error)
            assert f"what answers at {url} is a node of a Redis Cluster" in words
            with pytest.raises(ResponseError, match="is a node of a Redis Cluster"):
                await client.set("key", "value")


async def test_a_sentinel_is_no_server(tmp_path: Path) -> None:
    with LocalRedis() as master, sentinel_of(master, tmp_path) as port:
        async with asyncio.timeout(PATIENCE_S), open_redis(f"redis://127.0.0.1:{port}/0", PATIENCE_S) as client:
            while not client.unfit:
                with suppress(RedisError):
                    await client.look()
            with pytest.raises(InvalidConfig, match=r"is a Sentinel, which keeps no keys; give .*redis\+sentinel://"):
                await refuse_unfit(client)


async def test_a_server_that_is_fit_or_away_is_not_refused(redis_url: str) -> None:
    for url in (redis_url, "redis://127.0.0.1:1/0"):
        async with open_redis(url, PATIENCE_S) as client:
            await refuse_unfit(client)
