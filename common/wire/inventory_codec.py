"""An inventory to and from the chunks that carry it: a worker's whole ledger may not fit one message.

Entries keep their order over chunk borders, so that a cached block's parent index refers to the whole inventory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from common.contracts.errors import ProtocolViolation
from common.contracts.hashing import KEY_BYTES
from common.contracts.lease import CachedBlock, CachedBlocks, Inventory, InventorySequence
from common.contracts.limits import MAX_WORKER_SEQUENCES
from common.contracts.types import BlockHash, BlockId
from common.wire import packing
from common.wire.enum_codec import phase_from_proto, phase_to_proto
from common.wire.lease_codec import reserve_from_proto, reserve_to_proto
from quire.kvmanager.v1 import kvmanager_pb2

CHUNK_BYTES: Final = 256 * 1024
_CLAIM_BYTES: Final = 4 + KEY_BYTES + 4 + 8
_PLACE_BYTES: Final = KEY_BYTES + 4  # of a claim that says itself where it stands
_FRAME_BYTES: Final = 4 + 2 * KEY_BYTES + 4 + 8
_OVERHEAD_BYTES: Final = 64  # tags and lengths of a chunk's own fields
_TAG_BYTES: Final = 6  # tag and length of one sequence in a chunk


class _Column(NamedTuple):
    """The bytes of an entry of a packed column, and how the column is read."""

    width: int
    unpack: Callable[[bytes], Sequence[Any]]


_PACKED_FIELDS: Final = {
    "pool": _Column(4, packing.unpack_blocks),
    "cached_blocks": _Column(4, packing.unpack_blocks),
    "cached_hashes": _Column(KEY_BYTES, packing.unpack_hashes),
    "cached_parents": _Column(4, packing.unpack_indexes),
    "cached_last_used": _Column(8, packing.unpack_u64),
    "cached_parent_hashes": _Column(KEY_BYTES, packing.unpack_hashes),
    "cached_depths": _Column(4, packing.unpack_blocks),
    "block_groups": _Column(1, list),
    "block_pages": _Column(4, packing.unpack_blocks),
    "frames": _Column(4, packing.unpack_blocks),
    "frame_hashes": _Column(KEY_BYTES, packing.unpack_hashes),
    "frame_parent_hashes": _Column(KEY_BYTES, packing.unpack_hashes),
    "frame_depths": _Column(4, packing.unpack_blocks),
    "frame_last_used": _Column(8, packing.unpack_u64),
    "saved_frames": _Column(4, packing.unpack_blocks),
    "saved_hashes": _Column(KEY_BYTES, packing.unpack_hashes),
    "saved_parent_hashes": _Column(KEY_BYTES, packing.unpack_hashes),
    "saved_depths": _Column(4, packing.unpack_blocks),
    "saved_last_used": _Column(8, packing.unpack_u64),
    "frame_groups": _Column(1, list),
    "frame_pages": _Column(4, packing.unpack_blocks),
    "saved_groups": _Column(1, list),
    "saved_pages": _Column(4, packing.unpack_blocks),
}

_T = TypeVar("_T")


def inventory_chunks(inventory: Inventory, limit: int = CHUNK_BYTES) -> list[kvmanager_pb2.Inventory]:
    """Return an inventory in chunks of at most `limit` bytes (more if one sequence needs it), the last marked."""
    room, claims = limit - _OVERHEAD_BYTES, CachedBlocks.of(inventory.cached_blocks)
    chunks = [
        *_sequence_chunks(inventory.sequences, room),
        *(kvmanager_pb2.Inventory(pool=packing.pack_blocks(part)) for part in _slices(inventory.pool, room // 4)),
        *map(_claims_to_proto, _slices(claims, room // (_CLAIM_BYTES + (_PLACE_BYTES if claims.depths else 0)))),
        *(kvmanager_pb2.Inventory(block_groups=bytes(part)) for part in _slices(inventory.block_groups, room)),
        *(
            kvmanager_pb2.Inventory(block_pages=packing.pack_blocks(part))
            for part in _slices(inventory.block_pages, room // 4)
        ),
        *map(_frames_to_proto, _slices(CachedBlocks.of(inventory.frames), room // _FRAME_BYTES)),
        *(kvmanager_pb2.Inventory(frame_groups=bytes(part)) for part in _slices(inventory.frame_groups, room)),
        *(
            kvmanager_pb2.Inventory(frame_pages=packing.pack_blocks(part))
            for part in _slices(inventory.frame_pages, room // 4)
        ),
        *map(_saved_to_proto, _slices(CachedBlocks.of(inventory.saved), room // _FRAME_BYTES)),
        *(kvmanager_pb2.Inventory(saved_groups=bytes(part)) for part in _slices(inventory.saved_groups, room)),
        *(
            kvmanager_pb2.Inventory(saved_pages=packing.pack_blocks(part))
            for part in _slices(inventory.saved_pages, room // 4)
        ),
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
    columns = CachedBlocks.of(cached_blocks)  # slices of it are such columns too
    return kvmanager_pb2.Inventory(
        cached_blocks=packing.pack_blocks(columns.blocks),
        cached_hashes=packing.pack_hashes(columns.hashes),
        cached_parents=packing.pack_blocks(map(BlockId, columns.parents)),
        cached_last_used=packing.pack_u64(columns.last_used),
        cached_parent_hashes=packing.pack_hashes(columns.parent_hashes),
        cached_depths=packing.pack_blocks(map(BlockId, columns.depths)),
    )


def _frames_to_proto(frames: Sequence[CachedBlock]) -> kvmanager_pb2.Inventory:
    columns = CachedBlocks.of(frames)
    return kvmanager_pb2.Inventory(
        frames=packing.pack_blocks(columns.blocks),
        frame_hashes=packing.pack_hashes(columns.hashes),
        frame_parent_hashes=packing.pack_hashes(columns.parent_hashes),
        frame_depths=packing.pack_blocks(map(BlockId, columns.depths)),
        frame_last_used=packing.pack_u64(columns.last_used),
    )


def _saved_to_proto(saved: Sequence[CachedBlock]) -> kvmanager_pb2.Inventory:
    columns = CachedBlocks.of(saved)
    return kvmanager_pb2.Inventory(
        saved_frames=packing.pack_blocks(columns.blocks),
        saved_hashes=packing.pack_hashes(columns.hashes),
        saved_parent_hashes=packing.pack_hashes(columns.parent_hashes),
        saved_depths=packing.pack_blocks(map(BlockId, columns.depths)),
        saved_last_used=packing.pack_u64(columns.last_used),
    )


def _sequence_to_proto(sequence: InventorySequence) -> kvmanager_pb2.InventorySequence:
    return kvmanager_pb2.InventorySequence(
        reserve=reserve_to_proto(sequence.reserve),
        phase=phase_to_proto(sequence.phase),
        arrival=sequence.arrival,
        block_table=packing.pack_blocks(sequence.block_table),
        preemptions=sequence.preemptions,
        runs=map(packing.pack_blocks, sequence.runs),
    )


def _sequence_from_proto(message: kvmanager_pb2.InventorySequence) -> InventorySequence:
    return InventorySequence(
        reserve=reserve_from_proto(message.reserve),
        phase=phase_from_proto(message.phase),
        arrival=message.arrival,
        block_table=tuple(packing.unpack_indexes(message.block_table)),
        preemptions=message.preemptions,
        runs=tuple([tuple(packing.unpack_indexes(run)) for run in message.runs]),
    )


@dataclass(frozen=True, slots=True)
class InventoryBounds:
    """How much an inventory may have: chunks, bytes of them, blocks of the worker and of its tiers, sequences."""

    messages: int = 4096
    bytes: int = 128 << 20
    blocks: int = 1 << 20
    frames: int = 0
    saved: int = 0
    sequences: int = MAX_WORKER_SEQUENCES

    def entries_of(self, column: str) -> int:
        """Return how many entries a packed column may have."""
        if column.startswith("saved"):
            return self.saved
        return self.frames if column.startswith("frame") else self.blocks


class InventoryAssembler:
    """Puts the chunks of one inventory together. Each is compared with the bounds, and then decoded on its own.

    So no turn of the event loop decodes more than one chunk.
    """

    def __init__(self, bounds: InventoryBounds = InventoryBounds()) -> None:
        self._bounds = bounds
        self._messages = self._bytes = 0
        self._sequences: list[InventorySequence] = []
        self._columns: dict[str, list[Any]] = {name: [] for name in _PACKED_FIELDS}

    def add(self, chunk: kvmanager_pb2.Inventory) -> Inventory | None:
        """Take the next chunk; return the inventory when it was the last.

        Raises ProtocolViolation when the chunk is malformed or exceeds a bound.
        """
        self._refuse_excess(chunk)
        self._sequences += map(_sequence_from_proto, chunk.sequences)
        for name, column in _PACKED_FIELDS.items():
            self._columns[name] += column.unpack(getattr(chunk, name))
        return self._assemble() if chunk.last else None

    def _refuse_excess(self, chunk: kvmanager_pb2.Inventory) -> None:
        bounds, columns = self._bounds, self._columns
        self._messages, self._bytes = self._messages + 1, self._bytes + chunk.ByteSize()
        sizes = (
            ("messages", self._messages, bounds.messages, "--max-inventory-messages"),
            ("bytes", self._bytes, bounds.bytes, "--max-inventory-bytes"),
            ("sequences", len(self._sequences) + len(chunk.sequences), bounds.sequences, ""),
            *(
                (
                    f"entries of {name}",
                    len(columns[name]) + len(getattr(chunk, name)) // column.width,
                    bounds.entries_of(name),
                    "",
                )
                for name, column in _PACKED_FIELDS.items()
            ),
        )
        for what, found, most, flag in sizes:
            if found > most:
                hint = f" ({flag} of the manager)" if flag else ""
                raise ProtocolViolation(f"an inventory has {found} {what} so far; expected at most {most}{hint}")

    def _assemble(self) -> Inventory:
        columns = tuple(self._columns.values())
        (pool, *cached), (groups, pages), frames, saved = columns[:7], columns[7:9], columns[9:14], columns[14:19]
        packing.parallel("cached_blocks", *cached[:4], *(cached[4:] if any(cached[4:]) else ()))
        packing.parallel("frames", *frames)
        packing.parallel("saved_frames", *saved)
        claims, below = CachedBlocks(*cached), (_placed(*frames), _placed(*saved), *map(tuple, columns[19:]))
        return Inventory(tuple(self._sequences), tuple(pool), claims, tuple(groups), tuple(pages), *below)


def _placed(
    frames: Sequence[BlockId],
    hashes: Sequence[BlockHash],
    parents: Sequence[BlockHash],
    depths: Sequence[int],
    last_used: Sequence[int],
) -> CachedBlocks:
    """Return claims that say themselves where they stand."""
    return CachedBlocks(frames, hashes, [-1] * len(frames), last_used, parents, depths)
