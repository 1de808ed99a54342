"""What operators ask over the wire: look-ups, block tables, pools, decision records; and the metrics endpoint."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc import aio

from common.contracts.errors import InvalidRequest
from common.contracts.lease import CachedBlock, Inventory, Report, Reserve
from common.contracts.transfers import TransferEnd
from common.contracts.types import BlockHash, BlockId, FinishReason, KvGroup, KvGroupKind, SequenceId
from quire.api.status import error_from_rpc
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc
from quire.types.v1 import types_pb2
from tests.kvmanager.conftest import ChannelTo, Connect, Running
from tests.support.kvmanager.fake_session import IDENTITY, RawWorker
from tests.support.waiting import until

HASHES = tuple(BlockHash(bytes([index]) * 16) for index in range(1, 5))
PACKED = b"".join(HASHES)


async def worker_with_one_sequence(manager: Running, connect: Connect, worker_id: str = "w0") -> RawWorker:
    """Return a worker that runs one sequence of 40 tokens, with two sealed blocks, and has one block leased."""
    worker = connect(manager, worker_id)
    await worker.attached()
    reserve = Reserve(SequenceId(7), 40, 64, block_hashes=HASHES[:2], request_id="request-7")
    await worker.exchange(Report(reserve=(reserve,)))
    seals = ((BlockId(0), HASHES[0]), (BlockId(1), HASHES[1]))
    await worker.exchange(Report(step=1, seal=seals, lease_want=1))
    return worker


def stub_of(manager: Running, channel_to: ChannelTo) -> kvmanager_pb2_grpc.KvManagerServiceStub:
    return kvmanager_pb2_grpc.KvManagerServiceStub(channel_to(manager.address))


async def test_lookup_shows_the_longest_prefix_on_each_worker(
    manager: Running, connect: Connect, channel_to: ChannelTo
) -> None:
    await worker_with_one_sequence(manager, connect)
    await connect(manager, "w1").attached()
    found = await stub_of(manager, channel_to).Lookup(kvmanager_pb2.LookupRequest(block_hashes=PACKED, num_tokens=70))
    first, second = found.matches
    assert (first.worker_id, first.hit_blocks, first.diverged_at) == ("w0", 2, 2)
    assert first.miss_reason == types_pb2.MISS_REASON_DIVERGED_AT
    assert (second.worker_id, second.hit_blocks) == ("w1", 0)
    assert second.miss_reason == types_pb2.MISS_REASON_NEVER_SEEN


async def test_lookup_of_one_worker(manager: Running, connect: Connect, channel_to: ChannelTo) -> None:
    for worker_id in ("w0", "w1"):
        await connect(manager, worker_id).attached()
    request = kvmanager_pb2.LookupRequest(block_hashes=PACKED, num_tokens=70, worker_id="w1")
    found = await stub_of(manager, channel_to).Lookup(request)
    assert [match.worker_id for match in found.matches] == ["w1"]


async def test_lookup_with_half_a_hash_names_the_field(manager: Running, channel_to: ChannelTo) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await stub_of(manager, channel_to).Lookup(kvmanager_pb2.LookupRequest(block_hashes=PACKED[:17]))
    error = error_from_rpc(caught.value)
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "block_hashes"


@pytest.mark.parametrize("method", ["Lookup", "GetBlockTable", "GetPool", "GetBlockMap", "GetBlock"])
async def test_worker_that_is_not_attached_is_not_found(manager: Running, channel_to: ChannelTo, method: str) -> None:
    request = getattr(kvmanager_pb2, method + "Request")(worker_id="nobody")
    with pytest.raises(aio.AioRpcError) as caught:
        await getattr(stub_of(manager, channel_to), method)(request)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("wanted", [{"sequence": 7}, {"request_id": "request-7"}, {}], ids=str)
async def test_block_table_by_sequence_by_request_or_all(
    manager: Running, connect: Connect, channel_to: ChannelTo, wanted: dict[str, int | str]
) -> None:
    await worker_with_one_sequence(manager, connect)
    request = kvmanager_pb2.GetBlockTableRequest(worker_id="w0", **wanted)  # type: ignore[arg-type]
    (table,) = (await stub_of(manager, channel_to).GetBlockTable(request)).tables
    assert (table.sequence, table.request_id, list(table.block_ids)) == (7, "request-7", [0, 1, 2])
    assert (table.phase, table.n_shared, table.sealed_blocks) == (kvmanager_pb2.SEQUENCE_PHASE_RUNNING, 0, 2)


async def test_block_table_of_a_sequence_that_is_gone_is_not_found(
    manager: Running, connect: Connect, channel_to: ChannelTo
) -> None:
    await worker_with_one_sequence(manager, connect)
    with pytest.raises(aio.AioRpcError) as caught:
        await stub_of(manager, channel_to).GetBlockTable(kvmanager_pb2.GetBlockTableRequest(sequence=8))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_pool_counts_every_block_once(manager: Running, connect: Connect, channel_to: ChannelTo) -> None:
    await worker_with_one_sequence(manager, connect)
    answer = await stub_of(manager, channel_to).GetPool(kvmanager_pb2.GetPoolRequest())
    (pool,) = answer.pools
    assert answer.epoch == 1
    assert (pool.num_blocks, pool.in_use, pool.leased, pool.cached, pool.free) == (8, 3, 1, 0, 4)
    assert (pool.running, pool.waiting) == (1, 0)
    assert (pool.prefix_query_blocks, pool.prefix_hit_blocks, dict(pool.misses_by_reason)) == (2, 0, {"never_seen": 1})


async def test_decisions_of_a_request_are_listed(manager: Running, connect: Connect, channel_to: ChannelTo) -> None:
    await worker_with_one_sequence(manager, connect)
    stub = decision_pb2_grpc.DecisionServiceStub(channel_to(manager.address))
    (grant,) = (await stub.ListDecisions(decision_pb2.ListDecisionsRequest(request_id="request-7"))).decisions
    assert (grant.kind, grant.chosen) == ("grant", "0 shared and 3 fresh blocks")
    assert grant.figures["fresh_blocks"] == 3.0
    other = await stub.ListDecisions(decision_pb2.ListDecisionsRequest(request_id="request-8"))
    assert list(other.decisions) == []


async def test_traces_are_the_routers(manager: Running, channel_to: ChannelTo) -> None:
    stub = decision_pb2_grpc.DecisionServiceStub(channel_to(manager.address))
    with pytest.raises(aio.AioRpcError) as caught:
        await stub.GetTrace(decision_pb2.GetTraceRequest(trace_id="0" * 32))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


# ---------------------------------------------------------------- metrics


async def scraped(manager: Running, path: str = "/metrics") -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", manager.process.metrics.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    body = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    return body


def values(text: str, name: str) -> dict[str, float]:
    """Return the samples of a metric by their labels."""
    found = re.findall(rf"^{re.escape(name)}(\{{.*\}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


async def test_metrics_show_blocks_by_state(manager: Running, connect: Connect) -> None:
    await worker_with_one_sequence(manager, connect)
    text = await scraped(manager)
    states = {"free": 4, "leased": 1, "in_use": 3, "cached": 0, "pinned": 0}
    expected = {f'{{state="{state}",worker="w0"}}': float(count) for state, count in states.items()}
    assert values(text, "quire:kv_blocks") == expected
    assert values(text, "quire:kv_cache_usage_perc") == {'{worker="w0"}': 0.5}


async def test_metrics_show_the_blocks_of_groups_of_layers(manager: Running, connect: Connect) -> None:
    groups = (KvGroup(KvGroupKind.FULL, 0, 1, (1,)), KvGroup(KvGroupKind.WINDOW, 16, 2, (0, 2)))
    identity = replace(IDENTITY, kv_geometry=replace(IDENTITY.kv_geometry, groups=groups))
    worker = connect(manager, identity=identity, num_blocks=16)
    await worker.attached()
    await worker.exchange(Report(reserve=(Reserve(SequenceId(7), 40, 40),)))
    text = await scraped(manager)
    used = {("full", "in_use"): 3.0, ("full", "cached"): 0.0, ("window of 16", "in_use"): 3.0}
    used |= {("window of 16", "cached"): 0.0}
    expected = {f'{{layers="{layers}",state="{state}",worker="w0"}}': count for (layers, state), count in used.items()}
    assert values(text, "quire:kv_group_blocks") == expected
    assert values(text, "quire:kv_blocks")['{state="in_use",worker="w0"}'] == 9.0


async def test_without_groups_of_layers_there_are_no_blocks_of_them(manager: Running, connect: Connect) -> None:
    await worker_with_one_sequence(manager, connect)
    assert values(await scraped(manager), "quire:kv_group_blocks") == {}


async def test_frames_of_host_memory_and_their_copies_are_in_metrics_and_pools(
    manager: Running, connect: Connect, channel_to: ChannelTo
) -> None:
    """Of two blocks that frames have, one is loaded; for the other seven blocks of the pool nothing is evicted."""
    worker = connect(manager, host_frames=3)
    below = [CachedBlock(BlockId(at), HASHES[at], -1, 1, HASHES[at - 1] if at else HASHES[0], at) for at in range(2)]
    await worker.attached(Inventory(frames=below))
    await worker.exchange(Report(reserve=(Reserve(SequenceId(7), 32, 64, block_hashes=HASHES[:2]),)))
    text = await scraped(manager)
    held = {'{state="free",worker="w0"}': 1.0, '{state="held",worker="w0"}': 2.0}
    copied = {'{direction="load",worker="w0"}': 1.0, '{direction="store",worker="w0"}': 0.0}
    assert values(text, "quire:kv_host_frames") == held
    assert values(text, "quire:kv_host_blocks_total") == copied
    assert values(text, "quire:kv_host_dropped_total") == {'{worker="w0"}': 0.0}
    (pool,) = (await stub_of(manager, channel_to).GetPool(kvmanager_pb2.GetPoolRequest())).pools
    assert (pool.host_frames, pool.host_held) == (3, 2)
    assert (pool.host_stores, pool.host_loads, pool.host_drops) == (0, 1, 0)


async def test_frames_on_disk_and_transfers_are_in_metrics_and_pools(
    manager: Running, connect: Connect, channel_to: ChannelTo
) -> None:
    """Two of three frames on disk have blocks. A sequence waits for both; the second one cannot be read."""
    worker = connect(manager, host_frames=4, disk_frames=3)
    saved = [CachedBlock(BlockId(at), HASHES[at], -1, 1, HASHES[at - 1] if at else HASHES[0], at) for at in range(2)]
    await worker.attached(Inventory(saved=saved))
    reserve = Reserve(SequenceId(7), 40, 64, block_hashes=HASHES[:2])
    batch = await worker.exchange(Report(reserve=(reserve,)))
    first, second = (each.id for each in batch.transfers)
    (pool,) = (await stub_of(manager, channel_to).GetPool(kvmanager_pb2.GetPoolRequest())).pools
    assert (pool.disk_frames, pool.disk_held, pool.disk_closed, pool.fetching, pool.fetches) == (3, 2, False, 1, 1)
    assert values(await scraped(manager), "quire:num_requests_waiting")['{reason="fetching",worker="w0"}'] == 1.0
    await worker.exchange(Report(ended=((first, TransferEnd.DONE), (second, TransferEnd.CORRUPT))))
    text, of_worker = await scraped(manager), '{worker="w0"}'
    frames = {'{state="free",worker="w0"}': 2.0, '{state="held",worker="w0"}': 1.0}
    assert values(text, "quire:kv_disk_frames") == frames
    counted = ("stored", "loaded", "lost", "unsaved")
    assert [values(text, f"quire:kv_disk_{each}_total")[of_worker] for each in counted] == [0.0, 1.0, 1.0, 0.0]
    assert values(text, "quire:kv_fetches_total") == {of_worker: 1.0}
    ends = {"done": 1.0, "stale": 0.0, "corrupt": 1.0, "failed": 0.0, "late": 0.0}
    expected = {f'{{end="{end}",worker="w0"}}': count for end, count in ends.items()}
    assert values(text, "quire:kv_transfer_ends_total") == expected
    (pool,) = (await stub_of(manager, channel_to).GetPool(kvmanager_pb2.GetPoolRequest())).pools
    assert (pool.disk_held, pool.fetching, pool.disk_stores, pool.disk_loads) == (1, 0, 0, 1)
    assert (pool.disk_lost, pool.unsaved, pool.fetches) == (1, 0, 1)
    assert dict(pool.transfer_ends) == {"done": 1, "corrupt": 1}
    await worker.exchange(Report(disk_closed=True, lease_want=1))
    (pool,) = (await stub_of(manager, channel_to).GetPool(kvmanager_pb2.GetPoolRequest())).pools
    assert (pool.disk_frames, pool.disk_held, pool.disk_closed) == (0, 0, True)


async def test_metrics_count_prefix_queries_reports_and_sessions(manager: Running, connect: Connect) -> None:
    await worker_with_one_sequence(manager, connect)
    text = await scraped(manager)
    assert values(text, "quire:prefix_cache_queries_total") == {'{worker="w0"}': 32.0}
    assert values(text, "quire:prefix_cache_hits_total") == {'{worker="w0"}': 0.0}
    assert values(text, "quire:prefix_cache_admissions_total") == {'{miss_reason="never_seen",worker="w0"}': 1.0}
    assert values(text, "quire:num_preemptions_total") == {'{worker="w0"}': 0.0}
    assert values(text, "quire:report_handling_seconds_count") == {"": 2.0}
    assert values(text, "quire:sessions_total") == {'{group=""}': 1.0}
    assert values(text, "quire:num_requests_running") == {'{worker="w0"}': 1.0}


async def test_prefix_hits_count_tokens_as_they_do_in_vllm(manager: Running, connect: Connect) -> None:
    worker = await worker_with_one_sequence(manager, connect)
    again = Reserve(SequenceId(8), 40, 48, block_hashes=HASHES[:2], request_id="request-8")
    await worker.exchange(Report(reserve=(again,), lease_want=1))
    text = await scraped(manager)
    assert values(text, "quire:prefix_cache_queries_total") == {'{worker="w0"}': 2 * 32.0}
    assert values(text, "quire:prefix_cache_hits_total") == {'{worker="w0"}': 32.0}


async def test_metrics_count_prompts_that_begin_with_a_part_of_their_blocks(manager: Running, connect: Connect) -> None:
    worker = connect(manager, num_blocks=40)
    await worker.attached()
    await worker.exchange(Report(reserve=(Reserve(SequenceId(1), 320, 336, request_id="request-1"),)))
    batch = await worker.exchange(Report(reserve=(Reserve(SequenceId(2), 544, 560, request_id="request-2"),)))
    assert [len(each.block_table) for each in batch.admit] == [18]
    text = await scraped(manager)
    assert values(text, "quire:admissions_total") == {'{worker="w0"}': 2.0}
    assert values(text, "quire:chunked_grants_total") == {'{worker="w0"}': 1.0}


async def test_counters_do_not_fall_when_a_worker_attaches_again(manager: Running, connect: Connect) -> None:
    await worker_with_one_sequence(manager, connect)
    await connect(manager, session=2).attached()
    text = await scraped(manager)
    assert values(text, "quire:prefix_cache_queries_total") == {'{worker="w0"}': 32.0}
    assert values(text, "quire:sessions_total") == {'{group=""}': 2.0}


async def test_metrics_count_quarantines_and_refusals(manager: Running, connect: Connect) -> None:
    worker = connect(manager)
    await worker.attached()
    await connect(manager, incarnation=b"another".ljust(16)).attach()
    await worker.report(Report(bind=((SequenceId(1), BlockId(1)),)))
    with pytest.raises(aio.AioRpcError):
        await worker.receive()
    text = await scraped(manager)
    assert values(text, "quire:quarantines_total") == {'{group=""}': 1.0}
    assert values(text, "quire:sessions_refused_total") == {'{group=""}': 1.0}


async def test_health_over_http_until_draining(manager: Running) -> None:
    assert (await scraped(manager, "/health")).startswith("HTTP/1.1 200")
    manager.attachments.drain()
    assert (await scraped(manager, "/health")).startswith("HTTP/1.1 503")


# ---------------------------------------------------------------- the prefix cache


async def test_a_reset_waits_for_the_worker_and_says_what_went(
    manager: Running, connect: Connect, channel_to: ChannelTo
) -> None:
    worker = await worker_with_one_sequence(manager, connect)
    await worker.exchange(Report(step=2, finished=((SequenceId(7), FinishReason.STOP),)))
    asked = stub_of(manager, channel_to).ResetPrefixCache(kvmanager_pb2.ResetPrefixCacheRequest(), timeout=120.0)
    order = await worker.batch()
    assert order.reset > 0
    await worker.report(Report(step=2, reset=order.reset))
    answer = await asked
    (reset,) = answer.workers
    assert (answer.dropped_blocks, answer.index_current) == (2, True)
    assert (reset.worker_id, reset.dropped_blocks, reset.blocks_in_use, reset.confirmed) == ("w0", 2, 0, True)
    (pool,) = (await stub_of(manager, channel_to).GetPool(kvmanager_pb2.GetPoolRequest())).pools
    assert pool.cached == 0
    decisions = decision_pb2_grpc.DecisionServiceStub(channel_to(manager.address))
    (record,) = (await decisions.ListDecisions(decision_pb2.ListDecisionsRequest(kind="reset"))).decisions
    assert (record.chosen, record.figures["dropped"]) == ("2 cached blocks", 2.0)
    assert values(await scraped(manager), "quire:prefix_cache_reset_blocks_total") == {'{worker="w0"}': 2.0}


async def test_a_worker_that_leaves_during_a_reset_has_not_confirmed(
    manager: Running, connect: Connect, channel_to: ChannelTo
) -> None:
    worker = await worker_with_one_sequence(manager, connect)
    asked = stub_of(manager, channel_to).ResetPrefixCache(kvmanager_pb2.ResetPrefixCacheRequest(), timeout=120.0)
    await worker.batch()
    worker.call.cancel()
    (reset,) = (await asked).workers
    assert (reset.worker_id, reset.confirmed) == ("w0", False)


async def test_block_map_and_one_block(manager: Running, connect: Connect, channel_to: ChannelTo) -> None:
    await worker_with_one_sequence(manager, connect)
    stub = stub_of(manager, channel_to)
    found = await stub.GetBlockMap(kvmanager_pb2.GetBlockMapRequest(worker_id="w0", limit=5))
    sealed, filling = kvmanager_pb2.BLOCK_USE_SEALED, kvmanager_pb2.BLOCK_USE_FILLING
    assert list(found.uses[:3]) == [sealed, sealed, filling]
    assert (found.first_block, len(found.uses), found.block_size, found.num_sequences) == (0, 5, 16, 1)
    (sequence,) = found.sequences
    assert (sequence.sequence, sequence.request_id, sequence.blocks, sequence.max_blocks) == (7, "request-7", 3, 4)
    assert sequence.phase == kvmanager_pb2.SEQUENCE_PHASE_RUNNING
    block = await stub.GetBlock(kvmanager_pb2.GetBlockRequest(worker_id="w0", block=1))
    assert (block.use, block.references, block.index, block.block_hash) == (sealed, 1, 1, HASHES[1])
    assert [each.request_id for each in block.holders] == ["request-7"]


@pytest.mark.parametrize(
    ("method", "fields", "status"),
    [
        ("GetBlockMap", {}, grpc.StatusCode.INVALID_ARGUMENT),
        ("GetBlockMap", {"worker_id": "w0", "limit": (1 << 16) + 1}, grpc.StatusCode.INVALID_ARGUMENT),
        ("GetBlock", {"block": 1}, grpc.StatusCode.INVALID_ARGUMENT),
        ("GetBlock", {"worker_id": "w0", "block": (1 << 32) - 1}, grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_blocks_that_there_are_not(
    manager: Running, connect: Connect, channel_to: ChannelTo, method: str, fields: dict[str, Any], status: object
) -> None:
    await connect(manager, "w0").attached()
    with pytest.raises(aio.AioRpcError) as caught:
        await getattr(stub_of(manager, channel_to), method)(getattr(kvmanager_pb2, method + "Request")(**fields))
    assert caught.value.code() is status


async def test_events_of_the_prefix_cache_are_a_snapshot_and_then_every_change(
    manager: Running, connect: Connect, channel_to: ChannelTo
) -> None:
    worker = await worker_with_one_sequence(manager, connect)
    stub = stub_of(manager, channel_to)
    call: Any = stub.SubscribeKvEvents(kvmanager_pb2.SubscribeKvEventsRequest(), timeout=120.0)
    first = await call.read()
    assert (first.worker_id, first.number, first.snapshot.reason, first.snapshot.last) == ("w0", 2, "first", True)
    assert first.snapshot.block_hashes == HASHES[0] + HASHES[1]
    more = Reserve(SequenceId(8), 16, 32, block_hashes=HASHES[2:3], request_id="request-8")
    batch = await worker.exchange(Report(step=2, reserve=(more,)))
    (admitted,) = batch.admit
    await worker.report(Report(step=3, seal=((admitted.block_table[0], HASHES[2]),)))
    news = await call.read()
    (change,) = news.changes.changes
    assert (news.stream, news.number, change.stored.block_hash, change.stored.depth) == (first.stream, 3, HASHES[2], 0)
    call.cancel()
    after = kvmanager_pb2.KvPosition(worker_id="w0", stream=first.stream, number=2)
    again: Any = stub.SubscribeKvEvents(kvmanager_pb2.SubscribeKvEventsRequest(after=[after]), timeout=120.0)
    assert (await again.read()).changes.changes[0].stored.block_hash == HASHES[2]
    worker.call.cancel()
    assert (await again.read()).WhichOneof("event") == "detached"
    again.cancel()


async def test_a_client_that_goes_gives_its_subscription_back(manager: Running, channel_to: ChannelTo) -> None:
    stub = stub_of(manager, channel_to)
    hub = manager.attachments.events
    calls = [stub.SubscribeKvEvents(kvmanager_pb2.SubscribeKvEventsRequest(), timeout=120.0) for _ in range(3)]
    async with asyncio.timeout(120.0):
        await until(lambda: len(hub._subscriptions) >= 3, seconds=120.0)
        for call in calls:
            call.cancel()
        await until(lambda: not hub._subscriptions, seconds=120.0)
