"""Reads decision logs from disk, page by page as a service answers, also while services write there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.contracts.errors import FieldViolation, InvalidConfig
from common.contracts.limits import MAX_LISTED_BYTES
from common.contracts.types import Decision, DecisionKind
from common.decisions.log_files import Member, body_of, is_ours, members_in
from common.decisions.log_folder import contents_in, file_path, folders_in, former_in, numbers_in, service_of
from common.decisions.merged import merged
from common.decisions.pages import bounds_of, query_of
from common.decisions.query import DecisionQuery
from common.decisions.ring import listed
from common.wire.decision_json import record_of, text_of
from quire.decision.v1 import decision_pb2 as pb

# A record's number in its folder: the number of the file, of the member within it, and of the line within that.
_FILE_SHIFT: Final = 36
_MEMBER_SHIFT: Final = 16
# Files that are held in memory, compressed, with their members' places.
_HELD: Final = 2
_KINDS: Final = frozenset(each.value for each in DecisionKind)


@dataclass(frozen=True, slots=True)
class _File:
    data: bytes
    members: tuple[Member, ...]


class FolderReader:
    """The records of one process. `faults` are what could not be read so far, in a line each."""

    def __init__(self, path: Path) -> None:
        self.path, self.service = path, service_of(path.resolve())
        self.faults = former_in(path)
        self._held: dict[int, _File] = {}
        self._numbers = numbers_in(path)
        self._dropped: dict[int, int] = {}
        self._oldest_ns: int | None = None

    @property
    def source(self) -> str:
        """What tells pages of several folders apart, on several volumes too; it has no ',' and no ':'."""
        found = self.path.stat()
        return f"{self.path.resolve().name}-{found.st_dev}-{found.st_ino}"

    @property
    def has_files(self) -> bool:
        return bool(self._numbers)

    @property
    def dropped(self) -> int:
        """Records that a slow or full disk cost, in the files that were read."""
        return sum(self._dropped.values())

    def page(self, request: pb.ListDecisionsRequest) -> pb.ListDecisionsResponse:
        """Return the newest records that match, oldest first, and the token of those before. Raises InvalidRequest."""
        query, bounds = query_of(request), bounds_of(request.page_token)
        before = (max(self._numbers, default=0) + 1) << _FILE_SHIFT
        before = before if bounds is None else bounds.get(self.source, 0)
        found, room, most, more = list[pb.DecisionRecord](), MAX_LISTED_BYTES, listed(request.limit), False
        for record in self._backwards(query, before):
            room -= record.ByteSize()
            if found and (room < 0 or len(found) == most):
                more = True
                break
            found.append(record)
        token = f"{self.source}:{found[-1].sequence}" if more else ""
        return pb.ListDecisionsResponse(
            decisions=reversed(found),
            next_page_token=token,
            source=self.source,
        )

    @property
    def has_all(self) -> bool:
        """Whether no file has left this folder yet."""
        return self._numbers[:1] == [1]

    def oldest_ns(self) -> int:
        """Return the time of the oldest record; 0 without one."""
        if self._oldest_ns is None:
            files = (self._file(number) for number in self._numbers)
            self._oldest_ns = next((each.members[0].first_ns for each in files if each and each.members), 0)
        return self._oldest_ns

    def _backwards(self, query: DecisionQuery, before: int) -> Iterator[pb.DecisionRecord]:
        """Yield the records below a number that match, newest first."""
        texts = (query.request_id, query.kind, query.tenant, query.worker, query.session)
        needles = [text_of(each).encode() for each in texts if each]
        for number in reversed(self._numbers):
            base = number << _FILE_SHIFT
            if base >= before or (file := self._file(number)) is None:
                continue
            for index in reversed(range(len(file.members))):
                first = base + (index << _MEMBER_SHIFT)
                if first < before and _overlaps(file.members[index], query):
                    for at, line in self._lines(file, index, number, needles):
                        record = _record(line) if first + at < before else None
                        if record is not None and _matches(record, query):
                            record.sequence = first + at
                            yield record

    def _lines(self, file: _File, index: int, number: int, needles: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        """Yield the lines of a member that have all needles, newest first, each with its number."""
        member = file.members[index]
        try:
            body, end = body_of(file.data, member)
        except ValueError as error:
            self._fault(number, f"is corrupt at byte {member.start:,}: a gzip member {error}")
            return
        is_newest = number == self._numbers[-1] and index == len(file.members) - 1
        if end != member.stop and not is_newest:  # the newest one may just be written
            self._fault(number, f"is corrupt at byte {end:,}: {member.stop - end:,} bytes are not read")
        if all(each in body for each in needles):
            lines = body.split(b"\n")[: 1 << _MEMBER_SHIFT]
            found = ((at, line) for at, line in enumerate(lines) if line and all(each in line for each in needles))
            yield from reversed([*found])

    def _file(self, number: int) -> _File | None:
        """Return a file; None where it was removed meanwhile, or cannot be read at all."""
        held = self._held.pop(number, None)
        if held is None:
            try:
                data = contents_in(file_path(self.path, number))
            except FileNotFoundError:
                return None
            except OSError as error:
                self._fault(number, f"cannot be read: {error.strerror}")
                return None
            held = _File(data, members_in(data))
            self._check(number, held)
            self._dropped[number] = sum(each.dropped for each in held.members)
        self._held[number] = held
        while len(self._held) > _HELD:
            del self._held[next(iter(self._held))]
        return held

    def _check(self, number: int, file: _File) -> None:
        """Say what stands before the first member; the first of the newest file may just be written."""
        unread = file.members[0].start if file.members else len(file.data)
        if not is_ours(file.data):
            self._fault(number, "is not a file of a decision log; remove it if it is in the wrong folder")
        elif unread and (file.members or number != self._numbers[-1]):
            self._fault(number, f"is corrupt at byte 0: {unread:,} bytes are not read")

    def _fault(self, number: int, what: str) -> None:
        line = f"{file_path(self.path, number)} {what}"
        if line not in self.faults:
            self.faults.append(line)


def _overlaps(member: Member, query: DecisionQuery) -> bool:
    return member.last_ns >= query.since_ns and (not query.until_ns or member.first_ns < query.until_ns)


def _record(line: bytes) -> pb.DecisionRecord | None:
    try:
        return record_of(line)
    except ValueError:
        return None


def _matches(record: pb.DecisionRecord, query: DecisionQuery) -> bool:
    """Return whether a record matches; one of a kind that a newer Quire made matches no query."""
    if record.kind not in _KINDS:
        return False
    asked_for = Decision(
        "", DecisionKind(record.kind), record.time_unix_nano, "", record.request_id,
        victim=record.victim, beneficiary=record.beneficiary, tenant=record.tenant, worker=record.worker,
        session=record.session,
    )  # fmt: skip
    return query.matches(asked_for)


class LogReader:
    """The logs of all processes in some directories. Raises InvalidConfig when there is none."""

    def __init__(self, roots: Sequence[Path], flag: str = "--log") -> None:
        self.folders: list[FolderReader] = []
        for root in roots:
            self.folders += _readers(root, flag)

    @property
    def services(self) -> frozenset[str]:
        return frozenset(each.service for each in self.folders)

    @property
    def faults(self) -> list[str]:
        """What could not be read so far, in a line each."""
        return [line for each in self.folders for line in each.faults]

    @property
    def dropped(self) -> int:
        """Records that are missing because a disk was slow or full, in the files that were read."""
        return sum(each.dropped for each in self.folders)

    def page(self, service: str, request: pb.ListDecisionsRequest) -> pb.ListDecisionsResponse:
        """Return a page of the records of a service, as its processes answer together. Raises InvalidRequest."""
        folders = [each for each in self.folders if each.service == service]
        answers = [each.page(request) for each in folders]
        whole = merged(answers, bounds_of(request.page_token), listed(request.limit))
        whole.complete_since_unix_nano = _complete_since_ns(folders)
        return whole


def _complete_since_ns(folders: Sequence[FolderReader]) -> int:
    """Return from when on all records are there: from the first one, unless files have left a folder since."""
    began = [since for each in folders if (since := each.oldest_ns())]
    shortened = [since for each in folders if not each.has_all and (since := each.oldest_ns())]
    return max(shortened) if shortened else min(began, default=0)


def _readers(root: Path, flag: str) -> list[FolderReader]:
    if not root.is_dir():
        what = f"{root} is not a folder; name the one that the services have as --decision-log"
        raise InvalidConfig(FieldViolation(flag, what))
    try:
        found = [FolderReader(each) for each in folders_in([root]) if os.access(each, os.R_OK)]
        denied = [each for each in folders_in([root]) if not os.access(each, os.R_OK)]
    except OSError as error:
        raise InvalidConfig(FieldViolation(flag, f"{root} cannot be read: {error.strerror}")) from None
    if denied:
        what = f"{denied[0]} cannot be read: Permission denied; read it as the user of the services"
        raise InvalidConfig(FieldViolation(flag, what))
    if not any(each.has_files for each in found):
        what = f"{root} has no decision log; name a folder that services have, or had, as --decision-log"
        raise InvalidConfig(FieldViolation(flag, what))
    return found
