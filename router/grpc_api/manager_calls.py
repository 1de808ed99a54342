"""Operators' calls that the KV manager answers; the router's admin plane passes them on.

A reset of the prefix cache is the manager's decision, and the events of the caches are the manager's. Operators then
need one address, the router's. Each call opens its channel: they are rare, and a renewed certificate counts at once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Final

import grpc
from grpc import aio

from common.errors import Unavailable
from common.group.leader_watch import LeaderWatch, ManagerState
from common.process.supervised import Supervisor
from common.rpc.server import Dial
from quire.api.status import error_from_rpc
from quire.decision.v1 import decision_pb2, decision_pb2_grpc
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2_grpc as rpc
from router.serving.call_context import Context

MANAGER: Final = "quire.kvmanager.v1.KvManagerService"
# The manager waits for workers and Redis, up to 15 s.
_PATIENCE_S: Final = 30.0
_LIST_PATIENCE_S: Final = 3.0


class ManagerCalls:
    """`addresses` are HOST:PORT of the KV manager, or of each manager of a group: the one that leads is called."""

    def __init__(self, addresses: Sequence[str], dial: Dial) -> None:
        self._first, self._dial = addresses[0], dial
        self._watch = LeaderWatch(addresses, dial) if len(addresses) > 1 else None

    def start(self, supervisor: Supervisor) -> None:
        """Begin to follow which manager of a group leads; the supervisor ends that."""
        if self._watch is not None:
            self._watch.start(supervisor)

    def managers(self) -> tuple[ManagerState, ...]:
        """Return what each manager of a group says of itself; () where there is no group."""
        return self._watch.managers if self._watch is not None else ()

    @property
    def _address(self) -> str:
        return (self._watch.leader if self._watch is not None else None) or self._first

    async def reset(
        self, request: pb.ResetPrefixCacheRequest, context: Context | None = None
    ) -> pb.ResetPrefixCacheResponse:
        """Reset the prefix cache of all workers. Raises Unavailable when no manager answers."""
        async with self._dial(self._address) as channel:
            try:
                return await rpc.KvManagerServiceStub(channel).ResetPrefixCache(request, timeout=_PATIENCE_S)
            except aio.AioRpcError as error:
                raise self._in_words(error) from None

    async def decisions(self, request: decision_pb2.ListDecisionsRequest) -> decision_pb2.ListDecisionsResponse:
        """Return the manager's decision records. Raises Unavailable when no manager answers."""
        async with self._dial(self._address) as channel:
            try:
                stub = decision_pb2_grpc.DecisionServiceStub(channel)
                return await stub.ListDecisions(request, timeout=_LIST_PATIENCE_S)
            except aio.AioRpcError as error:
                raise self._in_words(error) from None

    async def all_decisions(
        self, requests: Sequence[decision_pb2.ListDecisionsRequest]
    ) -> Sequence[decision_pb2.ListDecisionsResponse]:
        """Return the manager's records for several calls, in their order. Raises Unavailable when none answers."""
        async with self._dial(self._address) as channel:
            stub = decision_pb2_grpc.DecisionServiceStub(channel)
            calls = [stub.ListDecisions(each, timeout=_LIST_PATIENCE_S) for each in requests]
            try:
                return [await call for call in calls]
            except aio.AioRpcError as error:
                raise self._in_words(error) from None

    async def watch(
        self, request: decision_pb2.WatchDecisionsRequest
    ) -> AsyncGenerator[decision_pb2.WatchDecisionsResponse, None]:
        """Pass on the manager's decisions, as fast as the watcher reads them."""
        async with self._dial(self._address) as channel:
            call = decision_pb2_grpc.DecisionServiceStub(channel).WatchDecisions(request)
            try:
                async for response in call:
                    yield response
            except aio.AioRpcError as error:
                raise self._in_words(error) from None
            finally:
                call.cancel()

    async def pools(self, request: pb.GetPoolRequest, context: Context | None = None) -> pb.GetPoolResponse:
        """Return what the blocks of each worker are used for. Raises Unavailable when no manager answers."""
        async with self._dial(self._address) as channel:
            try:
                return await rpc.KvManagerServiceStub(channel).GetPool(request, timeout=_LIST_PATIENCE_S)
            except aio.AioRpcError as error:
                raise self._in_words(error) from None

    async def block_map(self, request: pb.GetBlockMapRequest) -> pb.GetBlockMapResponse:
        """Return how a page of a worker's blocks is used. Raises Unavailable when no manager answers, and NotFound."""
        async with self._dial(self._address) as channel:
            try:
                return await rpc.KvManagerServiceStub(channel).GetBlockMap(request, timeout=_LIST_PATIENCE_S)
            except aio.AioRpcError as error:
                raise self._in_words(error) from None

    async def block(self, request: pb.GetBlockRequest) -> pb.GetBlockResponse:
        """Return everything about one block. Raises Unavailable when no manager answers, and NotFound."""
        async with self._dial(self._address) as channel:
            try:
                return await rpc.KvManagerServiceStub(channel).GetBlock(request, timeout=_LIST_PATIENCE_S)
            except aio.AioRpcError as error:
                raise self._in_words(error) from None

    async def block_tables(self, request: pb.GetBlockTableRequest) -> pb.GetBlockTableResponse:
        """Return block tables of live sequences. Raises Unavailable when no manager answers, and NotFound."""
        async with self._dial(self._address) as channel:
            try:
                return await rpc.KvManagerServiceStub(channel).GetBlockTable(request, timeout=_LIST_PATIENCE_S)
            except aio.AioRpcError as error:
                raise self._in_words(error) from None

    async def reset_page(self) -> object:
        """Return the answer to a reset over HTTP."""
        answer = await self.reset(pb.ResetPrefixCacheRequest())
        workers = [
            {
                "worker_id": each.worker_id,
                "dropped_blocks": each.dropped_blocks,
                "blocks_in_use": each.blocks_in_use,
                "confirmed": each.confirmed,
            }
            for each in answer.workers
        ]
        return {"dropped_blocks": answer.dropped_blocks, "workers": workers, "index_current": answer.index_current}

    async def events(
        self, request: pb.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[pb.SubscribeKvEventsResponse]:
        """Pass on the manager's events, as fast as the subscriber reads them: the manager bounds what waits."""
        async with self._dial(self._address) as channel:
            call = rpc.KvManagerServiceStub(channel).SubscribeKvEvents(request)
            try:
                async for response in call:
                    yield response
            except aio.AioRpcError as error:
                raise self._in_words(error) from None
            finally:
                call.cancel()

    def _in_words(self, error: aio.AioRpcError) -> Exception:
        found = error_from_rpc(error)
        if isinstance(found, Unavailable) and "connect" in str(found).lower():
            what = f"no KV manager answers at {self._address}; start one, or name it to the router with --manager"
            return Unavailable(what)
        return found

    def add_to(self, server: aio.Server) -> None:
        """Serve three methods; gRPC answers UNIMPLEMENTED to the others of the service."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "ResetPrefixCache": grpc.unary_unary_rpc_method_handler(
                self.reset, pb.ResetPrefixCacheRequest.FromString, pb.ResetPrefixCacheResponse.SerializeToString
            ),
            "GetPool": grpc.unary_unary_rpc_method_handler(
                self.pools, pb.GetPoolRequest.FromString, pb.GetPoolResponse.SerializeToString
            ),
            "SubscribeKvEvents": grpc.unary_stream_rpc_method_handler(
                self.events, pb.SubscribeKvEventsRequest.FromString, pb.SubscribeKvEventsResponse.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(MANAGER, handlers),))
