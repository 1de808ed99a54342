"""Which addresses a client reaches through the proxy of its environment, and which never.

gRPC takes a proxy from `grpc_proxy`, `https_proxy` or `http_proxy` for every address that `no_proxy` does not name,
this machine's own ones included. A proxy elsewhere cannot reach those.
"""

from __future__ import annotations

import ipaddress
from typing import Final
from urllib.parse import unquote

PROXY_OPTION: Final = "grpc.enable_http_proxy"
_SCHEMES: Final = ("dns:", "ipv4:", "ipv6:")
_ONE_COLON: Final = 1


def is_this_machine(address: str) -> bool:
    """Return whether HOST:PORT, or a target as gRPC writes it, stays on this machine: loopback, or a socket file."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = _host_of(address).lower().rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return any(each.is_loopback or each.is_unspecified for each in (found, mapped) if each is not None)


def _host_of(address: str) -> str:
    """Return the host of a target, without brackets: of `ipv6:[::1]:1`, `dns:///::1` and `[::1]:1` it is ::1."""
    for scheme in _SCHEMES:
        address = address.removeprefix(scheme)
    rest = unquote(address.lstrip("/").rpartition("/")[2])
    if rest.startswith("["):
        return rest[1:].partition("]")[0]
    return rest.partition(":")[0] if rest.count(":") == _ONE_COLON else rest
