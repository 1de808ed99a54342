"""A file system without room, a real one of 256 KiB: needs root, and is skipped without."""

from __future__ import annotations

import gzip
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.contracts.clock import ManualClock
from common.contracts.types import Decision, DecisionKind
from common.decisions.log_files import Bounds, members_in
from common.decisions.log_folder import LogFolder, file_path, numbers_in
from common.decisions.log_writer import DecisionLogWriter
from kvmanager.index.state_file import EpochFile

BOUNDS = Bounds(1 << 24, 10**18)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid():
        pytest.skip("a file system can be mounted by root alone")
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take all room that is left."""
    filler = folder / "filler"
    file = os.open(filler, os.O_CREAT | os.O_WRONLY)
    try:
        while os.write(file, bytes(4096)):
            pass
    except OSError:
        pass
    finally:
        os.close(file)
    return filler


def write(writer: DecisionLogWriter, first: int, count: int) -> None:
    for number in range(first, first + count):
        text = os.urandom(400).hex()
        writer.add(number, Decision(f"d{number}", DecisionKind.ROUTING, number, text, f"r{number}"), 1)
        writer.flush()


def test_a_decision_log_drops_records_until_there_is_room(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = LogFolder.claimed(small, "router", BOUNDS, 0)
    writer = DecisionLogWriter(folder, ManualClock(1.0))
    write(writer, 1, 10)
    filler = fill(small)
    write(writer, 11, 40)
    dropped = writer.counts.not_written
    assert dropped > 0
    filler.unlink()
    write(writer, 51, 10)
    assert writer.counts.not_written == dropped
    lines = [record.getMessage() for record in caplog.records if "decision log" in record.getMessage()]
    assert ["No space left on device" in line for line in lines] == [True, False]
    files = [file_path(folder.path, number).read_bytes() for number in numbers_in(folder.path)]
    records = gzip.decompress(b"".join(files)).splitlines()
    assert len(records) == writer.counts.written == 60 - dropped
    assert sum(member.dropped for data in files for member in members_in(data)) == dropped
    folder.close()


def test_a_manager_starts_without_room_for_its_epoch(small: Path) -> None:
    file = EpochFile(small / "state")
    file.write(12)
    filler = fill(small)
    file.check()
    assert file.read() == 12
    filler.unlink()
    file.write(13)
    assert file.read() == 13
