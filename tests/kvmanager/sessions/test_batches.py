"""A report with many requests is answered by batch after batch: the worker begins with those of the first one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.contracts.errors import Unavailable
from common.contracts.lease import GrantBatch, Inventory, Report
from common.contracts.types import SequenceId
from common.wire.inventory_codec import inventory_chunks
from common.wire.lease_codec import attach_to_proto, batch_from_proto, report_to_proto
from kvmanager.sessions.attached_worker import ADMISSIONS_A_BATCH
from kvmanager.sessions.handler import SessionHandler
from quire.kvmanager.v1 import kvmanager_pb2
from tests.kvmanager.conftest import Connect, Running
from tests.support.kvmanager.fake_session import TIMEOUT_S, attach_of
from tests.support.kvmanager.sessions import reserve
from tests.support.waiting import until

CROWD = ADMISSIONS_A_BATCH + 8
RESERVES = tuple(reserve(SequenceId(number), 16, ()) for number in range(CROWD))


class HeldAnswer:
    """A session in this process that reports a crowd, and is held after the first batch until `going_on` is set."""

    def __init__(self, running: Running) -> None:
        self.held, self.going_on, self._reported = asyncio.Event(), asyncio.Event(), False
        self.answers = list[kvmanager_pb2.SessionResponse]()
        handler = SessionHandler(
            running.attachments, self._requests(), lambda _: None, between_steps=self._between_batches
        )
        self.serving = asyncio.create_task(handler.serve(self._write))

    async def _requests(self) -> AsyncIterator[kvmanager_pb2.SessionRequest]:
        (chunk,) = inventory_chunks(Inventory())
        attach = attach_to_proto(attach_of("w0", num_blocks=2 * CROWD))
        yield kvmanager_pb2.SessionRequest(session=1, seq=1, attach=attach)
        yield kvmanager_pb2.SessionRequest(session=1, seq=2, inventory=chunk)
        report, self._reported = report_to_proto(Report(reserve=RESERVES)), True
        yield kvmanager_pb2.SessionRequest(session=1, seq=3, report=report)
        await asyncio.Event().wait()

    async def _between_batches(self) -> None:
        if self._reported:  # the rebuild has steps, too
            self.held.set()
            await self.going_on.wait()

    async def _write(self, response: kvmanager_pb2.SessionResponse) -> None:
        self.answers.append(response)

    async def batches(self, count: int) -> list[GrantBatch]:
        """Wait for so many batches with admissions, and return them."""
        return await until(self.with_admissions, lambda found: len(found) >= count, seconds=TIMEOUT_S)

    def with_admissions(self) -> list[GrantBatch]:
        found = (batch_from_proto(each.batch) for each in self.answers if each.WhichOneof("message") == "batch")
        return [each for each in found if each.admit]


async def test_the_first_batch_leaves_and_others_are_served_before_the_second_one(
    manager: Running, connect: Connect
) -> None:
    crowd, other = HeldAnswer(manager), connect(manager, "w1")
    async with asyncio.timeout(TIMEOUT_S):
        await crowd.held.wait()
    (first,) = await crowd.batches(1)
    await other.attached()
    assert len((await other.exchange(Report(reserve=(RESERVES[0],)))).admit) == 1
    crowd.going_on.set()
    _, second = await crowd.batches(2)
    crowd.serving.cancel()
    admitted = [[each.sequence for each in batch.admit] for batch in (first, second)]
    assert admitted == [[*range(ADMISSIONS_A_BATCH)], [*range(ADMISSIONS_A_BATCH, CROWD)]]
    assert [(each.seq, each.ack) for each in crowd.answers[-2:]] == [(3, 3), (4, 3)]


async def test_a_session_that_is_replaced_between_two_batches_sends_no_more(manager: Running, connect: Connect) -> None:
    crowd, successor = HeldAnswer(manager), connect(manager, "w0", session=2, num_blocks=2 * CROWD)
    async with asyncio.timeout(TIMEOUT_S):
        await crowd.held.wait()
    await successor.attached()
    crowd.going_on.set()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(crowd.serving, TIMEOUT_S)
    assert len(crowd.with_admissions()) == 1
    assert len((await successor.exchange(Report(reserve=RESERVES[:1]))).admit) == 1
