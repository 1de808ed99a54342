"""How the hosts of a worker's ranks come together: a store at MASTER_ADDR names the port to which all others connect.

    rank 0's host                          another host
    store at MASTER_PORT, links on a       reads the address of the links
    port of --rank-interface
          <-- a link for each rank --      starts its ranks, each on its link
          <-- a link for the host ---      beats, tokens
    the process that carries what ranks share (gpuworker/plane/rank_bridge.py), at both ends

A rank does not know over what its link goes: what it is told is what ranks of rank 0's host are told.
"""

from __future__ import annotations

import fcntl
import pickle
import select
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Final

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from common.contracts.errors import FieldViolation, InvalidConfig
from gpuworker.plane.rank_hosts import LOOPBACK, Hosts
from gpuworker.plane.rank_watch import how_it_ended
from gpuworker.runner.rank_messages import Ended, unpacked

_HELLO: Final = struct.Struct("<4sii")  # magic, host, rank or -1 for the link of a host
_MAGIC: Final = b"QRK1"
_HELLO_S: Final = 2.0  # for what connects and says nothing
_MOST_COMING: Final = 256  # connections that have said nothing so far; the oldest makes room
_AGAIN_S: Final = 0.2
_LOST_S: Final = 30  # without an answer of the system at the other end, which may have vanished
_ADDRESS_OF_INTERFACE: Final = 0x8915  # SIOCGIFADDR
_HEADER: Final = 4  # bytes of a message's length
_PEEKED: Final = 4096
_GONE: Final = "is gone: its process ended, or its host cannot be reached"
_KEY: Final = "links"


def interface_of(name: str | None) -> tuple[str, str]:
    """Return a network interface, the loopback where none is named, and its IPv4 address. Raises InvalidConfig."""
    name = name or LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            known = ", ".join(each for _, each in socket.if_nameindex())
            what = f"is {name}, which has no IPv4 address here: {error.strerror}; expected one of {known}"
            raise InvalidConfig(FieldViolation("--rank-interface", what)) from None
    return name, socket.inet_ntoa(found[20:24])


def connected_store(hosts: Hosts, port: int, timeout: float) -> Store:
    """Connect to the store. Raises DistNetworkError where it does not come in so many seconds."""
    store = TCPStore(hosts.address, port, None, False, timedelta(seconds=timeout), wait_for_workers=False)
    return PrefixStore(f"quire/{hosts.attempt}", store)


@dataclass(slots=True)
class RemoteMember:
    """Implements `gpuworker.plane.rank_group.Member` for a rank of another host, by its link alone."""

    link: socket.socket
    _how: str = ""

    def ended(self) -> str:
        """Look at what comes next on the link and leave it there: an end, or a word of the host on it."""
        if not self._how:
            self._how = self._look()
        return self._how

    def _look(self) -> str:
        try:
            seen = self.link.recv(_PEEKED, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return ""
        except OSError:
            return _GONE
        if not seen:
            return _GONE
        try:
            message = unpacked(seen[_HEADER:])
        except pickle.UnpicklingError:
            return ""  # a longer message, for who reads the link
        return message.how if isinstance(message, Ended) else ""

    def end(self, seconds: float) -> None:
        """Wait until the other end is closed."""
        until = time.monotonic() + seconds
        self._shut(socket.SHUT_WR)
        poll = select.poll()
        poll.register(self.link, select.POLLIN)
        try:
            while (left := until - time.monotonic()) > 0 and poll.poll(1000 * left) and self.link.recv(_PEEKED):
                pass
        except OSError:
            pass
        self.link.close()

    def kill(self) -> None:
        self._shut(socket.SHUT_RDWR)

    def _shut(self, how: int) -> None:
        with suppress(OSError):  # it is closed already
            self.link.shutdown(how)


class Arrivals:
    """Accepts connections and reads what each says first, all beside each other: who is silent holds off nobody."""

    def __init__(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        self._listening, self._said = listening, dict[socket.socket, tuple[float, bytes]]()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)

    def next_hello(self, until: float) -> tuple[socket.socket, bytes]:
        """Return the next connection that has said as many bytes as a hello has. Raises TimeoutError."""
        while (now := time.monotonic()) < until:
            for silent in [link for link, (came, _) in self._said.items() if came + _HELLO_S <= now]:
                self._leave(silent).close()
            for key, _ in self._selector.select(min(until - now, _AGAIN_S)):
                link = key.fileobj
                assert isinstance(link, socket.socket)
                if link is self._listening:
                    self._accept()
                elif link in self._said and (said := self._heard(link)):  # else it has just made room
                    return self._leave(link), said
        raise TimeoutError

    def close(self) -> None:
        """Close what has said no hello."""
        for link in list(self._said):
            self._leave(link).close()
        self._selector.close()

    def _accept(self) -> None:
        with suppress(BlockingIOError, ConnectionAbortedError):  # it has gone again
            link, _ = self._listening.accept()
            link.setblocking(False)
            if len(self._said) >= _MOST_COMING:
                self._leave(next(iter(self._said))).close()
            self._said[link] = time.monotonic(), b""
            self._selector.register(link, selectors.EVENT_READ)

    def _heard(self, link: socket.socket) -> bytes:
        """Read on; return what a connection has said once that is whole."""
        came, said = self._said[link]
        try:
            more = link.recv(_HELLO.size - len(said))
        except BlockingIOError:
            return b""
        except OSError:
            more = b""
        if not more:
            self._leave(link).close()
            return b""
        self._said[link] = came, said + more
        return said + more if len(said + more) == _HELLO.size else b""

    def _leave(self, link: socket.socket) -> socket.socket:
        del self._said[link]
        self._selector.unregister(link)
        link.setblocking(True)
        return link


@dataclass(slots=True)
class Guests:
    """The links of rank 0's host to those of the others, once all have come."""

    ranks: dict[int, socket.socket] = field(default_factory=dict)
    hosts: dict[int, socket.socket] = field(default_factory=dict)

    def close(self) -> None:
        for link in (*self.ranks.values(), *self.hosts.values()):
            link.close()


class Rendezvous:
    """Rank 0's side: the store, and a port that the other hosts connect to, both on one interface."""

    def __init__(self, hosts: Hosts, size: int, interface: str | None, timeout: float) -> None:
        """Raises InvalidConfig for an interface or a port that cannot be had."""
        self.hosts, self.size, self.timeout = hosts, size, timeout
        self.interface, address = interface_of(interface)
        self._links = socket.create_server((address, 0), backlog=2 * size)
        try:
            self._store = self._own_store(address)
        except BaseException:
            self._links.close()
            raise
        self.store = PrefixStore(f"quire/{hosts.attempt}", self._store)
        self.store.set(_KEY, f"{address}:{self._links.getsockname()[1]}")

    def _own_store(self, address: str) -> TCPStore:
        hosts, seconds = self.hosts, timedelta(seconds=self.timeout)
        if hosts.store_is_there:
            try:
                return TCPStore(hosts.address, hosts.port, None, False, seconds, wait_for_workers=False)
            except RuntimeError as error:
                what = f"is {hosts.address}, where the launcher serves no store at port {hosts.port}: {_first(error)}"
                raise InvalidConfig(FieldViolation("MASTER_ADDR", what)) from None
        try:
            listening = socket.create_server((address, hosts.port), backlog=2 * self.size)
        except OSError as error:
            what = f"is {hosts.port}, and {address} ({self.interface}) cannot listen there: {error.strerror}"
            raise InvalidConfig(FieldViolation("MASTER_PORT", f"{what}; take a free one, on all hosts")) from None
        return TCPStore(
            address, hosts.port, None, True, seconds, wait_for_workers=False, master_listen_fd=listening.detach()
        )

    def await_guests(self) -> Guests:
        """Return the links of all other hosts. Raises InvalidConfig that names each rank which did not come in time."""
        guests, until = Guests(), time.monotonic() + self.timeout
        wanted = set(range(self.size)) - set(self.hosts.own_ranks(self.size))
        arrivals = Arrivals(self._links)
        try:
            while wanted - guests.ranks.keys() or len(guests.hosts) < self.hosts.count - 1:
                self._greet(guests, wanted, *arrivals.next_hello(until))
        except TimeoutError:
            guests.close()
            raise self._missing(wanted - guests.ranks.keys()) from None
        finally:
            arrivals.close()
        return guests

    def _greet(self, guests: Guests, wanted: set[int], link: socket.socket, said: bytes) -> None:
        magic, host, rank = _HELLO.unpack(said)
        if magic == _MAGIC and rank in wanted and rank not in guests.ranks:
            guests.ranks[rank] = link
        elif magic == _MAGIC and rank == -1 and 0 < host < self.hosts.count and host not in guests.hosts:
            guests.hosts[host] = link
        else:
            link.close()  # no rank, or one that was started twice
            return
        _tune(link)

    def _missing(self, ranks: set[int]) -> InvalidConfig:
        names = ", ".join(map(str, sorted(ranks))) or "of a host"
        what = f"{'ranks' if len(ranks) > 1 else 'rank'} {names} did not come within {self.timeout:g} s"
        where = f"its host connects to {self.hosts.address}:{self.hosts.port}"
        return InvalidConfig(FieldViolation("--rank-timeout", f"{what}; {where}, and its log lines say why it did not"))

    def close(self) -> None:
        self._links.close()


def start_bridge(meeting: Rendezvous, guests: Guests, board: int) -> subprocess.Popen[bytes]:
    """Start the process that carries what ranks share from rank 0's host; it alone has the links of hosts then."""
    links = [guests.hosts[host] for host in sorted(guests.hosts)]
    handles = [board, *(link.fileno() for link in links)]
    words = [meeting.size, board, meeting.hosts.port, meeting.interface, meeting.timeout, *handles[1:]]
    command = [sys.executable, "-P", "-m", "gpuworker.plane.rank_bridge", *map(str, words)]
    process = subprocess.Popen(command, pass_fds=handles, stdin=subprocess.DEVNULL)
    for link in links:
        link.close()
    return process


@dataclass(slots=True)
class Joined:
    """The links of another host than rank 0's."""

    ranks: Mapping[int, socket.socket]
    host: Connection
    store: Store
    interface: str


def join(hosts: Hosts, size: int, interface: str | None, timeout: float) -> Joined:
    """Connect a host to rank 0's. Raises InvalidConfig where rank 0 does not come in so many seconds."""
    name, address = interface_of(interface)
    until = time.monotonic() + timeout
    while True:
        try:
            return _joined(hosts, size, (name, address), max(until - time.monotonic(), 0.001))
        except (RuntimeError, OSError) as error:  # those of torch.distributed are RuntimeErrors
            # Rank 0 may be about to end, and another one to begin in its place.
            if time.monotonic() + _AGAIN_S >= until:
                what = f"rank 0 did not come at {hosts.address}:{hosts.port} within {timeout:g} s: {_first(error)}"
                raise InvalidConfig(FieldViolation("--rank-timeout", f"{what}; start it, or give it longer")) from None
        time.sleep(_AGAIN_S)


def _joined(hosts: Hosts, size: int, interface: tuple[str, str], timeout: float) -> Joined:
    name, address = interface
    links = dict[int, socket.socket]()
    try:
        store = connected_store(hosts, hosts.port, timeout)
        where, _, port = store.get(_KEY).decode().rpartition(":")
        for rank in (*hosts.own_ranks(size), -1):
            links[rank] = _linked((where, int(port)), address, hosts.own, rank)
    except BaseException:
        for link in links.values():
            link.close()
        raise
    return Joined(links, Connection(links.pop(-1).detach()), store, name)


def _first(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


def _linked(to: tuple[str, int], own: str, host: int, rank: int) -> socket.socket:
    link = socket.create_connection(to, timeout=_HELLO_S, source_address=(own, 0))
    link.settimeout(None)
    _tune(link)
    link.sendall(_HELLO.pack(_MAGIC, host, rank))
    return link


def _tune(link: socket.socket) -> None:
    """Send at once, and find a host that has vanished, also while models load and beats are not watched."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _LOST_S // 2)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _LOST_S // 6)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _LOST_S)


@dataclass(frozen=True, slots=True)
class MemberProcess:
    """Implements `gpuworker.plane.rank_group.Member` over a child of this process."""

    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, rank: int, connection: socket.socket, board: int, settings: str = "") -> MemberProcess:
        """Start a rank; `settings` are those of its own host, where that is not rank 0's."""
        handles = connection.fileno(), board
        command = [sys.executable, "-P", "-m", "gpuworker.plane.rank_process", *map(str, (rank, *handles))]
        process = subprocess.Popen(command, pass_fds=handles, stdin=subprocess.PIPE)
        assert process.stdin is not None
        with process.stdin as written:
            written.write(settings.encode())
        return cls(process)

    def ended(self) -> str:
        status = self.process.poll()
        return "" if status is None else how_it_ended(status)

    def end(self, seconds: float) -> None:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def kill(self) -> None:
        self.process.kill()
