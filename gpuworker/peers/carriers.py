"""How the bytes of an image come from the source S to the destination D: in the connection, or by shared memory.

A third way, NIXL, stands in `nixl.py`. All are behind one seam, so the rest of server and client does not know which
one it is. Hello, token, ends and checksums go over the connection in any case, and D verifies the checksum in its own
memory.

S writes images into slots of a file in /dev/shm, and D copies them out by reads. Neither maps the file, so a peer that
cuts it short causes a short read and no signal. D opens it for reading, and S reads nothing of it: neither writes what
is the other's. The file has one page until D has proven, by the nonce in it, that both see the same file. Then S
removes its name, and gives it room. So a process that is killed leaves at most one page behind.

    page 0: nonce 32 B | slot 0 | slot 1 | ...        a slot has an image, rounded up to pages
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import stat
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from gpuworker.peers.channel import Channel, ChannelBroken, Pace
from gpuworker.peers.wire import NO_SLOT, NONCE_BYTES, Item, RingOffer, pack_item, pack_taken

log = logging.getLogger(__name__)

Image = bytes | bytearray | memoryview
CARRIERS: Final = ("shm", "tcp", "nixl")
"""Names of all carriers, as counts and metrics have them. TLS is a matter of the connection: `tcp`."""
SHARED_MEMORY: Final = Path("/dev/shm")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_PAGE: Final = 4096
_NAME_BYTES: Final = 16
# Slots above that make no transfer faster.
_MOST_SLOTS: Final = 64


def host_key(folder: Path = SHARED_MEMORY) -> bytes:
    """Return 16 bytes that are equal for processes that see the same /dev/shm as the same user; b"" where none do.

    They are of the boot, the user namespace, the user, and the mount behind /dev/shm. Equal keys are a hint; the nonce
    in the ring proves it.
    """
    try:
        boot, users = _BOOT_ID.read_text().strip(), os.stat("/proc/self/ns/user")
        mount = folder.stat()
    except OSError:
        return b""
    text = f"quire-host-v1 {boot} {users.st_dev}:{users.st_ino} {os.geteuid()} {mount.st_dev}:{mount.st_ino}"
    return hashlib.sha256(text.encode()).digest()[:16]


def rounded_to_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def write_whole(file: int, content: memoryview, at: int) -> None:
    """Write all of the content to a file. Raises OSError."""
    while content:
        written = os.pwrite(file, content, at)
        at, content = at + written, content[written:]


def read_whole(file: int, target: memoryview, at: int) -> None:
    """Fill the target from a file. Raises ChannelBroken where the file is too short, and OSError."""
    while target:
        found = os.preadv(file, [target], at)
        if not found:
            raise ChannelBroken("the source's ring is shorter than it said")
        at, target = at + found, target[found:]


# ---------------------------------------------------------------- S


class Outlet(Protocol):
    """S's end of a carrier."""

    name: str

    def send_image(self, item: Item, image: memoryview) -> None:
        """Hand over an item that is DONE, with its image. Raises ChannelBroken."""
        ...


class InlineOutlet:
    """Images follow their heads in the connection."""

    name = "tcp"

    def __init__(self, channel: Channel, pace: Pace) -> None:
        self._channel, self._pace = channel, pace

    def send_image(self, item: Item, image: memoryview) -> None:
        self._channel.send(pack_item(item), self._pace, more=True)
        self._channel.send(image, self._pace)


class Ring:
    """S's end of a ring. It is made with one page; `give_room` makes the slots."""

    def __init__(self, image_bytes: int, ring_bytes: int, folder: Path = SHARED_MEMORY) -> None:
        """Raises OSError when the file cannot be made."""
        self.slot_bytes = rounded_to_pages(image_bytes)
        self.slots = min(_MOST_SLOTS, ring_bytes // self.slot_bytes)
        self.nonce, name = secrets.token_bytes(NONCE_BYTES), secrets.token_bytes(_NAME_BYTES)
        self.offer = RingOffer(self.slots, self.slot_bytes, name)
        self._path: Path | None = ring_path(name, folder)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(self._file, self.nonce.ljust(_PAGE, b"\0"), 0)
        except OSError:
            self.close()
            raise

    @property
    def room(self) -> int:
        """The bytes that the ring takes once it is used."""
        return _PAGE + self.slots * self.slot_bytes

    def give_room(self) -> None:
        """Make the slots. Raises OSError when there is too little room."""
        os.posix_fallocate(self._file, 0, self.room)

    def write_image(self, slot: int, image: memoryview) -> None:
        """Raises OSError."""
        write_whole(self._file, image, _PAGE + slot * self.slot_bytes)

    def remove_name(self) -> None:
        """From here on the file lives while one of the two has it open."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()
            self._path = None

    def close(self) -> None:
        self.remove_name()
        with suppress(OSError):
            os.close(self._file)


class Slots(Protocol):
    """Where S puts images for one connection."""

    slots: int

    def write_image(self, slot: int, image: memoryview) -> None:
        """Raises OSError."""
        ...


class SlotOutlet:
    """Images lie in slots; each slot is free again once D has said that it took the image."""

    def __init__(self, name: str, channel: Channel, pace: Pace, slots: Slots, await_taken: Callable[[], None]) -> None:
        """`await_taken` reads the next message of D, and calls `free_slot`; it raises ChannelBroken."""
        self.name = name
        self._channel, self._pace, self._slots, self._await_taken = channel, pace, slots, await_taken
        self._free, self._used = deque(range(slots.slots)), set[int]()

    def send_image(self, item: Item, image: memoryview) -> None:
        while not self._free:
            self._await_taken()
        slot = self._free.popleft()
        self._used.add(slot)
        try:
            self._slots.write_image(slot, image)
        except OSError as error:
            raise ChannelBroken(f"an image could not be written into memory for it: {error.strerror}") from None
        placed = Item(item.request, item.item, item.end, item.length, item.digest, slot)
        self._channel.send(pack_item(placed), self._pace)

    def free_slot(self, slot: int) -> None:
        """Raises ChannelBroken for a slot that has nothing in it."""
        if slot not in self._used:
            raise ChannelBroken("a slot was given back that has no image")
        self._used.remove(slot)
        self._free.append(slot)


def ring_path(name: bytes, folder: Path = SHARED_MEMORY) -> Path:
    return folder / f"quire-ring-{name.hex()}"


def lacks_room(ring: Ring, folder: Path = SHARED_MEMORY) -> str:
    """Return in words, with numbers, why /dev/shm is too small for a ring; "" when it is not."""
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if free >= 2 * ring.room:
        return ""
    return f"{folder} has {free / 2**20:.1f} MiB free, and twice the {ring.room / 2**20:.1f} MiB of a ring are needed"


# ---------------------------------------------------------------- D


class Inlet(Protocol):
    """D's end of a carrier."""

    name: str

    def fetch_image(self, item: Item, target: memoryview, pace: Pace) -> None:
        """Fill the target, which has the item's length. Raises ChannelBroken."""
        ...


class InlineInlet:
    """Images follow their heads in the connection."""

    name = "tcp"

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def fetch_image(self, item: Item, target: memoryview, pace: Pace) -> None:
        self._channel.receive_into(target, pace)


class RingInlet:
    """Images lie in slots of S's ring."""

    name = "shm"

    def __init__(self, channel: Channel, offer: RingOffer, folder: Path = SHARED_MEMORY) -> None:
        """Open the ring that S offers. Raises OSError when it cannot be opened, or is not of this user's making."""
        self._channel, self._offer = channel, offer
        self._file = os.open(ring_path(offer.name, folder), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(self._file)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o600:
                raise PermissionError("the ring is not a file of this user alone")
            self.nonce = os.pread(self._file, NONCE_BYTES, 0)
        except OSError:
            self.close()
            raise

    def fetch_image(self, item: Item, target: memoryview, pace: Pace) -> None:
        if item.slot >= self._offer.slots or len(target) > self._offer.slot_bytes:
            raise ChannelBroken("the source named a slot that its ring does not have")
        try:
            read_whole(self._file, target, _PAGE + item.slot * self._offer.slot_bytes)
        except OSError as error:
            raise ChannelBroken(f"the source's ring cannot be read: {error.strerror}") from None
        self._channel.send(pack_taken(item.slot), pace)

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._file)


def inlet_for(item: Item, inline: InlineInlet, slots: Inlet | None) -> Inlet:
    """Return where the image of an item is. Raises ChannelBroken when there is no such place."""
    if item.slot == NO_SLOT:
        return inline
    if slots is None:
        raise ChannelBroken("the source named a slot of a ring that was never opened")
    return slots
