"""Clients of Redis, the same in every service."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

# The pool of a client refuses a call when 100 connections are in use, as if Redis did not answer.
CALLS_AT_ONCE: Final = 64


def open_redis(url: str, timeout: float, ca: Path | None = None) -> Redis:
    """Return a client whose values are bytes, without retries; it connects on first use.

    `timeout` is in seconds, of a connection's start and of each answer. `ca` is for `rediss://`.
    """
    return _Client.from_url(
        url,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        retry=Retry(NoBackoff(), 0),
        decode_responses=False,
        **redis_tls(ca),
    )


def redis_tls(ca: Path | None) -> dict[str, Any]:
    """Return the arguments that make a client trust the CA in a PEM file; without one it trusts what Python trusts."""
    return {} if ca is None else {"ssl_ca_certs": str(ca)}


class _Client(Redis):
    """Sends CALLS_AT_ONCE calls at once, pipelines aside; others wait for their turn.

    It raises ConnectionError for a connection that the kernel has given up, as the one to a host beyond a partition:
    uvloop raises RuntimeError when something is written to it, and redis-py passes that on.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._turns = asyncio.Semaphore(CALLS_AT_ONCE)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            async with self._turns:
                return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise RedisConnectionError(f"the connection is lost: {error}") from error
