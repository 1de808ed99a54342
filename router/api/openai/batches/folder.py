"""Files and batches on disk, which several routers may share.

    DIR/TENANT/files/ID.data    what a client uploaded, or answers; they grow while their batch runs
                     ID.json    its description, written when it is whole: without it there is no file
                     ID.part    an upload that is not whole
              /batches/ID.json  a batch, written by the process alone that runs it
                      ID.in     its input, which outlives the file that the client sees
                      ID.open   while it has not ended, and when it expires; who runs it holds a lock on this
                      ID.cancel the wish to cancel it, from any router

TENANT is a digest, as a tenant's name may have any character. Everything here blocks, and is called in threads.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, NamedTuple

from common.contracts import limits
from common.contracts.errors import (
    FieldViolation,
    InvalidConfig,
    InvalidRequest,
    Overloaded,
    QuotaViolation,
    Unavailable,
)
from router.api.openai.batches.records import Batch, StoredFile

_OWNER_ALONE: Final = 0o700
# Seconds after which answers without a description are left over from a router that died: no batch writes them by then.
_LEFT_OVER_S: Final = limits.MAX_BATCH_SECONDS + 86_400
# The same of whatever else is not whole: no upload lasts so long.
_UNUSED_S: Final = 3_600.0
_RETRY_S: Final = 10.0


class Waiting(NamedTuple):
    """A batch that has not ended: its tenant's folder, its id, and whether it is to end without further requests."""

    tenant: str
    name: str
    is_over: bool


class Claim:
    """A batch that nobody else runs until `release`."""

    def __init__(self, folder: BatchFolder, batch: Batch, lock: IO[bytes]) -> None:
        self.folder, self.batch, self._lock = folder, batch, lock

    def release(self) -> None:
        self._lock.close()


class BatchFolder:
    """The folder of `--batch-dir`."""

    def __init__(self, root: Path) -> None:
        """Raises InvalidConfig for a folder that cannot be written."""
        self._root = root
        try:
            root.mkdir(mode=_OWNER_ALONE, parents=True, exist_ok=True)
            probe = root / f".{secrets.token_hex(8)}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            what = f"{root} cannot be written: {error.strerror}; expected a folder of this router, or a new one"
            raise InvalidConfig(FieldViolation("--batch-dir", what)) from None

    # ------------------------------------------------------------ files

    def check_room(self, tenant: str) -> int:
        """Return how many bytes a tenant may still store. Raises InvalidRequest, and Unavailable on a full disk."""
        count, size = self.usage(tenant)
        if count >= limits.MAX_BATCH_FILES_A_TENANT:
            raise storage_full(f"{count} files are stored; at most {limits.MAX_BATCH_FILES_A_TENANT}")
        if size >= limits.MAX_BATCH_BYTES_A_TENANT:
            raise storage_full(f"{size} bytes are stored; at most {limits.MAX_BATCH_BYTES_A_TENANT}")
        self.check_disk()
        return limits.MAX_BATCH_BYTES_A_TENANT - size

    def check_disk(self) -> None:
        """Raise Unavailable where the disk has too little room for others."""
        if shutil.disk_usage(self._root).free < limits.MIN_FREE_BATCH_BYTES:
            raise Unavailable("the disk of files is almost full; ask the operator", _RETRY_S)

    def usage(self, tenant: str) -> tuple[int, int]:
        """Return the number of a tenant's files, and the bytes of all that is kept for it."""
        count, sizes = 0, dict[int, int]()
        for folder in (self._files(tenant), self._batches(tenant)):
            for entry in _scanned(folder):
                with suppress(FileNotFoundError):
                    found = entry.stat()
                    sizes[found.st_ino] = found.st_size
                    count += entry.name.endswith((".data", ".part"))
        return count, sum(sizes.values())

    def new_part(self, tenant: str, name: str) -> Path:
        """Return where an upload is written until it is whole."""
        return _made(self._files(tenant)) / f"{name}.part"

    def keep(self, tenant: str, file: StoredFile) -> None:
        """Make a file of an upload that is whole."""
        files = self._files(tenant)
        (files / f"{file.id}.part").replace(files / f"{file.id}.data")
        _write(files / f"{file.id}.json", file.entry())

    def describe(self, tenant: str, file: StoredFile) -> None:
        """Make a file of answers that are whole."""
        _write(self._files(tenant) / f"{file.id}.json", file.entry())

    def answers(self, tenant: str, name: str) -> Path:
        """Return where the answers of a batch are written."""
        return _made(self._files(tenant)) / f"{name}.data"

    def file(self, tenant: str, name: str, now: float) -> StoredFile | None:
        found = _read(self._files(tenant) / f"{name}.json")
        file = None if found is None else StoredFile.of(found)
        return None if file is None or file.expires_at <= now else file

    def files(self, tenant: str, now: float) -> Iterator[StoredFile]:
        """Yield the files of a tenant, the newest first."""
        for name in _names(self._files(tenant), ".json"):
            if (file := self.file(tenant, name, now)) is not None:
                yield file

    def opened(self, tenant: str, name: str) -> IO[bytes] | None:
        """Open a file's content."""
        return _opened(self._files(tenant) / f"{name}.data")

    def delete_file(self, tenant: str, name: str) -> None:
        for ending in ("json", "data"):
            (self._files(tenant) / f"{name}.{ending}").unlink(missing_ok=True)

    # ------------------------------------------------------------ batches

    def add(self, batch: Batch) -> None:
        """Begin a batch. Raises Overloaded where too many have not ended, FileNotFoundError without its input."""
        folder = _made(self._batches(batch.tenant))
        open_ones = len(_names(folder, ".open"))
        if open_ones >= limits.MAX_OPEN_BATCHES_A_TENANT:
            words = f"{open_ones} batches have not ended; at most {limits.MAX_OPEN_BATCHES_A_TENANT}"
            raise Overloaded(QuotaViolation("router.batches", f"{words}; wait for one or cancel it"), _RETRY_S)
        source, kept = self._files(batch.tenant) / f"{batch.input_file_id}.data", folder / f"{batch.id}.in"
        try:
            os.link(source, kept)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without links
            shutil.copyfile(source, kept)
        (folder / f"{batch.id}.open").write_text(str(batch.expires_at))
        _write(folder / f"{batch.id}.json", batch.entry())

    def batch(self, tenant: str, name: str) -> Batch | None:
        """Return a batch as a client sees it: whoever runs it, it is being cancelled from the moment of the wish on."""
        found = _read(self._batches(tenant) / f"{name}.json")
        batch = None if found is None else Batch.of(found)
        return None if batch is None else batch.seen(self.cancelled_at(tenant, name))

    def batches(self, tenant: str) -> Iterator[Batch]:
        """Yield the batches of a tenant, the newest first."""
        for name in _names(self._batches(tenant), ".json"):
            if (batch := self.batch(tenant, name)) is not None:
                yield batch

    def wish_to_cancel(self, tenant: str, name: str) -> None:
        (self._batches(tenant) / f"{name}.cancel").touch(exist_ok=True)

    def cancelled_at(self, tenant: str, name: str) -> float | None:
        """Return when a client wished to cancel a batch that has not ended."""
        with suppress(FileNotFoundError):
            return (self._batches(tenant) / f"{name}.cancel").stat().st_mtime
        return None

    def source(self, batch: Batch) -> IO[bytes] | None:
        """Open the input of a batch."""
        return _opened(self._batches(batch.tenant) / f"{batch.id}.in")

    def write(self, batch: Batch) -> None:
        """Write a batch that this process runs. What belongs to it goes once it has ended."""
        folder = self._batches(batch.tenant)
        _write(folder / f"{batch.id}.json", batch.entry())
        if batch.has_ended:
            for ending in ("in", "cancel", "open"):
                (folder / f"{batch.id}.{ending}").unlink(missing_ok=True)

    # ------------------------------------------------------------ what is to be done

    def waiting(self, now: float) -> list[Waiting]:
        """Return the batches that have not ended, of each tenant the oldest first."""
        found = list[Waiting]()
        for tenant in _scanned(self._root):
            folder = Path(tenant.path) / "batches"
            for name in _names(folder, ".open")[::-1]:
                cancelled = (folder / f"{name}.cancel").exists()
                found.append(Waiting(tenant.name, name, cancelled or _expires_at(folder / f"{name}.open") <= now))
        return found

    def claim(self, tenant: str, name: str) -> Claim | None:
        """Return a batch to run; None where another process runs it, or it has ended. `tenant` is a folder's name."""
        folder = self._root / tenant / "batches"
        marker = folder / f"{name}.open"
        try:
            lock = marker.open("rb")
        except FileNotFoundError:
            return None
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Read with the lock: nobody else writes it from now on.
            batch = Batch.of(_read(folder / f"{name}.json") or b"")
            if batch is not None and not batch.has_ended and marker.exists():
                return Claim(self, batch, lock)
            if batch is not None and batch.has_ended:  # and its router ended before it could say so
                self.write(batch)
        lock.close()
        return None

    def sweep(self, now: float) -> None:
        """Delete what is too old, and what routers that died left over."""
        for tenant in _scanned(self._root):
            files, batches = Path(tenant.path) / "files", Path(tenant.path) / "batches"
            _sweep_files(files, now)
            _sweep_batches(batches, now)
            for folder in (files, batches, Path(tenant.path)):
                if _age(folder, now) > _UNUSED_S:  # younger ones are about to be used
                    with suppress(OSError):  # it is not empty
                        folder.rmdir()

    def _files(self, tenant: str) -> Path:
        return self._root / _digest(tenant) / "files"

    def _batches(self, tenant: str) -> Path:
        return self._root / _digest(tenant) / "batches"


def _sweep_files(folder: Path, now: float) -> None:
    for name in _names(folder, ".json"):
        file = StoredFile.of(_read(folder / f"{name}.json") or b"")
        if file is None or file.expires_at <= now:
            for ending in ("json", "data"):
                (folder / f"{name}.{ending}").unlink(missing_ok=True)
    described = set(_names(folder, ".json"))
    for entry in _scanned(folder):
        path = Path(entry.path)
        most = _LEFT_OVER_S if path.suffix == ".data" else _UNUSED_S
        if path.suffix != ".json" and path.stem not in described and _age(path, now) > most:
            path.unlink(missing_ok=True)


def _sweep_batches(folder: Path, now: float) -> None:
    open_ones, ended = set(_names(folder, ".open")), 0
    for name in _names(folder, ".json"):
        ended += name not in open_ones
        old = _age(folder / f"{name}.json", now) > limits.BATCH_FILE_SECONDS
        if name not in open_ones and (old or ended > limits.MAX_BATCHES_A_TENANT):
            (folder / f"{name}.json").unlink(missing_ok=True)
    known = set(_names(folder, ".json"))
    for entry in _scanned(folder):
        path = Path(entry.path)
        if path.stem not in known and _age(path, now) > _UNUSED_S:
            path.unlink(missing_ok=True)


def _age(path: Path, now: float) -> float:
    with suppress(FileNotFoundError):
        return now - path.stat().st_mtime
    return 0.0


def _digest(tenant: str) -> str:
    return hashlib.sha256(tenant.encode()).hexdigest()[:32]


def _made(folder: Path) -> Path:
    for each in (folder.parent, folder):  # of parents that it makes by itself, mkdir forgets the mode
        each.mkdir(mode=_OWNER_ALONE, exist_ok=True)
    return folder


def _scanned(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [*entries]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _names(folder: Path, ending: str) -> list[str]:
    """Return the ids of the files with this ending, the newest first."""
    found = (entry.name for entry in _scanned(folder))
    return sorted((name.removesuffix(ending) for name in found if name.endswith(ending)), reverse=True)


def _expires_at(marker: Path) -> float:
    """Return when a batch expires; infinity where a router is about to write it, or has taken the mark away."""
    try:
        return float(marker.read_text())
    except (FileNotFoundError, ValueError):
        return math.inf


def _opened(path: Path) -> IO[bytes] | None:
    with suppress(FileNotFoundError):
        return path.open("rb")
    return None


def _read(path: Path) -> bytes | None:
    with suppress(FileNotFoundError):
        return path.read_bytes()
    return None


def _write(path: Path, entry: bytes) -> None:
    """Replace a file by a whole one: whoever reads it, and whenever this process is killed, sees the old or the new."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with fresh.open("xb") as file:
            file.write(entry)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def storage_full(words: str) -> InvalidRequest:
    """Return the error of a tenant who has to delete something."""
    return InvalidRequest(FieldViolation("file", f"has no room: {words}; delete some", "STORAGE_FULL"))
