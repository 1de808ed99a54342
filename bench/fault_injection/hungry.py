"""Calls that need memory in the process that answers them: each carries megabytes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.contracts.limits import MAX_PUBLIC_MESSAGE_BYTES

_CALLS: Final = 8
_PAUSE_S: Final = 0.1
_CALL_S: Final = 60.0
HAD_MEMORY: Final = "NOT_FOUND"
"""How a call ends for which there was memory."""
_WORDS: Final = 80  # characters of an error
# Of a message, for what is not the name.
_REST_BYTES: Final = 1 << 10


async def feed(dial: Callable[[], grpc.aio.Channel], became: Counter[str]) -> None:
    """Make such calls until cancelled, so many at once; count in `became` how they end, by status and words.

    Each of them has a channel of its own, which `dial` opens.
    """
    name = "x" * (MAX_PUBLIC_MESSAGE_BYTES - _REST_BYTES)

    async def one() -> None:
        # A health check of a service that nobody has: NOT_FOUND where there is memory to read the name.
        async with dial() as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                try:
                    await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=_CALL_S)
                except grpc.aio.AioRpcError as error:
                    became[f"{error.code().name} ({(error.details() or '-')[:_WORDS]})"] += 1
                await asyncio.sleep(_PAUSE_S)

    await asyncio.gather(*(one() for _ in range(_CALLS)))


def lacked_memory(became: Counter[str]) -> bool:
    """Return whether any of the calls was refused for want of memory."""
    return any(not status.startswith(HAD_MEMORY) for status in became)
