"""Statuses that the client's own library loses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import grpc
from grpc import aio

# What grpc.aio says of a write to a stream that the server has ended; it then drops the server's status.
ENDED: Final = "Internal error from Core"


def is_lost(error: aio.AioRpcError) -> bool:
    """Return whether the status is not the server's, so that the call has to be made again to see it."""
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == ENDED


async def refusal_of(call: Callable[[], Awaitable[object]]) -> aio.AioRpcError:
    """Make a call that the server must refuse, again while its status is lost; return the error."""
    while True:
        try:
            await call()
        except asyncio.InvalidStateError:
            continue  # the server had ended the stream before another write to it
        except aio.AioRpcError as error:
            if not is_lost(error):
                return error
        else:
            raise AssertionError("the call was not refused")
