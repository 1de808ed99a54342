"""The output of a batch: a line for each request that ended. It tells a later run what is left to do.

A run may be killed at any moment, so the last line may be half written. A request that failed for lack of a server is
to be tried again. Both kinds of lines are taken out when the file is opened.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

from common.backoff import Backoff
from common.contracts.errors import FieldViolation, InvalidRequest, Unavailable

# Statuses of a server that is busy, drains, or is behind a proxy that cannot reach it.
AGAIN: Final = frozenset({429, 502, 503, 504})
BACKOFF: Final = Backoff(first=0.25, longest=30.0, jitter=0.5)
# A server may ask for a longer pause than the longest own one, up to this.
_LONGEST_ASKED_S: Final = 60.0


# Which answers to a request of a batch are none yet, and when to ask again.
def asked_pause(retry_after: str) -> float:
    """Return the seconds that a server asks for in its header; 0 where it asks for none, or for a date."""
    try:
        return min(max(0.0, float(retry_after)), _LONGEST_ASKED_S)
    except ValueError:
        return 0.0


_OK: Final = range(200, 300)


@dataclass(frozen=True, slots=True)
class Result:
    """How one request ended: the server's answer, or why there is none."""

    custom_id: str
    status: int = 0
    request_id: str = ""
    body: Any = None
    error: str = ""
    code: str = "unavailable"
    # The body in JSON, without line ends, where it is at hand; `body` is None then.
    raw: bytes = b""

    @property
    def ok(self) -> bool:
        return self.status in _OK

    def line(self) -> bytes:
        """Return the line in OpenAI's form."""
        head: dict[str, Any] = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": self.custom_id}
        if self.error:
            error = {"code": self.code, "message": self.error}
            return _dumps(head | {"response": None, "error": error}) + b"\n"
        answer = {"status_code": self.status, "request_id": self.request_id}
        body = self.raw or _dumps(self.body)
        return b'%s, "response": %s, "body": %s}, "error": null}\n' % (_dumps(head)[:-1], _dumps(answer)[:-1], body)


class ResultFile:
    """The output file, open for one run: `done` says of each request that ended earlier whether it succeeded."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidRequest when the file cannot be used, Unavailable while another run writes it."""
        self._path = path
        self.done: dict[str, bool] = {}
        self.repaired = False
        self._lock = _locked(path)
        try:
            self._clean()
            self._file = path.open("ab", buffering=0)
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self._lock.close()

    def sync(self) -> None:
        """Return once a crash of the machine loses no line."""
        os.fsync(self._file.fileno())

    def write(self, result: Result) -> int:
        """Add a line, in one write: a kill leaves at most this line incomplete. Return the bytes of the line.

        Raises Unavailable on a full disk.
        """
        line = result.line()
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            what = f"{self._path} cannot be written: {error.strerror}; the answers so far are there"
            raise Unavailable(f"{what}, and the same command goes on from here") from None
        return len(line)

    def _clean(self) -> None:
        """Keep the lines of requests that have ended, each once; the others go, and their requests are sent again."""
        kept = sum(len(line) + 1 for line in _lines(self._path) if self._keep(line))
        size = self._path.stat().st_size
        self.repaired = kept != size
        if self.repaired:
            self._rewrite()

    def _keep(self, line: bytes) -> bool:
        ended = _ended(line)
        if ended is None or ended[0] in self.done:
            return False
        self.done[ended[0]] = ended[1]
        return True

    def _rewrite(self) -> None:
        """Replace the file by one with the lines to keep, and lock that one."""
        self.done.clear()
        fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        with fresh.open("wb") as file:
            file.writelines(line + b"\n" for line in _lines(self._path) if self._keep(line))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)
        replaced = self._lock
        self._lock = _locked(self._path)
        replaced.close()


def _locked(path: Path) -> IO[bytes]:
    """Open a file for one run alone. Raises InvalidRequest, and Unavailable while another run has it."""
    try:
        file = path.open("ab")
    except OSError as error:
        raise InvalidRequest(FieldViolation(str(path), f"cannot be written: {error.strerror}")) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.stat().st_ino == os.fstat(file.fileno()).st_ino:  # not replaced meanwhile
            return file
    except OSError:
        pass
    file.close()
    raise Unavailable(f"{path}: another run of quire batch writes it; wait for its end")


def _lines(path: Path) -> Iterator[bytes]:
    """Yield lines without their ends."""
    with path.open("rb") as file:
        for line in file:
            yield line.rstrip(b"\n")


def _ended(line: bytes) -> tuple[str, bool] | None:
    """Return the id in a line, and whether the request succeeded; None if it is sent again, or is not a result."""
    try:
        entry = json.loads(line)
        custom_id, response = entry["custom_id"], entry["response"]
        return (custom_id, response["status_code"] in _OK) if isinstance(custom_id, str) else None
    except (ValueError, KeyError, TypeError):
        return None


def _dumps(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
