"""What is told of cached contents: in which order, with which tokens, and when nobody takes it for long."""

from __future__ import annotations

from common.contracts.lease import GrantBatch, TierCopy
from common.contracts.transfers import Medium, Place, Transfer, TransferEnd
from common.contracts.types import BlockId, FrameId, KvGroup, KvGroupKind
from gpuworker.scheduling.block_states import Content
from gpuworker.scheduling.kv_events import (
    CacheLabel,
    CacheWatch,
    Cleared,
    Origin,
    Removed,
    Stored,
    WatchedClaims,
    spec_of,
)
from tests.support.gpuworker.agent_harness import Driver, blocks, keys

PROMPT = list(range(10, 19))  # two blocks of four, and a token
HASHES = keys(PROMPT, 4)
FETCH = Transfer(1, HASHES[1], HASHES[0], 1, Place(Medium.DISK, BlockId(0)), Place(Medium.HOST, BlockId(1)))
TELL = CacheLabel(b"tenant", "sql", "ab" * 16)


def content(number: int, group: int = 0) -> Content:
    return Content(HASHES[number], HASHES[number - 1] if number else None, number, 1, group)


def origin(number: int) -> Origin:
    return Origin(HASHES[number - 1] if number else None, tuple(PROMPT[4 * number : 4 * number + 4]))


def watched() -> tuple[CacheWatch, WatchedClaims]:
    watch = CacheWatch()
    watch.describe(HASHES[0], origin(0))
    watch.describe(HASHES[1], origin(1))
    return watch, WatchedClaims(watch, Medium.BLOCK)


def test_blocks_are_told_with_their_tokens_as_a_step_seals_them() -> None:
    watch = CacheWatch()
    worker = Driver(watch=watch)
    worker.submit(1, PROMPT, label=TELL)
    worker.admit(1, [3, 5, 6])
    assert watch.take_changes(9) == []
    worker.step()
    first = Stored(Medium.BLOCK, 0, HASHES[0], Origin(None, (10, 11, 12, 13), TELL))
    second = Stored(Medium.BLOCK, 0, HASHES[1], Origin(HASHES[0], (14, 15, 16, 17), TELL))
    assert watch.take_changes(9) == [first, second]
    assert watch.take_changes(9) == []


def test_sampled_tokens_are_told_too() -> None:
    watch = CacheWatch()
    worker = Driver(watch=watch)
    worker.submit(1, PROMPT[:3], max_tokens=4)
    worker.admit(1, [0, 1])
    for token in (50, 51, 52):
        worker.step(token)
    (told,) = watch.take_changes(9)
    assert isinstance(told, Stored)
    assert told.origin == Origin(None, (10, 11, 12, 50))


def test_what_is_leased_again_is_removed_and_what_was_copied_to_host_memory_is_stored_there() -> None:
    watch = CacheWatch()
    worker = Driver(watch=watch, host_frames=2)
    worker.submit(1, PROMPT, max_tokens=1)
    worker.admit(1, [0, 1, 2])
    worker.step()
    watch.take_changes(9)
    worker.agent.apply_grant(GrantBatch(1, lease=blocks([1]), tier=(TierCopy(BlockId(1), FrameId(0)),)))
    stored, removed = watch.take_changes(9)
    assert stored == Stored(Medium.HOST, 0, HASHES[1], origin(1))
    assert removed == Removed(Medium.BLOCK, 0, HASHES[1])


def test_a_content_is_told_once_while_there_is_any_copy() -> None:
    watch, claims = watched()
    claims[BlockId(0)] = content(0)
    claims[BlockId(1)] = content(0)
    assert watch.take_changes(9) == [Stored(Medium.BLOCK, 0, HASHES[0], origin(0))]
    claims[BlockId(2)] = content(1)
    claims.pop(BlockId(0), None)
    claims[BlockId(1)] = content(0)._replace(last_used=7)
    assert watch.take_changes(9) == [Stored(Medium.BLOCK, 0, HASHES[1], origin(1))]
    del claims[BlockId(1)]
    claims.pop(BlockId(1), None)
    assert watch.take_changes(9) == [Removed(Medium.BLOCK, 0, HASHES[0])]


def test_what_came_and_went_meanwhile_is_not_told() -> None:
    watch, claims = watched()
    claims[BlockId(0)], claims[BlockId(1)] = content(0), content(1)
    claims[BlockId(1)] = None
    assert watch.take_changes(9) == [Stored(Medium.BLOCK, 0, HASHES[0], origin(0))]


def test_a_parent_that_is_claimed_again_is_told_before_its_child() -> None:
    watch, claims = watched()
    claims[BlockId(1)] = content(1)
    claims.pop(BlockId(1), None)
    watch.describe(HASHES[1], origin(1))
    claims[BlockId(0)], claims[BlockId(1)] = content(0), content(1)
    assert [change.hash for change in watch.take_changes(9) if isinstance(change, Stored)] == list(HASHES)


def test_a_reset_of_an_idle_worker_is_one_change() -> None:
    watch, claims = watched()
    claims[BlockId(0)], claims[BlockId(1)] = content(0), content(1)
    watch.take_changes(9)
    claims.clear()
    assert watch.take_changes(9) == [Cleared()]
    assert not watch.has_changes


def test_changes_wait_in_parts_and_are_bounded_by_the_contents() -> None:
    watch, claims = watched()
    for _ in range(1000):
        claims[BlockId(0)], claims[BlockId(1)] = content(0), content(1)
        claims.pop(BlockId(1), None)
        claims.pop(BlockId(0), None)
        watch.describe(HASHES[0], origin(0))
        watch.describe(HASHES[1], origin(1))
    assert len(watch._changed) == 2
    claims[BlockId(0)], claims[BlockId(1)] = content(0), content(1)
    assert len(watch.take_changes(1)) == 1
    assert watch.has_changes
    assert len(watch.take_changes(1)) == 1


def test_contents_of_groups_are_told_apart() -> None:
    watch, claims = watched()
    claims[BlockId(0)], claims[BlockId(1)] = content(0), content(0, group=1)
    assert [change.group for change in watch.take_changes(9) if isinstance(change, Stored)] == [0, 1]
    claims.pop(BlockId(1), None)
    assert watch.take_changes(9) == [Removed(Medium.BLOCK, 1, HASHES[0])]


def test_what_came_without_tokens_is_told_once_a_sequence_has_them() -> None:
    """So it is with what an earlier process had on disk, and with what was fetched ahead of need."""
    watch = CacheWatch()
    worker = Driver(watch=watch, host_frames=2, disk_frames=1)
    worker.agent.apply_grant(GrantBatch(0, transfers=(FETCH,)))
    worker.agent.take_reads()
    worker.agent.end_transfer(FETCH, TransferEnd.DONE)
    assert watch.take_changes(9) == []
    assert watch.unknown == {HASHES[1]}
    worker.submit(1, PROMPT)
    assert watch.take_changes(9) == [Stored(Medium.HOST, 0, HASHES[1], origin(1))]
    assert not watch.unknown


def test_so_it_is_at_once_where_a_sequence_waits_for_it() -> None:
    watch = CacheWatch()
    worker = Driver(watch=watch, host_frames=2, disk_frames=1)
    worker.submit(1, PROMPT)
    worker.agent.apply_grant(GrantBatch(0, transfers=(FETCH,)))
    worker.agent.take_reads()
    worker.agent.end_transfer(FETCH, TransferEnd.DONE)
    assert watch.take_changes(9) == [Stored(Medium.HOST, 0, HASHES[1], origin(1))]


def test_a_new_agent_claims_nothing() -> None:
    watch, claims = watched()
    claims[BlockId(0)] = content(0)
    watch.take_changes(9)
    watch.begin(lambda block_hash, depth: None)
    assert watch.take_changes(9) == [Cleared()]


def test_what_the_disk_keeps_through_a_failed_step_is_not_told_again() -> None:
    watch, claims = watched()
    disk = WatchedClaims(watch, Medium.DISK)
    claims[BlockId(0)], disk[BlockId(9)] = content(0), content(1)
    watch.take_changes(9)
    watch.begin(lambda block_hash, depth: None)
    WatchedClaims(watch, Medium.DISK)[BlockId(9)] = content(1)
    assert watch.take_changes(9) == [Removed(Medium.BLOCK, 0, HASHES[0])]
    assert watch.take_changes(9) == []


def test_groups_have_the_names_of_their_kinds() -> None:
    assert spec_of((), 0) == (("full_attention", None),)
    assert spec_of((), 128) == (("sliding_window", 128),)
    kinds = (KvGroupKind.FULL, 0), (KvGroupKind.WINDOW, 64), (KvGroupKind.CHUNK, 32), (KvGroupKind.STATE, 0)
    groups = tuple(KvGroup(kind, span, 1, (number,)) for number, (kind, span) in enumerate(kinds))
    assert spec_of(groups, 0) == (
        ("full_attention", None),
        ("sliding_window", 64),
        ("chunked_local_attention", 32),
        ("mamba", None),
    )
