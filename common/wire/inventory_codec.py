"""An inventory to and from the chunks that carry it: a worker's whole ledger may not fit one message.

Entries keep their order over chunk borders, so that a cached block's parent index refers to the whole inventory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeVar

from common.hashing import KEY_BYTES
from common.lease import CachedBlock, Inventory, InventorySequence
from common.types import BlockId
from common.wire import packing
from common.wire.enum_codec import phase_from_proto, phase_to_proto
from common.wire.lease_codec import reserve_from_proto, reserve_to_proto
from quire.kvmanager.v1 import kvmanager_pb2

CHUNK_BYTES: Final = 256 * 1024
_CLAIM_BYTES: Final = 4 + KEY_BYTES + 4 + 4
_OVERHEAD_BYTES: Final = 64  # tags and lengths of a chunk's own fields
_TAG_BYTES: Final = 6  # tag and length of one sequence in a chunk
_PACKED_FIELDS: Final = ("pool", "cached_blocks", "cached_hashes", "cached_parents", "cached_last_used")

_T = TypeVar("_T")


def inventory_chunks(inventory: Inventory, limit: int = CHUNK_BYTES) -> list[kvmanager_pb2.Inventory]:
    """Return an inventory in chunks of at most `limit` bytes (more if one sequence needs it), the last marked."""
    room = limit - _OVERHEAD_BYTES
    chunks = [
        *_sequence_chunks(inventory.sequences, room),
        *(kvmanager_pb2.Inventory(pool=packing.pack_blocks(part)) for part in _slices(inventory.pool, room // 4)),
        *(_claims_to_proto(part) for part in _slices(inventory.cached_blocks, room // _CLAIM_BYTES)),
    ] or [kvmanager_pb2.Inventory()]
    chunks[-1].last = True
    return chunks


def _sequence_chunks(sequences: Iterable[InventorySequence], room: int) -> Iterator[kvmanager_pb2.Inventory]:
    chunk, size = kvmanager_pb2.Inventory(), 0
    for message in map(_sequence_to_proto, sequences):
        added = message.ByteSize() + _TAG_BYTES
        if size and size + added > room:
            yield chunk
            chunk, size = kvmanager_pb2.Inventory(), 0
        chunk.sequences.append(message)
        size += added
    if size:
        yield chunk


def _slices(entries: Sequence[_T], width: int) -> Iterator[Sequence[_T]]:
    for at in range(0, len(entries), max(1, width)):
        yield entries[at : at + max(1, width)]


def _claims_to_proto(cached_blocks: Sequence[CachedBlock]) -> kvmanager_pb2.Inventory:
    return kvmanager_pb2.Inventory(
        cached_blocks=packing.pack_blocks(each.block for each in cached_blocks),
        cached_hashes=packing.pack_hashes(each.hash for each in cached_blocks),
        cached_parents=packing.pack_blocks(BlockId(each.parent) for each in cached_blocks),
        cached_last_used=packing.pack_u32(each.last_used & 0xFFFFFFFF for each in cached_blocks),
    )


def _sequence_to_proto(sequence: InventorySequence) -> kvmanager_pb2.InventorySequence:
    return kvmanager_pb2.InventorySequence(
        reserve=reserve_to_proto(sequence.reserve),
        phase=phase_to_proto(sequence.phase),
        arrival=sequence.arrival,
        block_table=packing.pack_blocks(sequence.block_table),
    )


def _sequence_from_proto(message: kvmanager_pb2.InventorySequence) -> InventorySequence:
    return InventorySequence(
        reserve=reserve_from_proto(message.reserve),
        phase=phase_from_proto(message.phase),
        arrival=message.arrival,
        block_table=tuple(packing.unpack_blocks(message.block_table)),
    )


class InventoryAssembler:
    def __init__(self) -> None:
        self._sequences: list[InventorySequence] = []
        self._packed: dict[str, bytearray] = {name: bytearray() for name in _PACKED_FIELDS}

    def add(self, chunk: kvmanager_pb2.Inventory) -> Inventory | None:
        """Take the next chunk; return the inventory when it was the last. Raises ProtocolViolation when malformed."""
        self._sequences += map(_sequence_from_proto, chunk.sequences)
        for name in _PACKED_FIELDS:
            self._packed[name] += getattr(chunk, name)
        return self._assemble() if chunk.last else None

    def _assemble(self) -> Inventory:
        packed = {name: bytes(value) for name, value in self._packed.items()}
        blocks, hashes = packing.unpack_blocks(packed["cached_blocks"]), packing.unpack_hashes(packed["cached_hashes"])
        parents = packing.unpack_blocks(packed["cached_parents"])
        last_used = packing.unpack_u32(packed["cached_last_used"])
        packing.parallel("cached_blocks", blocks, hashes, parents, last_used)
        cached_blocks = tuple(map(CachedBlock, blocks, hashes, parents, last_used))
        return Inventory(tuple(self._sequences), tuple(packing.unpack_blocks(packed["pool"])), cached_blocks)
