"""What tests of session streams send, and wait for."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc import aio

from common.contracts.lease import Reserve
from common.contracts.types import BlockHash, SequenceId
from common.wire.lease_codec import attach_to_proto
from quire.kvmanager.v1 import kvmanager_pb2
from tests.support.kvmanager.fake_session import RawWorker
from tests.support.kvmanager.running import Running

HASHES = tuple(BlockHash(bytes([index]) * 16) for index in range(1, 5))


def reserve(sequence: SequenceId, num_tokens: int = 40, block_hashes: tuple[BlockHash, ...] = HASHES[:2]) -> Reserve:
    return Reserve(sequence, num_tokens, 64, block_hashes=block_hashes, request_id=f"r{sequence}")


async def ended_with(worker: RawWorker) -> grpc.StatusCode:
    """Return the status with which the manager ended a stream."""
    with pytest.raises(aio.AioRpcError) as caught:
        await received(worker)
    return caught.value.code()


async def received(worker: RawWorker) -> None:
    while True:
        await worker.receive()


def attach_message(worker: RawWorker) -> kvmanager_pb2.Attach:
    return attach_to_proto(worker.worker)


async def until_left(running: Running) -> None:
    async with asyncio.timeout(60.0):
        await running.attachments.left()
