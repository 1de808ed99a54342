"""Images by NIXL, for networks with RDMA: S writes them into staging memory, and D's agent reads them there.

The agent has a process of its own (`nixl_agent.py` says why), and with it the staging memory is all that a peer can
reach. Both ends trust nothing of what lies there. S writes into a slot that D has given back. D has its agent read the
slot into D's own staging memory, copies it out, and only then computes the checksum, of its copy. The offer of the
slots, the checksums and what was taken go over the connection, whose ends have proven who they are.

    S: image -> slot of S's staging    ~~~ read of D's agent ~~~>    D's staging -> D's own memory -> checksum

An agent process that has ended stays ended: a peer can have caused it. Blocks then come over the connection.
"""

from __future__ import annotations

import fcntl
import ipaddress
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from common.contracts.errors import FieldViolation, InvalidConfig
from common.contracts.limits import MAX_PEER_IMAGE_BYTES
from common.process import die_with_parent
from gpuworker.peers.carriers import read_whole, rounded_to_pages, write_whole
from gpuworker.peers.channel import Channel, ChannelBroken, ChannelTimedOut, Pace
from gpuworker.peers.nixl_agent import (
    COMMAND,
    MAX_MESSAGE_BYTES,
    OVER,
    READ,
    READY,
    AgentKind,
    CommandKind,
)
from gpuworker.peers.wire import Item, NixlOffer, pack_taken

log = logging.getLogger(__name__)

# One half is for images that peers read, the other one for those that are read. Two images of any size fit into each.
STAGING_BYTES: Final = 4 * MAX_PEER_IMAGE_BYTES
# Slots of one connection: as many as these bytes have, at least 2, and none that make no transfer faster.
_RING_BYTES: Final = 8 << 20
_MOST_SLOTS: Final = 16
_START_SECONDS: Final = 60.0
_END_SECONDS: Final = 5.0
# What of this process's environment the agent's has: no secret is among it.
_KEPT: Final = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")
_KEPT_OF: Final = ("UCX_", "NIXL_")
_SHARED_SPACE: Final = ipaddress.ip_network("100.64.0.0/10")


# ---------------------------------------------------------------- what decides


class Extents:
    """Which parts of a row of bytes are free: the first that is large enough is taken."""

    def __init__(self, first: int, size: int) -> None:
        self._free = [(first, size)]

    def take(self, size: int) -> int | None:
        """Return where so many bytes are, which are not free from here on; None where there are none."""
        for number, (at, free) in enumerate(self._free):
            if free >= size:
                self._free[number : number + 1] = [(at + size, free - size)] if free > size else []
                return at
        return None

    def give_back(self, at: int, size: int) -> None:
        """Free what `take` returned."""
        whole = list[tuple[int, int]]()
        for start, length in sorted([*self._free, (at, size)]):
            if whole and sum(whole[-1]) == start:
                whole[-1] = (whole[-1][0], whole[-1][1] + length)
            else:
                whole.append((start, length))
        self._free = whole


def slots_for(image_bytes: int) -> tuple[int, int]:
    """Return how many slots a connection gets, and the bytes of each."""
    slot = rounded_to_pages(image_bytes)
    return min(_MOST_SLOTS, max(2, _RING_BYTES // slot)), slot


def is_private(host: str) -> bool:
    """Return whether an address is of this machine or of a private network."""
    address = _address_of(host)
    if address is None or address.is_unspecified or address.is_multicast:
        return False
    return address.is_private or (address.version == 4 and address in _SHARED_SPACE)


def may_load_from(host: str, secure: bool) -> bool:
    """Return whether a source at an address has proven who it is, `secure` being by TLS, and is on a private network.

    Metadata of others are not loaded: some end the agent.
    """
    address = _address_of(host)
    return is_private(host) and (secure or (address is not None and address.is_loopback))


def _address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def places_in_words(listening: Iterable[str]) -> str:
    """Return in words why NIXL may not listen at these addresses; "" when it may."""
    public = sorted({host for host in listening if not is_private(host)})
    if not public:
        return ""
    return (
        f"NIXL listens at {', '.join(public)}, and who reaches it can write what peers read; expected loopback and "
        "private networks alone: name their interfaces in UCX_NET_DEVICES, such as UCX_NET_DEVICES=eth1"
    )


def agent_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what of a worker's environment its agent gets: no secret, and no GPU."""
    kept = {name: value for name, value in environment.items() if name in _KEPT or name.startswith(_KEPT_OF)}
    return kept | {"CUDA_VISIBLE_DEVICES": ""}


# ---------------------------------------------------------------- the agent, as its worker sees it


@dataclass(slots=True)
class _Asked:
    """A load or a read that the agent has not answered. A load has the `name` of an agent, a read its `extent`."""

    name: bytes = b""
    extent: tuple[int, int] | None = None
    given_up: bool = False
    well: bool = False
    over: threading.Event = field(default_factory=threading.Event)


class _StagingFile:
    """The staging memory as a file of no folder, which is closed behind its last user."""

    def __init__(self, size: int) -> None:
        """Raises OSError. Nobody can cut the file short, so that its mapping in the agent's process stays."""
        self.file = os.memfd_create("quire-nixl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.file, size)
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            os.close(self.file)


class NixlStation:
    """A worker's agent process and its staging memory. Methods are for any thread."""

    def __init__(self, staging_bytes: int = STAGING_BYTES) -> None:
        """Start the agent. For a thread that lives as long as the worker. Raises InvalidConfig when there is none."""
        if sys.platform != "linux":
            raise _unusable("it is for Linux alone")
        half = staging_bytes // 2
        self._lock, self._closed = threading.Lock(), False
        self._serving, self._fetching = Extents(0, half), Extents(half, half)
        self._tickets, self._asked = itertools.count(1), dict[int, _Asked]()
        self._lines = set[str]()
        try:
            self.staging = _StagingFile(staging_bytes)
            self._control, self._process = _start_process(self.staging)
        except OSError as error:
            raise _unusable(f"its process cannot be started: {error}") from None
        try:
            self.name, self.address, self.metadata = self._await_ready()
            if why := places_in_words(listening_places(self._process.pid)):
                raise InvalidConfig(FieldViolation("--carrier", f"is nixl. {why}"))
        except BaseException:
            self._end_process(0.0)
            raise
        self._reader = threading.Thread(target=self._read_answers, name="nixl-answers", daemon=True)
        self._reader.start()

    def _await_ready(self) -> tuple[bytes, int, bytes]:
        self._control.settimeout(_START_SECONDS)
        try:
            message = self._control.recv(MAX_MESSAGE_BYTES)
        except TimeoutError:
            raise _unusable(f"its process was not ready in {_START_SECONDS:g} s") from None
        except OSError:
            message = b""
        if message and message[0] == AgentKind.FAILED:
            raise _unusable(_text_of(message))
        if len(message) < READY.size or message[0] != AgentKind.READY:
            raise _unusable(f"its process ended at once ({self._end_process(1.0)})")
        self._control.settimeout(None)
        _, name, address = READY.unpack_from(message)
        return name, address, message[READY.size :]

    @property
    def works(self) -> bool:
        """Whether the agent can be used."""
        return not self._closed

    @property
    def process_id(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End the agent. What is asked of it fails."""
        with self._lock:
            self._closed = True
        self._end_process(0.0)
        self._reader.join(_END_SECONDS)

    def _end_process(self, seconds: float) -> str:
        """Kill the process unless it ends in so many seconds, and return in words how it ended."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._control.close()
        status = self._process.returncode
        return signal.strsignal(-status) or f"signal {-status}" if (status or 0) < 0 else f"exit status {status}"

    # ------------------------------------------------------------ S

    def open_slots(self, image_bytes: int) -> NixlSlots | None:
        """Return slots for one connection; None when there is no room, which the log says once."""
        slots, slot_bytes = slots_for(image_bytes)
        with self._lock:
            at = None if self._closed else self._serving.take(slots * slot_bytes)
        if at is not None:
            return NixlSlots(self, at, slots, slot_bytes)
        if not self._closed:
            self._say("all staging memory of NIXL is in use: blocks for further workers go over TCP")
        return None

    def close_slots(self, at: int, size: int) -> None:
        with self._lock:
            self._serving.give_back(at, size)

    # ------------------------------------------------------------ D

    def load(self, offer: NixlOffer, seconds: float) -> None:
        """Make the agent of a source known. Raises ChannelBroken."""
        asked = _Asked(name=offer.name)
        if not self._ask(CommandKind.LOAD, offer.name, offer.metadata, asked, seconds):
            raise ChannelBroken("NIXL cannot use what the source says of its agent")

    def forget(self, name: bytes) -> None:
        """Take back a load that went well."""
        with suppress(ChannelBroken):
            self._tell(COMMAND.pack(CommandKind.FORGET, 0, name))

    def read_into(self, target: memoryview, name: bytes, address: int, seconds: float) -> None:
        """Fill the target with what a source has at an address. Raises ChannelBroken.

        A read that takes longer has its place in the staging memory until the library says that it is over.
        """
        size = rounded_to_pages(len(target))
        with self._lock:
            at = self._fetching.take(size)
        if at is None:
            raise ChannelBroken("all staging memory for reads by NIXL is in use")
        asked = _Asked(extent=(at, size))
        if not self._ask(CommandKind.READ, name, READ.pack(address, at, len(target)), asked, seconds):
            self._give_back(asked)
            raise ChannelBroken("NIXL could not read the source's staging memory")
        try:
            read_whole(self.staging.file, target, at)
        finally:
            self._give_back(asked)

    def _give_back(self, asked: _Asked) -> None:
        if asked.extent is not None:
            with self._lock:
                self._fetching.give_back(*asked.extent)

    def _ask(self, kind: CommandKind, name: bytes, rest: bytes, asked: _Asked, seconds: float) -> bool:
        """Return whether what was asked went well. Raises ChannelTimedOut; its answer then undoes it."""
        with self._lock:
            ticket = next(self._tickets)
            self._asked[ticket] = asked
        try:
            self._tell(COMMAND.pack(kind, ticket, name) + rest)
        except ChannelBroken:
            with self._lock:
                self._asked.pop(ticket, None)
            return False
        asked.over.wait(seconds)
        with self._lock:
            asked.given_up = not asked.over.is_set()
        if asked.given_up:
            raise ChannelTimedOut(f"NIXL brought nothing in {seconds:g} s")
        return asked.well

    def _tell(self, message: bytes) -> None:
        """Raises ChannelBroken where the agent is gone, or reads nothing."""
        if self._closed:
            raise ChannelBroken("the process of NIXL has ended")
        try:
            self._control.send(message, socket.MSG_DONTWAIT)
        except OSError:
            raise ChannelBroken("the process of NIXL does not read") from None

    def _read_answers(self) -> None:
        """Take the agent's answers until it ends. It may have been taken over: nothing of them is believed."""
        while True:
            try:
                message = self._control.recv(MAX_MESSAGE_BYTES)
            except OSError:
                message = b""
            if len(message) != OVER.size or message[0] != AgentKind.OVER:
                break
            _, well, ticket = OVER.unpack(message)
            self._note_over(ticket, bool(well))
        self._note_end(message)

    def _note_over(self, ticket: int, well: bool) -> None:
        with self._lock:
            asked = self._asked.pop(ticket, None)
            if asked is None:
                return
            asked.well = well
            asked.over.set()
            if asked.given_up and asked.extent is not None:
                self._fetching.give_back(*asked.extent)
        if asked.given_up and asked.name and well:
            self.forget(asked.name)

    def _note_end(self, last: bytes) -> None:
        with self._lock:
            expected, self._closed = self._closed, True
            open_ones, self._asked = list(self._asked.values()), {}
        for asked in open_ones:
            asked.over.set()
        how = self._end_process(0.0 if expected else 1.0)
        if not expected:
            why = _text_of(last) if last[:1] == bytes([AgentKind.FAILED]) else how
            log.error("the process of NIXL ended (%s): blocks go over TCP until this worker is started again", why)

    def _say(self, text: str) -> None:
        with self._lock:
            said = text in self._lines
            self._lines.add(text)
        if not said:
            log.warning("%s", text)


def _start_process(staging: _StagingFile) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    files = (theirs.fileno(), staging.file)
    command = [sys.executable, "-m", "gpuworker.peers.nixl_agent", *map(str, files)]
    try:
        process = subprocess.Popen(
            die_with_parent.command(command),
            env=agent_environment(os.environ),
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            stdout=2,  # UCX writes its log to standard output
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return ours, process


def listening_places(process_id: int) -> Iterator[str]:
    """Yield the addresses at which a process listens; those of all interfaces where it listens at any."""
    import psutil

    for each in psutil.Process(process_id).net_connections("inet"):
        if each.status != psutil.CONN_LISTEN:
            continue
        if not ipaddress.ip_address(each.laddr.ip).is_unspecified:
            yield each.laddr.ip
            continue
        for places in psutil.net_if_addrs().values():
            yield from (place.address for place in places if place.family in (socket.AF_INET, socket.AF_INET6))


def _text_of(failed: bytes) -> str:
    """Return what an agent says of its end, as one line."""
    return "".join(each if each.isprintable() else " " for each in failed[1:].decode(errors="replace"))


def _unusable(why: str) -> InvalidConfig:
    return InvalidConfig(FieldViolation("--carrier", f"is nixl, and {why}; without RDMA leave the option out"))


# ---------------------------------------------------------------- the ends of a connection


class NixlSlots:
    """S's slots for one connection."""

    def __init__(self, station: NixlStation, at: int, slots: int, slot_bytes: int) -> None:
        self._station, self._at = station, at
        self.slots, self.slot_bytes = slots, slot_bytes
        self.offer = NixlOffer(slots, slot_bytes, station.name, station.address + at, station.metadata)

    def write_image(self, slot: int, image: memoryview) -> None:
        """Raises OSError."""
        write_whole(self._station.staging.file, image, self._at + slot * self.slot_bytes)

    def close(self) -> None:
        """Give the slots back. Who still reads them gets bytes of others, whose checksum differs from what S said."""
        self._station.close_slots(self._at, self.slots * self.slot_bytes)


class NixlInlet:
    """D's end: images lie in S's slots."""

    name = "nixl"

    def __init__(self, channel: Channel, station: NixlStation, offer: NixlOffer, pace: Pace) -> None:
        """Raises ChannelBroken when the agent of S cannot be used."""
        station.load(offer, pace.seconds)
        self._channel, self._station, self._offer = channel, station, offer
        self.failed = False

    def fetch_image(self, item: Item, target: memoryview, pace: Pace) -> None:
        offer = self._offer
        if item.slot >= offer.slots or len(target) > offer.slot_bytes:
            raise ChannelBroken("the source named a slot that it does not have")
        self.failed = True
        self._station.read_into(target, offer.name, offer.address + item.slot * offer.slot_bytes, pace.seconds)
        self.failed = False
        self._channel.send(pack_taken(item.slot), pace)

    def close(self) -> None:
        self._station.forget(self._offer.name)


@dataclass(frozen=True, slots=True)
class Carriers:
    """What a worker can hand images over by, beside the connection, and take them by.

    Peers with the same `host_key` use shared memory; with b"" none does. All others use NIXL where both have it.
    """

    host_key: bytes = b""
    nixl: NixlStation | None = None
