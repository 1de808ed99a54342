"""Images move to and from disk on threads of their own; each move ends once."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.contracts.moves import MoveEnd
from gpuworker.memory import disk_frames
from gpuworker.memory.disk_frames import DiskFrames
from gpuworker.memory.disk_mover import DiskMover
from gpuworker.scheduling.image_moves import ImageMover, MovedImage
from tests.support.gpuworker.disk_harness import System, fetch, hash_of, held, image_of, opened, save

SECONDS = 30.0


class Moves:
    """A mover, and what it has said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._woken = threading.Event()
        self.disk: DiskFrames = opened(folder)
        self.mover: ImageMover = DiskMover(self.disk, self._woken.set)

    def ended(self, count: int) -> list[MovedImage]:
        """Return so many moves, once they have ended."""
        found: list[MovedImage] = []
        while len(found) < count:
            assert self._woken.wait(SECONDS)
            self._woken.clear()
            found += self.mover.poll()
        assert len(found) == count
        return found


@pytest.fixture
def moves(tmp_path: Path) -> Iterator[Moves]:
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


def test_a_block_that_is_saved_is_fetched_again(moves: Moves) -> None:
    saved, loaded = save("a", 1, number=4), fetch("a", 1, number=5)
    assert moves.mover.read_seconds == 0.0
    moves.mover.start(saved, image_of("a"))
    ((move, image, end, _),) = moves.ended(1)
    assert (move, image, end) == (saved, None, MoveEnd.DONE)
    moves.mover.start(loaded)
    ((move, image, end, seconds),) = moves.ended(1)
    assert (move, image, end) == (loaded, image_of("a"), MoveEnd.DONE)
    assert moves.mover.read_seconds == seconds > 0
    moves.mover.start(loaded)
    ((*_, later),) = moves.ended(1)
    assert moves.mover.read_seconds == pytest.approx(0.9 * seconds + 0.1 * later)


def test_moves_that_fail_say_how(moves: Moves, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str, data: bytes) -> bytes:
        if name == "pwrite":
            raise OSError(errno.ENOSPC, "No space left on device")
        return data

    moves.mover.start(fetch("a", 1))
    assert [(each.image, each.end) for each in moves.ended(1)] == [(None, MoveEnd.CORRUPT)]
    monkeypatch.setattr(disk_frames, "os", System(full))
    moves.mover.start(save("a", 1), image_of("a"))
    assert [(each.image, each.end) for each in moves.ended(1)] == [(None, MoveEnd.FAILED)]
    assert moves.mover.usable
    for frame in range(7):
        moves.mover.start(save(frame, 1), image_of(frame))
    assert {each.end for each in moves.ended(7)} == {MoveEnd.FAILED}
    assert not moves.mover.usable
    assert moves.mover.read_seconds == 0.0


def test_an_error_that_nobody_foresaw_ends_a_move_too(moves: Moves, caplog: pytest.LogCaptureFixture) -> None:
    moves.mover.start(save("a", 1, number=7), b"too short")
    assert [each.end for each in moves.ended(1)] == [MoveEnd.FAILED]
    assert "move 7 failed" in caplog.text
    moves.mover.start(save("b", 1), image_of("b"))
    assert [each.end for each in moves.ended(1)] == [MoveEnd.DONE]


def test_a_fetch_waits_for_no_save(moves: Moves, monkeypatch: pytest.MonkeyPatch) -> None:
    moves.mover.start(save("a", 0), image_of("a"))
    moves.ended(1)
    waits, go = blocked(monkeypatch)
    moves.mover.start(save("b", 1), image_of("b"))
    assert waits.wait(SECONDS)
    moves.mover.start(fetch("a", 0))
    assert [each.move for each in moves.ended(1)] == [fetch("a", 0)]
    go.set()
    assert [each.move for each in moves.ended(1)] == [save("b", 1)]


def test_saves_end_in_their_order_and_a_reset_voids_those_ordered_before_it(
    moves: Moves, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, go = blocked(monkeypatch)
    for number, name in enumerate("abc"):
        moves.mover.start(save(name, number, number=number), image_of(name))
    assert waits.wait(SECONDS)
    moves.disk.clear(9)
    moves.mover.start(save("d", 3, number=3), image_of("d"))
    go.set()
    assert [(each.move.id, each.end) for each in moves.ended(4)] == [(n, MoveEnd.DONE) for n in range(4)]
    assert held(moves.disk) == {3: hash_of("d")}


def test_at_the_end_what_runs_is_finished_and_what_waits_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = Moves(tmp_path / "w")
    waits, go = blocked(monkeypatch)
    moves.mover.start(save("a", 0), image_of("a"))
    moves.mover.start(save("b", 1), image_of("b"))
    assert waits.wait(SECONDS)
    closing = threading.Thread(target=moves.mover.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    go.set()
    closing.join(SECONDS)
    assert [each.move for each in moves.mover.poll()] == [save("a", 0)]
    again = opened(tmp_path / "w")
    assert held(again) == {0: hash_of("a")}
    again.close()


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="priorities of threads are Linux's")
def test_the_threads_stand_back_and_no_other_does(moves: Moves) -> None:
    def until(right: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        ends = time.monotonic() + SECONDS
        while not right(found := nice_values()):
            assert time.monotonic() < ends
        return found

    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    expected = {"quire-disk-read": 5, "quire-disk-write": 15}
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
    moves: Moves, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)

    def broken(_: str, data: bytes) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk_frames, "os", System(broken))
    for number in range(20):
        moves.mover.start(fetch("a", 0, number=number))
        moves.mover.start(save("a", 0, number=number), image_of("a"))
    assert {each.end for each in moves.ended(40)} == {MoveEnd.FAILED}
    assert len(caplog.messages) == 1
