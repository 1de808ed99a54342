"""Attacks on the KV manager by who reaches its port or its Redis: other workers keep their sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from grpc import aio
from redis.asyncio import Redis

from common.contracts import index_format
from common.contracts.lease import Report, Reserve
from common.contracts.types import SequenceId
from common.rpc.server import open_channel
from common.wire.lease_codec import attach_to_proto
from quire.kvmanager.v1 import kvmanager_pb2
from tests.support.kvmanager.fake_session import EMPTY, IDENTITY, RawWorker, attach_of
from tests.support.kvmanager.manager_child import ManagerChild, manager_process
from tests.support.waiting import until

MANY_BLOCKS = 3_000_000
# What a manager's memory may grow by under attack; the unmended one took 1 GB and 815 MB.
GROWTH_MIB = 200.0


@asynccontextmanager
async def attached(child: ManagerChild, worker_id: str) -> AsyncIterator[RawWorker]:
    """Attach an innocent worker."""
    async with open_channel(child.address) as channel:
        worker = RawWorker(channel, attach_of(worker_id))
        await worker.attached()
        yield worker


async def is_served(worker: RawWorker, sequence: int = 0) -> None:
    """Let a worker reserve blocks for a sequence, and expect their grant."""
    reserve = Reserve(SequenceId(sequence), 40, 64, request_id=f"r{sequence}")
    batch = await worker.exchange(Report(reserve=(reserve,)))
    assert [admit.sequence for admit in batch.admit] == [sequence]


async def attack(worker: RawWorker) -> None:
    """Attach as an attacker. The stream may end meanwhile, even before the inventory is sent."""
    with suppress(aio.AioRpcError, EOFError, asyncio.InvalidStateError):
        await worker.attach(EMPTY)


async def flooded(worker: RawWorker, message: kvmanager_pb2.SessionRequest, times: int) -> bool:
    """Send a message again and again; return whether the stream ended meanwhile."""
    with suppress(asyncio.InvalidStateError, aio.AioRpcError):
        for _ in range(times):
            await worker.send(message)
        return False
    return True


@pytest.mark.parametrize("seen", [2**64 - 1, 2**63, 2**53])
async def test_an_absurd_epoch_harms_neither_workers_nor_the_next_manager(
    tmp_path: Path, redis_url: str, redis_client: Redis, seen: int
) -> None:
    async with manager_process(tmp_path, "--redis-url", redis_url) as child:
        async with open_channel(child.address) as channel, attached(child, "w0") as worker:
            await attack(RawWorker(channel, attach_of("evil", epoch_seen=seen)))
            await is_served(worker)
        async with attached(child, "w1") as worker:
            await is_served(worker)
        said = await child.stopped()
    assert len(said.splitlines()) < 50
    assert int((tmp_path / "epoch").read_text()) < 2**32
    fence = await redis_client.get(index_format.fence_key(IDENTITY.namespace))
    assert fence is not None
    assert int(fence) < 2**32
    async with manager_process(tmp_path, "--redis-url", redis_url) as child, attached(child, "w0") as worker:
        await is_served(worker)


async def test_a_worker_with_millions_of_blocks_is_refused_at_no_cost(tmp_path: Path) -> None:
    async with manager_process(tmp_path, "--redis-url", "") as child, attached(child, "w0") as worker:
        before = child.rss_mib
        async with open_channel(child.address) as channel:
            for number, num_blocks in enumerate((MANY_BLOCKS, 2**32 - 1)):
                evil = RawWorker(channel, attach_of(f"evil-{number}", num_blocks=num_blocks))
                answer = await evil.refused()
                assert answer.WhichOneof("message") == "attach_rejected", answer
                assert "--max-blocks-per-worker" in answer.attach_rejected.reason
        assert child.rss_mib - before < GROWTH_MIB
        await is_served(worker)


async def test_an_inventory_without_an_end_is_cut_off(tmp_path: Path) -> None:
    chunk = kvmanager_pb2.SessionRequest(inventory=kvmanager_pb2.Inventory(pool=bytes(8 << 20)))
    async with manager_process(tmp_path, "--redis-url", "") as child, attached(child, "w0") as worker:
        before = child.rss_mib
        async with open_channel(child.address) as channel:
            evil = RawWorker(channel, attach_of("evil"))
            await evil.send(kvmanager_pb2.SessionRequest(attach=attach_to_proto(evil.worker)))
            assert await flooded(evil, chunk, 75), "the manager took it all"
        assert child.rss_mib - before < GROWTH_MIB
        await is_served(worker)


@pytest.mark.parametrize("fence", [b"%d" % 10**15, b"nonsense", b"\xff"])
async def test_an_absurd_fence_in_redis_ends_no_manager(
    tmp_path: Path, redis_url: str, redis_client: Redis, fence: bytes
) -> None:
    key = index_format.fence_key(IDENTITY.namespace)
    flags = ("--redis-url", redis_url, "--lease-ttl", "0.3")
    async with manager_process(tmp_path, *flags) as child, attached(child, "w0") as worker:
        await is_served(worker, 0)
        await redis_client.set(key, fence)
        # A renewal of the manager meets the fence.
        await until(
            lambda: redis_client.get(key),
            lambda found: found != fence or child.process.returncode is not None,
            every=0.05,
        )
        assert child.process.returncode is None, "the manager has ended"
        assert int(await redis_client.get(key) or 0) < 2**33
        await is_served(worker, 1)
