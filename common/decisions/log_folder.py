"""The folder of one process in the directory of a decision log: its lock, and its files.

    DIR/router-0/lock                held while a process writes there
    DIR/router-0/00000001.jsonl.gz   records, oldest first

A process takes the first folder of its service that no other process holds, so a service that restarts goes on in its
own. Only their owner may read the files: records hold names of tenants. A file of another kind, or with another
beginning, is not ours: it is neither read nor counted nor removed, and no link is followed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from common.contracts.errors import FieldViolation, InvalidConfig
from common.contracts.limits import MAX_LOG_FILE_BYTES, MAX_LOG_FOLDERS
from common.decisions.log_files import (
    MARK_BYTES,
    Bounds,
    LogFile,
    end_of,
    expired,
    is_full,
    is_ours,
    members_in,
    times_of,
)

_NAME: Final = re.compile(r"(\d{8})\.jsonl\.gz")
_FORMER: Final = re.compile(r"\d{8}\.log")
_FOLDER: Final = re.compile(r"([a-z]+)-(\d{1,3})")
_LOCK: Final = "lock"
_OPEN: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
# A FIFO that nobody writes to would else hold the reader.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FLAG: Final = "--decision-log"


def file_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08}.jsonl.gz"


def numbers_in(folder: Path) -> list[int]:
    """Return the numbers of the files in a folder that have names of ours, oldest first."""
    found = (_NAME.fullmatch(each.name) for each in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def former_in(folder: Path) -> list[str]:
    """Return in a line that a folder has files of the format before this one."""
    names = sorted(each.name for each in folder.iterdir() if _FORMER.fullmatch(each.name))
    what = "file(s) of an older format, which are not read"
    return [f"{folder} has {len(names):,} {what}: {names[0]} is one; remove them"] if names else []


def service_of(folder: Path) -> str:
    """Return the service whose records a folder has by its name; "" if it is no such folder."""
    match = _FOLDER.fullmatch(folder.name)
    return match[1] if match else ""


def contents_in(path: Path) -> bytes:
    """Return the bytes of a file. Raises OSError, also for one that is far larger than any of ours."""
    with _opened(path) as file:
        data = file.read(MAX_LOG_FILE_BYTES + 1)
    if len(data) > MAX_LOG_FILE_BYTES:
        raise OSError(errno.EFBIG, f"has more than {MAX_LOG_FILE_BYTES >> 20} MiB")
    return data


def _opened(path: Path) -> BinaryIO:
    """Open a regular file. Raises OSError for all else."""
    try:
        number = os.open(path, _READ)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link") from None
        raise
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return os.fdopen(number, "rb")


def _file(folder: Path, number: int) -> LogFile | None:
    """Return a file, or None for one of others; its last write came at most a second after its newest record."""
    try:
        with _opened(file_path(folder, number)) as file:
            found = os.fstat(file.fileno())
            return LogFile(number, found.st_size, found.st_mtime_ns) if is_ours(file.read(MARK_BYTES)) else None
    except OSError:
        return None


def _files_in(folder: Path) -> list[LogFile]:
    return [found for number in numbers_in(folder) if (found := _file(folder, number)) is not None]


def _remove(folder: Path, number: int) -> None:
    """Remove a file, unless one of others has taken its place. Raises OSError."""
    if _file(folder, number) is not None:
        file_path(folder, number).unlink(missing_ok=True)


@dataclass(slots=True)
class _Open:
    """The file that grows: its descriptor, its length, and the times of its first and last record."""

    number: int
    file: int
    size: int
    began_ns: int
    newest_ns: int


class LogFolder:
    """`claimed` takes a folder. `faults` says in a line each what of its last file was cut, or cannot be read."""

    def __init__(self, path: Path, lock: int, bounds: Bounds, now_ns: int) -> None:
        self.path, self._lock, self._bounds = path, lock, bounds
        self._complete = _files_in(path)
        numbers = numbers_in(path)
        self._last = numbers[-1] if numbers else 0
        self.faults = [*former_in(path), *_others(path, numbers, self._complete)]
        self._open: _Open | None = None
        if self._complete:
            self._go_on(self._complete[-1])
        self.retain(now_ns)

    @classmethod
    def claimed(cls, root: Path, service: str, bounds: Bounds, now_ns: int) -> LogFolder:
        """Return the first free folder of a service. Raises InvalidConfig when none can be written."""
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for number in range(MAX_LOG_FOLDERS):
                path = root / f"{service}-{number}"
                if path.is_symlink():
                    continue
                path.mkdir(mode=0o700, exist_ok=True)
                if (lock := _locked(path)) is not None:
                    return cls(path, lock, bounds, now_ns)
        except OSError as error:
            what = f"{error.filename or root} cannot be used: {error.strerror}; name a folder that may be written to"
            raise InvalidConfig(FieldViolation(_FLAG, what)) from None
        what = f"is {str(root)!r}, where {MAX_LOG_FOLDERS} processes write already; expected a folder with fewer"
        raise InvalidConfig(FieldViolation(_FLAG, what))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(each.size for each in self._complete) + (self._open.size if self._open is not None else 0)

    def append(self, member: bytes, first_ns: int, last_ns: int, now_ns: int) -> None:
        """Write a gzip member as a whole or not at all; older files leave for it. Raises OSError."""
        if len(member) > self._bounds.max_bytes:
            raise OSError(errno.EFBIG, "records of one flush are larger than --decision-log-size")
        grown = self._open
        if grown is not None and is_full(
            grown.size, len(member), grown.began_ns, grown.newest_ns, self._bounds, now_ns
        ):
            self._complete_open()
        self.retain(now_ns, len(member))
        if self._open is None:
            self._open = self._begun(first_ns)
        _write(self._open, member)
        self._open.newest_ns = max(self._open.newest_ns, last_ns)

    def retain(self, now_ns: int, more: int = 0) -> None:
        """Remove the files that are beyond the bounds once `more` bytes are written. Raises OSError."""
        if self._open is not None and now_ns - self._open.newest_ns > self._bounds.max_age_ns:
            self._complete_open()
        size = self._open.size if self._open is not None else 0
        for number in expired(self._complete, size + more, self._bounds, now_ns):
            _remove(self.path, number)
            self._complete = [each for each in self._complete if each.number != number]

    def close(self) -> None:
        """Give the folder back."""
        if self._open is not None:
            self._complete_open()
        os.close(self._lock)

    def _go_on(self, last: LogFile) -> None:
        """Open the last file to go on in it, without what a process that was killed left of a member."""
        path = file_path(self.path, last.number)
        try:
            data = contents_in(path)
        except OSError as error:
            self.faults.append(f"{path} cannot be read: {error.strerror}")
            return
        end = end_of(data)
        if end is None:
            self.faults.append(f"{path} is corrupt at its end: the next records go into a new file")
            return
        file = os.open(path, _OPEN, 0o600)
        if end < len(data):
            os.ftruncate(file, end)
            what = f"ended within a gzip member: its last {len(data) - end:,} bytes are cut off"
            self.faults.append(f"{path} {what}")
        members = members_in(data[:end])
        began = members[0].first_ns if members else last.newest_ns
        newest = max((each.last_ns for each in members), default=last.newest_ns)
        self._complete.pop()
        self._open = _Open(last.number, file, end, began, newest)

    def _begun(self, first_ns: int) -> _Open:
        self._last += 1
        file = os.open(file_path(self.path, self._last), _OPEN | os.O_EXCL, 0o600)
        return _Open(self._last, file, 0, first_ns, first_ns)

    def _complete_open(self) -> None:
        grown, self._open = self._open, None
        assert grown is not None
        os.close(grown.file)
        self._complete.append(LogFile(grown.number, grown.size, grown.newest_ns))


def _write(grown: _Open, data: bytes) -> None:
    """Write all of `data` to the end of the file, or nothing. Raises OSError."""
    left, at = memoryview(data), grown.size
    try:
        while left:
            written = os.pwrite(grown.file, left, at)
            left, at = left[written:], at + written
    except OSError:
        os.ftruncate(grown.file, grown.size)
        raise
    grown.size = at


def _others(folder: Path, numbers: Sequence[int], files: Sequence[LogFile]) -> list[str]:
    """Return in a line which files are not ours although they have names of such."""
    others = sorted({*numbers} - {each.number for each in files})
    if not others:
        return []
    name = file_path(folder, others[0]).name
    what = "file(s) that are not of a decision log"
    return [f"{folder} has {len(others):,} {what}: {name} is one; remove them"]


def _locked(folder: Path) -> int | None:
    """Return the lock of a folder; None while another process holds it. Raises OSError."""
    file = os.open(folder / _LOCK, _OPEN, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    except OSError:
        os.close(file)
        raise
    return file


def folders_in(roots: Iterable[Path]) -> Iterator[Path]:
    """Yield the folders of processes in directories of decision logs; such a folder itself counts too, and no link."""
    for root in roots:
        if service_of(root.resolve()) and numbers_in(root):
            yield root
            continue
        found = (each for each in root.iterdir() if service_of(each))
        yield from sorted(each for each in found if each.is_dir() and not each.is_symlink())


def remove_aged(root: Path, service: str, bounds: Bounds, now_ns: int) -> None:
    """Remove aged files from folders that no process holds, as of former replicas; others' folders are let be."""
    for path in folders_in([root]):
        if service_of(path) == service:
            with suppress(OSError):
                _remove_aged(path, bounds, now_ns)


def _remove_aged(path: Path, bounds: Bounds, now_ns: int) -> None:
    if (lock := _locked(path)) is None:
        return
    try:
        files = _files_in(path)
        for each, newest_ns in zip(files, times_of(files, now_ns), strict=True):
            if now_ns - newest_ns > bounds.max_age_ns:
                _remove(path, each.number)
    finally:
        os.close(lock)
