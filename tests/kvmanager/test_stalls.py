"""A manager that grants nothing although blocks are free: metric, log, debug state and the health of its work say so.

It stays ready.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import urllib.request
from dataclasses import replace
from http import HTTPStatus
from urllib.error import HTTPError

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.contracts.lease import GrantBatch, Report, Reserve
from common.contracts.types import FinishReason, SequenceId
from common.rpc.health import WORK
from kvmanager.ledger import chunked_grants
from kvmanager.ledger.ledger import Ledger
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc
from tests.kvmanager.conftest import Connect, Running, Start
from tests.support.kvmanager.fake_session import TIMEOUT_S
from tests.support.waiting import until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def _stalled(manager: Running) -> bool:
    return "quire:stalled 1.0" in _page(manager, "metrics")


def _page(manager: Running, path: str) -> str:
    """Return a page of the metrics port. Raises HTTPError where its status is no 200."""
    with urllib.request.urlopen(f"http://127.0.0.1:{manager.process.metrics.port}/{path}", timeout=TIMEOUT_S) as answer:
        return str(answer.read(), "utf-8")


async def _until(manager: Running, stalled: bool) -> None:
    await until(lambda: asyncio.to_thread(_stalled, manager), lambda found: found == stalled, seconds=TIMEOUT_S)


def _lose_patience(manager: Running) -> None:
    """Let the manager act at its next look: --manager-patience is over."""
    watchdog = manager.process.watchdog
    assert watchdog.last_resort is not None
    watchdog.last_resort = watchdog.last_resort._replace(seconds=0.0)


async def _health(manager: Running, service: str = "") -> int:
    async with aio.insecure_channel(manager.address) as channel:
        asked = health_pb2.HealthCheckRequest(service=service)
        answer = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=TIMEOUT_S)
    return int(answer.status)


async def _why_no_work(manager: Running) -> str:
    """Return what /work says to a probe; "" where it is well."""
    try:
        await asyncio.to_thread(_page, manager, "work")
    except HTTPError as error:
        if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
            return str(json.loads(error.read())["reason"])
        raise
    return ""


async def _stalled_pools(manager: Running) -> dict[str, str]:
    """Return what the manager tells operators of each ledger."""
    async with aio.insecure_channel(manager.address) as channel:
        stub = kvmanager_pb2_grpc.KvManagerServiceStub(channel)
        found = await stub.GetPool(kvmanager_pb2.GetPoolRequest(), timeout=TIMEOUT_S)
    return {pool.worker_id: pool.stalled for pool in found.pools}


async def test_sequences_that_wait_beside_free_blocks_are_shown_and_the_manager_stays_ready(
    start_manager: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    schedule, works = Ledger.schedule, asyncio.Event()

    def faulty(self: Ledger, most: int | None = None) -> GrantBatch | None:
        return schedule(self, most) if works.is_set() else None

    manager = await start_manager(stall_timeout=0.1)
    worker = connect(manager)
    await worker.attached()
    monkeypatch.setattr(Ledger, "schedule", faulty)
    await worker.report(Report(reserve=(Reserve(SequenceId(1), 4, 8),)))
    await _until(manager, stalled=True)
    reason = str(manager.process.debug_state()["stalled"])
    assert reason.startswith("w0: 1 sequences wait, none runs, 8 of 8 blocks are free")
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        f"work stands still: {reason}"
    ]
    assert await _stalled_pools(manager) == {"w0": reason.removeprefix("w0: ")}
    # It stays ready, so that this worker and all others reach it.
    assert "reason" not in json.loads(await asyncio.to_thread(_page, manager, "health"))
    assert [await _health(manager, service) for service in ("", WORK)] == [SERVING, NOT_SERVING]
    assert await _why_no_work(manager) == reason
    works.set()
    batch = await worker.exchange(Report())
    assert [admit.sequence for admit in batch.admit] == [1]
    await _until(manager, stalled=False)
    assert manager.process.debug_state()["stalled"] == ""
    assert await _stalled_pools(manager) == {"w0": ""}
    assert [await _health(manager, service) for service in ("", WORK)] == [SERVING, SERVING]
    assert await _why_no_work(manager) == ""


async def test_a_manager_whose_ledgers_all_stand_still_takes_a_new_attach_which_mends_one(
    start_manager: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    schedule, stuck = Ledger.schedule, set[Ledger]()
    monkeypatch.setattr(Ledger, "schedule", lambda self, most=None: None if self in stuck else schedule(self, most))
    manager = await start_manager(stall_timeout=0.1)
    workers = [connect(manager, worker_id=name) for name in ("w0", "w1")]
    for number, worker in enumerate(workers):
        await worker.attached()
        stuck.update(ledger for _, ledger in manager.process.attachments.ledgers())
        await worker.report(Report(reserve=(Reserve(SequenceId(1), 4, 8),)))
        await until(lambda: _why_no_work(manager), lambda why, name=f"w{number}": name in why, seconds=TIMEOUT_S)  # type: ignore[misc]
    assert (await _why_no_work(manager)).startswith("all 2: w0: 1 sequences wait")
    assert [record.getMessage()[:27] for record in caplog.records if record.levelno == logging.ERROR] == [
        "work stands still: w0: 1 se",
        "work stands still: all 2: w",
    ]
    assert [await _health(manager, service) for service in ("", WORK)] == [SERVING, NOT_SERVING]
    workers[1].call.cancel()
    again = connect(manager, worker_id="w1", session=2)  # of a later session the end of this one need not be seen
    await again.attached()
    await until(lambda: _why_no_work(manager), lambda why: why.startswith("w0: "), seconds=TIMEOUT_S)


async def test_a_begun_prompt_that_gets_no_blocks_gives_up_its_part_after_the_patience(
    start_manager: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_grants, "lease_want", lambda _state, _begun: 0)
    manager = await start_manager(stall_timeout=0.1, watermark=0.0, backfill=False)
    worker = connect(manager)
    await worker.attached()
    size, second = worker.worker.identity.block_size, SequenceId(2)
    holds, begins = Reserve(SequenceId(1), size, 2 * size), Reserve(second, 7 * size, 7 * size, request_id="r2")
    manager.process.attachments.manager.ledger("w0").state.config = replace(
        manager.process.attachments.manager.ledger("w0").state.config, first_part=size
    )
    await worker.exchange(Report(reserve=(Reserve(SequenceId(0), 2 * size, 2 * size), holds)))
    batch = await worker.exchange(Report(reserve=(begins,)))
    assert [(each.sequence, len(each.block_table)) for each in batch.admit] == [(2, 4)]
    gone = (SequenceId(0), FinishReason.STOP), (SequenceId(1), FinishReason.STOP)
    await worker.report(Report(finished=gone, returned=batch.lease, stalled=(second,)))
    await _until(manager, stalled=True)
    assert await _health(manager, WORK) == NOT_SERVING
    _lose_patience(manager)
    order = await worker.batch()
    while not order.preempt:
        order = await worker.batch()
    assert [each.sequence for each in order.preempt] == [second]
    batch = await worker.exchange(Report(preempted=((second, 7 * size),)))
    assert [(each.sequence, len(each.block_table)) for each in batch.admit] == [(2, 7)]
    await _until(manager, stalled=False)
    metrics = await asyncio.to_thread(_page, manager, "metrics")
    assert re.search(r"quire:broken_stalls_total\{.*\} 1\.0", metrics)


async def test_a_ledger_that_grants_nothing_for_too_long_ends_its_session(
    start_manager: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, stuck = Ledger.schedule, set[Ledger]()
    monkeypatch.setattr(Ledger, "schedule", lambda self, most=None: None if self in stuck else schedule(self, most))
    manager = await start_manager(stall_timeout=0.1)
    worker = connect(manager)
    await worker.attached()
    stuck.update(ledger for _, ledger in manager.process.attachments.ledgers())
    await worker.report(Report(reserve=(Reserve(SequenceId(1), 4, 8),)))
    await _until(manager, stalled=True)
    _lose_patience(manager)
    with pytest.raises(aio.AioRpcError, match="1 sequences wait, none runs"):
        await worker.receive()
    assert manager.process.attachments.manager.workers() == ()
    again = connect(manager)
    await again.attached()
    await _until(manager, stalled=False)
