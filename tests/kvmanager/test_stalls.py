"""A manager that grants nothing although blocks are free: metric, log and debug state say so; it stays ready."""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.request

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.lease import GrantBatch, Report, Reserve
from common.types import SequenceId
from kvmanager.core.ledger import Ledger
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc
from tests.kvmanager.conftest import Connect, Running, Start
from tests.support.kvmanager.fake_session import TIMEOUT_S
from tests.support.waiting import until

SERVING = health_pb2.HealthCheckResponse.SERVING


def _stalled(manager: Running) -> bool:
    return "quire:stalled 1.0" in _page(manager, "metrics")


def _page(manager: Running, path: str) -> str:
    """Return a page of the metrics port. Raises HTTPError where its status is no 200."""
    with urllib.request.urlopen(f"http://127.0.0.1:{manager.process.metrics.port}/{path}", timeout=TIMEOUT_S) as answer:
        return str(answer.read(), "utf-8")


async def _until(manager: Running, stalled: bool) -> None:
    await until(lambda: asyncio.to_thread(_stalled, manager), lambda found: found == stalled, seconds=TIMEOUT_S)


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

    def faulty(self: Ledger) -> GrantBatch | None:
        return schedule(self) if works.is_set() else None

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
    async with aio.insecure_channel(manager.address) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert health.status == SERVING
    works.set()
    batch = await worker.exchange(Report())
    assert [admit.sequence for admit in batch.admit] == [1]
    await _until(manager, stalled=False)
    assert manager.process.debug_state()["stalled"] == ""
    assert await _stalled_pools(manager) == {"w0": ""}
