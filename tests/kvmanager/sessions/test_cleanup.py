"""A session is gone when its handler is, however gRPC ends that: by one cancellation or two, at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from common.lease import Attach
from common.wire.lease_codec import attach_to_proto
from kvmanager.index.writer import IndexWriter
from kvmanager.sessions.handler import SessionHandler
from quire.kvmanager.v1 import kvmanager_pb2
from tests.kvmanager.conftest import Running
from tests.support.kvmanager.fake_session import attach_of


class Handler:
    """A handler of a Session RPC as gRPC would run it, without the network."""

    def __init__(self, manager: Running) -> None:
        self.requests: asyncio.Queue[kvmanager_pb2.SessionRequest | None] = asyncio.Queue()
        self.responses: asyncio.Queue[kvmanager_pb2.SessionResponse] = asyncio.Queue()
        stream = SessionHandler(manager.attachments, self._read(), lambda seconds: None)
        self.task = asyncio.create_task(stream.serve(self.responses.put))

    async def _read(self) -> AsyncIterator[kvmanager_pb2.SessionRequest]:
        while (request := await self.requests.get()) is not None:
            yield request

    def say_attach(self) -> None:
        message = attach_to_proto(attach_of())
        self.requests.put_nowait(kvmanager_pb2.SessionRequest(session=1, seq=1, attach=message))

    async def attached(self) -> None:
        self.say_attach()
        inventory = kvmanager_pb2.Inventory(last=True)
        self.requests.put_nowait(kvmanager_pb2.SessionRequest(session=1, seq=2, inventory=inventory))
        assert (await self.responses.get()).WhichOneof("message") == "attach_ok"


async def ended(task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(60.0):
        await asyncio.wait([task])


@pytest.mark.parametrize("turns", range(6))
async def test_worker_that_hangs_up_is_gone_although_its_handler_is_cancelled_meanwhile(
    manager: Running, turns: int
) -> None:
    handler = Handler(manager)
    await handler.attached()
    handler.requests.put_nowait(None)
    for _ in range(turns):
        await asyncio.sleep(0)
    handler.task.cancel()
    await ended(handler.task)
    assert manager.attachments.manager.workers() == ()
    await asyncio.wait_for(manager.attachments.left(), 60.0)


async def test_handler_that_is_cancelled_twice_leaves_no_session(manager: Running) -> None:
    handler = Handler(manager)
    await handler.attached()
    handler.task.cancel()
    await asyncio.sleep(0)
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
