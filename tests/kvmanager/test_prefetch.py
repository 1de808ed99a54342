"""Operators prefetch over the wire: what is ordered, when an idle worker gets the next part, and what is refused."""

from __future__ import annotations

from typing import Final

import pytest
from grpc import aio

from common.contracts.errors import InvalidRequest, NotFound
from common.contracts.lease import CachedBlock, GrantBatch, Inventory, Report
from common.contracts.transfers import TransferEnd
from common.contracts.types import BlockId
from common.wire.packing import pack_hashes
from quire.api.status import error_from_rpc
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2_grpc as rpc
from tests.kvmanager.conftest import ChannelTo, Connect, Running, Start
from tests.kvmanager.test_operator_calls import scraped, values
from tests.support.kvmanager.fake_session import RawWorker
from tests.support.kvmanager.ledgers import hashes, prompt, reserve
from tests.support.waiting import until

HASHES: Final = hashes(prompt(6 * 16))
CACHED: Final = Inventory(cached_blocks=tuple(CachedBlock(BlockId(n), key, n - 1, 1) for n, key in enumerate(HASHES)))
ABLE: Final = {"data_address": "127.0.0.1:7000", "image_format": b"f" * 16, "host_frames": 16}


async def ask(manager: Running, channel_to: ChannelTo, worker: str, keys: bytes) -> pb.PrefetchPrefixResponse:
    """Raises the error of the tree."""
    stub = rpc.KvManagerServiceStub(channel_to(manager.address))
    try:
        return await stub.PrefetchPrefix(pb.PrefetchPrefixRequest(worker_id=worker, block_hashes=keys))
    except aio.AioRpcError as error:
        raise error_from_rpc(error) from None


async def ended(worker: RawWorker, batch: GrantBatch) -> None:
    await worker.report(Report(ended=tuple((each.id, TransferEnd.DONE) for each in batch.transfers)))


async def test_an_idle_worker_gets_part_after_part(manager: Running, connect: Connect, channel_to: ChannelTo) -> None:
    await connect(manager, "w0", **ABLE).attached(CACHED)
    worker = connect(manager, "w1", **ABLE)
    await worker.attached()
    answer = await ask(manager, channel_to, "w1", pack_hashes(HASHES))
    assert answer.outcome == pb.PREFETCH_OUTCOME_CLIPPED
    assert (answer.num_blocks, answer.blocks_there, answer.blocks_coming) == (6, 0, 4)
    assert answer.reason == "it has room for 4 blocks ahead of need"
    for part in (HASHES[:2], HASHES[2:4]):  # the second one comes by the clock: no report follows the first one's end
        batch = await worker.batch()
        assert [each.hash for each in batch.transfers] == list(part)
        assert {each.peer.worker_id for each in batch.transfers if each.peer is not None} == {"w0"}
        await ended(worker, batch)
    ledger = manager.attachments.manager.ledger("w1")
    await until(lambda: ledger.pool_counts().ahead, lambda found: found == 0)
    stub = rpc.KvManagerServiceStub(channel_to(manager.address))
    (pool,) = (await stub.GetPool(pb.GetPoolRequest(worker_id="w1"))).pools
    assert (dict(pool.ahead_loads), pool.ahead, pool.host_held) == ({"prefetch": 4}, 0, 4)
    text = await scraped(manager)
    assert values(text, "quire:kv_ahead_loaded_total")['{class="prefetch",worker="w1"}'] == 4.0


@pytest.mark.parametrize(
    ("worker", "keys", "error", "words"),
    [
        ("", pack_hashes(HASHES), InvalidRequest, "worker_id: is missing"),
        ("nobody", pack_hashes(HASHES), NotFound, "no worker nobody is attached"),
        ("w0", b"", InvalidRequest, "block_hashes: is empty; expected at least one full block"),
        ("w0", b"12345", InvalidRequest, "block_hashes: is 5 bytes long; expected 16"),
        ("w0", bytes(16 * 8193), InvalidRequest, "names 8193 blocks; expected at most 8192"),
    ],
    ids=["no worker", "another worker", "nothing", "a part of a hash", "too much"],
)
async def test_what_is_wrong_is_named(
    manager: Running,
    connect: Connect,
    channel_to: ChannelTo,
    worker: str,
    keys: bytes,
    error: type[Exception],
    words: str,
) -> None:
    await connect(manager, "w0", **ABLE).attached()
    with pytest.raises(error, match=words):
        await ask(manager, channel_to, worker, keys)


async def test_a_worker_without_host_memory_refuses(manager: Running, connect: Connect, channel_to: ChannelTo) -> None:
    await connect(manager, "w0").attached()
    answer = await ask(manager, channel_to, "w0", pack_hashes(HASHES))
    assert answer.outcome == pb.PREFETCH_OUTCOME_REFUSED
    assert answer.reason.startswith("the worker keeps nothing in host memory")


async def test_a_manager_that_replicates_orders_a_hot_prefix_at_the_third_worker(
    start_manager: Start, connect: Connect
) -> None:
    manager = await start_manager(replicate=True)
    workers = [connect(manager, name, **ABLE) for name in ("w0", "w1", "w2")]
    for number, worker in enumerate(workers):
        await worker.attached(Inventory() if number else CACHED)
    for worker in workers[:2]:
        await worker.report(Report(reserve=(reserve(1, prompt(2 * 16 + 1)),)))
        await worker.batch()
    batch = await workers[2].batch()
    assert [each.hash for each in batch.transfers] == list(HASHES[:2])
