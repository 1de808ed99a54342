"""A session is gone when its handler is, however gRPC ends that: by one cancellation or two, at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from common.contracts.lease import Attach
from common.wire.lease_codec import attach_to_proto
from kvmanager.index.writer import IndexWriter
from kvmanager.sessions.handler import SessionHandler
from quire.kvmanager.v1 import kvmanager_pb2
from tests.kvmanager.conftest import Running
from tests.support.kvmanager.fake_session import attach_of
from tests.support.turns import take_turn
from tests.support.waiting import until


def session_request(seq: int, **message: Any) -> kvmanager_pb2.SessionRequest:
    return kvmanager_pb2.SessionRequest(session=1, seq=seq, **message)


class Handler:
    """A handler of a Session RPC as gRPC would run it, without the network."""

    def __init__(self, manager: Running, responses: int = 0, counted_from: int = 0) -> None:
        """`responses` are read from the handler, 0 for all of them. Messages count from `counted_from` on."""
        self.requests: asyncio.Queue[kvmanager_pb2.SessionRequest | None] = asyncio.Queue()
        self.responses: asyncio.Queue[kvmanager_pb2.SessionResponse] = asyncio.Queue(responses)
        self._before = counted_from
        stream = SessionHandler(manager.attachments, self._read(), lambda seconds: None)
        stream._received = stream._sent = counted_from
        self.task = asyncio.create_task(stream.serve(self.responses.put))

    async def _read(self) -> AsyncIterator[kvmanager_pb2.SessionRequest]:
        while (request := await self.requests.get()) is not None:
            yield request

    def say_attach(self) -> None:
        message = attach_to_proto(attach_of())
        self.requests.put_nowait(session_request(self._before + 1, attach=message))

    async def attached(self) -> None:
        self.say_attach()
        inventory = kvmanager_pb2.Inventory(last=True)
        self.requests.put_nowait(session_request(self._before + 2, inventory=inventory))
        assert (await self.responses.get()).WhichOneof("message") == "attach_ok"


async def ended(task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(60.0):
        await asyncio.wait([task])


async def test_a_worker_that_does_not_read_ends_its_session(manager: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers would pile up without a bound."""
    monkeypatch.setattr("kvmanager.sessions.handler.MAX_UNREAD_MESSAGES", 3)
    handler = Handler(manager, responses=1)
    handler.say_attach()
    handler.requests.put_nowait(session_request(2, inventory=kvmanager_pb2.Inventory(last=True)))
    for number in range(12):  # each of them is answered by a batch
        reserve = kvmanager_pb2.Reserve(sequence=number, num_tokens=4, max_len=8)
        handler.requests.put_nowait(session_request(3 + number, report=kvmanager_pb2.Report(reserve=[reserve])))
    await until(lambda: manager.attachments.counts.quarantined != 0)
    handler.task.cancel()
    await ended(handler.task)
    assert manager.attachments.manager.workers() == ()


@pytest.mark.parametrize("first", [2**31 - 3, 2**32 - 3])
async def test_messages_are_counted_beyond_every_32_bit_boundary(manager: Running, first: int) -> None:
    """At 200 reports a second a session comes there within a year."""
    handler = Handler(manager, counted_from=first)
    await handler.attached()
    assert (await handler.responses.get()).WhichOneof("message") == "batch"
    for number in range(6):
        reserve = kvmanager_pb2.Reserve(sequence=first + number, num_tokens=4, max_len=8)
        request = session_request(first + 3 + number, report=kvmanager_pb2.Report(reserve=[reserve]))
        handler.requests.put_nowait(kvmanager_pb2.SessionRequest.FromString(request.SerializeToString()))
        async with asyncio.timeout(60.0):
            answer = await handler.responses.get()
        answer = kvmanager_pb2.SessionResponse.FromString(answer.SerializeToString())
        assert (answer.seq, answer.ack) == (first + 3 + number, first + 3 + number)
        assert [admit.sequence for admit in answer.batch.admit] == [first + number]
    handler.requests.put_nowait(None)
    await ended(handler.task)


@pytest.mark.parametrize("turns", range(6))
async def test_worker_that_hangs_up_is_gone_although_its_handler_is_cancelled_meanwhile(
    manager: Running, turns: int
) -> None:
    handler = Handler(manager)
    await handler.attached()
    handler.requests.put_nowait(None)
    for _ in range(turns):
        await take_turn()
    handler.task.cancel()
    await ended(handler.task)
    assert manager.attachments.manager.workers() == ()
    await asyncio.wait_for(manager.attachments.left(), 60.0)


@pytest.mark.parametrize("turns", range(6))
async def test_handler_that_is_cancelled_twice_leaves_no_session(manager: Running, turns: int) -> None:
    handler = Handler(manager)
    await handler.attached()
    handler.task.cancel()
    for _ in range(turns):
        await take_turn()
    handler.task.cancel()
    await ended(handler.task)
    await asyncio.wait_for(manager.attachments.left(), 60.0)


async def test_cancellation_that_is_lost_while_the_epoch_is_taken_leaves_no_session(
    manager: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, lost = asyncio.Event(), asyncio.Event()

    async def epoch_for(index: IndexWriter, attach: Attach) -> int:
        asked.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        lost.set()
        return 1

    monkeypatch.setattr(IndexWriter, "epoch_for", epoch_for)
    handler = Handler(manager)
    handler.say_attach()
    await asyncio.wait_for(asked.wait(), 60.0)
    handler.task.cancel()
    await ended(handler.task)
    await asyncio.wait_for(lost.wait(), 60.0)
    await asyncio.wait_for(manager.attachments.left(), 60.0)
    assert manager.attachments.counts.opened == 1
