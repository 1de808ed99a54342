"""On which hosts the ranks of a worker run, by the variables that torchrun and a LeaderWorkerSet set. Pure.

WORLD_SIZE counts the processes that were started, one on each host, and RANK is this one's number. Each of them runs as
many ranks, in order: with four ranks on two hosts those are 0 and 1, 2 and 3. Where a launcher starts a process for
each rank, WORLD_SIZE is the number of ranks, and LOCAL_WORLD_SIZE says how many share the host's cores.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from common.contracts.errors import FieldViolation, InvalidConfig

LOOPBACK: Final = "lo"
_TRUE: Final = "True"


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a worker's ranks, and which one this process is on. Two processes of one host count as two."""

    count: int = 1
    own: int = 0
    address: str = ""
    """MASTER_ADDR, where rank 0 is."""
    port: int = 0
    beside: int = 1
    """Processes of the launcher on this machine, which share its cores."""
    store_is_there: bool = False
    """Whether the launcher serves the store of the rendezvous; else rank 0 does."""
    attempt: str = "0"
    """How often the launcher has started the processes anew."""

    @classmethod
    def of(cls, environ: Mapping[str, str], size: int) -> Hosts:
        """Return the hosts of so many ranks. Raises InvalidConfig with each variable that is missing or wrong."""
        count = _number(environ, "WORLD_SIZE", 1, default="1")
        if size == 1 or count == 1:
            return cls()
        found = list[FieldViolation]()
        if size % count:
            what = (
                f"is {count}, and does not divide the {size} ranks of --tensor-parallel-size; each process runs as many"
            )
            found.append(FieldViolation("WORLD_SIZE", f"{what}: change one of them"))
        values = dict[str, int]()
        for name, least, most in (("RANK", 0, count - 1), ("MASTER_PORT", 1, 65535)):
            try:
                values[name] = _number(environ, name, least, most)
            except InvalidConfig as error:
                found += error.violations
        address = environ.get("MASTER_ADDR", "")
        if not address:
            found.append(FieldViolation("MASTER_ADDR", "is missing; expected the host name or address of rank 0"))
        elif _version(address) == 6:
            what = f"is {address}, and ranks meet over IPv4; expected the host name or IPv4 address of rank 0"
            found.append(FieldViolation("MASTER_ADDR", what))
        if found:
            raise InvalidConfig(*found)
        return cls(
            count,
            values["RANK"],
            address,
            values["MASTER_PORT"],
            _number(environ, "LOCAL_WORLD_SIZE", 1, count, default="1"),
            environ.get("TORCHELASTIC_USE_AGENT_STORE") == _TRUE,
            environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )

    def ranks(self, host: int, size: int) -> range:
        """Return the ranks of a host, of `size` in all."""
        each = size // self.count
        return range(host * each, (host + 1) * each)

    def own_ranks(self, size: int) -> range:
        return self.ranks(self.own, size)

    def interface_problem(self, interface: str | None) -> FieldViolation | None:
        """Return why ranks that listen on an interface alone cannot meet at MASTER_ADDR."""
        if self.count == 1 or interface is not None or _is_loopback(self.address):
            return None
        what = f"is not given, so ranks listen on loopback alone, and MASTER_ADDR is {self.address}"
        return FieldViolation("--rank-interface", f"{what}; name the interface of a network that only ranks are on")


def _number(environ: Mapping[str, str], name: str, least: int, most: int = 2**31, default: str = "") -> int:
    value = environ.get(name) or default
    if value.isascii() and value.isdigit() and least <= int(value[:12]) <= most:
        return int(value)
    said = f"is {value[:64]!r}" if value else "is missing"
    upper = f" to {most}" if most < 2**31 else " or more"
    raise InvalidConfig(FieldViolation(name, f"{said}; expected a number from {least}{upper}"))


def _version(address: str) -> int | None:
    """Return the version of an IP address; None for a name."""
    try:
        return ipaddress.ip_address(address.strip("[]")).version
    except ValueError:
        return None


def _is_loopback(address: str) -> bool:
    return address == "localhost" or (_version(address) == 4 and ipaddress.IPv4Address(address).is_loopback)
