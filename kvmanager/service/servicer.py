"""The manager's gRPC service: the session stream, and the calls of operators."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from grpc import aio

from common.contracts.errors import FieldViolation, InvalidRequest, NotFound
from common.contracts.hashing import KEY_BYTES
from common.contracts.limits import (
    MAX_LEADER_WATCHERS,
    MAX_MAPPED_BLOCKS,
    MAX_MAPPED_SEQUENCES,
    MAX_PIN_NAME_CHARS,
    MAX_PIN_SECONDS,
    MAX_PINNED_TENANT_CHARS,
    MAX_PREFETCHED_BLOCKS,
    MAX_SHOWN_HOLDERS,
)
from common.contracts.types import BlockHash, BlockId, SequenceId
from common.decisions.watch import WatcherLimit
from common.rpc.interceptor import send
from common.rpc.roles import peer_of
from common.untrusted.ids import is_id
from common.wire.enum_codec import group_kind_to_proto, miss_to_proto, phase_to_proto
from common.wire.packing import pack_blocks, unpack_hashes
from kvmanager.cache.pins import Pin, PinAtWorker
from kvmanager.cache.prefix_cache import PrefixMatch
from kvmanager.contracts.counts import GroupCounts, PoolCounts
from kvmanager.contracts.ports import LeaderState
from kvmanager.contracts.sequence import BlockTable
from kvmanager.ledger.ahead_table import Outcome
from kvmanager.ledger.block_map import BlockMap, BlockView, SequenceUse
from kvmanager.ledger.ledger import Ledger
from kvmanager.sessions.attachments import Attachments
from kvmanager.sessions.handler import DEFAULT_LIMITS, SessionHandler, SessionLimits
from kvmanager.sessions.kv_event_codec import item_to_proto
from kvmanager.sessions.kv_events import Position
from kvmanager.sessions.pins import OperatorPins
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc


# Encodes the answers to operator calls as messages.
def table_to_proto(table: BlockTable) -> kvmanager_pb2.BlockTable:
    return kvmanager_pb2.BlockTable(
        sequence=table.sequence,
        request_id=table.request_id,
        phase=phase_to_proto(table.phase),
        block_ids=table.block_ids,
        n_shared=table.n_shared,
        sealed_blocks=table.sealed_blocks,
    )


def match_to_proto(worker_id: str, match: PrefixMatch) -> kvmanager_pb2.PrefixMatch:
    return kvmanager_pb2.PrefixMatch(
        worker_id=worker_id,
        hit_blocks=match.hit_blocks,
        miss_reason=miss_to_proto(match.miss_reason),
        diverged_at=match.diverged_at,
    )


def pool_to_proto(worker_id: str, counts: PoolCounts, stalled: str) -> kvmanager_pb2.Pool:
    """Return the message of a worker's pool; totals count since its session began."""
    return kvmanager_pb2.Pool(
        worker_id=worker_id,
        num_blocks=counts.num_blocks,
        free=counts.free,
        leased=counts.leased,
        in_use=counts.in_use,
        cached=counts.cached,
        pinned=counts.pinned,
        running=counts.running,
        waiting=counts.waiting,
        lease_target=counts.lease_target,
        preemptions=counts.totals.preemptions,
        evictions=counts.totals.evictions,
        prefix_query_blocks=counts.totals.prefix_query_blocks,
        prefix_hit_blocks=counts.totals.prefix_hit_blocks,
        misses_by_reason=counts.totals.misses_by_reason,
        retained=counts.retained,
        retained_evictions=counts.totals.retained_evictions,
        stalled=stalled,
        kept_pinned=counts.kept_pinned,
        pinned_evictions=counts.totals.pinned_evictions,
        groups=map(_group_to_proto, counts.groups),
        host_frames=counts.host_frames,
        host_held=counts.host_held,
        host_stores=counts.totals.host_stores,
        host_loads=counts.totals.host_loads,
        host_drops=counts.totals.host_drops,
        host_declined=counts.totals.host_declined,
        disk_frames=counts.disk_frames,
        disk_held=counts.disk_held,
        disk_closed=counts.disk_closed,
        fetching=counts.fetching,
        disk_stores=counts.totals.disk_stores,
        disk_loads=counts.totals.disk_loads,
        peer_loads=counts.totals.peer_loads,
        disk_lost=counts.totals.disk_lost,
        unsaved=counts.totals.unsaved,
        fetches=counts.totals.fetches,
        ahead=counts.ahead,
        ahead_loads=counts.totals.ahead_loads,
        transfer_ends={end.lower(): count for end, count in counts.totals.transfer_ends.items()},
    )


def _group_to_proto(counts: GroupCounts) -> kvmanager_pb2.GroupUse:
    group = counts.group
    return kvmanager_pb2.GroupUse(
        kind=group_kind_to_proto(group.kind),
        span=group.span,
        pages=group.pages,
        layers=len(group.layers),
        in_use=counts.in_use,
        cached=counts.cached,
    )


def hashes_from_proto(packed: bytes) -> tuple[BlockHash, ...]:
    """Raises InvalidRequest for a part of a hash."""
    if len(packed) % KEY_BYTES:
        what = f"is {len(packed)} bytes long; expected {KEY_BYTES} for each full block of the prompt"
        raise InvalidRequest(FieldViolation("block_hashes", what))
    return unpack_hashes(packed)


def pin_from_proto(request: kvmanager_pb2.PinPrefixRequest) -> tuple[str, str, tuple[BlockHash, ...], float | None]:
    """Return name, tenant, hashes and seconds of a pin. Raises InvalidRequest with everything that is wrong."""
    wrong, name, tenant = list[FieldViolation](), request.name, request.tenant
    if len(name) > MAX_PIN_NAME_CHARS or not is_id(name):
        what = f"is not 1 to {MAX_PIN_NAME_CHARS} printable ASCII characters without spaces"
        wrong.append(FieldViolation("name", what))
    if len(tenant) > MAX_PINNED_TENANT_CHARS:
        what = f"has {len(tenant)} characters; expected at most {MAX_PINNED_TENANT_CHARS}"
        wrong.append(FieldViolation("tenant", what))
    seconds = request.duration if request.HasField("duration") else None
    if seconds is not None and not 0.0 < seconds <= MAX_PIN_SECONDS:
        what = f"is {seconds:g}; expected seconds above 0, at most {MAX_PIN_SECONDS:g}, or nothing for no end"
        wrong.append(FieldViolation("duration", what))
    if not request.block_hashes:
        what = "is empty; expected at least one full block: a shorter prompt is never cached"
        wrong.append(FieldViolation("block_hashes", what))
    if wrong:
        raise InvalidRequest(*wrong)
    return name, tenant, hashes_from_proto(request.block_hashes), seconds


def pinned_to_proto(pin: Pin, workers: Iterable[PinAtWorker]) -> kvmanager_pb2.PinnedPrefix:
    return kvmanager_pb2.PinnedPrefix(
        name=pin.name,
        tenant=pin.tenant,
        num_tokens=pin.num_tokens,
        num_blocks=len(pin.block_hashes),
        expires=pin.expires,
        workers=[kvmanager_pb2.PinAtWorker(**asdict(each)) for each in workers],
        last_block_hash=pin.block_hashes[-1] if pin.block_hashes else b"",
    )


def map_to_proto(found: BlockMap) -> kvmanager_pb2.GetBlockMapResponse:
    return kvmanager_pb2.GetBlockMapResponse(
        num_blocks=found.num_blocks,
        block_size=found.block_size,
        first_block=found.first_block,
        uses=found.uses,
        sequences=map(_sequence_to_proto, found.sequences),
        num_sequences=found.num_sequences,
        groups=found.groups,
    )


def block_to_proto(found: BlockView) -> kvmanager_pb2.GetBlockResponse:
    """Return the message of a block; the numbers of both enums are the same."""
    return kvmanager_pb2.GetBlockResponse(
        block=found.block,
        use=kvmanager_pb2.BlockUse.ValueType(found.use),
        references=found.references,
        index=found.index,
        block_hash=found.hash or b"",
        holders=map(_sequence_to_proto, found.holders),
        figures=dict(found.figures),
        group=found.group,
        pages=pack_blocks(found.pages),
    )


def _sequence_to_proto(use: SequenceUse) -> kvmanager_pb2.SequenceUse:
    return kvmanager_pb2.SequenceUse(
        sequence=use.sequence,
        request_id=use.request_id,
        tenant=use.tenant,
        phase=phase_to_proto(use.phase),
        blocks=use.blocks,
        n_shared=use.n_shared,
        max_blocks=use.max_blocks,
    )


SERVICE = "quire.kvmanager.v1.KvManagerService"
SESSION_METHOD = f"/{SERVICE}/Session"

_Context = aio.ServicerContext[Any, Any]
# Seconds within which workers confirm a reset, and the index forgets the blocks.
_CONFIRM_S: Final = 10.0
_INDEX_S: Final = 5.0
_ID_BITS: Final = 63
_OUTCOMES: Final = {
    Outcome.ACCEPTED: kvmanager_pb2.PREFETCH_OUTCOME_ACCEPTED,
    Outcome.CLIPPED: kvmanager_pb2.PREFETCH_OUTCOME_CLIPPED,
    Outcome.REFUSED: kvmanager_pb2.PREFETCH_OUTCOME_REFUSED,
}


class KvManagerServicer(kvmanager_pb2_grpc.KvManagerServiceServicer):
    """`observe` receives the seconds that each report took; `stalled` says what stands still in a worker's ledger."""

    def __init__(
        self,
        attachments: Attachments,
        observe: Callable[[float], None],
        pins: OperatorPins,
        limits: SessionLimits = DEFAULT_LIMITS,
        stalled: Callable[[str], str] = lambda worker_id: "",
    ) -> None:
        self._attachments, self._observe, self._limits, self._stalled = attachments, observe, limits, stalled
        self._pins = pins
        self._watchers = WatcherLimit(MAX_LEADER_WATCHERS, "leader")

    # A coroutine that writes, not a generator: gRPC leaves a generator whose RPC is cancelled to the garbage collector.
    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[kvmanager_pb2.SessionRequest], context: _Context
    ) -> None:
        """Serve a worker's stream. The headers go first: they show the worker that a manager answers."""
        await context.send_initial_metadata(())
        handler = SessionHandler(
            self._attachments, request_iterator, self._observe, limits=self._limits, peer=peer_of(context)
        )
        await handler.serve(partial(send, context))

    async def WatchLeader(
        self, request: kvmanager_pb2.WatchLeaderRequest, context: _Context
    ) -> AsyncIterator[kvmanager_pb2.WatchLeaderResponse]:
        """Send who leads, and again after each change. Raises Overloaded."""
        with self._watchers:
            async with aclosing(self._attachments.leading.states()) as states:
                async for state in states:
                    yield _leader_to_proto(state, time.monotonic())

    async def Lookup(self, request: kvmanager_pb2.LookupRequest, context: _Context) -> kvmanager_pb2.LookupResponse:
        """Return the cached prefix of a prompt on each worker. It changes nothing, not even the order of eviction."""
        await self._attachments.leading.confirmed()
        block_hashes = hashes_from_proto(request.block_hashes)
        ledgers = self._attachments.ledgers(request.worker_id)
        matches = [
            match_to_proto(worker_id, ledger.look_up_prompt(block_hashes, request.num_tokens))
            for worker_id, ledger in ledgers
        ]
        return kvmanager_pb2.LookupResponse(matches=matches)

    async def GetBlockTable(
        self, request: kvmanager_pb2.GetBlockTableRequest, context: _Context
    ) -> kvmanager_pb2.GetBlockTableResponse:
        """Return the block table of one sequence, of all sequences of a request, or of all sequences of a worker."""
        await self._attachments.leading.confirmed()
        found = [
            table_to_proto(table)
            for _, ledger in self._attachments.ledgers(request.worker_id)
            for table in _tables(ledger, request)
        ]
        if not found and request.WhichOneof("id"):
            raise NotFound("no live sequence has this id; give the id of a sequence or request that runs or waits")
        return kvmanager_pb2.GetBlockTableResponse(tables=found)

    async def GetPool(self, request: kvmanager_pb2.GetPoolRequest, context: _Context) -> kvmanager_pb2.GetPoolResponse:
        """Return what the blocks of each worker are used for."""
        await self._attachments.leading.confirmed()
        ledgers = self._attachments.ledgers(request.worker_id)
        pools = [
            pool_to_proto(worker_id, ledger.pool_counts(), self._stalled(worker_id)) for worker_id, ledger in ledgers
        ]
        return kvmanager_pb2.GetPoolResponse(epoch=self._attachments.index.epoch, pools=pools)

    async def GetBlockMap(
        self, request: kvmanager_pb2.GetBlockMapRequest, context: _Context
    ) -> kvmanager_pb2.GetBlockMapResponse:
        """Return how a page of a worker's blocks is used. It changes nothing."""
        await self._attachments.leading.confirmed()
        ledger, limit = self._ledger(request.worker_id), request.limit or MAX_MAPPED_BLOCKS
        if limit > MAX_MAPPED_BLOCKS:
            what = f"is {limit}; expected at most {MAX_MAPPED_BLOCKS} blocks a page"
            raise InvalidRequest(FieldViolation("limit", what))
        return map_to_proto(ledger.block_map(request.first_block, limit, MAX_MAPPED_SEQUENCES))

    async def GetBlock(
        self, request: kvmanager_pb2.GetBlockRequest, context: _Context
    ) -> kvmanager_pb2.GetBlockResponse:
        """Return everything about one block. It changes nothing."""
        await self._attachments.leading.confirmed()
        found = self._ledger(request.worker_id).block_view(BlockId(request.block), MAX_SHOWN_HOLDERS)
        if found is None:
            raise NotFound(f"worker {request.worker_id} has no block {request.block}; GetPool says how many it has")
        return block_to_proto(found)

    def _ledger(self, worker_id: str) -> Ledger:
        """Return the ledger of a worker, which must be named. Raises InvalidRequest and NotFound."""
        return next(ledger for _, ledger in self._attachments.ledgers(self._named(worker_id)))

    def _named(self, worker_id: str) -> str:
        if not worker_id:
            raise InvalidRequest(FieldViolation("worker_id", "is missing; GetPool names the workers that are attached"))
        return worker_id

    async def ResetPrefixCache(
        self, request: kvmanager_pb2.ResetPrefixCacheRequest, context: _Context
    ) -> kvmanager_pb2.ResetPrefixCacheResponse:
        """Drop the cached blocks that no sequence uses, on every worker, and wait until the index has none of them."""
        await self._attachments.leading.confirmed()
        number = secrets.randbits(_ID_BITS) + 1
        resets = await self._attachments.reset_cache(number, _CONFIRM_S)
        await self._pins.keep_reset()
        current = await self._attachments.index.flush(_INDEX_S)
        return kvmanager_pb2.ResetPrefixCacheResponse(
            dropped_blocks=sum(each.dropped_blocks for each in resets),
            workers=[kvmanager_pb2.WorkerReset(**asdict(each)) for each in resets],
            index_current=current,
        )

    async def PinPrefix(
        self, request: kvmanager_pb2.PinPrefixRequest, context: _Context
    ) -> kvmanager_pb2.PinPrefixResponse:
        """Keep a prefix cached on every worker that computes it. Raises InvalidRequest beyond a bound."""
        name, tenant, hashes, seconds = pin_from_proto(request)
        pin = await self._pins.pin(name, tenant, hashes, request.num_tokens, seconds)
        (workers,) = await self._pins.at_workers([pin])
        return kvmanager_pb2.PinPrefixResponse(pin=pinned_to_proto(pin, workers), durable=self._pins.durable)

    async def ListPins(
        self, request: kvmanager_pb2.ListPinsRequest, context: _Context
    ) -> kvmanager_pb2.ListPinsResponse:
        """Return the pins, the oldest first, and what each worker has of them."""
        pins = await self._pins.pins()
        found = map(pinned_to_proto, pins, await self._pins.at_workers(pins))
        return kvmanager_pb2.ListPinsResponse(pins=found, durable=self._pins.durable)

    async def UnpinPrefix(
        self, request: kvmanager_pb2.UnpinPrefixRequest, context: _Context
    ) -> kvmanager_pb2.UnpinPrefixResponse:
        """Let a pinned prefix be evicted as any other. Raises NotFound."""
        await self._pins.unpin(request.name)
        return kvmanager_pb2.UnpinPrefixResponse()

    async def PrefetchPrefix(
        self, request: kvmanager_pb2.PrefetchPrefixRequest, context: _Context
    ) -> kvmanager_pb2.PrefetchPrefixResponse:
        """Let a prefix come into a worker's host memory. Raises InvalidRequest and NotFound."""
        await self._attachments.leading.confirmed()
        worker_id, hashes = self._named(request.worker_id), hashes_from_proto(request.block_hashes)
        if not hashes:
            what = "is empty; expected at least one full block: a shorter prompt is never cached"
            raise InvalidRequest(FieldViolation("block_hashes", what))
        if len(hashes) > MAX_PREFETCHED_BLOCKS:
            what = f"names {len(hashes)} blocks; expected at most {MAX_PREFETCHED_BLOCKS}"
            raise InvalidRequest(FieldViolation("block_hashes", what))
        answer = self._attachments.wish_prefix(worker_id, hashes, "an operator wants a prefix")
        return kvmanager_pb2.PrefetchPrefixResponse(
            outcome=_OUTCOMES[answer.outcome],
            num_blocks=len(hashes),
            blocks_there=answer.there,
            blocks_coming=answer.blocks,
            reason=answer.why,
        )

    async def SubscribeKvEvents(
        self, request: kvmanager_pb2.SubscribeKvEventsRequest, context: _Context
    ) -> AsyncIterator[kvmanager_pb2.SubscribeKvEventsResponse]:
        """Send each worker's membership, or what came since a position, and then every change."""
        await self._attachments.leading.confirmed()
        after = {each.worker_id: Position(each.stream, each.number) for each in request.after}
        hub = self._attachments.events
        subscription = hub.subscribe(request.worker_id, after)
        try:
            async for item in subscription.items():
                yield item_to_proto(item)
        finally:
            hub.unsubscribe(subscription)


def _tables(ledger: Ledger, request: kvmanager_pb2.GetBlockTableRequest) -> list[BlockTable]:
    match request.WhichOneof("id"):
        case "sequence":
            table = ledger.block_table(SequenceId(request.sequence))
            return [table] if table is not None else []
        case "request_id":
            return [table for table in ledger.block_tables() if table.request_id == request.request_id]
        case _:
            return list(ledger.block_tables())


def _leader_to_proto(state: LeaderState, now: float) -> kvmanager_pb2.WatchLeaderResponse:
    return kvmanager_pb2.WatchLeaderResponse(
        owner=state.owner,
        leads=state.leads,
        term=state.term,
        leader=state.leader,
        state_seconds=max(0.0, now - state.since),
        group=state.group,
    )
