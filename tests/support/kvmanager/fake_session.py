"""One Session stream, message by message, so that a test can send valid messages and invalid ones."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from grpc import aio

from common.contracts.lease import Attach, GrantBatch, Inventory, Report
from common.contracts.types import KvGeometry, PoolIdentity
from common.wire.inventory_codec import inventory_chunks
from common.wire.lease_codec import attach_to_proto, batch_from_proto, report_to_proto
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc

IDENTITY = PoolIdentity("model" * 6, "tokenizer" * 3, 16, KvGeometry(2, 2, 8, 8, "float32"))
EMPTY = Inventory()
TIMEOUT_S = 120.0


def attach_of(worker_id: str = "w0", **changes: Any) -> Attach:
    """Return an Attach of a worker with 8 blocks, with the given changes."""
    attach = Attach(worker_id, worker_id.encode().ljust(16, b"."), 1, 0, IDENTITY, 8, f"127.0.0.1:1{worker_id[-1]}")
    return replace(attach, **changes)


class RawWorker:
    """A worker's end of one stream."""

    def __init__(self, channel: aio.Channel, attach: Attach) -> None:
        self.worker = attach
        self.call = kvmanager_pb2_grpc.KvManagerServiceStub(channel).Session()
        self.sent = 0

    async def send(self, message: kvmanager_pb2.SessionRequest) -> None:
        self.sent += 1
        message.session, message.seq = self.worker.session, self.sent
        await self.call.write(message)

    async def receive(self) -> kvmanager_pb2.SessionResponse:
        """Return the next message. Raises AioRpcError when the stream ended with an error, EOFError when without."""
        async with asyncio.timeout(TIMEOUT_S):
            async for response in self.call:
                return response
        raise EOFError

    async def attach(self, inventory: Inventory = EMPTY) -> kvmanager_pb2.SessionResponse:
        """Offer a session and return the answer."""
        await self._offer()
        for chunk in inventory_chunks(inventory):
            await self.send(kvmanager_pb2.SessionRequest(inventory=chunk))
        return await self.receive()

    async def refused(self) -> kvmanager_pb2.SessionResponse:
        """Offer a session that is refused, and return the answer: the stream may end before an inventory."""
        await self._offer()
        return await self.receive()

    async def _offer(self) -> None:
        await self.send(kvmanager_pb2.SessionRequest(attach=attach_to_proto(self.worker)))

    async def attached(self, inventory: Inventory = EMPTY) -> GrantBatch:
        """Attach, and return the first batch, which carries the lease target."""
        answer = await self.attach(inventory)
        assert answer.WhichOneof("message") == "attach_ok", answer
        return await self.batch()

    async def report(self, report: Report) -> None:
        await self.send(kvmanager_pb2.SessionRequest(report=report_to_proto(report)))

    async def batch(self) -> GrantBatch:
        """Return the next message, which must be a batch."""
        response = await self.receive()
        assert response.WhichOneof("message") == "batch", response
        return batch_from_proto(response.batch)

    async def exchange(self, report: Report) -> GrantBatch:
        """Report, and return the batch that answers it."""
        await self.report(report)
        return await self.batch()
