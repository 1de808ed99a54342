"""The folder of files and batches: what two routers see of it, and what one that was killed leaves over."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from common.contracts import limits
from common.contracts.errors import InvalidConfig, InvalidRequest
from router.api.openai.batches.folder import BatchFolder
from router.api.openai.batches.records import COMPLETED, IN_PROGRESS, Batch, StoredFile, is_id, new_id, seconds_of

NOW = 1_700_000_000.0


def stored(folder: BatchFolder, tenant: str = "red", content: bytes = b"line\n", seconds: int = 3600) -> StoredFile:
    file = StoredFile(new_id("file-", NOW), len(content), int(NOW), "in.jsonl", "batch", int(NOW) + seconds, 1, ["/v1"])
    folder.new_part(tenant, file.id).write_bytes(content)
    folder.keep(tenant, file)
    return file


def batch_of(file: StoredFile, tenant: str = "red", at: float = NOW) -> Batch:
    return Batch(
        id=new_id("batch_", at),
        tenant=tenant,
        credential="key",
        endpoint="/v1",
        input_file_id=file.id,
        completion_window="24h",
        created_at=int(at),
        expires_at=int(at) + 86_400,
        output_id=new_id("file-", at),
        error_id=new_id("file-", at),
        output_seconds=3600,
        total=1,
    )


def begun(folder: BatchFolder, tenant: str = "red", at: float = NOW) -> Batch:
    batch = batch_of(stored(folder, tenant), tenant, at)
    folder.add(batch)
    return batch


def claimed(folder: BatchFolder) -> list[str]:
    """Return the ids of the batches that a router may run, and hold none of them."""
    found = [folder.claim(each.tenant, each.name) for each in folder.waiting(NOW)]
    for each in found:
        if each is not None:
            each.release()
    return [each.batch.id for each in found if each is not None]


def names(root: Path) -> set[str]:
    return {path.suffix for path in root.rglob("*") if path.is_file()}


def test_what_is_stored_is_read_by_another_router(tmp_path: Path) -> None:
    folder, other = BatchFolder(tmp_path), BatchFolder(tmp_path)
    file = stored(folder)
    batch = batch_of(file)
    folder.add(batch)
    assert other.file("red", file.id, NOW) == file
    assert other.batch("red", batch.id) == batch
    assert (other.file("blue", file.id, NOW), other.batch("blue", batch.id)) == (None, None)


def test_one_router_runs_a_batch_and_the_next_one_when_it_is_gone(tmp_path: Path) -> None:
    folder, other = BatchFolder(tmp_path), BatchFolder(tmp_path)
    batch = begun(folder)
    ((tenant, name, _),) = folder.waiting(NOW)
    claim = folder.claim(tenant, name)
    assert claim is not None
    assert claimed(other) == []
    claim.release()
    assert claimed(other) == [batch.id]


def test_a_batch_is_over_when_it_expires_or_is_cancelled(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path)
    batch = begun(folder)
    assert [each.is_over for each in folder.waiting(NOW + 86_399)] == [False]
    assert [each.is_over for each in folder.waiting(NOW + 86_400)] == [True]
    folder.wish_to_cancel("red", batch.id)
    assert [each.is_over for each in folder.waiting(NOW)] == [True]


def test_batches_wait_in_the_order_of_their_creation(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path)
    made = [begun(folder, at=NOW + place).id for place in (2, 0, 1)]
    assert claimed(folder) == [made[1], made[2], made[0]]


def test_a_batch_that_ended_leaves_its_record_alone(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path)
    batch = begun(folder)
    folder.wish_to_cancel("red", batch.id)
    folder.write(batch.at(COMPLETED, NOW))
    assert (folder.waiting(NOW), folder.cancelled_at("red", batch.id)) == ([], None)
    assert names(tmp_path) == {".json", ".data"}


def test_a_router_that_was_killed_after_the_end_has_it_cleaned_up(tmp_path: Path) -> None:
    """It had written the record, and not yet taken away the mark of an open batch."""
    folder = BatchFolder(tmp_path)
    batch = begun(folder)
    ended = batch.at(COMPLETED, NOW)
    (record,) = tmp_path.rglob(f"{batch.id}.json")
    record.write_bytes(ended.entry())
    assert claimed(folder) == []
    assert (folder.waiting(NOW), folder.batch("red", batch.id)) == ([], ended)
    assert names(tmp_path) == {".json", ".data"}


def test_a_router_that_was_killed_while_it_began_a_batch_leaves_none(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path)
    batch = begun(folder)
    (record,) = tmp_path.rglob(f"{batch.id}.json")
    record.unlink()
    assert claimed(folder) == []
    assert [*folder.batches("red")] == []


def test_the_wish_to_cancel_is_seen_at_once_and_not_after_the_end(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path)
    batch = begun(folder)
    folder.wish_to_cancel("red", batch.id)
    seen = folder.batch("red", batch.id)
    assert seen is not None
    assert (seen.status, seen.body()["cancelling_at"] is not None) == ("cancelling", True)
    folder.write(batch.at(COMPLETED, NOW))
    folder.wish_to_cancel("red", batch.id)  # it came too late
    after = folder.batch("red", batch.id)
    assert after is not None
    assert after.status == "completed"


def test_bytes_count_once_and_belong_to_a_tenant(tmp_path: Path) -> None:
    """The input of a batch is a link to the file."""
    folder = BatchFolder(tmp_path)
    file = stored(folder, content=b"x" * 100_000)
    folder.add(batch_of(file))
    count, size = folder.usage("red")
    assert (count, 100_000 < size < 110_000) == (1, True)
    assert folder.usage("blue") == (0, 0)
    folder.delete_file("red", file.id)
    count, size = folder.usage("red")
    assert (count, size > 100_000) == (0, True), "the batch keeps its input"


def test_a_tenant_without_room_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = BatchFolder(tmp_path)
    assert folder.check_room("red") == limits.MAX_BATCH_BYTES_A_TENANT
    stored(folder)
    monkeypatch.setattr(limits, "MAX_BATCH_FILES_A_TENANT", 1)
    with pytest.raises(InvalidRequest, match="file: has no room: 1 files are stored; at most 1; delete some"):
        folder.check_room("red")
    folder.check_room("blue")


def test_what_is_too_old_is_swept(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path)
    short, long = stored(folder, seconds=10), stored(folder, seconds=20)
    folder.sweep(NOW + 10)
    assert [each.id for each in folder.files("red", 0.0)] == [long.id]
    assert folder.opened("red", short.id) is None


def test_a_batch_that_has_not_ended_is_never_swept(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path)
    waiting, ended = begun(folder), begun(folder)
    folder.write(ended.at(COMPLETED, NOW))
    for path in tmp_path.rglob("*"):
        os.utime(path, (NOW, NOW))
    folder.sweep(NOW + limits.BATCH_FILE_SECONDS + 1)
    assert [each.id for each in folder.batches("red")] == [waiting.id]
    assert claimed(folder) == [waiting.id]


def test_of_very_many_ended_batches_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BATCHES_A_TENANT", 2)
    folder = BatchFolder(tmp_path)
    made = [begun(folder, at=NOW + place) for place in range(4)]
    for batch in made[:3]:
        folder.write(batch.at(COMPLETED, NOW))
    folder.sweep(NOW)
    assert [each.id for each in folder.batches("red")] == [each.id for each in made[:0:-1]]


def test_what_died_routers_left_over_goes_in_the_end(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path)
    part, answers = folder.new_part("red", new_id("file-", NOW)), folder.answers("red", new_id("file-", NOW))
    batches = part.parent.parent / "batches"
    batches.mkdir()
    unsaid = [batches / f"{new_id('batch_', NOW)}{ending}" for ending in (".in", ".open")]
    for path in (part, answers, *unsaid):
        path.touch()
        os.utime(path, (NOW, NOW))
    folder.sweep(NOW + limits.HTTP_UPLOAD_SECONDS)
    assert all(path.exists() for path in (part, answers, *unsaid))
    folder.sweep(NOW + 3601)
    assert [path for path in (part, answers, *unsaid) if path.exists()] == [answers], "a batch may still write it"
    folder.sweep(NOW + limits.MAX_BATCH_SECONDS)
    assert answers.exists()
    folder.sweep(NOW + limits.MAX_BATCH_SECONDS + 86_401)
    assert not answers.exists()


def test_a_damaged_record_is_none(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path)
    file, batch = stored(folder), begun(folder)
    for name in (file.id, batch.id):
        (record,) = tmp_path.rglob(f"{name}.json")
        record.write_bytes(b'{"id": 1}')
    assert (folder.file("red", file.id, NOW), folder.batch("red", batch.id)) == (None, None)
    assert claimed(folder) == []


def test_a_folder_is_the_owners_alone_and_one_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path / "new" / "folder")
    stored(folder)
    assert {path.stat().st_mode & 0o77 for path in (tmp_path / "new" / "folder").rglob("*") if path.is_dir()} == {0}
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfig, match=r"--batch-dir: .*/file/batches cannot be written: "):
        BatchFolder(tmp_path / "file" / "batches")


def test_a_status_has_the_time_of_its_first_moment() -> None:
    file = StoredFile("file-1", 1, 1, "a", "batch", 1)
    batch = batch_of(file).at(IN_PROGRESS, 5.0).at(IN_PROGRESS, 7.0, completed=3)
    assert (batch.body()["in_progress_at"], batch.completed) == (5, 3)
    assert Batch.of(batch.entry()) == batch
    assert StoredFile.of(replace(file, urls=["/v1"]).entry()) == replace(file, urls=["/v1"])


@pytest.mark.parametrize(
    ("window", "seconds"),
    [
        ("24h", 86_400),
        ("30m", 1800),
        ("7d", 604_800),
        ("5s", 5),
        ("", None),
        ("24", None),
        ("-1h", None),
        ("1h ", None),
    ],
)
def test_windows(window: str, seconds: int | None) -> None:
    assert seconds_of(window) == seconds


def test_ids_sort_by_their_time_and_nothing_else_is_one() -> None:
    first, second = new_id("file-", NOW), new_id("file-", NOW + 0.001)
    assert first < second
    assert is_id("file-", first)
    for wrong in ("", first[:-1], f"{first}0", first.upper(), f"../{first}", f"{first}\n", new_id("batch_", NOW)):
        assert not is_id("file-", wrong), wrong
