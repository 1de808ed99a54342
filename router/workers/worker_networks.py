"""The networks to whose addresses a router connects when discovery names them: a pure rule over HOST:PORT."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Final

from common.contracts.limits import MAX_ADDRESS_CHARS

LOOPBACK: Final = ("127.0.0.0/8", "::1/128", "localhost")
PRIVATE: Final = (*LOOPBACK, "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class WorkerNetworks:
    """Networks by address, and host names: whole names, or domains that begin with a dot."""

    def __init__(self, networks: Iterable[str]) -> None:
        names = tuple(networks)
        self._networks = tuple([each for each in map(_network, names) if each is not None])
        self._names = tuple([name.lower() for name in names if _network(name) is None])

    def refusal(self, address: str) -> str:
        """Return why the router does not connect to HOST:PORT, or nothing if it may."""
        host, _, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]").lower()
        if not host or len(address) > MAX_ADDRESS_CHARS or not (port.isascii() and port.isdigit()):
            return "its address is not HOST:PORT"
        if not 0 < int(port) < 65536:
            return f"its port {port[:8]} is none"
        return "" if self._has(host) else f"its address {address!a} is in none of --worker-network"

    def _has(self, host: str) -> bool:
        try:
            found = ipaddress.ip_address(host)
        except ValueError:
            return any(host == name or (name.startswith(".") and host.endswith(name)) for name in self._names)
        mapped = getattr(found, "ipv4_mapped", None) or found
        return any(mapped in network for network in self._networks)


def _network(text: str) -> _Network | None:
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        return None
