"""The address at which others reach this service when no option gives it: a container gets it at run time."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from common.addresses.host_port import joined_address
from common.own_thread import in_own_thread

log = logging.getLogger(__name__)

# Hosts that mean "listen on every address", so no client can use them.
_EVERY_ADDRESS: Final = frozenset({"0.0.0.0", "::", "[::]"})
_RETRY_SECONDS: Final = 1.0


async def reachable_address(host: str, port: int, towards: str, *others: str) -> str:
    """Return HOST:PORT of a service that listens on `host`; for every address, the one on the way `towards` a peer.

    Peers are HOST:PORT; the first whose name can be resolved counts. While there is none this waits.
    """
    if host not in _EVERY_ADDRESS:
        return joined_address(host, port)
    peers, logged = (towards, *others), False
    while True:
        try:
            own = await in_own_thread("own address", _address_towards, peers)
        except OSError as error:
            if not logged:
                names = ", ".join(peers)
                log.warning("%s cannot be found (%s); looking again until it is", names, error)
                logged = True
            await asyncio.sleep(_RETRY_SECONDS)
        else:
            return joined_address(own, port)


def is_this_host(host: str) -> bool:
    """Return whether a host name or address is one of this machine; a name that cannot be resolved is not."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: object) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.bind(address)  # type: ignore[arg-type]
        return True
    return False


def _address_towards(peers: Sequence[str]) -> str:
    """Return the address of this machine that packets to the first peer would have. Raises OSError without a route."""
    failure = OSError("no peer is named")
    for remote in peers:
        try:
            return _route_to(remote)
        except OSError as error:
            failure = error
    raise failure


def _route_to(remote: str) -> str:
    host, _, port = remote.rpartition(":")
    family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing: it only picks the route
        return str(probe.getsockname()[0])
