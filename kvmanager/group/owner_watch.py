"""Watches the owner of a lease, and tells for certain that its process has ended.

Certain are two observations: nothing listens at the owner's address any more, or another process does. They count
only after this owner has answered at that address: else the address may be wrong, or a firewall may refuse it. A
connection that breaks or times out is none: the owner may be hung, or the network between may be cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from grpc import aio

from common.rpc.server import Dial
from kvmanager.group.leadership import Lease
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc

_PAUSE_S: Final = 0.05
_CONNECT_S: Final = 1.0


async def owner_gone(lease: Lease, dial: Dial, resigned: Callable[[], None]) -> None:
    """Return once the owner's process has ended for certain. `resigned` is called when the owner stops leading."""
    met = False
    while True:
        answered = await _answered(lease, dial, resigned)
        met = met or lease.owner in answered
        if met and (answered - {lease.owner} or await nothing_listens(lease.address)):
            return
        await asyncio.sleep(_PAUSE_S)


async def _answered(lease: Lease, dial: Dial, resigned: Callable[[], None]) -> set[str]:
    """Follow the process at the owner's address until the stream breaks; return who answered there.

    The stream ends here when another process answers.
    """
    answered: set[str] = set()
    async with dial(lease.address) as channel:
        call = kvmanager_pb2_grpc.KvManagerServiceStub(channel).WatchLeader(kvmanager_pb2.WatchLeaderRequest())
        with suppress(aio.AioRpcError):
            async for response in call:
                answered.add(response.owner)
                if response.owner != lease.owner:
                    break
                if not response.leads:
                    resigned()
    return answered


async def nothing_listens(address: str) -> bool:
    """Return whether the machine at HOST:PORT answers that no process listens there."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False
