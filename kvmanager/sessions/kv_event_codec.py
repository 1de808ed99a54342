"""Encodes events of the prefix cache as messages."""

from __future__ import annotations

from common.wire import packing
from kvmanager.contracts.index_events import Cleared, IndexEvent, Removed, Stored
from kvmanager.sessions.kv_events import Changes, KvItem, Left, SnapshotPart
from quire.kvmanager.v1 import kvmanager_pb2


def item_to_proto(item: KvItem) -> kvmanager_pb2.SubscribeKvEventsResponse:
    message = kvmanager_pb2.SubscribeKvEventsResponse(
        worker_id=item.worker_id, stream=item.at.stream, number=item.at.number
    )
    match item:
        case SnapshotPart(entries=entries):
            message.snapshot.block_hashes = packing.pack_hashes(block_hash for block_hash, _ in entries)
            message.snapshot.depths = packing.pack_u32(depth for _, depth in entries)
            message.snapshot.reason, message.snapshot.last = item.reason, item.last
        case Changes(events=events):
            message.changes.changes.extend(map(_change_to_proto, events))
        case Left():
            message.detached.SetInParent()
    return message


def _change_to_proto(event: IndexEvent) -> kvmanager_pb2.KvChange:
    match event:
        case Stored():
            return kvmanager_pb2.KvChange(stored=_block(event))
        case Removed():
            return kvmanager_pb2.KvChange(removed=_block(event))
        case Cleared():
            return kvmanager_pb2.KvChange(cleared=kvmanager_pb2.KvCleared())


def _block(event: Stored | Removed) -> kvmanager_pb2.KvBlock:
    return kvmanager_pb2.KvBlock(block_hash=event.hash, depth=event.depth)
