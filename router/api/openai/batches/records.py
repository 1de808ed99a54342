"""What is stored of files and batches beside their lines, and how clients see it."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from common.contracts.errors import NotFound

Json = dict[str, Any]
# Of an id: 48 bits of time, so that ids sort by it, and 80 random ones, too many to guess.
_TIME_DIGITS: Final = 12
_RANDOM_BYTES: Final = 10
_DIGITS: Final = r"[0-9a-f]{32}"
_IDS: Final = {"file-": re.compile(f"file-{_DIGITS}"), "batch_": re.compile(f"batch_{_DIGITS}")}

VALIDATING: Final = "validating"
IN_PROGRESS: Final = "in_progress"
FINALIZING: Final = "finalizing"
CANCELLING: Final = "cancelling"
COMPLETED: Final = "completed"
FAILED: Final = "failed"
EXPIRED: Final = "expired"
CANCELLED: Final = "cancelled"
ENDED: Final = frozenset({COMPLETED, FAILED, EXPIRED, CANCELLED})
_TIMES: Final = (IN_PROGRESS, FINALIZING, COMPLETED, FAILED, EXPIRED, CANCELLING, CANCELLED)


def new_id(prefix: str, now: float) -> str:
    """Return an id that sorts after those of earlier moments."""
    return f"{prefix}{int(1000 * now):0{_TIME_DIGITS}x}{secrets.token_hex(_RANDOM_BYTES)}"


def is_id(prefix: str, text: str) -> bool:
    """Return whether a text can be an id; anything else never becomes part of a path."""
    return _IDS[prefix].fullmatch(text) is not None


def not_found(what: str, name: str) -> NotFound:
    return NotFound(f"{what} {name[:64]!r} is not here: it was deleted, it is too old, or it is somebody else's")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A whole file. `lines` and `urls` are those of its requests; one that the router wrote has answers, and none."""

    id: str
    size: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int
    lines: int = 0
    urls: Sequence[str] = ()

    def entry(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def of(entry: bytes) -> StoredFile | None:
        """Return the file of an entry; None where the entry is not in our form."""
        try:
            return StoredFile(**json.loads(entry))
        except (ValueError, TypeError):
            return None

    def body(self) -> Json:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch. The one process that runs it writes it; `times` has when each status began.

    `output_id` and `error_id` are chosen before the first line is sent, so that every later run writes the same files.
    A client sees them when the batch has ended, of those files that have lines.
    """

    id: str
    tenant: str
    credential: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_id: str
    error_id: str
    output_seconds: int
    total: int
    status: str = VALIDATING
    completed: int = 0
    failed: int = 0
    metadata: dict[str, str] | None = None
    times: dict[str, int] = field(default_factory=dict)
    problem: str = ""
    problem_code: str = ""
    output_file_id: str | None = None
    error_file_id: str | None = None

    def entry(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def of(entry: bytes) -> Batch | None:
        """Return the batch of an entry; None where the entry is not in our form."""
        try:
            return Batch(**json.loads(entry))
        except (ValueError, TypeError):
            return None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def at(self, status: str, now: float, **changes: Any) -> Batch:
        """Return the batch in a later status; a status that it had before keeps its time."""
        return replace(self, status=status, times={status: int(now)} | self.times, **changes)

    def seen(self, cancelled_at: float | None) -> Batch:
        """Return the batch as a client sees it who wished at this time to cancel it."""
        if cancelled_at is None or self.has_ended:
            return self
        return self.at(CANCELLING, cancelled_at)

    def body(self) -> Json:
        times = {f"{status}_at": self.times.get(status) for status in _TIMES}
        problem = {"code": self.problem_code, "message": self.problem, "param": None, "line": None}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": [problem]} if self.problem else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **times,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


def seconds_of(window: str) -> int | None:
    """Return the seconds of a span such as 24h, 30m or 7d; None where it is none."""
    match = re.fullmatch(r"([0-9]{1,7})([smhd])", window)
    return None if match is None else int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[match[2]]
