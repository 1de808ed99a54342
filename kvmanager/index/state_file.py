"""Keeps the highest epoch that a manager has held on disk, so that a restart does not lose it."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Final

from common.contracts.errors import FieldViolation, InvalidConfig
from common.contracts.limits import MAX_STORED_EPOCH

log = logging.getLogger(__name__)

# What passes: no room on the disk, for this user, or for a file of this size; no file descriptor.
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE})
_LONGEST: Final = 64  # bytes; more than any epoch has


class EpochFile:
    """Keeps an epoch on disk. A write is atomic and survives a crash of the machine."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "epoch"

    def read(self) -> int:
        """Return the epoch last written, 0 if none was. Raises InvalidConfig when the file cannot be used."""
        try:
            with self._path.open(encoding="ascii") as file:
                return _epoch_of(file.read(_LONGEST))
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            what = (
                f"{self._path} cannot be read ({error}); expected one number; remove the file to start anew: "
                "Redis and the workers know the epoch too"
            )
            raise InvalidConfig(FieldViolation("--state-dir", what)) from None

    def check(self) -> None:
        """Raise InvalidConfig unless the epoch can be read and written, or could with a disk that has room.

        A manager that ended on a full disk starts again: Redis and the workers know the epoch too.
        """
        epoch = self.read()
        try:
            self._store(epoch)
        except OSError as error:
            if error.errno not in _FULL:
                raise self._unwritable(error) from None
            log.error("the epoch cannot be stored until there is room: %s", error)

    def write(self, epoch: int) -> None:
        """Store an epoch. Raises InvalidConfig when the folder cannot be written."""
        try:
            self._store(epoch)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> InvalidConfig:
        what = f"{self._path} cannot be written ({error}); expected a folder for files that outlive the process"
        return InvalidConfig(FieldViolation("--state-dir", what))

    def _store(self, epoch: int) -> None:
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("w") as file:
                file.write(f"{epoch}\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        temporary.replace(self._path)
        _sync(self._path.parent)


def _epoch_of(text: str) -> int:
    epoch = int(text)
    if not 0 <= epoch <= MAX_STORED_EPOCH:
        raise ValueError(f"{epoch} is no epoch: the highest is {MAX_STORED_EPOCH}")
    return epoch


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
