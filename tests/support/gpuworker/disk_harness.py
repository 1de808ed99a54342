"""Frames on disk for tests: blocks of 40 bytes, transfers, and a system whose calls fail or end the process."""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from common.contracts.transfers import Medium, Place, Transfer, TransferEnd
from common.contracts.types import BlockHash, FrameId, KvGeometry, PoolIdentity
from gpuworker.memory.disk_frames import DiskFrames, size_of
from gpuworker.scheduling.images import TransferFailed

SIZE = 40
IDENTITY = PoolIdentity("a" * 32, "b" * 32, 16, KvGeometry(2, 3, 8, 4, "float32"))


def hash_of(name: object) -> BlockHash:
    return BlockHash(sha256(str(name).encode()).digest()[:16])


def image_of(name: object) -> bytes:
    """Return the image of a block, which follows from its name."""
    return (sha256(f"image {name}".encode()).digest() * 2)[:SIZE]


def save(name: object, frame: int, parent: object = "root", depth: int = 0, number: int = 1) -> Transfer:
    places = Place(Medium.BLOCK, FrameId(7)), Place(Medium.DISK, FrameId(frame))
    return Transfer(number, hash_of(name), hash_of(parent) if depth else BlockHash(b""), depth, *places)


def fetch(name: object, frame: int, parent: object = "root", depth: int = 0, number: int = 1) -> Transfer:
    places = Place(Medium.DISK, FrameId(frame)), Place(Medium.HOST, FrameId(3))
    return Transfer(number, hash_of(name), hash_of(parent) if depth else BlockHash(b""), depth, *places)


def opened(folder: Path, frames: int = 4, identity: PoolIdentity = IDENTITY, **options: Any) -> DiskFrames:
    return DiskFrames.open(folder, size_of(frames, SIZE), SIZE, identity, **options)


def read_or_end(disk: DiskFrames, transfer: Transfer) -> bytes | TransferEnd:
    """Return the image that a fetch finds, or how it ends."""
    try:
        return disk.read(transfer)
    except TransferFailed as failure:
        return failure.end


def write_or_end(disk: DiskFrames, transfer: Transfer, image: bytes, generation: int | None = None) -> TransferEnd:
    try:
        disk.write(transfer, image, generation)
    except TransferFailed as failure:
        return failure.end
    return TransferEnd.DONE


def held(disk: DiskFrames) -> dict[int, BlockHash]:
    return {each.block: each.hash for each in disk.claims().contents}


class Crash(BaseException):
    """The process ends here."""


class System:
    """Stands for the module `os`; what changes files passes `gate`, which may cut it short.

    `gate` gets the name of a call and the bytes that it is to write; it returns those that are written, or raises.
    """

    def __init__(self, gate: Callable[[str, bytes], bytes]) -> None:
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pwrite(self, file: int, data: memoryview, at: int) -> int:
        return os.pwrite(file, self._gate("pwrite", bytes(data)), at)

    def pread(self, file: int, size: int, at: int) -> bytes:
        self._gate("pread", b"")
        return os.pread(file, size, at)

    def ftruncate(self, file: int, size: int) -> None:
        self._gate("ftruncate", b"")
        os.ftruncate(file, size)

    def fsync(self, file: int) -> None:
        self._gate("fsync", b"")
        os.fsync(file)


class Crashing:
    """A gate that ends the process behind so many calls that change a file, the last of which writes a part alone."""

    def __init__(self, calls: int, share: float) -> None:
        self._left, self._share = calls, share

    def __call__(self, name: str, data: bytes) -> bytes:
        if name == "pread":
            return data
        if not self._left:
            raise Crash
        self._left -= 1
        return data if self._left else data[: max(1, int(len(data) * self._share))]


def drop(disk: DiskFrames) -> None:
    """Let go of a folder as a process does that is killed."""
    for file in (disk._images, disk._table):
        os.close(file)
