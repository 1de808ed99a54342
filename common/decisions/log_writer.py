"""Writes decision records to disk on a thread of its own. A slow or full disk costs records, and nothing else.

The caller's part is an append to a queue. The thread makes lines, compresses and writes them twice a second. After
each few records it lets other threads run: a thread that computes would else hold the event loop for 5 ms.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from common.contracts.clock import Clock, SystemClock
from common.contracts.limits import MAX_LOG_MEMBER_BYTES, MAX_LOG_QUEUE, MAX_LOG_QUEUE_BYTES
from common.contracts.types import Decision
from common.decisions.log_files import Bounds, Timed, member_of, packed
from common.decisions.log_folder import LogFolder, remove_aged
from common.decisions.ring import DecisionRing
from common.settings.decision_log import DecisionLogSettings
from common.wire.decision_json import line_of

log = logging.getLogger(__name__)

FLUSH_S: Final = 0.5
_MEMBER_BYTES: Final = 128 << 10
# Records of 30 microseconds each.
_AT_A_TIME: Final = 8
_YIELD_S: Final = 1e-4
# Seconds between two looks at the age of files.
_RETAIN_S: Final = 60.0
_CLOSE_S: Final = 2.0

_Queued = tuple[int, Decision, int]


class Files(Protocol):
    """What the thread writes to (`LogFolder`)."""

    @property
    def size(self) -> int: ...

    def append(self, member: bytes, first_ns: int, last_ns: int, now_ns: int) -> None: ...

    def retain(self, now_ns: int, more: int = 0) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class LogCounts:
    """Records that were written, and those that were not: the queue was full, or the disk refused them."""

    written: int = 0
    queue_full: int = 0
    not_written: int = 0
    bytes: int = 0
    failing: bool = False

    @property
    def dropped(self) -> int:
        return self.queue_full + self.not_written


@dataclass(slots=True)
class DecisionLogWriter:
    """Takes records with `add`, on any one thread, from `start` to `close`."""

    files: Files
    clock: Clock = field(default_factory=SystemClock)
    tidy: Callable[[], None] = lambda: None
    flush_s: float = FLUSH_S
    most: int = MAX_LOG_QUEUE
    most_bytes: int = MAX_LOG_QUEUE_BYTES
    counts: LogCounts = field(default_factory=LogCounts)
    _queue: deque[_Queued] = field(default_factory=deque)
    _taken_bytes: int = 0
    _queued_bytes: int = 0
    _told: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _queued: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self, ring: DecisionRing) -> None:
        """Write what a ring keeps from now on."""
        ring.copy_to(self.add)
        self.counts.bytes = self.files.size
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
        self._thread.start()

    def add(self, number: int, decision: Decision, size: int) -> None:
        """Queue a record of about `size` bytes of memory, or count that it was dropped. Never waits."""
        if len(self._queue) >= self.most or self._queued_bytes - self._taken_bytes + size > self.most_bytes:
            self.counts.queue_full += 1
            return
        self._queued_bytes += size
        self._queue.append((number, decision, size))
        if not self._queued.is_set():
            self._queued.set()

    def close(self, patience_s: float = _CLOSE_S) -> None:
        """Write what is queued, if the disk takes it in time."""
        self._stop.set()
        self._queued.set()
        if self._thread is None:
            return
        self._thread.join(patience_s)
        if self._thread.is_alive():
            log.warning("the decision log is not closed: its disk does not answer", extra={"queued": len(self._queue)})

    def _run(self) -> None:
        retained = self.clock.monotonic()
        while not self._stop.is_set():
            if self._queued.wait(max(0.0, retained + _RETAIN_S - self.clock.monotonic())):
                self._stop.wait(self.flush_s)  # what comes meanwhile goes in the same member
                self._queued.clear()  # before the queue is read: later records set it again
                self.flush()
            if self.clock.monotonic() - retained >= _RETAIN_S:
                retained = self.clock.monotonic()
                self._tried(self._retain)
        self.flush()
        self._tried(self.files.close)

    def _retain(self) -> None:
        self.files.retain(self.clock.time_ns())
        self.counts.bytes = self.files.size
        self.tidy()

    def flush(self) -> None:
        """Write what is queued now."""
        left = len(self._queue)
        while left:
            records, taken = self._lines(left)
            left -= taken
            for group in packed(records, _MEMBER_BYTES):
                self._write(group)

    def _write(self, group: list[Timed]) -> None:
        dropped = self.counts.dropped
        times = [time_ns for time_ns, _ in group]
        member = member_of(group, dropped - self._told)
        if self._tried(lambda: self.files.append(member, min(times), max(times), self.clock.time_ns())):
            self.counts.written += len(group)
            self._told = dropped
        else:
            self.counts.not_written += len(group)
        self.counts.bytes = self.files.size

    def _lines(self, most: int) -> tuple[list[Timed], int]:
        """Return the lines of the next records, of a member or so, and how many left the queue."""
        found, taken, size = list[Timed](), 0, 0
        while taken < most and size < _MEMBER_BYTES:
            number, decision, memory = self._queue.popleft()
            self._taken_bytes += memory
            taken += 1
            for each in self._encoded(number, decision):
                found.append((decision.time_ns, each))
                size += len(each)
            if not taken % _AT_A_TIME:
                # A sleep of 0 would take Python's lock back before the other thread wakes up.
                time.sleep(0.0 if self._stop.is_set() else _YIELD_S)
        return found, taken

    def _encoded(self, number: int, decision: Decision) -> Iterator[bytes]:
        """Yield the line of a record, unless it has none (a text that is no Unicode) or it is far too large."""
        try:
            line = line_of(number, decision)
        except (ValueError, TypeError) as error:
            log.warning("a decision record cannot be written: %s", error, extra={"decision_id": decision.decision_id})
            self.counts.not_written += 1
            return
        if len(line) < MAX_LOG_MEMBER_BYTES // 2:
            yield line
        else:
            self.counts.not_written += 1

    def _tried(self, act: Callable[[], None]) -> bool:
        """Do something with the disk, and return whether it could be done. The first failure in a row is logged."""
        try:
            act()
        except OSError as error:
            if not self.counts.failing:
                what = "the decision log cannot be written: %s; records are dropped until it can"
                log.warning(what, error.strerror or error)
            self.counts.failing = True
            return False
        if self.counts.failing:
            log.info("the decision log is written again", extra={"dropped": self.counts.dropped})
        self.counts.failing = False
        return True


def opened(settings: DecisionLogSettings, clock: Clock) -> DecisionLogWriter | None:
    """Return a writer to a folder of its own; None where no log is wanted. Raises InvalidConfig.

    What is wrong with its files is logged in a line each.
    """
    root, service = settings.decision_log, settings.service
    if root is None:
        return None
    bounds = Bounds(settings.decision_log_size, round(settings.decision_log_age * 1e9))
    folder = LogFolder.claimed(root, service, bounds, clock.time_ns())
    _log_faults(folder.faults)
    return DecisionLogWriter(folder, clock, lambda: remove_aged(root, service, bounds, clock.time_ns()))


def _log_faults(faults: Iterable[str]) -> None:
    for each in faults:
        log.warning("decision log: %s", each)
