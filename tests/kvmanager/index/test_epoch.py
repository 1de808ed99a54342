"""Epochs from the state file, from Redis and from what workers have seen; and the manager that was replaced."""

from __future__ import annotations

import errno
import itertools
import os
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from redis.asyncio import Redis

from common.contracts.errors import InvalidConfig, ProtocolViolation, StaleEpoch
from common.contracts.lease import highest_plausible_epoch
from common.contracts.limits import MAX_STORED_EPOCH
from common.process.local_redis import LocalRedis
from common.process.redis_client import open_redis
from kvmanager.contracts import epochs
from kvmanager.contracts.ports import IndexUnavailable
from kvmanager.index.epoch import EpochKeeper
from kvmanager.index.state_file import EpochFile
from kvmanager.index.store import TIMEOUT_S, RedisIndexStore

NAMESPACE = "{quire:m:t:16}"
NOBODY = "redis://127.0.0.1:1/0"
FAR = highest_plausible_epoch(0) + 1


Keeper = Callable[..., EpochKeeper]


@pytest.fixture
async def keeper() -> AsyncIterator[Keeper]:
    """Return what makes the epochs of one manager process: (folder of its state, URL of Redis)."""
    async with AsyncExitStack() as stack:

        def make(directory: Path, url: str | None = None) -> EpochKeeper:
            store = RedisIndexStore(open_redis(url, TIMEOUT_S), NAMESPACE, 60.0, 5.0, lambda: 0) if url else None
            if store is not None:
                stack.push_async_callback(store.close)
            return EpochKeeper(EpochFile(directory), store)

        yield make


async def test_first_epoch_is_one_and_is_kept_for_all_workers(keeper: Keeper, tmp_path: Path) -> None:
    epochs = keeper(tmp_path)
    assert [await epochs.for_attach(0), await epochs.for_attach(0), await epochs.for_attach(1)] == [1, 1, 1]


async def test_next_process_takes_a_higher_epoch_by_the_state_file(keeper: Keeper, tmp_path: Path) -> None:
    await keeper(tmp_path).for_attach(0)
    assert await keeper(tmp_path).for_attach(0) == 2


async def test_epoch_is_above_what_any_worker_has_seen(keeper: Keeper, tmp_path: Path) -> None:
    epochs = keeper(tmp_path)
    assert await epochs.for_attach(7) == 8
    assert await epochs.for_attach(3) == 8
    assert await epochs.for_attach(9) == 10


async def test_worker_that_has_seen_an_unanswered_epoch_saw_a_predecessors(keeper: Keeper, tmp_path: Path) -> None:
    EpochFile(tmp_path).write(4)
    assert await keeper(tmp_path).for_attach(5) == 6


async def test_redis_counts_over_lost_state_files(keeper: Keeper, tmp_path: Path, redis_url: str) -> None:
    assert await keeper(tmp_path / "a", redis_url).for_attach(0) == 1
    assert await keeper(tmp_path / "b", redis_url).for_attach(0) == 2


async def test_taking_the_epoch_writes_the_fence(
    keeper: Keeper, tmp_path: Path, redis_url: str, redis_client: Redis
) -> None:
    await keeper(tmp_path, redis_url).for_attach(6)
    assert await redis_client.get(NAMESPACE + ":fence") == b"7"
    assert await redis_client.get(NAMESPACE + ":epoch") == b"7"


async def test_epoch_does_not_fall_when_redis_was_wiped(
    keeper: Keeper, tmp_path: Path, redis_url: str, redis_client: Redis
) -> None:
    epochs = keeper(tmp_path, redis_url)
    await epochs.for_attach(6)
    await redis_client.flushall()
    assert await epochs.renew_fence() == 8
    assert await redis_client.get(NAMESPACE + ":fence") == b"8"


async def test_workers_are_answered_although_the_epoch_cannot_be_stored(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    epochs = keeper(tmp_path)
    monkeypatch.setattr(os, "fsync", full_disk)
    assert await epochs.for_attach(2) == 3
    with pytest.raises(InvalidConfig, match="No space left"):
        EpochFile(tmp_path).write(3)


async def test_epoch_does_not_fall_when_neither_disk_nor_redis_has_kept_it(
    keeper: Keeper, tmp_path: Path, redis_url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    epochs = keeper(tmp_path, redis_url)
    monkeypatch.setattr(os, "fsync", full_disk)
    assert await epochs.for_attach(6) == 7
    await redis_client.flushall()
    assert await epochs.renew_fence() == 8


def full_disk(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_epoch_taken_after_a_wipe_is_unanswered(keeper: Keeper, tmp_path: Path, redis_url: str) -> None:
    epochs = keeper(tmp_path, redis_url)
    await epochs.for_attach(0)
    assert await epochs.renew_fence() == 2
    assert await epochs.for_attach(2) == 3  # a worker that has seen 2 has it from somebody else


async def test_replaced_manager_cannot_take_a_new_epoch(keeper: Keeper, tmp_path: Path, redis_url: str) -> None:
    old, new = keeper(tmp_path / "a", redis_url), keeper(tmp_path / "b", redis_url)
    await old.for_attach(0)
    await new.for_attach(0)
    with pytest.raises(StaleEpoch, match="epoch 2 has taken over"):
        await old.for_attach(5)


async def test_without_redis_workers_are_answered_and_the_fence_is_wanted(keeper: Keeper, tmp_path: Path) -> None:
    epochs = keeper(tmp_path, NOBODY)
    assert await epochs.for_attach(0) == 1
    with pytest.raises(IndexUnavailable):
        await epochs.fenced()


async def test_epoch_jumps_where_redis_counts_none_so_that_two_managers_never_hold_one(
    redis_url: str, tmp_path: Path, redis_client: Redis
) -> None:
    """Both hold one when Redis is wiped; the older comes back first and must not take the other's."""
    jumps = iter((0, 0, 500, 0))
    store = RedisIndexStore(open_redis(redis_url, TIMEOUT_S), NAMESPACE, 60.0, 5.0, lambda: next(jumps))
    try:
        old, new = EpochKeeper(EpochFile(tmp_path / "a"), store), EpochKeeper(EpochFile(tmp_path / "b"), store)
        assert [await old.for_attach(0), await new.for_attach(0)] == [1, 2]
        await redis_client.flushall()
        assert await old.renew_fence() == 502
        with pytest.raises(StaleEpoch):
            await new.renew_fence()
    finally:
        await store.close()


async def test_fence_is_taken_when_redis_is_back(keeper: Keeper, tmp_path: Path) -> None:
    server = LocalRedis()
    epochs = keeper(tmp_path, server.url)
    assert await epochs.for_attach(3) == 4
    with server:
        assert [await epochs.fenced(), await epochs.fenced()] == [5, 5]
        async with Redis.from_url(server.url) as client:
            assert await client.get(NAMESPACE + ":fence") == b"5"


def test_state_file_without_a_number_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "epoch").write_text("seven")
    with pytest.raises(InvalidConfig, match=r"--state-dir: .*epoch cannot be read"):
        EpochFile(tmp_path).read()


@pytest.mark.parametrize("text", ["-1", str(MAX_STORED_EPOCH + 1), "1e3", "9" * 5000, "\N{DIGIT ONE}\xff", ""])
def test_state_file_with_no_epoch_is_refused_with_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / "epoch").write_text(text)
    with pytest.raises(InvalidConfig, match="remove the file to start anew: Redis and the workers know the epoch too"):
        EpochFile(tmp_path).check()


async def test_an_epoch_that_no_manager_can_have_given_is_refused(keeper: Keeper, tmp_path: Path) -> None:
    epochs = keeper(tmp_path)
    for seen in (FAR, 2**63, 2**64 - 1):
        with pytest.raises(ProtocolViolation, match="Start the worker anew"):
            await epochs.for_attach(seen)
    assert await epochs.for_attach(0) == 1


async def test_epochs_go_on_beyond_what_is_believed_of_others(keeper: Keeper, tmp_path: Path, redis_url: str) -> None:
    """The highest number that is believed is taken; its own successors are believed too, after a restart as well."""
    assert await keeper(tmp_path, redis_url).for_attach(FAR - 1) == FAR
    assert await keeper(tmp_path, redis_url).for_attach(FAR) == FAR + 1
    assert await keeper(tmp_path).for_attach(FAR + 1) == FAR + 2


async def test_values_in_redis_that_are_no_epochs_are_overwritten(
    keeper: Keeper, tmp_path: Path, redis_url: str, redis_client: Redis
) -> None:
    epochs = keeper(tmp_path, redis_url)
    await epochs.for_attach(0)
    for broken in (b"nonsense", b"-3", b"1e300", b"%d" % FAR, b"%d" % 10**15, b"9" * 400, b"\xff"):
        await redis_client.mset({NAMESPACE + ":fence": broken, NAMESPACE + ":epoch": broken})
        before = epochs.epoch
        assert await epochs.renew_fence() > before
        assert await redis_client.get(NAMESPACE + ":fence") == b"%d" % epochs.epoch
    await redis_client.delete(NAMESPACE + ":fence")
    await redis_client.sadd(NAMESPACE + ":fence", "a key of another type")
    await epochs.renew_fence()
    assert await redis_client.get(NAMESPACE + ":fence") == b"%d" % epochs.epoch


def test_state_file_leaves_nothing_else_behind(tmp_path: Path) -> None:
    file = EpochFile(tmp_path / "made" / "on demand")
    file.write(12)
    assert file.read() == 12
    assert [path.name for path in (tmp_path / "made" / "on demand").iterdir()] == ["epoch"]


def test_a_full_disk_keeps_no_manager_from_its_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The unmended manager refused its options, and nothing starts a process again that does."""
    file = EpochFile(tmp_path)
    file.write(12)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        file.check()
        with pytest.raises(InvalidConfig, match="cannot be written"):
            file.write(13)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot be stored until there is room" in caplog.text
    assert file.read() == 12
    assert [path.name for path in tmp_path.iterdir()] == ["epoch"]
    file.check()


def test_state_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match="cannot be written"):
        EpochFile(tmp_path / "file" / "folder").write(1)


@pytest.mark.parametrize("counter", [None, 0, 3, 8, FAR])
@pytest.mark.parametrize("fence", [None, 3, 8, FAR - 1, FAR])
async def test_redis_takes_epochs_by_the_rules_of_the_core(
    counter: int | None, fence: int | None, redis_url: str, redis_client: Redis
) -> None:
    """The executable model of the protocol runs on these rules; the manager has Redis follow them, in Lua."""
    store = RedisIndexStore(open_redis(redis_url, TIMEOUT_S), NAMESPACE, 60.0, 5.0, lambda: 500)
    try:
        for held, least in itertools.product((0, 3, 5), (1, 4, 12)):
            await redis_client.flushall()
            for key, value in (("epoch", counter), ("fence", fence)):
                if value is not None:
                    await redis_client.set(f"{NAMESPACE}:{key}", value)
            if epochs.is_replaced(held, fence):
                with pytest.raises(StaleEpoch, match=f"epoch {fence} has taken over"):
                    await store.acquire(least, held)
                continue
            expected = epochs.acquired(least, counter, fence, 500)
            assert await store.acquire(least, held) == expected
            stored = await redis_client.mget([f"{NAMESPACE}:epoch", f"{NAMESPACE}:fence"])
            assert stored == [b"%d" % expected] * 2
    finally:
        await store.close()
