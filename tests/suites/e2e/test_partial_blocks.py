"""Blocks of 64 slots: two prompts that part inside a block share whole quarters of it, and no token changes."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import grpc
import httpx

from cli.suite.stack import StackOptions
from common.process.metrics import metrics_port
from tests.support.checkpoints import VOCAB_SIZE, checkpoint, hf_greedy
from tests.support.load import kill
from tests.support.suite import PATIENCE, Suite, cached_tokens, greedy, running_suite, stream
from tests.support.up_harness import Up
from tests.support.why import head_of

SIZE, TOKENS = 64, 16
_random = random.Random(64)


def fresh(count: int) -> list[int]:
    return [_random.randrange(6, VOCAB_SIZE) for _ in range(count)]


FIRST = fresh(2 * SIZE + 10)
SECOND = FIRST[: SIZE + 50] + fresh(30)
"""It has a block and 50 slots of the next one in common with the first."""


async def counted(suite: Suite, name: str) -> float:
    """Return the sum of a metric of the manager over its workers."""
    port = metrics_port(None, suite.stack.options.manager_port)
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        lines = (await client.get(f"http://127.0.0.1:{port}/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


async def test_prompts_that_part_inside_a_block_share_quarters_of_it(tmp_path: Path) -> None:
    flags, folder = ("--kv-blocks", "32", "--dtype", "float32"), checkpoint("llama")
    async with running_suite(tmp_path, StackOptions(model=folder, block_size=SIZE, worker_flags=flags)) as suite:
        first = await suite.generate(greedy(FIRST, TOKENS, "first"))
        await suite.until_all_free(1)
        second = await suite.generate(greedy(SECOND, TOKENS, "second"))
        await suite.until_all_free(1)
        assert [first.tokens, second.tokens] == [hf_greedy(folder, each, TOKENS) for each in (FIRST, SECOND)]
        assert (cached_tokens(first), cached_tokens(second)) == (0, SIZE + 48)
        assert "partial block: 48 slots are copied from block" in await head_of(suite, "second")
        assert await counted(suite, "quire:prefix_cache_partial_hits_total{") == 1
        assert await counted(suite, "quire:prefix_cache_partial_hit_tokens_total{") == 48
        # A manager that comes anew learns the parts from a sequence that shares the blocks.
        kill(suite, "kvmanager")
        third, fourth = FIRST[: SIZE + 40] + fresh(30), FIRST[: SIZE + 20] + fresh(60)
        again = await suite.generate(greedy(FIRST, TOKENS))
        outcomes = await asyncio.gather(*(suite.generate(greedy(each, TOKENS)) for each in (third, fourth)))
        assert again.tokens == first.tokens
        assert [each.tokens for each in outcomes] == [hf_greedy(folder, each, TOKENS) for each in (third, fourth)]
        assert [cached_tokens(each) for each in outcomes] == [SIZE + 32, SIZE + 16]


async def test_quire_serve_with_large_blocks_shares_parts_of_them(tmp_path: Path) -> None:
    up = Up(tmp_path, "--block-size", str(SIZE), "--kv-blocks", "32", "--deterministic")
    try:
        await asyncio.to_thread(up.until, "quire     ready")
        async with grpc.aio.insecure_channel(up.address) as channel:
            first = await stream(channel, greedy(FIRST, TOKENS))
            uncached = greedy(SECOND, TOKENS)
            uncached.cache.no_cache = True
            alone = await stream(channel, uncached)
            second = await stream(channel, greedy(SECOND, TOKENS))
    finally:
        await asyncio.to_thread(up.close)
    assert [cached_tokens(each) for each in (first, alone, second)] == [0, 0, SIZE + 48]
    assert second.tokens == alone.tokens
