"""The manager's gRPC service: the session stream, and the calls of operators."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from grpc import aio

from common.errors import FieldViolation, InvalidRequest, NotFound
from common.hashing import KEY_BYTES
from common.rpc.interceptor import send
from common.types import BlockHash, SequenceId
from common.wire.packing import unpack_hashes
from kvmanager.codec import match_to_proto, pool_to_proto, table_to_proto
from kvmanager.core.block_table import BlockTable
from kvmanager.core.ledger import Ledger
from kvmanager.sessions.attachments import Attachments
from kvmanager.sessions.handler import SessionHandler
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc

SERVICE = "quire.kvmanager.v1.KvManagerService"
SESSION_METHOD = f"/{SERVICE}/Session"

_Context = aio.ServicerContext[Any, Any]


class KvManagerServicer(kvmanager_pb2_grpc.KvManagerServiceServicer):
    """`observe` receives the seconds that each report took."""

    def __init__(self, attachments: Attachments, observe: Callable[[float], None]) -> None:
        self._attachments, self._observe = attachments, observe

    # A coroutine that writes, not a generator: gRPC leaves a generator whose RPC is cancelled to the garbage collector.
    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[kvmanager_pb2.SessionRequest], context: _Context
    ) -> None:
        """Serve a worker's stream. The headers go first: they show the worker that a manager answers."""
        await context.send_initial_metadata(())
        await SessionHandler(self._attachments, request_iterator, self._observe).serve(partial(send, context))

    async def Lookup(self, request: kvmanager_pb2.LookupRequest, context: _Context) -> kvmanager_pb2.LookupResponse:
        """Return the cached prefix of a prompt on each worker. It changes nothing, not even the order of eviction."""
        block_hashes = _block_hashes(request.block_hashes)
        ledgers = self._attachments.ledgers(request.worker_id)
        matches = [
            match_to_proto(worker_id, ledger.lookup(block_hashes, request.num_tokens)) for worker_id, ledger in ledgers
        ]
        return kvmanager_pb2.LookupResponse(matches=matches)

    async def GetBlockTable(
        self, request: kvmanager_pb2.GetBlockTableRequest, context: _Context
    ) -> kvmanager_pb2.GetBlockTableResponse:
        """Return the block table of one sequence, of all sequences of a request, or of all sequences of a worker."""
        found = [
            table_to_proto(table)
            for _, ledger in self._attachments.ledgers(request.worker_id)
            for table in _tables(ledger, request)
        ]
        if not found and request.WhichOneof("id"):
            raise NotFound("no live sequence has this id; give the id of a sequence or request that runs or waits")
        return kvmanager_pb2.GetBlockTableResponse(tables=found)

    async def GetPool(self, request: kvmanager_pb2.GetPoolRequest, context: _Context) -> kvmanager_pb2.GetPoolResponse:
        ledgers = self._attachments.ledgers(request.worker_id)
        pools = [pool_to_proto(worker_id, ledger.pool()) for worker_id, ledger in ledgers]
        return kvmanager_pb2.GetPoolResponse(epoch=self._attachments.index.epoch, pools=pools)


def _block_hashes(packed: bytes) -> tuple[BlockHash, ...]:
    if len(packed) % KEY_BYTES:
        what = f"is {len(packed)} bytes long; expected {KEY_BYTES} for each full block of the prompt"
        raise InvalidRequest(FieldViolation("block_hashes", what))
    return unpack_hashes(packed)


def _tables(ledger: Ledger, request: kvmanager_pb2.GetBlockTableRequest) -> list[BlockTable]:
    match request.WhichOneof("id"):
        case "sequence":
            table = ledger.block_table(SequenceId(request.sequence))
            return [table] if table is not None else []
        case "request_id":
            return [table for table in ledger.block_tables() if table.request_id == request.request_id]
        case _:
            return list(ledger.block_tables())
