"""KV events of two workers of a running suite, beside what the KV manager says of the same caches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest_asyncio

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from common.wire.packing import unpack_hashes
from quire.kvmanager.v1 import kvmanager_pb2 as kv
from tests.support.kv_subscriber import KvSubscriber
from tests.support.simulated import seeded
from tests.support.suite import PATIENCE, Suite, running_suite
from tests.support.waiting import until

WORKERS = 2
FREE = "tcp://127.0.0.1:0"
FLAGS = ("--kv-blocks", "24", "--simulate", "base=1ms,prefill=10us", "--kv-events-topic", "kv")


@pytest_asyncio.fixture
async def suite(tmp_path: Path) -> AsyncIterator[Suite]:
    ends = ("--kv-events", FREE, "--kv-events-replay", FREE)
    stack = StackOptions(model=CHECKPOINT, workers=WORKERS, worker_flags=FLAGS, kv_events=(ends,) * WORKERS)
    async with running_suite(tmp_path, stack) as running:
        yield running


async def cached_at_manager(suite: Suite) -> dict[str, set[int]]:
    """Return the numbers of the hashes that the KV manager has of each worker: those of a first snapshot."""
    found, left = dict[str, set[int]](), WORKERS
    call = suite.manager.SubscribeKvEvents(kv.SubscribeKvEventsRequest(), timeout=PATIENCE)
    async for message in call:
        hashes = unpack_hashes(message.snapshot.block_hashes)
        found.setdefault(message.worker_id, set()).update(int.from_bytes(each[-8:], "big") for each in hashes)
        left -= message.snapshot.last
        if not left:
            break
    call.cancel()
    return found


async def test_events_are_what_the_manager_has_through_evictions_and_resets(suite: Suite) -> None:
    status = await suite.status()
    sources = {each.worker_id: each.kv_events for each in status.workers}
    assert all(each.topic == "kv" and each.buffer_steps and each.hwm for each in sources.values())
    assert len({each.endpoint for each in sources.values()}) == WORKERS
    prompts = [[*range(1000 + 100 * (number % 5), 1090 + 100 * (number % 5)), *[number] * 90] for number in range(8)]
    for prompt in prompts:
        await suite.generate(seeded(prompt, 20))
    await suite.until_all_free(WORKERS)
    with ExitStack() as ends:
        readers = {
            worker: ends.enter_context(KvSubscriber(each.endpoint, each.replay_endpoint, "kv"))
            for worker, each in sources.items()
        }
        for worker, has in (await cached_at_manager(suite)).items():
            readers[worker].catch_up()
            assert {number for _, _, number in readers[worker].known} == has, worker
            assert len(has) > 12
        events = [event["type"] for each in readers.values() for event in each.events]
        assert events.count("BlockRemoved") > 2
        await suite.manager.ResetPrefixCache(kv.ResetPrefixCacheRequest(), timeout=PATIENCE)
        for each in readers.values():
            await until(each.catch_up, lambda known: not known)
            assert each.events[-1] == {"type": "AllBlocksCleared"}
