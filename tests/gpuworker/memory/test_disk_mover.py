"""Images transfer to and from disk on threads of their own; each transfer ends once."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.contracts.transfers import TransferEnd
from gpuworker.memory import disk_frames
from gpuworker.memory.disk_frames import DiskFrames
from gpuworker.memory.disk_mover import DiskMover
from gpuworker.scheduling.images import EndedTransfer, ImageMover
from tests.support.gpuworker.disk_harness import System, fetch, hash_of, held, image_of, opened, save

SECONDS = 30.0


class Moves:
    """A mover, and what it has said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._woken = threading.Event()
        self.disk: DiskFrames = opened(folder)
        self.mover: ImageMover = DiskMover(self.disk, self._woken.set)

    def ended(self, count: int) -> list[EndedTransfer]:
        """Return so many transfers, once they have ended."""
        found: list[EndedTransfer] = []
        while len(found) < count:
            assert self._woken.wait(SECONDS)
            self._woken.clear()
            found += self.mover.poll()
        assert len(found) == count
        return found


@pytest.fixture
def transfers(tmp_path: Path) -> Iterator[Moves]:
    made = Moves(tmp_path / "w")
    yield made
    made.mover.close()


def blocked(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Let writes of images wait; return what says that one does, and what lets them go."""
    waits, go = threading.Event(), threading.Event()

    def gate(name: str, data: bytes) -> bytes:
        if name == "pwrite" and len(data) == len(image_of("")):
            waits.set()
            assert go.wait(SECONDS)
        return data

    monkeypatch.setattr(disk_frames, "os", System(gate))
    return waits, go


def test_a_block_that_is_saved_is_fetched_again(transfers: Moves) -> None:
    saved, loaded = save("a", 1, number=4), fetch("a", 1, number=5)
    transfers.mover.start(saved, image_of("a"))
    ((transfer, image, end),) = transfers.ended(1)
    assert (transfer, image, end) == (saved, None, TransferEnd.DONE)
    transfers.mover.start(loaded)
    ((transfer, image, end),) = transfers.ended(1)
    assert (transfer, image, end) == (loaded, image_of("a"), TransferEnd.DONE)


def test_moves_that_fail_say_how(transfers: Moves, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str, data: bytes) -> bytes:
        if name == "pwrite":
            raise OSError(errno.ENOSPC, "No space left on device")
        return data

    transfers.mover.start(fetch("a", 1))
    assert [(each.image, each.end) for each in transfers.ended(1)] == [(None, TransferEnd.CORRUPT)]
    monkeypatch.setattr(disk_frames, "os", System(full))
    transfers.mover.start(save("a", 1), image_of("a"))
    assert [(each.image, each.end) for each in transfers.ended(1)] == [(None, TransferEnd.FAILED)]
    assert transfers.mover.usable
    for frame in range(7):
        transfers.mover.start(save(frame, 1), image_of(frame))
    assert {each.end for each in transfers.ended(7)} == {TransferEnd.FAILED}
    assert not transfers.mover.usable


def test_an_error_that_nobody_foresaw_ends_a_move_too(transfers: Moves, caplog: pytest.LogCaptureFixture) -> None:
    transfers.mover.start(save("a", 1, number=7), b"too short")
    assert [each.end for each in transfers.ended(1)] == [TransferEnd.FAILED]
    assert "transfer 7 failed" in caplog.text
    transfers.mover.start(save("b", 1), image_of("b"))
    assert [each.end for each in transfers.ended(1)] == [TransferEnd.DONE]


def test_a_fetch_waits_for_no_save(transfers: Moves, monkeypatch: pytest.MonkeyPatch) -> None:
    transfers.mover.start(save("a", 0), image_of("a"))
    transfers.ended(1)
    waits, go = blocked(monkeypatch)
    transfers.mover.start(save("b", 1), image_of("b"))
    assert waits.wait(SECONDS)
    transfers.mover.start(fetch("a", 0))
    assert [each.transfer for each in transfers.ended(1)] == [fetch("a", 0)]
    go.set()
    assert [each.transfer for each in transfers.ended(1)] == [save("b", 1)]


def test_saves_end_in_their_order_and_a_reset_voids_those_ordered_before_it(
    transfers: Moves, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, go = blocked(monkeypatch)
    for number, name in enumerate("abc"):
        transfers.mover.start(save(name, number, number=number), image_of(name))
    assert waits.wait(SECONDS)
    transfers.disk.clear(9)
    transfers.mover.start(save("d", 3, number=3), image_of("d"))
    go.set()
    assert [(each.transfer.id, each.end) for each in transfers.ended(4)] == [(n, TransferEnd.DONE) for n in range(4)]
    assert held(transfers.disk) == {3: hash_of("d")}


def test_at_the_end_what_runs_is_finished_and_what_waits_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers = Moves(tmp_path / "w")
    waits, go = blocked(monkeypatch)
    transfers.mover.start(save("a", 0), image_of("a"))
    transfers.mover.start(save("b", 1), image_of("b"))
    assert waits.wait(SECONDS)
    closing = threading.Thread(target=transfers.mover.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    go.set()
    closing.join(SECONDS)
    assert [each.transfer for each in transfers.mover.poll()] == [save("a", 0)]
    again = opened(tmp_path / "w")
    assert held(again) == {0: hash_of("a")}
    again.close()


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="priorities of threads are Linux's")
def test_the_threads_stand_back_and_no_other_does(transfers: Moves) -> None:
    def until(right: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        ends = time.monotonic() + SECONDS
        while not right(found := nice_values()):
            assert time.monotonic() < ends
        return found

    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    expected = {"quire-disk-read": min(19, own + 5), "quire-disk-write": min(19, own + 15)}
    assert until(lambda found: found == expected) == expected
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


def nice_values() -> dict[str, int]:
    """Return the nice values of the mover's threads by their names."""
    return {
        each.name: os.getpriority(os.PRIO_PROCESS, each.native_id)
        for each in threading.enumerate()
        if each.name.startswith("quire-disk") and each.native_id is not None
    }


def test_the_log_of_a_broken_disk_is_one_line(
    transfers: Moves, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)

    def broken(_: str, data: bytes) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk_frames, "os", System(broken))
    for number in range(20):
        transfers.mover.start(fetch("a", 0, number=number))
        transfers.mover.start(save("a", 0, number=number), image_of("a"))
    assert {each.end for each in transfers.ended(40)} == {TransferEnd.FAILED}
    assert len(caplog.messages) == 1
