"""Frames on disk: a worker that restarts finds them, and whatever else a file has is a miss."""

from __future__ import annotations

import builtins
import errno
import logging
import os
import stat
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.contracts.errors import InvalidConfig
from common.contracts.transfers import TransferEnd
from common.contracts.types import KvGeometry, KvGroup, KvGroupKind
from gpuworker.memory import disk_frames
from gpuworker.memory.disk_frames import (
    ENTRY_BYTES,
    HEAD_BYTES,
    DiskFrames,
    checked_frames,
    open_for_worker,
    size_of,
    stride_of,
)
from tests.support.gpuworker.disk_harness import (
    IDENTITY,
    SIZE,
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


def written(folder: Path, *names: str, frames: int = 4) -> DiskFrames:
    """Return frames that hold these blocks, from the first one on."""
    disk = opened(folder, frames)
    for frame, name in enumerate(names):
        disk.write(save(name, frame), image_of(name))
    return disk


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# ---------------------------------------------------------------- restarts


def test_a_worker_that_restarts_claims_what_it_has_saved(tmp_path: Path) -> None:
    disk = opened(tmp_path / "w")
    assert (disk.num_frames, disk.claims().contents, disk.reset) == (4, (), 0)
    disk.write(save("a", 2), image_of("a"))
    disk.write(save("b", 0, "a", 1), image_of("b"))
    disk.close()
    again = opened(tmp_path / "w")
    first, second = again.claims().contents
    assert (first.block, first.hash, first.parent_hash, first.depth) == (2, hash_of("a"), bytes(16), 0)
    assert (second.block, second.hash, second.parent_hash, second.depth) == (0, hash_of("b"), hash_of("a"), 1)
    assert again.read(fetch("a", 2)) == image_of("a")
    assert again.read(fetch("b", 0, "a", 1)) == image_of("b")


def test_a_process_that_is_killed_leaves_what_it_has_saved(tmp_path: Path) -> None:
    drop(written(tmp_path / "w", "a", "b"))
    assert held(opened(tmp_path / "w")) == {0: hash_of("a"), 1: hash_of("b")}


def test_claims_are_in_the_order_of_their_last_use(tmp_path: Path) -> None:
    disk = written(tmp_path / "w", "a", "b", "c")
    assert [(each.hash, each.last_used) for each in disk.claims().contents] == [
        (hash_of(name), n) for n, name in enumerate("abc")
    ]
    disk.read(fetch("a", 0))
    disk.close()
    assert [each.hash for each in opened(tmp_path / "w").claims().contents] == [
        hash_of("b"),
        hash_of("c"),
        hash_of("a"),
    ]


def test_a_block_that_two_frames_hold_is_claimed_once(tmp_path: Path) -> None:
    disk = written(tmp_path / "w", "a", "b", "a")
    assert held(disk) == {1: hash_of("b"), 2: hash_of("a")}


def test_a_frame_that_is_written_again_holds_the_new_block(tmp_path: Path) -> None:
    disk = written(tmp_path / "w", "a")
    disk.write(save("b", 0), image_of("b"))
    assert held(disk) == {0: hash_of("b")}
    assert read_or_end(disk, fetch("a", 0)) == TransferEnd.CORRUPT
    assert held(disk) == {0: hash_of("b")}


@pytest.mark.parametrize(
    "transfer",
    [fetch("b", 0), fetch("a", 0, depth=1), fetch("b", 1, "other", 1), fetch("b", 1, "a", 2), fetch("a", 2)],
    ids=["another hash", "a depth", "another parent", "another depth", "an empty frame"],
)
def test_a_frame_that_holds_another_block_gives_nothing_and_keeps_it(tmp_path: Path, transfer: Any) -> None:
    disk = written(tmp_path / "w", "a")
    disk.write(save("b", 1, "a", 1), image_of("b"))
    assert read_or_end(disk, transfer) == TransferEnd.CORRUPT
    assert read_or_end(disk, fetch("a", 0)) == image_of("a")
    assert read_or_end(disk, fetch("b", 1, "a", 1)) == image_of("b")


# ---------------------------------------------------------------- resets


def test_a_reset_empties_all_frames_for_good(tmp_path: Path) -> None:
    disk = written(tmp_path / "w", "a", "b")
    disk.clear(5)
    assert (disk.claims().contents, disk.reset) == ((), 5)
    assert read_or_end(disk, fetch("a", 0)) == TransferEnd.CORRUPT
    disk.write(save("c", 1), image_of("c"))
    drop(disk)
    again = opened(tmp_path / "w")
    assert (held(again), again.reset) == ({1: hash_of("c")}, 5)


def test_a_save_that_was_ordered_before_a_reset_holds_nothing(tmp_path: Path) -> None:
    disk = opened(tmp_path / "w")
    ordered = disk.generation
    disk.clear(1)
    assert write_or_end(disk, save("a", 0), image_of("a"), ordered) == TransferEnd.DONE
    assert held(disk) == {}


def test_a_reset_is_on_the_disk_before_it_is_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    disk = opened(tmp_path / "w")

    def noted(name: str, data: bytes) -> bytes:
        calls.append(name)
        return data

    monkeypatch.setattr(disk_frames, "os", System(noted))
    disk.clear(1)
    assert calls == ["pwrite", "fsync"]


def test_a_reset_that_cannot_be_stored_closes_the_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = written(tmp_path / "w", "a")

    def broken(name: str, data: bytes) -> bytes:
        if name == "fsync":
            raise OSError(errno.EIO, "Input/output error")
        return data

    monkeypatch.setattr(disk_frames, "os", System(broken))
    disk.clear(1)
    assert not disk.usable
    assert "a reset of the prefix cache could not be stored there: Input/output error" in caplog.text
    monkeypatch.undo()
    drop(disk)
    assert held(opened(tmp_path / "w")) == {}


# ---------------------------------------------------------------- crashes

# The calls of a save: entry zeroed, image, entry. A crash may cut each of them.
CUTS = [(0, 1.0), (1, 0.5), (1, 1.0), (2, 0.01), (2, 0.5), (2, 1.0), (3, 0.01), (3, 0.5), (3, 0.9)]


@pytest.mark.parametrize(("calls", "share"), CUTS)
def test_a_save_that_is_cut_short_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int, share: float
) -> None:
    disk = written(tmp_path / "w", "a", "b")
    monkeypatch.setattr(disk_frames, "os", System(Crashing(calls, share)))
    with suppress(Crash):  # none where a part of the entry is the last that was written
        disk.write(save("c", 0), image_of("c"))
    monkeypatch.undo()
    drop(disk)
    again = opened(tmp_path / "w")
    assert held(again) == {1: hash_of("b")} | ({0: hash_of("a")} if not calls else {})
    assert read_or_end(again, fetch("c", 0)) == TransferEnd.CORRUPT


@pytest.mark.parametrize("at", range(ENTRY_BYTES))
def test_an_entry_of_which_a_byte_is_not_there_is_a_miss(tmp_path: Path, at: int) -> None:
    """The disk may have written any part of an entry when the power goes."""
    disk = written(tmp_path / "w", "a")
    drop(disk)
    flip(tmp_path / "w" / "table", HEAD_BYTES + at)
    again = opened(tmp_path / "w")
    assert (held(again), read_or_end(again, fetch("a", 0))) == ({}, TransferEnd.CORRUPT)


@pytest.mark.parametrize("at", range(SIZE))
def test_an_image_of_which_a_byte_has_changed_is_a_miss(tmp_path: Path, at: int) -> None:
    drop(written(tmp_path / "w", "b", "a"))
    flip(tmp_path / "w" / "images", stride_of(SIZE) + at)
    again = opened(tmp_path / "w")
    assert held(again) == {0: hash_of("b"), 1: hash_of("a")}, "images are verified when they are loaded"
    assert read_or_end(again, fetch("a", 1)) == TransferEnd.CORRUPT
    assert held(again) == {0: hash_of("b")}
    assert again.read(fetch("b", 0)) == image_of("b")


@pytest.mark.parametrize("at", [0, 8, 12, 16, 32, 40, 48, 51, 64, 200])
def test_a_head_of_which_a_byte_has_changed_empties_the_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at: int
) -> None:
    drop(written(tmp_path / "w", "a"))
    flip(tmp_path / "w" / "table", at)
    again = opened(tmp_path / "w")
    assert held(again) == {}
    assert "is emptied, its table is broken" in caplog.text
    again.write(save("c", 1), image_of("c"))
    drop(again)
    assert held(opened(tmp_path / "w")) == {1: hash_of("c")}


def test_an_entry_in_the_place_of_another_one_is_a_miss(tmp_path: Path) -> None:
    drop(written(tmp_path / "w", "a", "b"))
    table = tmp_path / "w" / "table"
    data = bytearray(table.read_bytes())
    one, two = HEAD_BYTES, HEAD_BYTES + ENTRY_BYTES
    data[one : one + ENTRY_BYTES] = data[two : two + ENTRY_BYTES]
    table.write_bytes(data)
    assert held(opened(tmp_path / "w")) == {1: hash_of("b")}


@pytest.mark.parametrize("left", [0, 1, SIZE - 1])
def test_images_that_end_early_are_misses(tmp_path: Path, left: int) -> None:
    drop(written(tmp_path / "w", "a", "b"))
    os.truncate(tmp_path / "w" / "images", stride_of(SIZE) + left)
    again = opened(tmp_path / "w")
    assert read_or_end(again, fetch("b", 1)) == TransferEnd.CORRUPT
    assert again.read(fetch("a", 0)) == image_of("a")


@pytest.mark.parametrize("left", [0, 10, HEAD_BYTES, HEAD_BYTES + ENTRY_BYTES - 1, HEAD_BYTES + ENTRY_BYTES])
def test_a_table_that_ends_early_has_what_is_whole(tmp_path: Path, left: int) -> None:
    drop(written(tmp_path / "w", "a", "b"))
    os.truncate(tmp_path / "w" / "table", left)
    assert held(opened(tmp_path / "w")) == ({0: hash_of("a")} if left == HEAD_BYTES + ENTRY_BYTES else {})


@pytest.mark.parametrize("calls", range(12))
def test_a_start_that_ends_while_it_empties_a_folder_claims_nothing_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    drop(written(tmp_path / "w", "a"))
    foreign = replace(IDENTITY, block_size=32)
    monkeypatch.setattr(disk_frames, "os", System(Crashing(calls, 0.5)))
    try:
        opened(tmp_path / "w", identity=foreign).close()
    except Crash:
        assert calls < 10
    monkeypatch.undo()
    assert held(opened(tmp_path / "w", identity=foreign)) == {}


# ---------------------------------------------------------------- formats and sizes


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"identity": replace(IDENTITY, block_size=32)}, "block_size was 16 and is 32"),
        (
            {"identity": replace(IDENTITY, model_fingerprint="c" * 32)},
            f"model_fingerprint was {'a' * 32} and is {'c' * 32}",
        ),
        (
            {"identity": replace(IDENTITY, kv_geometry=KvGeometry(2, 3, 8, 4, "int8"), arithmetic="x" * 50)},
            f"arithmetic was {IDENTITY.arithmetic} and is {'x' * 40}..., kv_geometry.dtype was float32 and is int8",
        ),
        ({"made_with": {"quantization": "int8"}}, "quantization was not there and is int8"),
    ],
)
def test_another_format_empties_the_folder_and_the_log_names_what_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: dict[str, Any], words: str
) -> None:
    disk = written(tmp_path / "w", "a")
    disk.clear(3)
    disk.write(save("b", 1), image_of("b"))
    drop(disk)
    again = opened(tmp_path / "w", **changed)
    (line,) = caplog.messages
    assert line == f"{tmp_path / 'w'} is emptied, its blocks are of another format: {words}"
    assert (held(again), again.reset, again.generation) == ({}, 0, 3)
    assert os.stat(tmp_path / "w" / "images").st_size == 0
    drop(again)
    assert held(opened(tmp_path / "w")) == {}, "nor does the old format find its blocks again"


def test_an_image_of_another_size_is_another_format(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drop(written(tmp_path / "w", "a"))
    again = DiskFrames.open(tmp_path / "w", size_of(4, 48), 48, IDENTITY)
    assert held(again) == {}
    assert "image_bytes was 40 and is 48" in caplog.text


def test_a_newer_layout_is_another_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drop(written(tmp_path / "w", "a"))
    monkeypatch.setattr(disk_frames, "LAYOUT", 2)
    assert held(opened(tmp_path / "w")) == {}
    assert caplog.messages == [f"{tmp_path / 'w'} is emptied, its blocks are of another format: layout was 1 and is 2"]


def test_a_folder_of_another_size_keeps_what_fits(tmp_path: Path) -> None:
    drop(written(tmp_path / "w", "a", "b", "c"))
    smaller = opened(tmp_path / "w", frames=2)
    assert held(smaller) == {0: hash_of("a"), 1: hash_of("b")}
    assert os.stat(tmp_path / "w" / "images").st_size == 2 * stride_of(SIZE)
    drop(smaller)
    larger = opened(tmp_path / "w", frames=9000)
    assert held(larger) == {0: hash_of("a"), 1: hash_of("b")}
    larger.write(save("d", 8999), image_of("d"))
    drop(larger)
    assert held(opened(tmp_path / "w", frames=9000)) == {0: hash_of("a"), 1: hash_of("b"), 8999: hash_of("d")}


def test_a_size_has_as_many_frames_as_fit_with_their_entries() -> None:
    assert [checked_frames(size, SIZE) for size in (size_of(1, SIZE), size_of(2, SIZE) - 1, size_of(2, SIZE))] == [
        1,
        1,
        2,
    ]
    assert checked_frames(1 << 50, SIZE) == 1 << 20
    with pytest.raises(
        InvalidConfig, match=r"--disk-cache-size: is 68.1 KiB, and one block takes 68.1 KiB; ask for more"
    ):
        checked_frames(size_of(1, SIZE) - 1, SIZE)


def test_more_than_the_disk_has_is_refused_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(System):
        def fstatvfs(self, _: int) -> os.statvfs_result:
            return os.statvfs_result((4096, 4096, 100, 99, 40, 0, 0, 0, 0, 255))

    drop(written(tmp_path / "w", *"abcdefgh", frames=8))
    there = sum(each.stat().st_blocks * 512 for each in (tmp_path / "w").iterdir())
    fit = (there + 40 * 4096 - HEAD_BYTES) // (stride_of(SIZE) + ENTRY_BYTES)
    monkeypatch.setattr(disk_frames, "os", Small(lambda _, data: data))
    drop(opened(tmp_path / "w", frames=fit))
    words = r"--disk-cache-size: is \d.*, and 160.0 KiB are free in .*/w, which has \d.* already; ask for less"
    with pytest.raises(InvalidConfig, match=words):
        opened(tmp_path / "w", frames=fit + 1)
    drop(opened(tmp_path / "w", frames=fit))


# ---------------------------------------------------------------- errors


def full(_: str, data: bytes) -> bytes:
    if len(data) == SIZE:
        raise OSError(errno.ENOSPC, "No space left on device")
    return data


def test_a_full_disk_fails_a_save_and_the_frame_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = written(tmp_path / "w", "a", "b")
    monkeypatch.setattr(disk_frames, "os", System(full))
    assert write_or_end(disk, save("c", 0), image_of("c")) == TransferEnd.FAILED
    monkeypatch.undo()
    assert held(disk) == {1: hash_of("b")}
    assert caplog.messages == [f"a block in {tmp_path / 'w'} could not be written: No space left on device"]
    assert write_or_end(disk, save("c", 0), image_of("c")) == TransferEnd.DONE


def test_a_file_that_may_not_grow_fails_a_save(tmp_path: Path) -> None:
    """The system's own error, in a process whose files end after one frame."""
    script = f"""
import resource, signal
from pathlib import Path
from tests.support.gpuworker.disk_harness import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
disk = opened(Path({str(tmp_path / "w")!r}), frames=40)
resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, 80_000))
for frame in range(40):
    write_or_end(disk, save(frame, frame), image_of(frame))
print(*sorted(held(disk)), disk.usable)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [*map(str, range(20)), "False"]


@pytest.mark.parametrize("verb", ["read", "written"])
def test_eight_errors_in_a_row_close_the_tier_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    caplog.set_level(logging.ERROR)
    disk = written(tmp_path / "w", *"abcdefghijklm", frames=20)

    def transfer(frame: int) -> object:
        if verb == "read":
            return read_or_end(disk, fetch("abcdefghijklm"[frame], frame))
        return write_or_end(disk, save(frame, frame), image_of(frame))

    def broken(_: str, data: bytes) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    for frame in range(7):
        with monkeypatch.context() as patch:
            patch.setattr(disk_frames, "os", System(broken))
            assert transfer(frame) == TransferEnd.FAILED
    assert disk.usable
    disk.read(fetch("m", 12))  # one that works, so they were not in a row
    monkeypatch.setattr(disk_frames, "os", System(broken))
    assert [transfer(0) for _ in range(7)] == [TransferEnd.FAILED] * 7
    assert disk.usable
    assert transfer(1) == TransferEnd.FAILED
    assert not disk.usable
    monkeypatch.undo()
    assert read_or_end(disk, fetch("m", 12)) == TransferEnd.FAILED
    (line,) = caplog.messages
    assert line == (
        f"the disk cache in {tmp_path / 'w'} is closed: 8 blocks in a row could not be read or written: "
        "Input/output error; make room or mend the disk, and restart this worker"
    )


# ---------------------------------------------------------------- whose folder it is


def test_folder_and_files_are_for_their_user_alone(tmp_path: Path) -> None:
    disk = opened(tmp_path / "root" / "w")
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in (tmp_path / "root").rglob("*")}
    assert modes == {"w": 0o700, "images": 0o600, "table": 0o600}
    drop(disk)
    (tmp_path / "root" / "w").chmod(0o777)
    (tmp_path / "root" / "w" / "table").chmod(0o666)
    opened(tmp_path / "root" / "w")
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in (tmp_path / "root").rglob("*")}
    assert modes == {"w": 0o700, "images": 0o600, "table": 0o600}


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    disk = written(tmp_path / "w", "a")
    script = f"""
from pathlib import Path
from tests.support.gpuworker.disk_harness import opened
opened(Path({str(tmp_path / "w")!r}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"{tmp_path / 'w'} is in use by another process; give this worker a --worker-id of its own" in done.stderr
    assert held(disk) == {0: hash_of("a")}
    disk.close()
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("late", [False, True], ids=["there before", "made at the last moment"])
@pytest.mark.parametrize("name", ["w", "w/images", "w/table"])
def test_a_symbolic_link_is_refused_and_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, late: bool
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to(tmp_path / ("elsewhere" if name == "w" else "file"))
    if late:
        monkeypatch.setattr(disk_frames, "_refuse_link", lambda _: None)
    words = (
        "w cannot be used: (Not a directory|Too many levels of symbolic links)"
        if late
        else f"{name} is a symbolic link"
    )
    with pytest.raises(InvalidConfig, match=f"--disk-cache: .*/{words}"):
        opened(tmp_path / "w")
    assert (tmp_path / "file").read_text() == "mine"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_file_with_two_names_and_one_that_is_none_are_refused(tmp_path: Path) -> None:
    drop(opened(tmp_path / "w"))
    os.link(tmp_path / "w" / "table", tmp_path / "other")
    with pytest.raises(InvalidConfig, match="table is not a plain file, or has other names"):
        opened(tmp_path / "w")
    (tmp_path / "other").unlink()
    (tmp_path / "w" / "images").unlink()
    os.mkfifo(tmp_path / "w" / "images")
    with pytest.raises(InvalidConfig, match="images is not a plain file"):
        opened(tmp_path / "w")


def test_what_belongs_to_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(System):
        def geteuid(self) -> int:
            return os.geteuid() + 1

    drop(opened(tmp_path / "w"))
    monkeypatch.setattr(disk_frames, "os", Other(lambda _, data: data))
    me = os.geteuid()
    with pytest.raises(
        InvalidConfig, match=f"w belongs to user {me}, and this worker runs as user {me + 1}; name another"
    ):
        opened(tmp_path / "w")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match=r"--disk-cache: .*/file/w cannot be used: (File exists|Not a directory)"):
        opened(tmp_path / "file" / "w")
    with pytest.raises(InvalidConfig, match="cannot be used: Not a directory"):
        opened(tmp_path / "file")


def test_a_worker_without_a_name_takes_the_first_folder_that_is_free(tmp_path: Path) -> None:
    root = tmp_path / "root"
    one, two = open_for_worker(root, None, opened), open_for_worker(root, None, opened)
    named = open_for_worker(root, "w7", opened)
    assert [each.folder.name for each in (one, two, named)] == ["unnamed-0", "unnamed-1", "w7"]
    one.write(save("a", 0), image_of("a"))
    drop(one)
    again = open_for_worker(root, None, opened)
    assert (again.folder.name, held(again)) == ("unnamed-0", {0: hash_of("a")})
    with pytest.raises(InvalidConfig, match="w7 is in use by another process"):
        open_for_worker(root, "w7", opened)


def test_files_are_closed_when_a_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drop(opened(tmp_path / "w"))
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(disk_frames, "_refuse_full_disk", lambda *_: os.stat("/nowhere"))
    with pytest.raises(InvalidConfig, match="No such file"):
        opened(tmp_path / "w")
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_the_package_a_worker_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imports = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == "xxhash":
            raise ImportError(name)
        return imports(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidConfig, match=r"--disk-cache: needs the package xxhash, .* pip install 'xxhash>=4.1'"):
        opened(tmp_path / "w")
    assert not (tmp_path / "w").exists()


# ---------------------------------------------------------------- contents of several pages

GROUPS = (KvGroup(KvGroupKind.FULL, 0, 1, (0,)), KvGroup(KvGroupKind.STATE, 0, 3, (1,)))
IN_GROUPS = replace(IDENTITY, kv_geometry=replace(IDENTITY.kv_geometry, groups=GROUPS))


def save_pages(disk: DiskFrames, name: str, *frames: int) -> None:
    """Save a checkpoint of three pages, or as many of its pages as there are frames."""
    for page, frame in enumerate(frames):
        disk.write(replace(save(name, frame, name, 1), group=1, page=page), image_of((name, page)))


def test_a_content_of_several_pages_is_there_once_each_of_them_is(tmp_path: Path) -> None:
    disk = opened(tmp_path / "w", 9, IN_GROUPS)
    disk.write(save("a", 4), image_of("a"))
    save_pages(disk, "b", 7, 1, 5)
    save_pages(disk, "c", 0, 2)
    disk.close()
    again = opened(tmp_path / "w", 9, IN_GROUPS)
    found = again.claims()
    assert [(each.block, each.hash) for each in found.contents] == [(4, hash_of("a")), (7, hash_of("b"))]
    assert (found.groups, found.pages) == ((0, 1), (4, 7, 1, 5))
    for page, frame in enumerate((7, 1, 5)):
        assert again.read(replace(fetch("b", frame, "b", 1), group=1, page=page)) == image_of(("b", page))


def test_a_page_is_no_other_page_and_no_block_of_another_group(tmp_path: Path) -> None:
    disk = opened(tmp_path / "w", 9, IN_GROUPS)
    save_pages(disk, "b", 7, 1, 5)
    for changed in ({"group": 1, "page": 1}, {"group": 0}, {"group": 1, "hash": hash_of("c")}):
        assert read_or_end(disk, replace(fetch("b", 7, "b", 1), **changed)) == TransferEnd.CORRUPT
    assert disk.read(replace(fetch("b", 1, "b", 1), group=1, page=1)) == image_of(("b", 1))


def test_a_page_that_was_written_over_takes_its_content_along(tmp_path: Path) -> None:
    disk = opened(tmp_path / "w", 9, IN_GROUPS)
    save_pages(disk, "b", 7, 1, 5)
    disk.write(save("a", 1), image_of("a"))
    disk.close()
    assert [each.hash for each in opened(tmp_path / "w", 9, IN_GROUPS).claims().contents] == [hash_of("a")]


def test_groups_of_other_pages_are_another_format(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened(tmp_path / "w", 9, IN_GROUPS).close()
    assert opened(tmp_path / "w", 9).claims().contents == ()
    assert "kv_geometry.groups was" in caplog.text


def test_an_entry_of_a_group_that_there_is_not_is_none(tmp_path: Path) -> None:
    disk = opened(tmp_path / "w", 9, IN_GROUPS)
    for group, page in ((2, 0), (255, 0), (1, 3), (0, 1)):
        disk.write(replace(save("a", group % 9, "a", 1), group=group, page=page), image_of("a"))
    assert disk.claims().contents == ()
