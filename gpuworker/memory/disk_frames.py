"""Frames on disk: images of blocks in a folder of one worker, which a worker that restarts finds again.

    images   an image of each frame, at multiples of 4 KiB; a sparse file, which grows as frames are written
    table    a head, and an entry of 128 bytes for each frame:

    head     magic 8 | layout 4 | bytes of the format 4 | format's digest 16 | generation 8 | reset 8 | crc 4
             and from byte 64 on the format: JSON of all that decides what an image holds
    entry    hash 16 | parent 16 | depth 4 | length 4 | last use 8 | generation 8 | image's xxh3-128 16
             | group 1 | zero | page 2 | zeros | crc 4

Where the pool has groups, a frame has a page, and a content is there if a frame of each of its pages is. Which frames
these are does not matter: what a page holds follows from hash, group and number. A frame holds a block if its entry is
whole, of the present generation, and its checksum is that of the image. A write zeroes the entry first and writes it
last. Entries are checked when they are read, images at each load. So nothing needs to reach the disk in order, and no
crash leaves more than misses. A reset of the cache makes a new generation.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import fields
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple

from common.contracts.errors import FieldViolation, InvalidConfig
from common.contracts.hashing import key_of
from common.contracts.lease import CachedBlock
from common.contracts.limits import MAX_WORKER_BLOCKS
from common.contracts.transfers import Transfer, TransferEnd
from common.contracts.types import BlockHash, FrameId, PoolIdentity
from gpuworker.memory.byte_plan import in_words
from gpuworker.scheduling.frame_claims import Claims
from gpuworker.scheduling.images import Image, TransferFailed

LAYOUT: Final = 1
"""Rises when the files change, or what the bytes of a block mean: `HostFrames` and `KvCache` have their order."""
NO_CHECKSUMS: Final = "needs the package xxhash, which is not installed: pip install 'xxhash>=4.1', or leave it out"
FOLDER_FLAG, SIZE_FLAG = "--disk-cache", "--disk-cache-size"
HEAD_BYTES: Final = 64 << 10
ENTRY_BYTES: Final = 128
_MAGIC: Final = b"quire kv"
_HEAD: Final = struct.Struct("<8sII16sQQ")
_CRC: Final = struct.Struct("<I")
_FORMAT_AT: Final = 64
_ENTRY: Final = struct.Struct("<16s16sIIQQ16sBxH48x")
_NO_ENTRY: Final = bytes(ENTRY_BYTES)
_ALIGNED: Final = 4 << 10
_MOST_FAILURES: Final = 8  # in a row: then nothing more is tried
_NO_PARENT: Final = bytes(16)  # in the entry of a first block
_READ_AT_ONCE: Final = 8192  # entries, when all are looked at
_MOST_WORD: Final = 40  # characters of a value that has changed
_UNNAMED_FOLDERS: Final = 256  # for workers without ids, at most
_log = logging.getLogger(__name__)

Checksum = Callable[[Image], bytes]


class _Locked(InvalidConfig):
    """Another process uses the folder."""


class _Entry(NamedTuple):
    hash: bytes
    parent: bytes
    depth: int
    length: int
    last_used: int  # nanoseconds of the wall clock
    generation: int
    checksum: bytes
    group: int = 0
    page: int = 0

    def packed(self, frame: int) -> bytes:
        body = _ENTRY.pack(*self)
        return body + _CRC.pack(zlib.crc32(body, frame))

    @classmethod
    def of(cls, packed: bytes, frame: int) -> _Entry | None:
        """Return the entry of a frame; None unless it is whole, and of that frame."""
        if len(packed) != ENTRY_BYTES or packed == _NO_ENTRY:
            return None
        body = packed[: _ENTRY.size]
        whole = packed[_ENTRY.size :] == _CRC.pack(zlib.crc32(body, frame))
        return cls(*_ENTRY.unpack(body)) if whole else None


class _Found(NamedTuple):
    """A content, the frames of its pages, and its entry; of two the one that was used last counts."""

    last_used: int
    frames: tuple[FrameId, ...]
    entry: _Entry


_Part = tuple[bytes, bytes, int, int]
"""A content of several pages: hash, parent, depth, group."""
_Pages = dict[int, tuple[int, int, _Entry]]
"""Its pages by their numbers: last use, frame, entry."""


def _note_newest(newest: dict[bytes, _Found], found: _Found) -> None:
    key = key_of(BlockHash(found.entry.hash), found.entry.group)
    newest[key] = max(newest.get(key, found), found)


class _Head(NamedTuple):
    layout: int
    format: bytes  # JSON
    generation: int
    reset: int

    def packed(self) -> bytes:
        digest = sha256(self.format).digest()[:16]
        body = _HEAD.pack(_MAGIC, self.layout, len(self.format), digest, self.generation, self.reset)
        return body + _CRC.pack(zlib.crc32(body))

    @classmethod
    def read(cls, table: int) -> _Head | None:
        """Return the head of a table; None unless it is whole."""
        packed = os.pread(table, HEAD_BYTES, 0)
        body, crc = packed[: _HEAD.size], packed[_HEAD.size : _HEAD.size + _CRC.size]
        if len(body) < _HEAD.size or crc != _CRC.pack(zlib.crc32(body)):
            return None
        magic, layout, length, digest, generation, reset = _HEAD.unpack(body)
        made_of = packed[_FORMAT_AT : _FORMAT_AT + length]
        if magic != _MAGIC or sha256(made_of).digest()[:16] != digest:
            return None
        return cls(layout, made_of, generation, reset)


class DiskFrames:
    """The frames of one worker on disk. `write` and `read` may be called by several threads at once, on other frames.

    Once `_MOST_FAILURES` transfers in a row have failed it is not `usable`, and every further one fails. `reset` is the
    id of the last reset of the prefix cache that was carried out here; 0: none. A write belongs to the `generation`
    that was the present one when it was ordered.
    """

    def __init__(
        self,
        folder: Path,
        files: tuple[int, int],
        num_frames: int,
        image_bytes: int,
        head: _Head,
        checksum: Checksum,
        block_pages: tuple[int, ...] = (),
    ) -> None:
        """Take the open files of images and table; `open` is what makes them.

        `block_pages` are the pages of a content, by its group, where the pool has groups.
        """
        self.folder, self.num_frames, self.image_bytes = folder, num_frames, image_bytes
        self._block_pages = block_pages
        self.usable = True
        self._images, self._table = files
        self._stride, self._head, self._checksum = stride_of(image_bytes), head, checksum
        self._failures = 0
        self._lock = Lock()  # what is read from an entry, and written to it because of that

    @staticmethod
    def open(
        folder: Path,
        size_bytes: int,
        image_bytes: int,
        identity: PoolIdentity,
        made_with: Mapping[str, str] | None = None,
    ) -> DiskFrames:
        """Open a folder, or make it; what it holds of another format is dropped, and the log names the differences.

        `made_with` are options beside the identity on which K and V depend. Files take `size_bytes` at most. Raises
        InvalidConfig where the folder cannot be used, or the size does not fit a block or the disk.
        """
        checksum = _checksum()
        num_frames = checked_frames(size_bytes, image_bytes)
        with ExitStack() as undo:
            try:
                files = _open_files(folder, undo)
                head = _prepared(
                    folder, files, num_frames, image_bytes, images_made_of(identity, image_bytes, made_with)
                )
                _refuse_full_disk(folder, files, num_frames, image_bytes)
            except OSError as error:
                what = f"{folder} cannot be used: {error.strerror or error}; name another folder, or leave it out"
                raise InvalidConfig(FieldViolation(FOLDER_FLAG, what)) from error
            undo.pop_all()
        if hasattr(os, "posix_fadvise"):
            # Whole images are read, each when it is ordered. On a device that reads 8 MiB ahead, those of frames in a
            # row took four times the processor's time of frames at random; with this advice they take the same.
            os.posix_fadvise(files[0], 0, 0, os.POSIX_FADV_RANDOM)
        pages = tuple([group.pages for group in identity.kv_geometry.groups])
        return DiskFrames(folder, files, num_frames, image_bytes, head, checksum, pages)

    @property
    def reset(self) -> int:
        return self._head.reset

    @property
    def generation(self) -> int:
        return self._head.generation

    def claims(self) -> Claims:
        """Return what the entries say that frames hold, each content once; no write may be under way.

        `last_used` ranks them from 0 on, the longest unused first: what is saved later ranks behind all of them. A
        content of which a page is missing is left out: a write of it was not over.
        """
        sizes, newest, parts, torn = self._block_pages or (1,), dict[bytes, _Found](), dict[_Part, _Pages](), 0
        for frame, entry in self._entries():
            size = sizes[entry.group] if entry.group < len(sizes) else 0
            if size == 1 and not entry.page:
                _note_newest(newest, _Found(entry.last_used, (FrameId(frame),), entry))
            elif entry.page < size:
                pages = parts.setdefault((*entry[:3], entry.group), {})
                found = entry.last_used, frame, entry
                pages[entry.page] = max(pages.get(entry.page, found), found)
        for (*_, group), pages in parts.items():
            if len(pages) < sizes[group]:
                torn += 1
                continue
            ordered = [pages[page] for page in range(sizes[group])]
            frames = tuple([FrameId(frame) for _, frame, _ in ordered])
            _note_newest(newest, _Found(max(used for used, _, _ in ordered), frames, ordered[0][2]))
        if torn:
            _log.info("%d contents in %s lack pages, and are none: their writes were not over", torn, self.folder)
        ranked = sorted(newest.values())
        claims = tuple(
            CachedBlock(frames[0], BlockHash(entry.hash), -1, rank, BlockHash(entry.parent), entry.depth)
            for rank, (_, frames, entry) in enumerate(ranked)
        )
        if not self._block_pages:
            return Claims(claims)
        pages_of_all = tuple([frame for _, frames, _ in ranked for frame in frames])
        return Claims(claims, tuple([entry.group for *_, entry in ranked]), pages_of_all)

    def _entries(self) -> Iterator[tuple[int, _Entry]]:
        """Yield each frame with an entry that is whole and of the present generation."""
        for first in range(0, self.num_frames, _READ_AT_ONCE):
            number = min(_READ_AT_ONCE, self.num_frames - first)
            packed = os.pread(self._table, number * ENTRY_BYTES, _entry_at(first))
            for at in range(number):
                entry = _Entry.of(packed[at * ENTRY_BYTES : (at + 1) * ENTRY_BYTES], first + at)
                if entry is not None and self._is_present(entry):
                    yield first + at, entry

    def _is_present(self, entry: _Entry) -> bool:
        return entry.generation == self._head.generation and entry.length == self.image_bytes

    # ------------------------------------------------------------ transfers, on threads of their own

    def write(self, transfer: Transfer, image: Image, generation: int | None = None) -> None:
        """Save an image, as part of the generation in which that was ordered; None: the present one.

        Raises TransferFailed: FAILED, and the frame holds nothing.
        """
        self._refuse_unusable()
        frame, of = transfer.target.index, self.generation if generation is None else generation
        assert memoryview(image).nbytes == self.image_bytes, "an image of another worker"
        content, part = (transfer.hash, transfer.parent, transfer.depth), (transfer.group, transfer.page)
        entry = _Entry(*content, self.image_bytes, time.time_ns(), of, self._checksum(image), *part)
        try:
            self._put(frame, _NO_ENTRY)
            _write(self._images, image, frame * self._stride)
            self._put(frame, entry.packed(frame))
        except OSError as error:
            with suppress(OSError):
                self._put(frame, _NO_ENTRY)
            raise self._failed("written", error) from error
        self._failures = 0

    def read(self, transfer: Transfer) -> bytes:
        """Load an image, verified. Raises TransferFailed; the frame holds nothing then, or still another block.

        CORRUPT: the entry is of another block, or not whole, or its checksum is that of other bytes. FAILED: the file
        cannot be read.
        """
        self._refuse_unusable()
        frame, packed = transfer.source.index, None
        try:
            packed = os.pread(self._table, ENTRY_BYTES, _entry_at(frame))
            entry = _Entry.of(packed, frame)
            asked = transfer.hash, transfer.parent or _NO_PARENT, transfer.depth, transfer.group, transfer.page
            fits = entry is not None and self._is_present(entry) and (*entry[:3], *entry[-2:]) == asked
            image = _read(self._images, self.image_bytes, frame * self._stride) if fits else b""
        except OSError as error:
            self._replace(frame, packed, _NO_ENTRY)
            raise self._failed("read", error) from error
        self._failures = 0
        if entry is None or not image or self._checksum(image) != entry.checksum:
            if fits or entry is None:
                self._replace(frame, packed, _NO_ENTRY)
            raise TransferFailed(TransferEnd.CORRUPT)
        self._replace(frame, packed, entry._replace(last_used=time.time_ns()).packed(frame))
        return image

    def _put(self, frame: int, packed: bytes) -> None:
        with self._lock:
            _write(self._table, packed, _entry_at(frame))

    def _replace(self, frame: int, before: bytes | None, packed: bytes) -> None:
        """Write an entry, unless it has changed since it was read; None: it was not read. Errors are of no weight."""
        with self._lock, suppress(OSError):
            if before is None or os.pread(self._table, ENTRY_BYTES, _entry_at(frame)) == before:
                _write(self._table, packed, _entry_at(frame))

    def _refuse_unusable(self) -> None:
        if not self.usable:
            raise TransferFailed(TransferEnd.FAILED)

    def _failed(self, verb: str, error: OSError) -> TransferFailed:
        """Count a failure, and return it."""
        with self._lock:
            self._failures += 1
        if self._failures == 1:
            _log.warning("a block in %s could not be %s: %s", self.folder, verb, error.strerror or error)
        if self._failures >= _MOST_FAILURES:
            self._give_up(f"{self._failures} blocks in a row could not be read or written", error)
        return TransferFailed(TransferEnd.FAILED)

    def _give_up(self, what: str, error: OSError) -> None:
        if self.usable:
            self.usable = False
            reason, todo = error.strerror or error, "make room or mend the disk, and restart this worker"
            _log.error("the disk cache in %s is closed: %s: %s; %s", self.folder, what, reason, todo)

    # ------------------------------------------------------------ resets, the end

    def clear(self, reset: int) -> None:
        """Empty all frames by order of a reset; it is on the disk before this returns.

        Writes that were ordered before it will hold nothing. What cannot store that is not usable any more.
        """
        self._head = self._head._replace(generation=self._head.generation + 1, reset=reset)
        try:
            with self._lock:
                _write(self._table, self._head.packed(), 0)
                os.fsync(self._table)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._table, 0)
            self._give_up("delete that folder, a reset of the prefix cache could not be stored there", error)

    def close(self) -> None:
        """Close the files, which lets another process use them; no transfer may be under way."""
        self.usable = False
        for each in (self._images, self._table):
            os.close(each)


def checked_frames(size_bytes: int, image_bytes: int) -> int:
    """Return how many frames fit into files of this size. Raises InvalidConfig if none does."""
    found = (size_bytes - HEAD_BYTES) // (stride_of(image_bytes) + ENTRY_BYTES)
    if found < 1:
        what = f"is {in_words(size_bytes)}, and one block takes {in_words(size_of(1, image_bytes))}; ask for more"
        raise InvalidConfig(FieldViolation(SIZE_FLAG, what))
    return min(found, MAX_WORKER_BLOCKS)


def size_of(num_frames: int, image_bytes: int) -> int:
    """Return the bytes of files with so many frames."""
    return HEAD_BYTES + num_frames * (stride_of(image_bytes) + ENTRY_BYTES)


def stride_of(image_bytes: int) -> int:
    """Return the bytes of a frame: those of an image, in whole pages."""
    return -(-image_bytes // _ALIGNED) * _ALIGNED


def open_for_worker(root: Path, worker_id: str | None, open_folder: Callable[[Path], DiskFrames]) -> DiskFrames:
    """Open the folder of a worker below `root`: the one of its id, or else the first one that no other worker has.

    What a folder holds is as good for one worker of a model as for another. So workers without ids, of which a host may
    start several with one `root`, take `unnamed-0`, `unnamed-1`, ... as they come. Raises as `open_folder` does.
    """
    if worker_id is not None:
        return open_folder(root / worker_id)
    for number in range(_UNNAMED_FOLDERS - 1):
        with suppress(_Locked):
            return open_folder(root / f"unnamed-{number}")
    return open_folder(root / f"unnamed-{_UNNAMED_FOLDERS - 1}")


class DiskRoom(NamedTuple):
    """Bytes below a folder of disk caches, free or taken by caches already; whether this user may write there."""

    free: int
    taken: int
    writable: bool


def look_at_disk(root: Path) -> DiskRoom:
    """Return what the workers of a host find below `root`, which need not exist yet."""
    root = root.expanduser().absolute()
    there = next(each for each in (root, *root.parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        return DiskRoom(0, 0, False)
    disk, taken = os.statvfs(there), 0
    for path in root.glob("*/*"):
        if path.name in ("images", "table"):
            with suppress(OSError):
                taken += path.lstat().st_blocks * 512
    return DiskRoom(disk.f_bavail * disk.f_frsize, taken, True)


def checksums_there() -> bool:
    """Return whether the package of checksums is installed; a worker needs it for a disk cache alone."""
    return find_spec("xxhash") is not None


# ---------------------------------------------------------------- files


def _open_files(folder: Path, undo: ExitStack) -> tuple[int, int]:
    """Return images and table of a folder that this process alone uses from now on. Raises OSError, InvalidConfig."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    _refuse_link(folder)
    there = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _refuse_others(folder, there)
        os.fchmod(there, 0o700)
        images, table = (_open_file(folder / name, there, undo) for name in ("images", "table"))
    finally:
        os.close(there)
    try:
        fcntl.flock(table, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        what = f"{folder} is in use by another process; give this worker a --worker-id of its own, or another folder"
        raise _Locked(FieldViolation(FOLDER_FLAG, what)) from error
    return images, table


def _open_file(path: Path, there: int, undo: ExitStack) -> int:
    _refuse_link(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    file = os.open(path.name, flags, 0o600, dir_fd=there)
    undo.callback(os.close, file)
    _refuse_others(path, file)
    os.fchmod(file, 0o600)
    return file


def _refuse_link(path: Path) -> None:
    """Say so in words; that it is followed in no case is what O_NOFOLLOW is for."""
    if path.is_symlink():
        raise InvalidConfig(FieldViolation(FOLDER_FLAG, f"{path} is a symbolic link; name the folder that it leads to"))


def _refuse_others(path: Path, file: int) -> None:
    """Raise InvalidConfig unless this is a folder or a plain file of the user who runs the worker."""
    found = os.fstat(file)
    if found.st_uid != os.geteuid():
        what = f"{path} belongs to user {found.st_uid}, and this worker runs as user {os.geteuid()}"
        raise InvalidConfig(FieldViolation(FOLDER_FLAG, f"{what}; name another folder"))
    if not stat.S_ISDIR(found.st_mode) and (not stat.S_ISREG(found.st_mode) or found.st_nlink > 1):
        what = f"{path} is not a plain file, or has other names; name another folder"
        raise InvalidConfig(FieldViolation(FOLDER_FLAG, what))


def _prepared(folder: Path, files: tuple[int, int], num_frames: int, image_bytes: int, made_of: bytes) -> _Head:
    """Let the files have so many frames of this format, and return the head. Raises OSError."""
    images, table = files
    head = _Head.read(table)
    if head is None or (head.layout, head.format) != (LAYOUT, made_of):
        if head is not None:
            _log.warning("%s is emptied, its blocks are of another format: %s", folder, _differences(head, made_of))
        elif os.fstat(table).st_size:
            _log.warning("%s is emptied, its table is broken", folder)
        generation = 1 if head is None else head.generation + 1
        for each in (table, images):  # no entry may come back, whatever reaches the disk first
            os.ftruncate(each, 0)
            os.fsync(each)
        head = _Head(LAYOUT, made_of, generation, 0)
        _write(table, made_of, _FORMAT_AT)
        _write(table, head.packed(), 0)
        os.fsync(table)
    os.ftruncate(table, HEAD_BYTES + num_frames * ENTRY_BYTES)
    if os.fstat(images).st_size > num_frames * stride_of(image_bytes):
        os.ftruncate(images, num_frames * stride_of(image_bytes))
    return head


def _refuse_full_disk(folder: Path, files: tuple[int, int], num_frames: int, image_bytes: int) -> None:
    there = sum(os.fstat(each).st_blocks * 512 for each in files)
    disk = os.fstatvfs(files[0])
    free, size = disk.f_bavail * disk.f_frsize, size_of(num_frames, image_bytes)
    if size > there + free:
        what = f"is {in_words(size)}, and {in_words(free)} are free in {folder}, which has {in_words(there)} already"
        raise InvalidConfig(FieldViolation(SIZE_FLAG, f"{what}; ask for less, or name another {FOLDER_FLAG}"))


def images_made_of(identity: PoolIdentity, image_bytes: int, made_with: Mapping[str, str] | None) -> bytes:
    """Return the JSON of all that decides what an image holds: options, the identity, and how large an image is."""
    parts = {"image_bytes": str(image_bytes), **(made_with or {})}
    parts |= {each.name: str(getattr(identity, each.name)) for each in fields(identity) if each.name != "kv_geometry"}
    geometry = identity.kv_geometry
    parts |= {f"kv_geometry.{each.name}": str(getattr(geometry, each.name)) for each in fields(geometry)}
    made = json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()
    assert len(made) <= HEAD_BYTES - _FORMAT_AT, "a geometry whose words fit no head"
    return made


def _differences(head: _Head, made_of: bytes) -> str:
    before, now = json.loads(head.format), json.loads(made_of)
    before["layout"], now["layout"] = str(head.layout), str(LAYOUT)
    differing = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return ", ".join(f"{name} was {_cut(before.get(name))} and is {_cut(now.get(name))}" for name in differing)


def _cut(value: str | None) -> str:
    if value is None:
        return "not there"
    return value if len(value) <= _MOST_WORD else f"{value[:_MOST_WORD]}..."


def _checksum() -> Checksum:
    try:
        from xxhash import xxh3_128_digest
    except ImportError as error:
        raise InvalidConfig(FieldViolation(FOLDER_FLAG, NO_CHECKSUMS)) from error
    return xxh3_128_digest


def _entry_at(frame: int) -> int:
    return HEAD_BYTES + frame * ENTRY_BYTES


def _write(file: int, data: Image, at: int) -> None:
    """Write all of it. Raises OSError, after some of it perhaps."""
    rest = memoryview(data).cast("B")
    while rest:
        written = os.pwrite(file, rest, at)
        rest, at = rest[written:], at + written


def _read(file: int, size: int, at: int) -> bytes:
    """Return so many bytes; none where the file is shorter."""
    found = os.pread(file, size, at)
    while 0 < len(found) < size and (more := os.pread(file, size - len(found), at + len(found))):
        found += more
    return found if len(found) == size else b""
