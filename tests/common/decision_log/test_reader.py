"""Records read back: filters, pages over folders, what is missing, and folders that hold no log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.contracts.errors import InvalidConfig, InvalidRequest
from common.contracts.types import Candidate, Decision, DecisionKind
from common.decisions import log_reader
from common.decisions.log_files import Bounds, Member, body_of, member_of, members_in
from common.decisions.log_folder import LogFolder, file_path
from common.decisions.log_reader import LogReader
from common.wire.decision_codec import decision_from_proto
from common.wire.decision_json import line_of
from quire.decision.v1 import decision_pb2 as pb

BOUNDS = Bounds(1 << 20, 10**18)
CANDIDATE = Candidate("w0", 0.5, (("prefill", 0.5),), figures=(("hit_blocks", 3.0),))
ROUTE = Decision(
    "d1", DecisionKind.ROUTING, 5, "w0", "r1", (CANDIDATE,), ("lowest cost",), (("load", 0.25),),
    figures=(("queued", 1.0),), tenant="acme", worker="w0",
)  # fmt: skip


def decision(number: int, request: str = "r", kind: DecisionKind = DecisionKind.ROUTING, **more: str) -> Decision:
    return Decision(f"d{number}", kind, number, "w0", request, **more)  # type: ignore[arg-type]


def write(root: Path, *flushes: list[Decision], service: str = "router", bounds: Bounds = BOUNDS) -> LogFolder:
    """Write a log of one process; it goes on holding its folder."""
    folder = LogFolder.claimed(root, service, bounds, 0)
    for each in flushes:
        append(folder, *each)
    return folder


def append(folder: LogFolder, *decisions: Decision, dropped: int = 0) -> None:
    times = [each.time_ns for each in decisions]
    timed = [(each.time_ns, line_of(1, each)) for each in decisions]
    folder.append(member_of(timed, dropped), min(times), max(times), max(times))


def ids(reader: LogReader, service: str = "router", **filters: object) -> list[str]:
    request = pb.ListDecisionsRequest(**filters)  # type: ignore[arg-type]
    return [each.decision_id for each in reader.page(service, request).decisions]


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    write(tmp_path, [ROUTE])
    (found,) = LogReader([tmp_path]).page("router", pb.ListDecisionsRequest()).decisions
    assert decision_from_proto(found) == ROUTE


def test_all_filters_of_a_live_service_hold(tmp_path: Path) -> None:
    write(
        tmp_path,
        [decision(1, "a"), decision(2, "b", DecisionKind.GRANT, worker="w1")],
        [decision(3, "c", DecisionKind.PREEMPTION, victim="a", beneficiary="b"), decision(4, "a", tenant="acme")],
    )
    reader = LogReader([tmp_path])
    assert ids(reader) == ["d1", "d2", "d3", "d4"]
    assert ids(reader, request_id="a") == ["d1", "d3", "d4"]
    assert ids(reader, request_id="b") == ["d2", "d3"]
    assert ids(reader, kind="grant") == ids(reader, worker="w1") == ["d2"]
    assert ids(reader, tenant="acme") == ["d4"]
    assert ids(reader, since_unix_nano=2, until_unix_nano=4) == ["d2", "d3"]
    assert ids(reader, limit=2) == ["d3", "d4"]
    assert ids(reader, request_id="d") == []  # a part of another text is no match
    assert ids(reader, "kvmanager") == []
    with pytest.raises(InvalidRequest, match="kind"):
        ids(reader, kind="no such kind")


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
def test_pages_over_several_folders_have_each_record_once_by_time(tmp_path: Path, limit: int) -> None:
    small = Bounds(16 * 400, 10**18)  # a few records a file
    first = write(tmp_path, *([decision(number)] for number in range(0, 20, 2)), bounds=small)
    write(tmp_path, *([decision(number), decision(number + 2)] for number in range(1, 20, 4)), bounds=small)
    assert len(list(first.path.glob("*.jsonl.gz"))) > 2
    reader, asked, found = LogReader([tmp_path]), pb.ListDecisionsRequest(limit=limit), list[str]()
    while True:
        page = reader.page("router", asked)
        found = [*(each.decision_id for each in page.decisions), *found]
        asked.page_token = page.next_page_token
        if not asked.page_token:
            break
    assert found == [f"d{number}" for number in range(20)]


def test_logs_of_two_volumes_are_told_apart_by_their_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two volumes number their files alike, and each has a folder router-0."""
    for name, number in (("a", 1), ("b", 2)):
        write(tmp_path / name, [decision(number)])
    real = Path.stat

    def stat(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        found = real(path, follow_symlinks=follow_symlinks)
        device = 1 if tmp_path / "a" in path.parents else 2
        return os.stat_result((found.st_mode, 7, device, *found[3:]))

    monkeypatch.setattr(Path, "stat", stat)
    reader = LogReader([tmp_path / "a", tmp_path / "b"])
    first, second = (each.source for each in reader.folders)
    assert first != second
    assert ids(reader) == ["d1", "d2"]
    page = reader.page("router", pb.ListDecisionsRequest(limit=1))
    assert [each.decision_id for each in page.decisions] == ["d2"]
    assert ids(reader, limit=1, page_token=page.next_page_token) == ["d1"]


def test_files_that_are_no_regular_ones_are_not_read(tmp_path: Path) -> None:
    folder = write(tmp_path, [decision(1)])
    os.mkfifo(file_path(folder.path, 2))
    file_path(folder.path, 3).symlink_to(file_path(folder.path, 1))
    file_path(folder.path, 4).mkdir()
    (tmp_path / "router-7").symlink_to(folder.path)
    reader = LogReader([tmp_path])
    assert ids(reader) == ["d1"]
    assert sorted(line.removeprefix(f"{folder.path}/") for line in reader.faults) == [
        "00000002.jsonl.gz cannot be read: it is not a regular file",
        "00000003.jsonl.gz cannot be read: it is a link",
        "00000004.jsonl.gz cannot be read: it is not a regular file",
    ]


def test_a_log_is_complete_since_its_first_record_or_since_what_has_left(tmp_path: Path) -> None:
    folder = write(tmp_path, [decision(7)])
    write(tmp_path, [decision(9)])
    assert LogReader([tmp_path]).page("router", pb.ListDecisionsRequest()).complete_since_unix_nano == 7
    file_path(folder.path, 1).rename(file_path(folder.path, 2))
    assert LogReader([tmp_path]).page("router", pb.ListDecisionsRequest()).complete_since_unix_nano == 7
    append(write(tmp_path), decision(12))
    file_path(tmp_path / "router-2", 1).rename(file_path(tmp_path / "router-2", 5))
    assert LogReader([tmp_path]).page("router", pb.ListDecisionsRequest()).complete_since_unix_nano == 12


def test_records_are_read_while_their_service_writes(tmp_path: Path) -> None:
    folder = write(tmp_path, [decision(1)])
    path = file_path(folder.path, 1)
    path.write_bytes(path.read_bytes() + member_of([(2, b"half\n")])[:-2])
    reader = LogReader([tmp_path])
    assert (ids(reader), reader.faults) == (["d1"], [])


def test_what_cannot_be_read_is_said_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path, [decision(1)], [decision(2)], [decision(3)])
    path = file_path(folder.path, 1)
    data = bytearray(path.read_bytes())
    second, third = (each.start for each in members_in(bytes(data))[1:])
    data[second + 40] ^= 1  # among the lines
    data[third] ^= 1  # of the head
    path.write_bytes(data)
    half = member_of([(3, b"half\n")])[:-2]
    file_path(folder.path, 2).write_bytes(b"the diary of somebody else")
    file_path(folder.path, 3).write_bytes(half)
    file_path(folder.path, 4).write_bytes(half[:12])
    file_path(folder.path, 5).write_bytes(member_of([(4, b"no JSON\n"), (5, b"[1]\n"), (6, b'{"kind": 7}\n')]))
    reader = LogReader([tmp_path])
    assert ids(reader) == ["d1"]
    damaged, *others = sorted(line.removeprefix(f"{folder.path}/") for line in reader.faults)
    assert damaged.startswith(f"00000001.jsonl.gz is corrupt at byte {second}: a gzip member cannot be decompressed: ")
    assert others == [
        "00000002.jsonl.gz is not a file of a decision log; remove it if it is in the wrong folder",
        f"00000003.jsonl.gz is corrupt at byte 0: {len(half)} bytes are not read",
        "00000004.jsonl.gz is corrupt at byte 0: 12 bytes are not read",
    ]


def test_members_of_other_times_are_not_decompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, *([decision(number)] for number in range(100)), bounds=Bounds(16 * 1_000, 10**18))
    assert len([*tmp_path.glob("*/*.gz")]) > 5
    read = list[Member]()

    def noted(data: bytes, member: Member) -> tuple[bytes, int]:
        read.append(member)
        return body_of(data, member)

    monkeypatch.setattr(log_reader, "body_of", noted)
    assert ids(LogReader([tmp_path]), since_unix_nano=40, until_unix_nano=42) == ["d40", "d41"]
    assert [each.first_ns for each in read] == [41, 40]


def test_a_page_goes_on_before_the_records_of_the_former_one(tmp_path: Path) -> None:
    """Also within a member, and while more is written."""
    folder = write(tmp_path, [decision(number) for number in range(5)])
    page = LogReader([tmp_path]).page("router", pb.ListDecisionsRequest(limit=2))
    append(folder, decision(5))
    assert ids(LogReader([tmp_path]), page_token=page.next_page_token) == ["d0", "d1", "d2"]


def test_files_of_the_former_format_are_said_in_a_line(tmp_path: Path) -> None:
    folder = write(tmp_path, [decision(1)])
    (folder.path / "00000001.log").write_bytes(b"QUIREd\x01\0")
    reader = LogReader([tmp_path])
    assert ids(reader) == ["d1"]
    assert [each for each in reader.faults if "1 file(s) of an older format" in each] == reader.faults != []


def test_records_that_a_disk_did_not_take_are_counted(tmp_path: Path) -> None:
    folder = write(tmp_path, [decision(1)])
    append(folder, decision(2), dropped=5)
    reader = LogReader([tmp_path])
    assert (ids(reader), reader.dropped) == (["d1", "d2"], 5)


def test_folders_without_a_log_are_refused_in_a_line(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "nowhere", "nowhere is not a folder; name the one"),
        (tmp_path, "has no decision log; name a folder that services have, or had, as --decision-log"),
    ):
        with pytest.raises(InvalidConfig, match=words) as error:
            LogReader([path])
        assert "\n" not in str(error.value)
    LogFolder.claimed(tmp_path, "router", BOUNDS, 0)  # a service that has written nothing yet
    with pytest.raises(InvalidConfig, match="has no decision log"):
        LogReader([tmp_path])
