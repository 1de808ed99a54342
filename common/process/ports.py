"""Free ports of this machine for services that somebody else starts, and sockets that listen."""

from __future__ import annotations

import errno
import itertools
import os
import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Final

# Below the ports that systems give to outgoing connections (32,768 on Linux). A service derives further ports from its
# own: of its workers, the next ones; of the metrics of each, the one 1,000 above. No candidate is one of those of
# another, up to 8 workers.
CANDIDATES: Final = range(20_000, 32_000, 12)

_CLAIMED_AT: Final = "127.0.0.1"
# By then the owner of a port listens, or will not.
_CLAIMS: Final = 64

_count = itertools.count(1)
_last_picked: dict[int, int] = {}
# File descriptors by port: the system closes them when the process ends.
_claims: dict[int, int] = {}


def free_ports(count: int, hosts: Sequence[str] = ("127.0.0.1",)) -> list[int]:
    """Return different ports that are free now at each host. A program that calls no such function may take one yet.

    A port that this process has picked is the last to be picked again: its owner may not listen yet. Other processes
    that pick here leave the latest of them alone.
    """
    shuffled = random.SystemRandom().sample(CANDIDATES, len(CANDIDATES))
    ports: list[int] = []
    with ExitStack() as held:
        for port in sorted(shuffled, key=lambda port: _last_picked.get(port, 0)):
            if len(ports) == count:
                break
            with suppress(OSError):
                for host in hosts:
                    held.enter_context(socket.socket(family_of(host))).bind((host, port))
                _claim(port)
                ports.append(port)
                _last_picked[port] = next(_count)
    if len(ports) < count:
        raise OSError(errno.EADDRINUSE, f"fewer than {count} ports from {CANDIDATES[0]} to {CANDIDATES[-1]} are free")
    return ports


def _claim(port: int) -> None:
    """Hold a UDP port of the same number, on which nothing here listens. Raises OSError when another process does.

    Where there is no such port, as on a host of IPv6 alone, there is no claim.
    """
    claim = _claims.pop(port, None)
    if claim is None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
            try:
                made.bind((_CLAIMED_AT, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise
                return
            claim = made.detach()
    _claims[port] = claim
    while len(_claims) > _CLAIMS:
        os.close(_claims.pop(next(iter(_claims))))


def family_of(host: str) -> socket.AddressFamily:
    """Return the family in which a host is listened on: that of an address, of a name IPv4 if it has any."""
    if ":" in host:
        return socket.AF_INET6
    with suppress(OSError):
        found = {each[0] for each in socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM)}
        return socket.AF_INET6 if found == {socket.AF_INET6} else socket.AF_INET
    return socket.AF_INET


def listener(host: str, port: int, backlog: int = 100, reuse_port: bool = False) -> socket.socket:
    """Return a socket that listens. `::` takes connections of both families, as gRPC's ports do. Raises OSError."""
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(
        (host, port), family=family_of(host), backlog=backlog, reuse_port=reuse_port, dualstack_ipv6=both
    )
