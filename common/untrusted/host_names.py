"""Names by which a client calls this machine: those that no foreign DNS server can give away.

A page in a browser may only read answers of its own host. Whoever owns the name of that host can let it lead to
127.0.0.1 tomorrow (DNS rebinding). A port that asks for no key believes such a page no more than any other.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import socket
from collections.abc import Collection
from typing import Final

# Ends of names that the machine or its cluster alone gives away.
_OWN_ENDS: Final = (".localhost", ".svc", ".svc.cluster.local")
# By which containers call the machine that they run on.
_OF_HOST: Final = ("host.docker.internal", "host.containers.internal")
# A name or an address, with a port or without.
_HOST: Final = re.compile(r"(?P<name>[^:\[\]]+|\[[^\]]*\])(?::\d*)?")


def is_own_name(host: str, allowed: Collection[str] = ()) -> bool:
    """Return whether a Host header, with a port or without, names this machine, or is one of the `allowed` names."""
    found = _HOST.fullmatch(host.lower())
    if found is None:
        return False
    name = found["name"]
    if "." not in name and not name.startswith("["):
        return True  # without a domain: no name of the internet
    if name in (_machine(), *_OF_HOST, *allowed) or name.endswith(_OWN_ENDS):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


@functools.cache
def _machine() -> str:
    return socket.gethostname().lower()
