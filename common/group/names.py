"""What the names of `--manager` stand for: one manager each, or all managers whose addresses DNS has under a name.

The rules are here, and they are pure; `resolved` asks the resolver of this machine.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import TypeAlias

from common.addresses.host_port import joined_address
from common.contracts.limits import MAX_NAMED_MANAGERS
from common.own_thread import in_own_thread

log = logging.getLogger(__name__)

# Returns the IP addresses of a host. Raises OSError where it has none, or where no answer came.
Resolve: TypeAlias = Callable[[str], Awaitable[Sequence[str]]]


class ManagerNames:
    """`names` are HOST:PORT. `addresses` are those that a client follows: of a host with several addresses, all.

    A name stands for itself until it has several addresses: gRPC resolves it with each connection. From then on it
    stands for its addresses, also where only one is left. An address that the name has lost stays while its manager is
    reachable. So an answer that is late, empty or incomplete breaks no stream.
    A machine may have an address of IPv4 and one of IPv6, and DNS does not pair them. So of a name the
    family with more addresses counts. Where both have as many, the one of before does; IPv4 at first.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(dict.fromkeys(names))
        self._found: dict[str, tuple[str, ...]] = {}

    @property
    def to_resolve(self) -> tuple[str, ...]:
        """The names whose host is not an IP address."""
        return tuple([name for name in self._names if not _is_ip(host_and_port(name)[0])])

    @property
    def addresses(self) -> tuple[str, ...]:
        every = (address for name in self._names for address in self._found.get(name, (name,)))
        return tuple(dict.fromkeys(every))

    def take(self, name: str, hosts: Iterable[str], reachable: Collection[str] = ()) -> None:
        """Note the IP addresses that a name has now. Of its earlier ones those stay that are `reachable`."""
        before = self._found.get(name)
        found, twice = _by_machine(name, hosts, before or ())
        if not found or (before is None and len(found) == 1):
            return
        stay = set(reachable).difference(twice).union(found)
        kept = [address for address in before or () if address in stay]
        every = dict.fromkeys([*kept, *found])
        if len(every) > MAX_NAMED_MANAGERS and len(before or ()) < MAX_NAMED_MANAGERS:
            log.warning("%s has %d addresses; the first %d are followed", name, len(every), MAX_NAMED_MANAGERS)
        self._found[name] = tuple(every)[:MAX_NAMED_MANAGERS]


def host_and_port(address: str) -> tuple[str, str]:
    """Return the host of HOST:PORT without brackets, and the port."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


async def resolved(host: str) -> Sequence[str]:
    """Return the IP addresses that the resolver of this machine has for a host. Raises OSError, also for no answer.

    The resolver bounds its own time: 5 s for each name server by default, and twice that for all. To give up earlier
    would lose the answer of the second server. Nothing else waits for the lookup, nor does the end of the process.
    """
    found = await in_own_thread(f"lookup of {host}", socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for _, _, _, _, address in found]


def _by_machine(name: str, hosts: Iterable[str], before: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the addresses of the family that counts, and those of the other one that stand for the same machines.

    Each comes once, the lowest first: resolvers change the order. The family in use is that of the first address of
    `before`. When it does not count, nothing says that the other one has the same machines.
    """
    _, port = host_and_port(name)
    ordered = sorted(set(hosts), key=_in_order)
    v4 = [joined_address(host, int(port)) for host in ordered if ":" not in host]
    v6 = [joined_address(host, int(port)) for host in ordered if ":" in host]
    in_use, other = (v6, v4) if before and before[0].startswith("[") else (v4, v6)
    return (in_use, other) if len(in_use) >= len(other) else (other, [])


def _in_order(host: str) -> tuple[int, int]:
    address = ipaddress.ip_address(host)
    return address.version, int(address)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
