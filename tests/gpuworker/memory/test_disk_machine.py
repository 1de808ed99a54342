"""Frames on disk against a dictionary, through crashes between any two calls, bit rot, resets and other formats."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.contracts.transfers import TransferEnd
from gpuworker.memory import disk_frames
from gpuworker.memory.disk_frames import HEAD_BYTES
from tests.support.gpuworker.disk_harness import (
    IDENTITY,
    Crash,
    Crashing,
    System,
    drop,
    fetch,
    hash_of,
    held,
    image_of,
    opened,
    read_or_end,
    save,
    write_or_end,
)

FRAMES = 3
NAMES = "abcd"
frames, names = st.integers(0, FRAMES - 1), st.sampled_from(NAMES)
crashes = st.none() | st.tuples(st.integers(0, 8), st.sampled_from([0.01, 0.5, 1.0]))


class DiskMachine(RuleBasedStateMachine):
    """`may` has what each frame may hold: None is nothing. One content alone: it must be there."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="quire-disk-"))
        self.frames, self.identity = FRAMES, IDENTITY
        self.may: dict[int, set[str | None]] = {frame: {None} for frame in range(FRAMES)}
        self.disk = self._opened()

    def teardown(self) -> None:
        if hasattr(self, "disk"):
            drop(self.disk)
            shutil.rmtree(self.folder)

    def _opened(self) -> disk_frames.DiskFrames:
        return opened(self.folder / "w", self.frames, self.identity)

    def _survives(self, crash: tuple[int, float] | None, act: Callable[[], object]) -> bool:
        """Act, in a process that may end meanwhile, and be followed by another one; return whether it did not."""
        with pytest.MonkeyPatch.context() as patch:
            if crash is not None:
                patch.setattr(disk_frames, "os", System(Crashing(*crash)))
            try:
                act()
            except Crash:
                pass
            else:
                return True
        drop(self.disk)
        self.disk = self._opened()
        return False

    @rule(name=names, frame=frames, crash=crashes)
    def save(self, name: str, frame: int, crash: tuple[int, float] | None) -> None:
        if frame >= self.frames:
            return
        whole = self._survives(crash, lambda: self.disk.write(save(name, frame), image_of(name)))
        self.may[frame] = {name} if whole else {*self.may[frame], None, name}

    @rule(name=names, frame=frames)
    def save_late(self, name: str, frame: int) -> None:
        if frame < self.frames:
            ordered = self.disk.generation
            self.clear(None)
            assert write_or_end(self.disk, save(name, frame), image_of(name), ordered) == TransferEnd.DONE

    @rule(name=st.none() | names, frame=frames, crash=crashes)
    def fetch(self, name: str | None, frame: int, crash: tuple[int, float] | None) -> None:
        """Fetch a block, or, without a name, one that the frame may hold."""
        if frame >= self.frames:
            return
        name = name or max([each for each in self.may[frame] if each], default=NAMES[0])
        ends: list[bytes | TransferEnd] = []
        self._survives(crash, lambda: ends.append(read_or_end(self.disk, fetch(name, frame))))
        if not ends:
            self.may[frame].add(None)
        elif ends == [image_of(name)]:
            assert name in self.may[frame]
            self.may[frame] = {name} if crash is None else {name, None}
        else:
            assert ends == [TransferEnd.CORRUPT]
            assert self.may[frame] != {name}
            self.may[frame] = (self.may[frame] - {name}) or {None}

    @rule(crash=crashes)
    def clear(self, crash: tuple[int, float] | None) -> None:
        whole = self._survives(crash, lambda: self.disk.clear(1))
        for frame, contents in self.may.items():
            self.may[frame] = {None} if whole else {*contents, None}

    @rule(killed=st.booleans())
    def restart(self, killed: bool) -> None:
        drop(self.disk) if killed else self.disk.close()
        self.disk = self._opened()

    @rule(frames=st.integers(1, FRAMES))
    def resize(self, frames: int) -> None:
        self.frames = frames
        self.restart(True)
        for frame in range(frames, FRAMES):
            self.may[frame] = {None}

    @rule(crash=crashes)
    def change_format(self, crash: tuple[int, float] | None) -> None:
        self.identity = replace(self.identity, block_size=48 - self.identity.block_size)
        drop(self.disk)
        with pytest.MonkeyPatch.context() as patch:
            if crash is not None:
                patch.setattr(disk_frames, "os", System(Crashing(*crash)))
            try:
                self.disk = self._opened()
            except Crash:
                patch.undo()
                self.disk = self._opened()
        self.may = {frame: {None} for frame in range(FRAMES)}

    @rule(frame=frames, of_image=st.booleans(), at=st.integers(0, 39), bit=st.integers(0, 7))
    def rot(self, frame: int, of_image: bool, at: int, bit: int) -> None:
        path = self.folder / "w" / ("images" if of_image else "table")
        place = frame * 4096 + at if of_image else HEAD_BYTES + frame * 128 + at
        with path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)
            if byte:
                file.seek(place)
                file.write(bytes([byte[0] ^ 1 << bit]))
                self.may[frame].add(None)

    @invariant()
    def claims_are_what_frames_may_hold(self) -> None:
        if not hasattr(self, "disk"):
            return
        claims = held(self.disk)
        assert len(set(claims.values())) == len(claims)
        for frame, contents in self.may.items():
            may = {None if name is None else hash_of(name) for name in contents}
            if claims.get(frame) is None:  # a block that two frames hold is claimed once
                assert None in may or may & set(claims.values())
            else:
                assert claims[frame] in may


DiskMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestDiskMachine = DiskMachine.TestCase
