"""A manager that grants nothing although blocks are free: health says so, and is well again by itself."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.lease import GrantBatch, Report, Reserve
from common.types import SequenceId
from kvmanager.core.ledger import Ledger
from tests.kvmanager.conftest import Connect, Start
from tests.support.kvmanager.fake_session import TIMEOUT_S

SERVING = health_pb2.HealthCheckResponse.SERVING


async def _until(channel: aio.Channel, serving: bool) -> None:
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    async for answer in watch:
        if (answer.status == SERVING) == serving:
            break
    watch.cancel()


def _health(port: int) -> tuple[int, dict[str, str]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=TIMEOUT_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as failed:
        return failed.code, json.load(failed)


async def test_sequences_that_wait_beside_free_blocks_are_not_healthy(
    start_manager: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, works = Ledger.schedule, asyncio.Event()

    def faulty(self: Ledger) -> GrantBatch | None:
        return schedule(self) if works.is_set() else None

    manager = await start_manager(stall_timeout=0.1)
    worker = connect(manager)
    await worker.attached()
    monkeypatch.setattr(Ledger, "schedule", faulty)
    await worker.report(Report(reserve=(Reserve(SequenceId(1), 4, 8),)))
    async with aio.insecure_channel(manager.address) as channel:
        await _until(channel, serving=False)
        port = manager.process.metrics.port
        status, words = await asyncio.to_thread(_health, port)
        assert (status, words["status"]) == (503, "not ready")
        assert words["reason"].startswith("w0: 1 sequences wait, none runs, 8 of 8 blocks are free")
        works.set()
        batch = await worker.exchange(Report())
        assert [admit.sequence for admit in batch.admit] == [1]
        await _until(channel, serving=True)
        assert (await asyncio.to_thread(_health, port))[0] == 200
