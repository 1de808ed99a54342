"""Blocks on disk outlive a worker: tokens and hits after kills, a reset and bit rot."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cli.suite.stack import StackOptions
from gpuworker.memory.disk_frames import ENTRY_BYTES, HEAD_BYTES
from quire.kvmanager.v1 import kvmanager_pb2
from tests.support.checkpoints import VOCAB_SIZE, checkpoint, hf_greedy
from tests.support.load import kill, until_restarted
from tests.support.suite import PATIENCE, Suite, cached_tokens, greedy, running_suite
from tests.support.waiting import until

TOKENS = 12
_random = random.Random(5)
TALKS = [[_random.randrange(6, VOCAB_SIZE) for _ in range(37)] for _ in range(4)]
"""Each takes twelve blocks of four slots with its output, so a pool of sixteen has room for one of them."""
BLOCKS = 4 * 12
WORKER = "worker-0"


def options_of(folder: Path, *flags: str) -> StackOptions:
    sizes = ("--dtype", "float32", "--kv-blocks", "16", "--max-model-len", "64", "--max-num-seqs", "4")
    tiers = ("--host-memory", "1MiB", "--disk-cache", str(folder / "disk"), "--disk-cache-size", "8MiB")
    return StackOptions(model=checkpoint("llama"), block_size=4, worker_flags=(*sizes, *tiers, *flags))


async def talked(suite: Suite) -> tuple[list[list[int]], list[int]]:
    """Return the tokens of each talk, and how many of its prompt's were cached."""
    outcomes = [await suite.generate(greedy(talk, TOKENS)) for talk in TALKS]
    return [list(each.tokens) for each in outcomes], [cached_tokens(each) for each in outcomes]


async def restart(suite: Suite) -> None:
    pid = suite.stack.children[WORKER].pid
    kill(suite, WORKER)
    await until_restarted(suite, WORKER, pid)
    await suite.until_connected(1)


def saved(folder: Path) -> int:
    """Return how many frames of the worker's file have an entry."""
    table = (folder / "disk" / WORKER / "table").read_bytes()[HEAD_BYTES:]
    return sum(any(table[at : at + ENTRY_BYTES]) for at in range(0, len(table), ENTRY_BYTES))


async def until_saved(folder: Path) -> None:
    """Wait until all blocks of all talks are on disk."""
    await until(lambda: saved(folder), lambda count: count >= BLOCKS, every=0.05)


@pytest.mark.parametrize("flags", [(), ("--model-impl", "transformers"), ("--kv-cache-dtype", "int8")], ids=str)
async def test_a_worker_that_was_killed_comes_back_with_its_blocks(flags: tuple[str, ...], tmp_path: Path) -> None:
    folder = checkpoint("llama")
    async with running_suite(tmp_path, options_of(tmp_path, *flags)) as suite:
        first, hits = await talked(suite)
        assert hits == [0] * 4
        if "int8" not in flags:
            assert first == [hf_greedy(folder, talk, TOKENS) for talk in TALKS]
        await until_saved(tmp_path)
        await restart(suite)
        assert await talked(suite) == (first, [36] * 4)
        await suite.until_all_free(1)


async def test_blocks_that_rot_on_disk_are_computed_again(tmp_path: Path) -> None:
    async with running_suite(tmp_path, options_of(tmp_path)) as suite:
        first, _ = await talked(suite)
        await until_saved(tmp_path)
        images = tmp_path / "disk" / WORKER / "images"
        with images.open("r+b") as file:
            for at in range(0, images.stat().st_size, 3 * 4096):  # of each third frame
                file.seek(at)
                file.write(b"rotten")
        await restart(suite)
        again, hits = await talked(suite)
        assert again == first
        assert sum(hits) < 4 * 36
        await suite.until_all_free(1)


async def test_a_reset_empties_the_disk_of_a_worker_that_is_killed_behind_it(tmp_path: Path) -> None:
    async with running_suite(tmp_path, options_of(tmp_path)) as suite:
        first, _ = await talked(suite)
        await until_saved(tmp_path)
        await suite.manager.ResetPrefixCache(kvmanager_pb2.ResetPrefixCacheRequest(), timeout=PATIENCE)
        await restart(suite)
        assert await talked(suite) == (first, [0] * 4)
