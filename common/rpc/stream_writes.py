"""Writes to a stream that its other end may have ended.

grpc.aio takes a write that comes too late for an error of its own. It ends the call as INTERNAL, drops what has come
and was not read, and hides the reason that the other end gave. So a write here goes to gRPC's core, below that rule.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

from google.protobuf.message import Message
from grpc import aio

from common.rpc.grpc_internals import core_of

StreamCall: TypeAlias = "aio.StreamStreamCall[Any, Any]"


async def write(call: StreamCall, message: Message) -> bool:
    """Send a message; return False when the call has ended: reads return what came before that, then raise the reason.

    A call has one writer; two writes at once end it.
    """
    try:
        if call.done():
            return False
        await call.wait_for_connection()
        core = core_of(call)
        if core is None:
            await call.write(message)
        else:
            await core.send_serialized_message(message.SerializeToString())
    except (aio.AioRpcError, aio.InternalError, asyncio.InvalidStateError):
        return False
    return True
