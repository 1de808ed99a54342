"""The folder of a process on a real disk: claims, restarts, bounds, modes, cut and damaged tails."""

from __future__ import annotations

import gzip
import os
import stat
from pathlib import Path

import pytest

from common.contracts.errors import InvalidConfig
from common.decisions.log_files import Bounds, body_of, member_of, members_in
from common.decisions.log_folder import LogFolder, file_path, folders_in, numbers_in, remove_aged

BOUNDS = Bounds(1 << 20, 1_600)
MEMBER = member_of([(1, b"record\n")])


def claimed(root: Path, bounds: Bounds = BOUNDS, now_ns: int = 0) -> LogFolder:
    return LogFolder.claimed(root, "router", bounds, now_ns)


def append(folder: LogFolder, *records: tuple[int, bytes], now_ns: int | None = None) -> None:
    newest_ns = records[-1][0]
    member = member_of([(time_ns, text + b"\n") for time_ns, text in records])
    folder.append(member, records[0][0], newest_ns, newest_ns if now_ns is None else now_ns)


def read(folder: Path) -> list[bytes]:
    """Return all records of a folder, oldest first."""
    found: list[bytes] = []
    for number in numbers_in(folder):
        data = file_path(folder, number).read_bytes()
        found += [line for member in members_in(data) for line in body_of(data, member)[0].splitlines()]
    return found


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_two_processes_get_two_folders_and_a_restart_gets_its_own(tmp_path: Path) -> None:
    first, second = claimed(tmp_path), claimed(tmp_path)
    manager = LogFolder.claimed(tmp_path, "kvmanager", BOUNDS, 0)
    assert [each.path.name for each in (first, second, manager)] == ["router-0", "router-1", "kvmanager-0"]
    first.close()
    assert claimed(tmp_path).path.name == "router-0"
    second.close()


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    folder = claimed(tmp_path / "log")
    append(folder, (1, b"a"))
    assert [mode(tmp_path / "log"), mode(folder.path)] == [0o700, 0o700]
    assert {mode(each) for each in folder.path.iterdir()} == {0o600}
    assert len(list(folder.path.iterdir())) == 2


def test_a_restart_goes_on_in_the_same_file(tmp_path: Path) -> None:
    folder = claimed(tmp_path)
    append(folder, (1, b"a"), (2, b"b"))
    folder.close()
    again = claimed(tmp_path)
    append(again, (3, b"c"))
    assert (read(again.path), numbers_in(again.path), again.faults) == ([b"a", b"b", b"c"], [1], [])
    assert again.size == file_path(again.path, 1).stat().st_size


@pytest.mark.parametrize("left", [1, 10, 16, 18, 30, -1])
def test_what_a_killed_process_left_of_a_member_is_cut(tmp_path: Path, left: int) -> None:
    folder = claimed(tmp_path)
    append(folder, (1, b"a"))
    append(folder, (2, b"b"))
    folder.close()
    path = file_path(folder.path, 1)
    whole = path.read_bytes()
    second = whole[members_in(whole)[1].start :]
    path.write_bytes(whole[: -len(second)] + second[:left])
    cut = len(second[:left])
    again = claimed(tmp_path)
    assert again.faults == [f"{path} ended within a gzip member: its last {cut} bytes are cut off"]
    append(again, (3, b"c"))
    assert (read(again.path), numbers_in(again.path)) == ([b"a", b"c"], [1])
    assert gzip.decompress(path.read_bytes()) == b"a\nc\n"


def test_a_first_member_that_was_never_whole_is_cut_too(tmp_path: Path) -> None:
    folder = claimed(tmp_path)
    append(folder, (1, b"a"))
    folder.close()
    path = file_path(folder.path, 1)
    path.write_bytes(path.read_bytes()[:-1])
    again = claimed(tmp_path)
    assert path.stat().st_size == again.size == 0
    append(again, (2, b"b"))
    assert read(again.path) == [b"b"]


def test_damage_at_the_end_is_said_in_a_line_and_left_as_it_is(tmp_path: Path) -> None:
    folder = claimed(tmp_path)
    append(folder, (1, b"a"))
    append(folder, (2, b"b"))
    folder.close()
    path = file_path(folder.path, 1)
    data = bytearray(path.read_bytes())
    data[-6] ^= 1  # of the checksum
    path.write_bytes(data)
    again = claimed(tmp_path)
    append(again, (3, b"c"))
    assert again.faults == [f"{path} is corrupt at its end: the next records go into a new file"]
    assert path.read_bytes() == data
    assert numbers_in(again.path) == [1, 2]


def test_a_full_log_loses_its_oldest_files_and_never_exceeds_its_size(tmp_path: Path) -> None:
    bounds = Bounds(16 * 200, 10**18)
    folder = claimed(tmp_path, bounds)
    for number in range(200):
        append(folder, (number, b"%03d" % number), now_ns=number)
        on_disk = sum(each.stat().st_size for each in folder.path.glob("*.jsonl.gz"))
        assert on_disk == folder.size <= bounds.max_bytes
    found = read(folder.path)
    assert found == [b"%03d" % number for number in range(200 - len(found), 200)]
    assert len(numbers_in(folder.path)) >= 15


def test_files_leave_by_age_also_when_nothing_is_written(tmp_path: Path) -> None:
    folder = claimed(tmp_path)
    append(folder, (10, b"a"), now_ns=10)
    append(folder, (500, b"b"), now_ns=500)
    append(folder, (1_000, b"c"), now_ns=1_000)
    assert len(numbers_in(folder.path)) == 3
    folder.retain(1_611)
    assert read(folder.path) == [b"b", b"c"]
    folder.retain(2_601)
    assert (read(folder.path), folder.size) == ([], 0)
    append(folder, (2_602, b"d"), now_ns=2_602)
    assert (read(folder.path), numbers_in(folder.path)) == ([b"d"], [4])


def test_a_flush_larger_than_the_log_is_refused_and_removes_nothing(tmp_path: Path) -> None:
    folder = claimed(tmp_path, Bounds(200, 10**18))
    append(folder, (1, b"a"))
    with pytest.raises(OSError, match="larger than --decision-log-size"):
        folder.append(bytes(300), 2, 2, 2)
    assert read(folder.path) == [b"a"]


def test_aged_files_of_former_replicas_leave_and_those_of_others_stay(tmp_path: Path) -> None:
    gone, live = claimed(tmp_path), claimed(tmp_path)
    other = LogFolder.claimed(tmp_path, "kvmanager", BOUNDS, 0)
    (tmp_path / "router-00" / "lock").mkdir(parents=True)  # nobody's, and the first in the order of names
    for each in (gone, live, other):
        append(each, (1, b"a"))
    gone.close()
    other.close()
    aged = file_path(gone.path, 1).stat().st_mtime_ns + BOUNDS.max_age_ns
    remove_aged(tmp_path, "router", BOUNDS, aged)
    assert numbers_in(gone.path) == [1]
    remove_aged(tmp_path, "router", BOUNDS, aged + 1)
    assert [numbers_in(each.path) for each in (gone, live, other)] == [[], [1], [1]]


def test_a_clock_that_was_put_back_begins_a_file_and_the_former_ones_leave_with_it(tmp_path: Path) -> None:
    folder = claimed(tmp_path)
    append(folder, (1_000_000, b"ahead"))
    append(folder, (10, b"a"))
    append(folder, (20, b"b"))
    assert numbers_in(folder.path) == [1, 2]
    folder.retain(1_620)
    assert read(folder.path) == [b"ahead", b"a", b"b"]
    folder.retain(1_621)
    assert (read(folder.path), folder.size) == ([], 0)


def test_a_clock_that_was_put_back_between_two_lives_begins_a_file(tmp_path: Path) -> None:
    folder = claimed(tmp_path)
    append(folder, (1_000_000, b"ahead"))
    folder.close()
    again = claimed(tmp_path)
    append(again, (10, b"a"))
    assert numbers_in(again.path) == [1, 2]


def test_a_former_replicas_file_from_the_future_leaves_with_the_next_one(tmp_path: Path) -> None:
    folder = claimed(tmp_path, Bounds(16 * 60, 1_600))  # a member a file
    for number in range(3):
        append(folder, (number, b"a"))
    folder.close()
    for number, time_ns in zip(numbers_in(folder.path), (5_000, 100, 3_000), strict=True):
        os.utime(file_path(folder.path, number), ns=(time_ns, time_ns))
    remove_aged(tmp_path, "router", BOUNDS, 1_701)
    assert numbers_in(folder.path) == [3]


def no_files_of_ours(folder: Path, elsewhere: Path) -> None:
    """Lay files of others, of 1970, under the names of files 1 to 4."""
    folder.mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "ours").write_bytes(MEMBER)
    file_path(folder, 1).write_bytes(b"the diary of somebody else" * 1_000)
    os.mkfifo(file_path(folder, 2))
    file_path(folder, 3).symlink_to(elsewhere / "ours")
    file_path(folder, 4).mkdir()
    os.utime(file_path(folder, 1), ns=(1, 1))


def test_files_of_others_are_neither_removed_nor_counted_and_do_not_hang_the_start(tmp_path: Path) -> None:
    no_files_of_ours(tmp_path / "router-0", tmp_path / "elsewhere")
    bounds = Bounds(16 * 60, 1_600)
    folder = claimed(tmp_path, bounds, now_ns=10**15)
    assert folder.size == 0
    assert folder.faults == [
        f"{folder.path} has 4 file(s) that are not of a decision log: 00000001.jsonl.gz is one; remove them"
    ]
    for number in range(40):
        append(folder, (10**15 + number, b"%02d" % number))
    assert folder.size <= bounds.max_bytes
    assert {1, 2, 3, 4} < set(numbers_in(folder.path))
    assert file_path(folder.path, 5).exists() is False  # ours left for the newer ones
    folder.close()
    remove_aged(tmp_path, "router", BOUNDS, 2 * 10**18)
    assert numbers_in(folder.path) == [1, 2, 3, 4]
    assert (tmp_path / "elsewhere" / "ours").read_bytes() == MEMBER


def test_a_file_of_others_that_took_the_place_of_one_of_ours_is_not_removed(tmp_path: Path) -> None:
    folder = claimed(tmp_path)
    append(folder, (1, b"a"))
    append(folder, (500, b"b"))
    assert numbers_in(folder.path) == [1, 2]
    file_path(folder.path, 1).write_bytes(b"the diary of somebody else")
    folder.retain(1_602)
    assert file_path(folder.path, 1).read_bytes() == b"the diary of somebody else"
    assert folder.size == file_path(folder.path, 2).stat().st_size


def test_folders_that_are_links_are_skipped(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    folder = claimed(elsewhere)
    append(folder, (1, b"a"))
    folder.close()
    root = tmp_path / "log"
    root.mkdir()
    (root / "router-0").symlink_to(folder.path)
    assert claimed(root).path == root / "router-1"
    assert list(folders_in([root])) == [root / "router-1"]
    remove_aged(root, "router", BOUNDS, 2 * 10**18)
    assert read(folder.path) == [b"a"]


def test_a_path_that_cannot_be_a_folder_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match=r"--decision-log: .*file cannot be used: .*name a folder"):
        claimed(tmp_path / "file")


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "router-0").mkdir()
    (tmp_path / "router-0" / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidConfig, match="--decision-log"):
        claimed(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_the_folder_of_a_process_counts_by_itself(tmp_path: Path) -> None:
    folder = claimed(tmp_path)
    append(folder, (1, b"a"))
    assert list(folders_in([tmp_path])) == list(folders_in([folder.path])) == [folder.path]


def test_files_of_the_former_format_are_let_be_and_said_in_a_line(tmp_path: Path) -> None:
    former = tmp_path / "router-0" / "00000007.log"
    former.parent.mkdir()
    former.write_bytes(b"QUIREd\x01\0")
    folder = claimed(tmp_path)
    append(folder, (1, b"a"))
    what = "1 file(s) of an older format, which are not read: 00000007.log is one; remove them"
    assert folder.faults == [f"{folder.path} has {what}"]
    assert (read(folder.path), former.exists()) == ([b"a"], True)
