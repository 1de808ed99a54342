"""A worker's blocks outlive it on disk: tokens and hits over kills, rot, resets, other models and disks that fail."""

from __future__ import annotations

import os
import resource
import struct
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from gpuworker.memory.disk_frames import ENTRY_BYTES, HEAD_BYTES
from quire.inference.v1 import inference_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2
from tests.suites.e2e.test_host_tier import IN_GROUPS, TALKS, TOKENS, small_pool
from tests.support.checkpoints import checkpoint, hf_greedy
from tests.support.load import kill, until_restarted
from tests.support.simulated import expected, seeded
from tests.support.suite import PATIENCE, Outcome, Suite, cached_tokens, greedy, running_suite
from tests.support.waiting import until

BLOCKS = 12
"""Full blocks of a talk with its output; the prompt alone has nine, of 36 tokens."""

_LAST_USE = struct.Struct("<40x Q")
"""Of an entry of the table: hash, parent, depth and length stand before it."""


def with_disk(tmp_path: Path, model: str = "llama") -> StackOptions:
    flags = ("--host-memory", "1MiB", "--disk-cache", str(tmp_path / "disk"), "--disk-cache-size", "4MiB")
    return StackOptions(model=checkpoint(model), block_size=4, worker_flags=small_pool(*flags))


@asynccontextmanager
async def suite_with_disk(tmp_path: Path, model: str = "llama") -> AsyncIterator[Suite]:
    state = tmp_path / "state"
    state.mkdir(exist_ok=True)
    async with running_suite(state, with_disk(tmp_path, model)) as suite:
        yield suite


def saved_blocks(tmp_path: Path, since: int = 0) -> int:
    """Return how many blocks were saved or read `since` a time in nanoseconds, by the worker's table."""
    (table,) = (tmp_path / "disk").glob("*/table")
    entries = table.read_bytes()[HEAD_BYTES:]
    used = [_LAST_USE.unpack_from(entries, at)[0] for at in range(0, len(entries), ENTRY_BYTES)]
    return sum(each > since for each in used)


async def until_saved(tmp_path: Path, since: int = 0, talks: int = len(TALKS)) -> None:
    """Wait until the disk has all blocks of so many talks."""
    whole = BLOCKS * talks
    await until(lambda: saved_blocks(tmp_path, since), lambda found: found >= whole, seconds=PATIENCE)


async def talk_to(suite: Suite) -> list[Outcome]:
    return [await suite.generate(greedy(talk, TOKENS)) for talk in TALKS]


def wanted(model: str = "llama") -> list[list[int]]:
    return [hf_greedy(checkpoint(model), talk, TOKENS) for talk in TALKS]


def tokens(outcomes: Sequence[Outcome]) -> list[list[int]]:
    return [each.tokens for each in outcomes]


async def kill_and_await(suite: Suite) -> None:
    """Kill the worker with SIGKILL, and wait until another process serves in its place."""
    pid = suite.stack.children["worker-0"].pid
    kill(suite, "worker-0")
    await until_restarted(suite, "worker-0", pid)
    await suite.until_connected(1)


async def fill(suite: Suite, tmp_path: Path, model: str = "llama") -> None:
    """Let the talks be computed, each once the disk has all blocks of those before.

    On a busy machine they would leave pool and host memory sooner than the disk takes them.
    """
    found = list[Outcome]()
    for talk in TALKS:
        found.append(await suite.generate(greedy(talk, TOKENS)))
        await until_saved(tmp_path, talks=len(found))
    assert tokens(found) == wanted(model)
    assert [cached_tokens(each) for each in found] == [0] * len(TALKS)


async def test_a_worker_that_was_killed_finds_its_blocks_again(tmp_path: Path) -> None:
    async with suite_with_disk(tmp_path) as suite:
        await fill(suite, tmp_path)
        await kill_and_await(suite)
        again = await talk_to(suite)
        assert tokens(again) == wanted()
        assert [cached_tokens(each) for each in again] == [36] * len(TALKS)
        usages = [each.finished.usage for each in again if each.finished is not None]
        assert [(each.host_cached_tokens, each.disk_cached_tokens) for each in usages] == [(0, 36)] * len(TALKS)
        await suite.until_all_free(1)


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["gemma4_text", "llama4_text", "qwen3_next"])
async def test_a_worker_that_was_killed_finds_windows_chunks_and_states_again(kind: str, tmp_path: Path) -> None:
    """Contents of all groups come back, and half of them once more after each second image has rotted."""
    flags = ("--dtype", "float32", "--kv-blocks", f"{IN_GROUPS[kind]}", "--max-model-len", "64", "--max-num-seqs", "4")
    disk = ("--host-memory", "4MiB", "--disk-cache", str(tmp_path / "disk"), "--disk-cache-size", "32MiB")
    options, right = StackOptions(model=checkpoint(kind), block_size=4, worker_flags=(*flags, *disk)), wanted(kind)
    (tmp_path / "state").mkdir()
    async with running_suite(tmp_path / "state", options) as suite:
        assert tokens(await talk_to(suite)) == right
        await until_disk_rests(suite)
        await kill_and_await(suite)
        again = await talk_to(suite)
        assert tokens(again) == right
        assert [cached_tokens(each) for each in again] == [36] * len(TALKS)
        (pool,) = await suite.pools()
        assert pool.disk_loads > 0
        await until_disk_rests(suite)
        (images,) = (tmp_path / "disk").glob("*/images")
        content = bytearray(images.read_bytes())
        content[:: 2 * 4096] = bytes(each ^ 0x40 for each in content[:: 2 * 4096])
        with images.open("r+b") as file:
            file.write(content)
        await kill_and_await(suite)
        rotten = await talk_to(suite)
        assert tokens(rotten) == right
        assert sum(map(cached_tokens, rotten)) < 36 * len(TALKS)
        await suite.until_all_free(1)


async def until_disk_rests(suite: Suite) -> None:
    """Wait until three looks in a row find as many contents on disk, and some."""
    seen = list[int]()

    async def look() -> list[int]:
        (pool,) = await suite.pools()
        seen.append(pool.disk_held)
        return seen[-3:]

    await until(look, lambda last: last[0] > 0 and last == last[:1] * 3, every=0.2, seconds=PATIENCE)


@pytest.mark.rest
async def test_blocks_that_rot_are_misses(tmp_path: Path) -> None:
    async with suite_with_disk(tmp_path) as suite:
        await fill(suite, tmp_path)
        (images,) = (tmp_path / "disk").glob("*/images")
        content = bytearray(images.read_bytes())
        content[::4096] = bytes(each ^ 0x40 for each in content[::4096])  # a bit of each image
        with images.open("r+b") as file:
            file.write(content)
        killed_at = time.time_ns()
        await kill_and_await(suite)
        again = await talk_to(suite)
        assert tokens(again) == wanted()
        assert [cached_tokens(each) for each in again] == [0] * len(TALKS)
        await until_saved(tmp_path, killed_at)
        await kill_and_await(suite)
        assert [cached_tokens(each) for each in await talk_to(suite)] == [36] * len(TALKS), "they were saved again"


@pytest.mark.rest
@pytest.mark.parametrize("manager_dies", [False, True])
async def test_a_worker_that_missed_a_reset_brings_nothing_back(tmp_path: Path, manager_dies: bool) -> None:
    async with suite_with_disk(tmp_path) as suite:
        await fill(suite, tmp_path)
        worker = suite.stack.children["worker-0"].pid
        kill(suite, "worker-0")
        await suite.manager.ResetPrefixCache(kvmanager_pb2.ResetPrefixCacheRequest(), timeout=PATIENCE)
        if manager_dies:
            manager = suite.stack.children["kvmanager"].pid
            kill(suite, "kvmanager")
            await until_restarted(suite, "kvmanager", manager)
        await until_restarted(suite, "worker-0", worker)
        await suite.until_connected(1)
        again = await talk_to(suite)
        assert tokens(again) == wanted()
        assert [cached_tokens(each) for each in again] == [0] * len(TALKS)
        await suite.until_all_free(1)


@pytest.mark.rest
async def test_a_folder_of_another_model_is_emptied_and_the_log_says_what_differs(tmp_path: Path) -> None:
    async with suite_with_disk(tmp_path) as suite:
        await fill(suite, tmp_path)
    async with suite_with_disk(tmp_path, "qwen3") as suite:
        (line,) = [line for line in suite.lines if "is emptied, its blocks are of another format" in line]
        assert "model_fingerprint was" in line
        await fill(suite, tmp_path, "qwen3")
    async with suite_with_disk(tmp_path, "qwen3") as suite:
        again = await talk_to(suite)
        assert tokens(again) == wanted("qwen3")
        assert [cached_tokens(each) for each in again] == [36] * len(TALKS), (
            "a suite that ended in peace keeps them too"
        )


@pytest.mark.rest
async def test_a_disk_that_takes_no_more_is_closed_and_requests_go_on(tmp_path: Path) -> None:
    async with suite_with_disk(tmp_path) as suite:
        pid = suite.stack.children["worker-0"].pid
        assert pid is not None
        limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, limits[1]))
        first = await talk_to(suite)
        await until(lambda: [line for line in suite.lines if "the disk cache in" in line and "is closed" in line])
        again = await talk_to(suite)
        assert tokens(first) == tokens(again) == wanted()
        assert [cached_tokens(each) for each in again] == [36] * len(TALKS), "host memory has them"
        assert not any("contradicts" in line or "ProtocolViolation" in line for line in suite.lines)
        assert suite.stack.children["worker-0"].pid == pid
        os.kill(pid, 9)
        await until_restarted(suite, "worker-0", pid)
        await suite.until_connected(1)
        await fill(suite, tmp_path)  # nothing of before is a hit, and the disk takes blocks again
        await suite.until_all_free(1)


@pytest.mark.rest
async def test_simulated_workers_check_what_comes_back(tmp_path: Path) -> None:
    """A simulated worker compares each block that it loads with the tokens that it is for."""
    disk = ("--host-memory", "1MiB", "--disk-cache", str(tmp_path / "disk"), "--disk-cache-size", "64MiB")
    flags = ("--kv-blocks", "16", "--max-num-seqs", "4", "--max-model-len", "64", "--simulate", "base=1ms", *disk)
    state = tmp_path / "state"
    state.mkdir()

    def asked() -> list[pb.GenerateRequest]:
        return [seeded(talk, TOKENS, seed) for seed, talk in enumerate(TALKS, start=1)]

    async with running_suite(state, StackOptions(CHECKPOINT, block_size=4, worker_flags=flags)) as suite:
        found = [await suite.generate(each) for each in asked()]
        assert tokens(found) == [expected(talk, TOKENS, seed) for seed, talk in enumerate(TALKS, start=1)]
        await until_saved(tmp_path)
        await kill_and_await(suite)
        again = [await suite.generate(each) for each in asked()]
        assert tokens(again) == tokens(found)
        assert [cached_tokens(each) for each in again] == [36] * len(TALKS)
