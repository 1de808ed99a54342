"""The address at which routers reach this worker when no option gives it: a container gets it at run time."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Final

log = logging.getLogger(__name__)

# Hosts that mean "listen on every address", so no client can use them.
_EVERY_ADDRESS: Final = frozenset({"0.0.0.0", "::", "[::]"})
_RETRY_SECONDS: Final = 1.0


async def reachable_address(host: str, port: int, manager: str) -> str:
    """Return HOST:PORT of a worker that listens on `host`; for every address, the one on the way to the manager.

    `manager` is HOST:PORT. While its name cannot be resolved this waits: a worker is of no use before.
    """
    if host not in _EVERY_ADDRESS:
        return f"{host}:{port}"
    logged = False
    while True:
        try:
            own = await asyncio.to_thread(_address_towards, manager)
        except OSError as error:
            if not logged:
                log.warning("the KV manager %s cannot be found (%s); looking again until it is", manager, error)
                logged = True
            await asyncio.sleep(_RETRY_SECONDS)
        else:
            return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"


def _address_towards(remote: str) -> str:
    """Return the address of this machine that packets to HOST:PORT would have. Raises OSError without a route."""
    host, _, port = remote.rpartition(":")
    family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing: it only picks the route
        return str(probe.getsockname()[0])
