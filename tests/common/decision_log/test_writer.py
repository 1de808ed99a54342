"""The thread that writes: its queue, a slow, a full and a failing disk, and what a process that is killed leaves."""

from __future__ import annotations

import errno
import gzip
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from common.contracts.clock import ManualClock
from common.contracts.types import Decision, DecisionKind
from common.decisions.log_files import Bounds, end_of, members_in
from common.decisions.log_folder import LogFolder, file_path, numbers_in
from common.decisions.log_metrics import LogMetrics
from common.decisions.log_reader import LogReader
from common.decisions.log_writer import DecisionLogWriter
from common.decisions.ring import DecisionRing
from common.wire.decision_json import record_of
from quire.decision.v1 import decision_pb2 as pb

PATIENCE_S = 60.0
BOUNDS = Bounds(1 << 24, 10**18)


class Disk:
    """Holds what is appended. `fails` raises that error; while `held`, an append waits."""

    def __init__(self) -> None:
        self.members: list[bytes] = []
        self.fails: OSError | None = None
        self.reached, self.let_go = threading.Event(), threading.Event()
        self.held, self.closed = False, False

    @property
    def size(self) -> int:
        return sum(map(len, self.members))

    def append(self, member: bytes, first_ns: int, last_ns: int, now_ns: int) -> None:
        if self.held:
            self.reached.set()
            self.let_go.wait(PATIENCE_S)
        if self.fails is not None:
            raise self.fails
        self.members.append(member)

    def retain(self, now_ns: int, more: int = 0) -> None: ...

    def close(self) -> None:
        self.closed = True

    def records(self) -> list[pb.DecisionRecord]:
        return [record_of(line) for each in self.members for line in gzip.decompress(each).splitlines()]

    def dropped(self) -> int:
        return sum(each.dropped for each in members_in(b"".join(self.members)))


def decision(number: int, text: str = "w0") -> Decision:
    return Decision(f"d{number}", DecisionKind.ROUTING, number, text, f"r{number}")


def record(ring: DecisionRing, numbers: range) -> None:
    for number in numbers:
        ring.record(decision(number))


def ids(records: list[pb.DecisionRecord]) -> list[str]:
    return [each.decision_id for each in records]


@pytest.fixture
def disk() -> Disk:
    return Disk()


def test_records_are_written_in_order_with_their_numbers_in_members_of_128_kib(disk: Disk) -> None:
    ring, writer = DecisionRing(4), DecisionLogWriter(disk, ManualClock(), flush_s=PATIENCE_S)
    writer.start(ring)
    record(ring, range(3_000))
    writer.close(PATIENCE_S)
    found = disk.records()
    assert ids(found) == [f"d{number}" for number in range(3_000)]
    assert [each.sequence for each in found] == list(range(1, 3_001))
    assert (disk.closed, writer.counts.written, writer.counts.dropped) == (True, 3_000, 0)
    assert 1 < len(disk.members) < 20


def test_a_slow_disk_costs_records_and_never_the_service(disk: Disk) -> None:
    disk.held = True
    ring, writer = DecisionRing(1_000), DecisionLogWriter(disk, ManualClock(), flush_s=0.001, most=10)
    writer.start(ring)
    ring.record(decision(0))
    assert disk.reached.wait(PATIENCE_S)
    record(ring, range(1, 31))  # the disk still has the first one, and 10 wait
    assert (len(ring), writer.counts.queue_full, disk.members) == (31, 20, [])
    disk.held = False
    disk.let_go.set()
    writer.close(PATIENCE_S)
    assert ids(disk.records()) == [f"d{number}" for number in range(11)]
    assert disk.dropped() == writer.counts.dropped == 20


def test_the_queue_is_bounded_in_bytes_too(disk: Disk) -> None:
    writer = DecisionLogWriter(disk, ManualClock(), most_bytes=1_000)
    for number in range(5):
        writer.add(number, decision(number), 400)
    assert writer.counts.queue_full == 3
    writer.flush()
    writer.add(6, decision(6), 1_000)
    assert writer.counts.queue_full == 3


def test_a_disk_that_does_not_answer_is_left_behind_at_the_end(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    disk.held = True
    ring, writer = DecisionRing(4), DecisionLogWriter(disk, ManualClock(), flush_s=0.001)
    writer.start(ring)
    ring.record(decision(0))
    assert disk.reached.wait(PATIENCE_S)
    writer.close(0.01)
    assert "its disk does not answer" in caplog.text
    disk.let_go.set()
    writer.close(PATIENCE_S)


def test_a_failing_disk_is_logged_once_and_written_again_when_it_can(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "common.decisions.log_writer")
    writer = DecisionLogWriter(disk, ManualClock())
    disk.fails = OSError(errno.ENOSPC, "No space left on device")
    for number in range(3):
        writer.add(number, decision(number), 1)
        writer.flush()
    assert [each.getMessage() for each in caplog.records] == [
        "the decision log cannot be written: No space left on device; records are dropped until it can"
    ]
    disk.fails = None
    writer.add(3, decision(3), 1)
    writer.flush()
    assert caplog.records[-1].getMessage() == "the decision log is written again"
    assert (ids(disk.records()), disk.dropped(), writer.counts.not_written) == (["d3"], 3, 3)


def test_a_record_that_has_no_message_is_dropped_alone(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    writer = DecisionLogWriter(disk, ManualClock())
    for number, text in enumerate(("w0", "\udc80", "w2")):
        writer.add(number, decision(number, text), 1)
    writer.flush()
    assert (ids(disk.records()), writer.counts.not_written) == (["d0", "d2"], 1)
    assert "d1" in str([vars(each) for each in caplog.records])


def test_the_figures_of_a_log_are_exposed(disk: Disk) -> None:
    writer, registry = DecisionLogWriter(disk, ManualClock(), most=2), CollectorRegistry()
    LogMetrics(registry, writer)
    for number in range(5):
        writer.add(number, decision(number), 1)
    writer.flush()
    assert registry.get_sample_value("quire:decision_log_records_total") == 2
    assert registry.get_sample_value("quire:decision_log_dropped_total", {"by": "queue"}) == 3
    assert registry.get_sample_value("quire:decision_log_dropped_total", {"by": "disk"}) == 0
    assert registry.get_sample_value("quire:decision_log_bytes") == disk.size > 0


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limit the size of files, as a full disk does: the kernel takes a part of a write and no more.

    The limit holds for the whole process: what pytest writes meanwhile fails too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_whole_members_alone(tmp_path: Path) -> None:
    folder = LogFolder.claimed(tmp_path, "router", BOUNDS, 0)
    writer = DecisionLogWriter(folder, ManualClock(1.0))
    with files_of_at_most(1_000):
        for number in range(40):
            writer.add(number, decision(number, os.urandom(40).hex()), 1)
            writer.flush()
    data = file_path(folder.path, 1).read_bytes()
    assert writer.counts.not_written > 0
    assert end_of(data) == len(data) <= 1_000
    assert len(gzip.decompress(data).splitlines()) == writer.counts.written > 0


_WRITES = """
import sys
import time
from pathlib import Path
from common.decisions.log_writer import opened
from common.decisions.ring import DecisionRing
from common.contracts.clock import SystemClock
from common.contracts.types import Decision, DecisionKind
from kvmanager.config import KvManagerSettings

writer = opened(KvManagerSettings(decision_log=Path(sys.argv[1]), decision_log_size=1 << 26), SystemClock())
writer.flush_s = 0.001
ring, number = DecisionRing(100), int(sys.argv[2])
last = number + 50_000  # the log has room for so many, however late the kill comes
writer.start(ring)
while True:
    while len(writer._queue) < 500 and number < last:
        number += 1
        ring.record(Decision(f"d{number}", DecisionKind.GRANT, time.time_ns(), "x" * (number % 50), f"r{number}"))
    print(writer.counts.written, flush=True)
"""


@pytest.mark.processes
def test_a_killed_process_loses_no_record_that_was_written_and_the_next_goes_on(tmp_path: Path) -> None:
    """Two lives, each killed while it writes; a third process reads."""
    begin = 0
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", _WRITES, str(tmp_path), str(begin)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            written = next(count for line in process.stdout if (count := int(line)) > 1_000)
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read().splitlines()
        written = max([written, *map(int, rest[:-1])])
        newest = int(records_in(tmp_path)[-1].decision_id[1:])
        assert newest >= begin + written
        begin = newest
    folder = tmp_path / "kvmanager-0"
    assert len(list(tmp_path.iterdir())) == 1
    found = [int(each.decision_id[1:]) for each in records_in(tmp_path)]
    assert found == list(range(1, begin + 1))
    assert len(found) > 2_000
    again = LogFolder.claimed(tmp_path, "kvmanager", BOUNDS, 0)
    assert again.path == folder
    assert all("ended within a gzip member" in each for each in again.faults)
    assert numbers_in(folder)


def records_in(root: Path) -> list[pb.DecisionRecord]:
    """Return all records of a manager's log, oldest first."""
    reader, asked = LogReader([root]), pb.ListDecisionsRequest(limit=1_000)
    found: list[pb.DecisionRecord] = []
    while True:
        page = reader.page("kvmanager", asked)
        found = [*page.decisions, *found]
        asked.page_token = page.next_page_token
        if not asked.page_token:
            assert reader.faults == []
            return found


class Waits(threading.Event):
    """An event that notes for how long it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout)
        return super().wait(timeout)


def test_a_writer_without_records_wakes_up_once_a_minute(disk: Disk) -> None:
    ring, writer, waits = DecisionRing(4), DecisionLogWriter(disk, ManualClock(), flush_s=0.001), Waits()
    writer._queued = waits
    disk.held = True  # so that it says when it is reached
    disk.let_go.set()
    writer.start(ring)
    ring.record(decision(0))
    assert disk.reached.wait(PATIENCE_S)
    writer.close(PATIENCE_S)
    assert ids(disk.records()) == ["d0"]
    assert set(waits.seconds) == {60.0}
    assert len(waits.seconds) <= 3
