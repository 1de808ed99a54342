"""How a router ends: where its clients go, which calls it still serves, and when it refuses.

Beside other routers on the same ports, the clients are to go to these, and no call is to fail that one of them could
serve. gRPC's own way is GOAWAY, and a call that crosses it is CANCELLED, which clients do not send again. So GOAWAY
comes last:

1. For a second this router serves as before, while it closes its ports, and each connection at a moment without calls.
2. For another second it refuses new calls as UNAVAILABLE: connections with many short calls get such a moment.
3. GOAWAY moves the clients whose connections carry long calls. These calls go on. New ones of the last moments before
   it are answered after it.

Without others, step 1 and 2 are left out, and gRPC's way comes after the last call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from common.rpc.server import RpcServer
from router.api.grpc.admin import AdminPlane
from router.api.http.http_server import HttpServer
from router.requests.frontend import RouterFrontend

log = logging.getLogger(__name__)

_LAST_REPLIES_S: Final = 0.5
# Each of the first two steps, and their share of the time for a drain.
_STEP_S: Final = 1.0
_STEP_SHARE: Final = 0.1
# For which calls are held before GOAWAY.
_HOLD_S: Final = 0.3


@dataclass(frozen=True, slots=True)
class Servers:
    """What listens. `http` is None before it does."""

    rpc: RpcServer
    admin: AdminPlane
    http: HttpServer | None


async def drain(
    servers: Servers,
    frontend: RouterFrontend,
    seconds: float,
    shared: bool,
    requests_ended: Callable[[], Awaitable[None]],
) -> None:
    """Let what runs finish for so many seconds, and close everything that listens.

    `shared`: other routers may listen on the same ports. `requests_ended` is awaited before the last connections end.
    """
    frontend.leaving = True
    both = servers.rpc, servers.admin.rpc
    await asyncio.gather(*(each.health.drain() for each in both))
    left, closing = seconds, None
    if shared:
        left -= await _leave_to_others(servers, frontend, seconds)
        closing = asyncio.create_task(_send_away(servers, left))
    if not await frontend.drain_requests(left):
        log.warning("stopping although some requests have not finished")
    await requests_ended()
    # Time for the last statuses to leave; health watchers are not waited for.
    await asyncio.gather(*(each.end_connections(_LAST_REPLIES_S) for each in both))
    await _close(servers, _LAST_REPLIES_S)
    if closing is not None:
        await closing


async def _leave_to_others(servers: Servers, frontend: RouterFrontend, seconds: float) -> float:
    """Let the clients go to the other routers; return the seconds that it took."""
    loop = asyncio.get_running_loop()
    began, step = loop.time(), min(_STEP_S, _STEP_SHARE * seconds)
    leaving = {asyncio.create_task(servers.rpc.leave_to_others(step))}
    if servers.http is not None:
        leaving.add(asyncio.create_task(servers.http.stop()))
        # Connections without a request have ended then, and others end after it: none brings one that is refused.
        await servers.http.leaving.wait()
    await asyncio.wait(leaving, timeout=step)
    frontend.draining = True
    await servers.rpc.leave_to_others(step)
    return loop.time() - began


async def _send_away(servers: Servers, grace: float) -> None:
    await asyncio.gather(servers.rpc.send_away(grace, min(_HOLD_S, _STEP_SHARE * grace)), servers.admin.stop(grace))


async def _close(servers: Servers, grace: float) -> None:
    """Stop listening, on HTTP first; running calls have `grace` seconds."""
    stops = [servers.rpc.stop(grace), servers.admin.stop(grace)]
    if servers.http is not None:
        stops.insert(0, servers.http.stop())
    await asyncio.gather(*stops)
