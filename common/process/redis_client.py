"""Clients of Redis, the same in every service."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ClusterDownError, MasterDownError, MovedError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from common.addresses.host_port import is_sentinel_url, sentinel_url, without_login
from common.contracts.errors import FieldViolation, InvalidConfig
from common.own_thread import in_own_thread

log = logging.getLogger(__name__)

# The pool of a client refuses a call when 100 connections are in use, as if Redis did not answer.
CALLS_AT_ONCE: Final = 64
# Seconds between two looks at whether the connections still lead to the server that the URL means: less than the pause
# of the router's discovery, each of whose calls looks.
LOOK_S: Final = 0.9
_LOOK_LIMIT_S: Final = 5.0
_MODES: Final = {
    "cluster": "is a node of a Redis Cluster, whose keys lie on several servers",
    "sentinel": "is a Sentinel, which keeps no keys",
}
_INSTEAD: Final = "give the URL of one server, or redis+sentinel://HOST:PORT,HOST:PORT/SERVICE"


def open_redis(url: str, timeout: float, ca: Path | None = None) -> QuireRedis:
    """Return a client whose values are bytes, without retries; it connects on first use.

    `timeout` is in seconds, of a connection's start and of each answer. `ca` is for TLS. Connections that lead to a
    server which is no longer a master, or is not the one that the URL's name means now, are made anew.
    """
    options: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "retry": Retry(NoBackoff(), 0),
        "decode_responses": False,
        **redis_tls(ca),
    }
    client = (
        _of_sentinels(url, options) if is_sentinel_url(url) else cast("QuireRedis", QuireRedis.from_url(url, **options))
    )
    client.url = without_login(url)
    return client


def _of_sentinels(url: str, options: Mapping[str, Any]) -> QuireRedis:
    """Return a client of the master that Sentinels name; each new connection asks them again."""
    found = sentinel_url(url)
    own = dict(options) | ({"ssl": True} if found.tls else {})
    asked = own | {"username": found.sentinel_username, "password": found.sentinel_password}
    sentinel = Sentinel(found.sentinels, sentinel_kwargs=asked)  # type: ignore[no-untyped-call]
    own |= {"username": found.username, "password": found.password, "db": found.db}
    client = sentinel.master_for(found.service, redis_class=QuireRedis, **own)
    return cast("QuireRedis", client)


def redis_tls(ca: Path | None) -> dict[str, Any]:
    """Return the arguments that make a client trust the CA in a PEM file; without one it trusts what Python trusts."""
    return {} if ca is None else {"ssl_ca_certs": str(ca)}


async def refuse_unfit(redis: QuireRedis, seconds: float = 2.0) -> None:
    """Raise InvalidConfig for a Redis Cluster or a Sentinel. One that does not answer in time may be fit."""
    with suppress(RedisError, OSError, TimeoutError):
        async with asyncio.timeout(seconds):
            await redis.look()
    if redis.unfit:
        raise InvalidConfig(FieldViolation("--redis-url", redis.unfit))


class QuireRedis(Redis):
    """Sends CALLS_AT_ONCE calls at once, pipelines aside; others wait for their turn.

    It raises ConnectionError for a connection that the kernel has given up, as the one to a host beyond a partition:
    uvloop raises RuntimeError when something is written to it, and redis-py passes that on.

    A failover leaves connections as they are: to a server that is a replica now, or that has lost its name to another.
    So calls look, every LOOK_S and after them, at the server's role and at the addresses of the name. `unfit` says why
    the server cannot be used at all ("": it can).
    """

    url = ""
    unfit = ""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._turns = asyncio.Semaphore(CALLS_AT_ONCE)
        self._looked = float("-inf")
        self._looking: asyncio.Task[None] | None = None
        self._closed = False
        self._was_master, self._addresses = False, frozenset[str]()
        self._said = ""  # why the server was left last, until it is a master again

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            async with self._turns:
                return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise RedisConnectionError(f"the connection is lost: {error}") from error
        except ResponseError as error:
            if _is_of_a_replica(error):
                await self._leave("is read-only")
            if isinstance(error, MovedError | ClusterDownError):
                raise ResponseError(self._unfit_words("cluster")) from error
            raise
        finally:
            self._look_sometimes()  # after the call, so that its connection is the one that is looked at

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        await super().aclose(close_connection_pool)
        if isinstance(self.connection_pool, SentinelConnectionPool):
            for sentinel in self.connection_pool.sentinel_manager.sentinels:
                await sentinel.aclose()

    # ------------------------------------------------------------ looking

    def _look_sometimes(self) -> None:
        now = time.monotonic()
        if self._closed or now - self._looked < LOOK_S or (self._looking is not None and not self._looking.done()):
            return
        self._looked, self._looking = now, asyncio.create_task(self._look_in_time())

    async def _look_in_time(self) -> None:
        with suppress(RedisError, OSError, TimeoutError, RuntimeError):
            async with asyncio.timeout(_LOOK_LIMIT_S):
                await self.look()

    async def look(self) -> None:
        """Ask the server what it is, and the resolver where its name leads; leave a server that is not meant."""
        addresses = await self._resolved()
        if addresses and self._addresses and not addresses & self._addresses:
            await self._leave("has another address now")
        self._addresses = addresses or self._addresses
        said = await self._hello()
        if said.get("role") == "master":
            self._was_master, self._said = True, ""
        before, self.unfit = self.unfit, self._unfit_words(said.get("mode", ""))
        if self.unfit and not before:
            log.error("%s", self.unfit)
        # One that never was a master is read from on purpose.
        if self._was_master and said.get("role") in ("replica", "slave"):
            await self._leave("is a replica now")
            await self._hello()  # connects anew, so that the next call need not

    async def _hello(self) -> dict[str, str]:
        async with self._turns:
            return _words(await super().execute_command("HELLO"))  # type: ignore[no-untyped-call]

    async def _resolved(self) -> frozenset[str]:
        """Return the addresses that the URL leads to: by its host's name, or by Sentinels. None for others."""
        pool = self.connection_pool
        if isinstance(pool, SentinelConnectionPool):
            return frozenset({str(await pool.sentinel_manager.discover_master(pool.service_name))})
        host = pool.connection_kwargs.get("host")
        if not isinstance(host, str) or _is_address(host):
            return frozenset()
        found = await in_own_thread("redis address", socket.getaddrinfo, host, None, 0, socket.SOCK_STREAM)
        return frozenset(str(each[4][0]) for each in found)

    async def _leave(self, why: str) -> None:
        """End the connections, each after its call; the next calls make new ones, to where the URL leads now."""
        if why != self._said:
            log.warning("the Redis at %s %s: it is connected anew", self.url, why)
        self._said = why
        pool: Any = self.connection_pool
        mark = getattr(pool, "update_active_connections_for_reconnect", None)  # redis-py has it from 7 on
        with suppress(RedisError, OSError, RuntimeError):
            if mark is not None:  # before the others end: meanwhile one that is in use may become one of them
                await mark()
            await pool.disconnect(inuse_connections=mark is None)

    def _unfit_words(self, mode: str) -> str:
        return f"what answers at {self.url} {_MODES[mode]}; {_INSTEAD}" if mode in _MODES else ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_of_a_replica(error: ResponseError) -> bool:
    """Return whether a replica refused a write, or answers nothing without its master. Scripts quote the first."""
    return isinstance(error, ReadOnlyError | MasterDownError) or "READONLY " in str(error)


def _words(answer: Any) -> dict[str, str]:
    """Return the texts in an answer to HELLO: a map, or names and values in turn before RESP 3."""
    pairs = answer.items() if isinstance(answer, Mapping) else zip(answer[::2], answer[1::2], strict=False)
    texts = ((name, value) for name, value in pairs if isinstance(name, bytes) and isinstance(value, bytes))
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, value in texts}
