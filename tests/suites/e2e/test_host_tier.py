"""Blocks that leave a small KV pool come back from host memory: tokens and hits, over preemptions, kills and resets."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path

import pytest

from cli.suite.stack import StackOptions
from quire.kvmanager.v1 import kvmanager_pb2
from tests.support.checkpoints import VOCAB_SIZE, checkpoint, hf_greedy
from tests.support.load import kill
from tests.support.suite import PATIENCE, cached_tokens, greedy, running_suite
from tests.support.why import quire_why

TOKENS = 12
_random = random.Random(3)
TALKS = [[_random.randrange(6, VOCAB_SIZE) for _ in range(37)] for _ in range(4)]
"""Each takes twelve blocks of four slots with its output, so a pool of sixteen has room for one of them."""


def small_pool(*flags: str) -> tuple[str, ...]:
    return ("--dtype", "float32", "--kv-blocks", "16", "--max-model-len", "64", "--max-num-seqs", "4", *flags)


@pytest.mark.parametrize("flags", [(), ("--model-impl", "transformers"), ("--kv-cache-dtype", "int8")], ids=str)
async def test_evicted_prefixes_are_loaded(flags: tuple[str, ...], tmp_path: Path) -> None:
    folder = checkpoint("llama")
    options = StackOptions(model=folder, block_size=4, worker_flags=small_pool("--host-memory", "1MiB", *flags))
    async with running_suite(tmp_path, options) as suite:
        first = [await suite.generate(greedy(talk, TOKENS)) for talk in TALKS]
        again = [await suite.generate(greedy(talk, TOKENS)) for talk in TALKS]
        assert [cached_tokens(each) for each in first] == [0] * 4
        assert [cached_tokens(each) for each in again] == [36] * 4
        assert [each.tokens for each in again] == [each.tokens for each in first]
        if "int8" not in flags:
            assert [each.tokens for each in first] == [hf_greedy(folder, talk, TOKENS) for talk in TALKS]


IN_GROUPS = {"gpt_oss": 34, "llama4_text": 34, "gemma4_text": 48, "qwen3_next": 40, "lfm2": 24}
"""Models with windows, with chunks, and with states beside layers that see everything; pages for hardly two talks."""


@pytest.mark.parametrize(
    "kind", [each if each in ("gpt_oss", "lfm2") else pytest.param(each, marks=pytest.mark.rest) for each in IN_GROUPS]
)
async def test_windows_chunks_and_states_are_loaded_over_a_new_manager_and_a_reset(kind: str, tmp_path: Path) -> None:
    folder = checkpoint(kind)
    flags = ("--dtype", "float32", "--kv-blocks", f"{IN_GROUPS[kind]}", "--max-model-len", "64", "--max-num-seqs", "4")
    options = StackOptions(model=folder, block_size=4, worker_flags=(*flags, "--host-memory", "4MiB"))
    async with running_suite(tmp_path, options) as suite:
        wanted = [hf_greedy(folder, talk, TOKENS) for talk in TALKS]
        first = [await suite.generate(greedy(talk, TOKENS)) for talk in TALKS]
        assert [each.tokens for each in first] == wanted
        assert [cached_tokens(each) for each in first] == [0] * 4
        kill(suite, "kvmanager")
        again = [await suite.generate(greedy(talk, TOKENS)) for talk in TALKS]
        assert [each.tokens for each in again] == wanted
        assert [cached_tokens(each) for each in again] == [36] * 4
        (pool,) = await suite.pools()
        assert pool.host_loads > 0
        assert 0 < pool.host_held <= pool.host_frames
        await suite.manager.ResetPrefixCache(kvmanager_pb2.ResetPrefixCacheRequest(), timeout=PATIENCE)
        after = [await suite.generate(greedy(talk, TOKENS)) for talk in TALKS]
        assert [each.tokens for each in after] == wanted
        assert [cached_tokens(each) for each in after] == [0] * 4
        outcomes = await asyncio.gather(*(suite.generate(greedy(talk, 25)) for talk in TALKS))
        assert [each.tokens for each in outcomes] == [hf_greedy(folder, talk, 25) for talk in TALKS]
        await suite.until_all_free(1)


async def test_a_preempted_sequence_loads_what_it_lost_and_a_new_manager_knows_the_frames(tmp_path: Path) -> None:
    folder, tokens = checkpoint("llama"), 25
    options = StackOptions(model=folder, block_size=4, worker_flags=small_pool("--host-memory", "1MiB"))
    async with running_suite(tmp_path, options) as suite:
        wanted = [hf_greedy(folder, talk, tokens) for talk in TALKS]
        outcomes = await asyncio.gather(*(suite.generate(greedy(talk, tokens)) for talk in TALKS))
        assert [each.tokens for each in outcomes] == wanted
        kill(suite, "kvmanager")
        again = [await suite.generate(greedy(talk, tokens)) for talk in TALKS]
        assert [each.tokens for each in again] == wanted
        assert [cached_tokens(each) for each in again] == [36] * 4
        await suite.until_all_free(1)


async def test_why_says_what_was_loaded_and_what_computing_it_would_take(tmp_path: Path) -> None:
    """The first talk leaves the pool, and comes back from host memory: nine blocks of four tokens."""
    options = StackOptions(model=checkpoint("llama"), block_size=4, worker_flags=small_pool("--host-memory", "1MiB"))
    async with running_suite(tmp_path, options) as suite:
        for talk in TALKS:
            await suite.generate(greedy(talk, TOKENS))
        request = greedy(TALKS[0], TOKENS)
        request.request_id = "back-again"
        outcome = await suite.generate(request)
        assert outcome.finished is not None
        usage = outcome.finished.usage
        assert (usage.cached_tokens, usage.host_cached_tokens) == (36, 36)
        status, out, err = await quire_why(suite, "back-again")
        assert (status, err) == (0, "")
        found = " ".join(out.split())
        loaded = (
            r"36 of 37 prompt tokens were cached; worker-0 loaded 9 blocks from host memory in (under )?[\d.]+ m?s "
            r"instead of computing 36 tokens \(about [\d.]+ m?s at its rate\)\."
        )
        assert re.search(loaded, found), out
        assert "host memory: 9 of 9 cached blocks are loaded" in found
        (pool,) = await suite.pools()
        assert (pool.host_loads, pool.host_drops, pool.host_held > 0) == (9, 0, True)
        assert pool.host_stores == pool.host_held
