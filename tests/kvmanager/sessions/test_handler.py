"""The session stream over real gRPC: attach, reports and grants, refusals, replacement, quarantine, drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc import aio

from common.checkpoint.fingerprint import model_fingerprint
from common.contracts.errors import Unavailable
from common.contracts.lease import Admit, CachedBlock, Inventory, InventorySequence, Report
from common.contracts.types import (
    BlockHash,
    BlockId,
    FinishReason,
    KvGeometry,
    KvGroup,
    KvGroupKind,
    MissReason,
    SequenceId,
    SequencePhase,
)
from common.rpc.silence import SILENCE_S
from common.wire.inventory_codec import inventory_chunks
from common.wire.lease_codec import attach_to_proto
from kvmanager.sessions.handler import SessionHandler
from quire.kvmanager.v1 import kvmanager_pb2
from tests.kvmanager.conftest import Connect, Running, Start
from tests.support.kvmanager.fake_session import IDENTITY, attach_of
from tests.support.kvmanager.sessions import HASHES, attach_message, ended_with, reserve, until_left

S0, S1 = SequenceId(0), SequenceId(1)


async def test_attach_is_answered_with_epoch_and_lease_target(manager: Running, connect: Connect) -> None:
    worker = connect(manager)
    answer = await worker.attach()
    assert answer.WhichOneof("message") == "attach_ok"
    assert (answer.session, answer.seq, answer.ack) == (1, 1, 2)  # the Attach and one chunk of inventory
    assert (answer.attach_ok.epoch, answer.attach_ok.lease_target) == (1, 0)


async def test_report_is_answered_with_rows_and_lease(manager: Running, connect: Connect) -> None:
    worker = connect(manager)
    await worker.attached()
    batch = await worker.exchange(Report(reserve=(reserve(S0),)))
    block_table = tuple(map(BlockId, (0, 1, 2)))
    assert batch.admit == (Admit(S0, block_table, 0, 0, MissReason.NEVER_SEEN, 0, batch.admit[0].decision_id),)
    batch = await worker.exchange(Report(step=1, lease_want=1))
    assert batch.lease == (BlockId(3),)


async def test_sealed_blocks_are_shared_with_the_next_sequence(manager: Running, connect: Connect) -> None:
    worker = connect(manager)
    await worker.attached()
    await worker.exchange(Report(reserve=(reserve(S0),)))
    await worker.report(Report(step=1, seal=((BlockId(0), HASHES[0]), (BlockId(1), HASHES[1]))))
    (admit,) = (await worker.exchange(Report(reserve=(reserve(S1),)))).admit
    assert (admit.block_table[:2], admit.n_shared, admit.cached_tokens) == ((0, 1), 2, 32)
    assert admit.miss_reason is MissReason.FULL_HIT


async def test_envelopes_count_and_acknowledge(manager: Running, connect: Connect) -> None:
    worker = connect(manager)
    await worker.attached()
    await worker.report(Report(reserve=(reserve(S0),)))
    response = await worker.receive()
    assert (response.session, response.seq, response.ack) == (1, 3, 3)


async def test_a_pulse_is_answered_and_changes_nothing(manager: Running, connect: Connect) -> None:
    worker = connect(manager)
    answer = await worker.attach()
    assert answer.attach_ok.silence_seconds == SILENCE_S
    await worker.batch()
    pool = manager.attachments.manager.ledger("w0").pool_counts()
    await worker.send(kvmanager_pb2.SessionRequest(pulse=kvmanager_pb2.Pulse()))
    response = await worker.receive()
    assert (response.WhichOneof("message"), response.session, response.seq, response.ack) == ("pulse", 1, 3, 3)
    assert manager.attachments.manager.ledger("w0").pool_counts() == pool


async def test_a_session_that_begins_with_a_pulse_is_refused(manager: Running, connect: Connect) -> None:
    worker = connect(manager)
    await worker.send(kvmanager_pb2.SessionRequest(pulse=kvmanager_pb2.Pulse()))
    assert await ended_with(worker) is grpc.StatusCode.INTERNAL


async def test_inventory_rebuilds_rows_pool_and_cache(manager: Running, connect: Connect) -> None:
    running = InventorySequence(reserve(S0), SequencePhase.RUNNING, 0, (BlockId(5), BlockId(6), BlockId(7)))
    cached_blocks = (
        CachedBlock(BlockId(5), HASHES[0], -1, 3),
        CachedBlock(BlockId(6), HASHES[1], 0, 3),
        CachedBlock(BlockId(1), HASHES[2], 1, 2),
    )
    worker = connect(manager)
    await worker.attached(Inventory((running,), (BlockId(4),), cached_blocks))
    pool = manager.attachments.manager.ledger("w0").pool_counts()
    assert (pool.in_use, pool.leased, pool.cached, pool.free) == (3, 1, 1, 3)


async def test_inventory_in_many_chunks_is_one_inventory(manager: Running, connect: Connect) -> None:
    count = 20_000
    keys = [BlockHash(index.to_bytes(16, "little")) for index in range(count)]
    cached_blocks = tuple(CachedBlock(BlockId(index), keys[index], index - 1, 0) for index in range(count))
    worker = connect(manager, num_blocks=count)
    answer = await worker.attach(Inventory(cached_blocks=cached_blocks))
    assert answer.ack == 4  # the Attach and three chunks
    assert manager.attachments.manager.ledger("w0").pool_counts().cached == count


class HeldRebuild:
    """A session in this process whose rebuild is held after its first step, until `going_on` is set."""

    def __init__(self, running: Running, count: int) -> None:
        self._count = count
        self._held, self.going_on = asyncio.Event(), asyncio.Event()
        self.answers: asyncio.Queue[kvmanager_pb2.SessionResponse] = asyncio.Queue()
        handler = SessionHandler(
            running.attachments, self._requests(), lambda _: None, between_steps=self._between_steps
        )
        self.serving = asyncio.create_task(handler.serve(self.answers.put))

    async def _requests(self) -> AsyncIterator[kvmanager_pb2.SessionRequest]:
        keys = [BlockHash(index.to_bytes(16, "little")) for index in range(self._count)]
        cached = tuple(CachedBlock(BlockId(index), key, index - 1, 0) for index, key in enumerate(keys))
        attach = attach_to_proto(attach_of("w0", num_blocks=self._count))
        yield kvmanager_pb2.SessionRequest(session=1, seq=1, attach=attach)
        for seq, chunk in enumerate(inventory_chunks(Inventory(cached_blocks=cached)), start=2):
            yield kvmanager_pb2.SessionRequest(session=1, seq=seq, inventory=chunk)
        await asyncio.Event().wait()

    async def _between_steps(self) -> None:
        self._held.set()
        await self.going_on.wait()

    async def held(self) -> None:
        async with asyncio.timeout(60.0):
            await self._held.wait()


async def test_reports_of_others_are_answered_between_the_steps_of_a_rebuild(
    manager: Running, connect: Connect
) -> None:
    other = connect(manager, "w1")
    await other.attached()
    rebuild = HeldRebuild(manager, 20_000)
    await rebuild.held()
    assert len((await other.exchange(Report(reserve=(reserve(S0),)))).admit) == 1
    assert rebuild.answers.empty()
    assert manager.attachments.manager.workers() == ("w1",), "a worker is attached when its ledger is rebuilt"
    rebuild.going_on.set()
    async with asyncio.timeout(60.0):
        answer = await rebuild.answers.get()
    assert answer.WhichOneof("message") == "attach_ok"
    assert manager.attachments.manager.ledger("w0").pool_counts().cached == 20_000
    rebuild.serving.cancel()
    await asyncio.wait([rebuild.serving])


async def test_a_rebuild_ends_when_the_worker_opens_another_session(manager: Running, connect: Connect) -> None:
    rebuild = HeldRebuild(manager, 20_000)
    await rebuild.held()
    newer = connect(manager, "w0", session=2)
    await newer.attached()
    rebuild.going_on.set()
    with pytest.raises(Unavailable, match="opened another session"):
        await asyncio.wait_for(rebuild.serving, 60.0)
    assert rebuild.answers.empty()
    ledger = manager.attachments.manager.ledger("w0")
    assert (ledger.pool_counts().num_blocks, ledger.pool_counts().cached) == (8, 0)


async def test_a_reset_during_a_rebuild_reaches_the_worker_with_its_first_batch(manager: Running) -> None:
    rebuild = HeldRebuild(manager, 20_000)
    await rebuild.held()
    assert await manager.attachments.reset_cache(7, seconds=60.0) == ()
    rebuild.going_on.set()
    async with asyncio.timeout(60.0):
        _, second = await rebuild.answers.get(), await rebuild.answers.get()
    assert second.batch.reset == 7
    assert manager.attachments.manager.ledger("w0").pool_counts().cached == 0
    rebuild.serving.cancel()
    await asyncio.wait([rebuild.serving])


STATES = (KvGroup(KvGroupKind.FULL, 0, 1, (1,)), KvGroup(KvGroupKind.STATE, 0, 3, (0,)))
DIFFERENT = {
    "block_size": (replace(IDENTITY, block_size=32), "16", "32", "--block-size"),
    "model_fingerprint": (replace(IDENTITY, model_fingerprint="other"), "model" * 6, "other", "--model"),
    "tokenizer_fingerprint": (
        replace(IDENTITY, tokenizer_fingerprint="other"),
        "tokenizer" * 3,
        "other",
        "--model or --tokenizer",
    ),
    "kv_geometry.num_kv_heads": (
        replace(IDENTITY, kv_geometry=KvGeometry(2, 1, 8, 8, "float32")),
        "2",
        "1",
        "--model",
    ),
    "kv_geometry.values_in_keys": (
        replace(IDENTITY, kv_geometry=KvGeometry(2, 2, 8, 8, "float32", values_in_keys=True)),
        "False",
        "True",
        "--model, or the Quire version",
    ),
    "kv_geometry.groups": (
        replace(IDENTITY, kv_geometry=replace(IDENTITY.kv_geometry, groups=STATES)),
        "",
        "full in 1 pages: 1; state in 3 pages: 0",
        "--model or --no-prefix-caching",
    ),
    "kv_geometry.shapes": (
        replace(IDENTITY, kv_geometry=KvGeometry(2, 2, 8, 8, "float32", shapes="a=2x8+8 b=1x8+8 ab")),
        "",
        "a=2x8+8 b=1x8+8 ab",
        "--model, or the Quire version",
    ),
    "kv_geometry.dtype": (
        replace(IDENTITY, kv_geometry=KvGeometry(2, 2, 8, 8, "bfloat16")),
        "float32",
        "bfloat16",
        "--dtype or --kv-cache-dtype",
    ),
    "hash_version": (replace(IDENTITY, hash_version="2"), "1", "2", "the Quire version"),
    "arithmetic": (
        replace(IDENTITY, arithmetic="fixed"),
        "any",
        "fixed",
        "--deterministic, --dtype, --quantization or --simulate, or run both on equal processors",
    ),
}


@pytest.mark.parametrize("part", DIFFERENT)
async def test_worker_of_another_identity_is_refused(manager: Running, connect: Connect, part: str) -> None:
    await connect(manager, "w0").attached()
    identity, ours, theirs, flag = DIFFERENT[part]
    answer = await connect(manager, "w1", identity=identity).refused()
    difference = kvmanager_pb2.IdentityDifference(field=part, manager=ours, worker=theirs, flag=flag)
    assert list(answer.attach_rejected.differences) == [difference]
    assert not answer.attach_rejected.retry
    assert manager.attachments.manager.workers() == ("w0",)


async def test_after_the_last_worker_left_the_next_one_says_what_the_pool_is(
    manager: Running, connect: Connect
) -> None:
    first, other = connect(manager, "w0"), replace(IDENTITY, model_fingerprint="other")
    await first.attached()
    answer = await connect(manager, "w1", identity=other).refused()
    assert answer.WhichOneof("message") == "attach_rejected"
    first.call.cancel()
    await until_left(manager)
    await connect(manager, "w1", identity=other).attached()
    assert manager.attachments.manager.identity == other
    answer = await connect(manager, "w0").refused()
    assert [each.field for each in answer.attach_rejected.differences] == ["model_fingerprint"]


async def test_configured_block_size_binds_the_first_worker_too(start_manager: Start, connect: Connect) -> None:
    manager = await start_manager(block_size=32)
    answer = await connect(manager).refused()
    (difference,) = answer.attach_rejected.differences
    assert (difference.manager, difference.worker, difference.flag) == ("32", "16", "--block-size")
    assert manager.attachments.manager.identity is None


async def test_configured_model_binds_the_first_worker_too(
    start_manager: Start, connect: Connect, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    manager = await start_manager(model=tmp_path)
    answer = await connect(manager).refused()
    differences = {each.field: each for each in answer.attach_rejected.differences}
    assert set(differences) == {"model_fingerprint", "tokenizer_fingerprint"}
    assert differences["model_fingerprint"].manager == model_fingerprint(tmp_path)
    assert differences["tokenizer_fingerprint"].manager == "none"
    served = replace(IDENTITY, model_fingerprint=model_fingerprint(tmp_path), tokenizer_fingerprint="none")
    assert (await connect(manager, identity=served).attach()).WhichOneof("message") == "attach_ok"


def test_identities_that_differ_in_any_part_have_namespaces_of_their_own() -> None:
    others = {different.namespace for different, *_ in DIFFERENT.values()}
    assert len(others | {IDENTITY.namespace}) == len(DIFFERENT) + 1


async def test_refused_stream_ends_without_an_error(manager: Running, connect: Connect) -> None:
    await connect(manager, "w0").attached()
    refused = connect(manager, "w1", identity=DIFFERENT["block_size"][0])
    await refused.refused()
    with pytest.raises(EOFError):
        await refused.receive()


async def test_violation_ends_the_session_and_not_the_process(manager: Running, connect: Connect) -> None:
    worker = connect(manager)
    await worker.attached()
    await worker.report(Report(bind=((S0, BlockId(3)),)))  # neither leased nor of a known sequence
    assert await ended_with(worker) is grpc.StatusCode.INTERNAL
    assert manager.attachments.counts.quarantined == 1
    again = connect(manager, session=2)
    await again.attached()
    assert (await again.exchange(Report(reserve=(reserve(S0),)))).admit


VIOLATIONS = {
    "a report before the attach": [kvmanager_pb2.SessionRequest(report=kvmanager_pb2.Report())],
    "nothing": [kvmanager_pb2.SessionRequest()],
}


@pytest.mark.parametrize("case", VIOLATIONS)
async def test_stream_that_does_not_begin_with_an_attach_is_ended(
    manager: Running, connect: Connect, case: str
) -> None:
    worker = connect(manager)
    for message in VIOLATIONS[case]:
        await worker.send(message)
    assert await ended_with(worker) is grpc.StatusCode.INTERNAL


async def test_report_before_the_inventory_is_complete_is_a_violation(manager: Running, connect: Connect) -> None:
    worker = connect(manager)
    await worker.send(kvmanager_pb2.SessionRequest(attach=attach_message(worker)))
    await worker.report(Report())
    assert await ended_with(worker) is grpc.StatusCode.INTERNAL


async def test_gap_in_the_numbers_is_a_violation(manager: Running, connect: Connect) -> None:
    worker = connect(manager)
    await worker.attached()
    worker.sent += 1
    await worker.report(Report())
    assert await ended_with(worker) is grpc.StatusCode.INTERNAL


async def test_second_inventory_is_a_violation(manager: Running, connect: Connect) -> None:
    worker = connect(manager)
    await worker.attached()
    await worker.send(kvmanager_pb2.SessionRequest(inventory=kvmanager_pb2.Inventory(last=True)))
    assert await ended_with(worker) is grpc.StatusCode.INTERNAL


async def test_contradictory_inventory_is_a_violation(manager: Running, connect: Connect) -> None:
    worker = connect(manager)
    cached = CachedBlock(BlockId(0), HASHES[0], -1, 0)
    with pytest.raises(aio.AioRpcError, match="cached block 0 is leased"):
        await worker.attach(Inventory(pool=(BlockId(0),), cached_blocks=(cached,)))


async def test_sequence_larger_than_the_pool_is_cancelled_at_once(manager: Running, connect: Connect) -> None:
    worker = connect(manager)
    await worker.attached()
    large = replace(reserve(S0), max_len=8 * 16 + 2)
    batch = await worker.exchange(Report(reserve=(large, reserve(S1))))
    assert batch.cancel == (S0,)
    assert [admit.sequence for admit in batch.admit] == [S1]


async def test_drain_asks_workers_to_leave_and_takes_no_others(manager: Running, connect: Connect) -> None:
    worker = connect(manager)
    await worker.attached()
    manager.attachments.drain()
    assert (await worker.receive()).WhichOneof("message") == "drain"
    refused = await connect(manager, "w1").refused()
    assert refused.attach_rejected.retry
    worker.call.cancel()
    await until_left(manager)


async def test_blocks_of_a_finished_sequence_are_free_again(manager: Running, connect: Connect) -> None:
    worker = connect(manager)
    await worker.attached()
    await worker.exchange(Report(reserve=(reserve(S0, block_hashes=()),)))
    await worker.report(Report(finished=((S0, FinishReason.CANCELLED),)))
    batch = await worker.exchange(Report(reserve=(replace(reserve(S1, num_tokens=120), max_len=128),)))
    assert len(batch.admit[0].block_table) == 8


async def test_workers_do_not_share_ledgers(manager: Running, connect: Connect) -> None:
    first, second = connect(manager, "w0"), connect(manager, "w1")
    await first.attached()
    await second.attached()
    answers = [await worker.exchange(Report(reserve=(reserve(S0),))) for worker in (first, second)]
    assert [answer.admit[0].block_table for answer in answers] == [(0, 1, 2), (0, 1, 2)]
