"""Reads decision logs from disk, page by page as a service answers, also while services write there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from common.contracts.errors import FieldViolation, InvalidConfig
from common.contracts.limits import MAX_LISTED_BYTES
from common.decisions.disk.core.segment import Contents, Frame, body_of, contents_of, records_of
from common.decisions.disk.folder import contents_in, folders_in, numbers_in, segment_path, service_of
from common.decisions.merged import merged
from common.decisions.pages import bounds_of, query_of
from common.decisions.query import DecisionQuery
from common.decisions.ring import listed
from common.wire.decision_codec import decision_from_proto
from quire.decision.v1 import decision_pb2 as pb

# A record's number in its folder: the number of the segment, then its own within the segment.
_SEGMENT_SHIFT: Final = 32
# Segments that are held in memory, with their frames' places.
_HELD: Final = 2


@dataclass(frozen=True, slots=True)
class _Segment:
    data: bytes
    contents: Contents


class FolderReader:
    """The records of one process. `faults` are what could not be read so far, in a line each."""

    def __init__(self, path: Path) -> None:
        self.path, self.service = path, service_of(path.resolve())
        self.faults: list[str] = []
        self._held: dict[int, _Segment] = {}
        self._numbers = numbers_in(path)
        self._dropped: dict[int, int] = {}
        self._oldest_ns: int | None = None

    @property
    def source(self) -> str:
        """What tells pages of several folders apart, on several volumes too; it has no ',' and no ':'."""
        found = self.path.stat()
        return f"{self.path.resolve().name}-{found.st_dev}-{found.st_ino}"

    @property
    def has_segments(self) -> bool:
        return bool(self._numbers)

    @property
    def dropped(self) -> int:
        """Records that a slow or full disk cost, in the segments that were read."""
        return sum(self._dropped.values())

    def page(self, request: pb.ListDecisionsRequest) -> pb.ListDecisionsResponse:
        """Return the newest records that match, oldest first, and the token of those before. Raises InvalidRequest."""
        query, bounds = query_of(request), bounds_of(request.page_token)
        before = (max(self._numbers, default=0) + 1) << _SEGMENT_SHIFT
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
        """Whether no segment has left this folder yet."""
        return self._numbers[:1] == [1]

    def oldest_ns(self) -> int:
        """Return the time of the oldest record; 0 without one."""
        if self._oldest_ns is None:
            segments = (self._segment(number) for number in self._numbers)
            frames = (each.contents.frames for each in segments if each is not None)
            self._oldest_ns = next((each[0].first_ns for each in frames if each), 0)
        return self._oldest_ns

    def _backwards(self, query: DecisionQuery, before: int) -> Iterator[pb.DecisionRecord]:
        """Yield the records below a number that match, newest first."""
        needles = [each.encode() for each in (query.request_id, query.kind, query.tenant, query.worker) if each]
        for number in reversed(self._numbers):
            base = number << _SEGMENT_SHIFT
            if base >= before or (segment := self._segment(number)) is None:
                continue
            for frame in reversed(segment.contents.frames):
                if base + frame.first >= before or not _overlaps(frame, query):
                    continue
                yield from self._records(segment, frame, number, query, needles, before)

    def _records(
        self, segment: _Segment, frame: Frame, number: int, query: DecisionQuery, needles: Sequence[bytes], before: int
    ) -> Iterator[pb.DecisionRecord]:
        try:
            body = body_of(segment.data, frame)
            encoded = records_of(body) if all(each in body for each in needles) else ()
        except ValueError as error:
            self._fault(number, f"is corrupt at byte {frame.start:,}: a frame {error}")
            return
        for index in reversed(range(len(encoded))):
            at = (number << _SEGMENT_SHIFT) + frame.first + index
            if at >= before or not all(each in encoded[index] for each in needles):
                continue
            record = _record(encoded[index])
            if record is not None and _matches(record, query):
                record.sequence = at
                yield record

    def _segment(self, number: int) -> _Segment | None:
        """Return a segment; None where it was removed meanwhile, or cannot be read at all."""
        held = self._held.pop(number, None)
        if held is None:
            path = segment_path(self.path, number)
            try:
                data = contents_in(path)
            except FileNotFoundError:
                return None
            except OSError as error:
                self._fault(number, f"cannot be read: {error.strerror}")
                return None
            contents = contents_of(data)
            held = _Segment(data, contents)
            for each in contents.faults:
                self._fault(number, each)
            self._cut(number, len(data), contents)
            self._dropped[number] = sum(each.dropped for each in contents.frames)
        self._held[number] = held
        while len(self._held) > _HELD:
            del self._held[next(iter(self._held))]
        return held

    def _cut(self, number: int, size: int, contents: Contents) -> None:
        """Say that a segment ends within a frame, unless it is the newest, whose frame may just be written."""
        if contents.end is not None and contents.end < size and number != self._numbers[-1]:
            self._fault(number, f"is corrupt at byte {contents.end:,}: it ends within a frame")

    def _fault(self, number: int, what: str) -> None:
        line = f"{segment_path(self.path, number)} {what}"
        if line not in self.faults:
            self.faults.append(line)


def _overlaps(frame: Frame, query: DecisionQuery) -> bool:
    return frame.last_ns >= query.since_ns and (not query.until_ns or frame.first_ns < query.until_ns)


def _record(encoded: bytes) -> pb.DecisionRecord | None:
    try:
        return pb.DecisionRecord.FromString(encoded)
    except DecodeError:
        return None


def _matches(record: pb.DecisionRecord, query: DecisionQuery) -> bool:
    """Return whether a record matches; one of a kind that a newer Quire made matches no query."""
    try:
        return query.matches(decision_from_proto(record))
    except ValueError:
        return False


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
        """Records that are missing because a disk was slow or full, in the segments that were read."""
        return sum(each.dropped for each in self.folders)

    def page(self, service: str, request: pb.ListDecisionsRequest) -> pb.ListDecisionsResponse:
        """Return a page of the records of a service, as its processes answer together. Raises InvalidRequest."""
        folders = [each for each in self.folders if each.service == service]
        answers = [each.page(request) for each in folders]
        whole = merged(answers, bounds_of(request.page_token), listed(request.limit))
        whole.complete_since_unix_nano = _complete_since_ns(folders)
        return whole


def _complete_since_ns(folders: Sequence[FolderReader]) -> int:
    """Return from when on all records are there: from the first one, unless segments have left a folder since."""
    began = [since for each in folders if (since := each.oldest_ns())]
    shortened = [since for each in folders if not each.has_all and (since := each.oldest_ns())]
    return max(shortened) if shortened else min(began, default=0)


def _readers(root: Path, flag: str) -> list[FolderReader]:
    if not root.is_dir():
        what = f"{root} is no folder; name the one that the services have as --decision-log"
        raise InvalidConfig(FieldViolation(flag, what))
    try:
        found = [FolderReader(each) for each in folders_in([root]) if os.access(each, os.R_OK)]
        denied = [each for each in folders_in([root]) if not os.access(each, os.R_OK)]
    except OSError as error:
        raise InvalidConfig(FieldViolation(flag, f"{root} cannot be read: {error.strerror}")) from None
    if denied:
        what = f"{denied[0]} cannot be read: Permission denied; read it as the user of the services"
        raise InvalidConfig(FieldViolation(flag, what))
    if not any(each.has_segments for each in found):
        what = f"{root} has no decision log; name a folder that services have, or had, as --decision-log"
        raise InvalidConfig(FieldViolation(flag, what))
    return found
