"""A failover of Redis under a running suite: the index of blocks and the list of workers go to the new master."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path

from redis.asyncio import Redis

from common.contracts.index_format import DISCOVERY_WORKERS_KEY
from tests.support.redis_pair import running_pair
from tests.support.up_harness import READY_SECONDS, Up
from tests.support.waiting import until


def ask(up: Up, text: str) -> None:
    body = json.dumps({"prompt": text, "max_tokens": 2}).encode()
    url = f"http://127.0.0.1:{up.port}/v1/completions"
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=READY_SECONDS).close()


async def test_the_index_follows_a_master_that_became_a_replica(tmp_path: Path) -> None:
    async with running_pair() as pair, Redis.from_url(pair.second.url) as new:
        up = await asyncio.to_thread(Up, tmp_path, "--simulate", "--redis-url", pair.url, cwd=tmp_path)
        try:
            await asyncio.to_thread(up.until, "quire     ready")
            await asyncio.to_thread(ask, up, "before " * 60)
            await pair.fail_over()
            # What was published before comes by replication too; these blocks are of after it.
            before = len(await new.keys("*"))
            await asyncio.to_thread(ask, up, "after " * 60)
            await until(lambda: new.keys("*"), lambda keys: len(keys) > before, every=0.1, seconds=READY_SECONDS)
            await new.delete(DISCOVERY_WORKERS_KEY)
            await until(lambda: new.exists(DISCOVERY_WORKERS_KEY), every=0.1, seconds=READY_SECONDS)
        finally:
            await asyncio.to_thread(up.close)


async def test_a_suite_at_rest_fills_a_new_master_that_knows_nothing(tmp_path: Path) -> None:
    """No request comes: the manager finds out by itself, and writes again what its workers hold."""
    async with (
        running_pair() as pair,
        Redis.from_url(pair.first.url) as old,
        Redis.from_url(pair.second.url) as new,
    ):
        up = await asyncio.to_thread(Up, tmp_path, "--simulate", "--redis-url", pair.url, cwd=tmp_path)
        try:
            await asyncio.to_thread(up.until, "quire     ready")
            await asyncio.to_thread(ask, up, "before " * 60)
            await until(lambda: old.keys("*:p:*"), every=0.1, seconds=READY_SECONDS)
            held = set(await old.keys("*"))
            assert not await new.keys("*")
            await pair.fail_over()
            await until(lambda: new.keys("*"), lambda keys: held <= set(keys), every=0.1, seconds=READY_SECONDS)
        finally:
            await asyncio.to_thread(up.close)
