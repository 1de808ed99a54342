"""Blocks of a worker for the page: the map, one block, and the block table of one sequence."""

from __future__ import annotations

import base64
from typing import Any, Final

from common.contracts.errors import NotFound
from common.contracts.limits import MAX_MAPPED_BLOCKS
from common.wire.packing import unpack_blocks
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from router.api.grpc.manager_calls import ManagerCalls
from router.api.page.query import Query
from router.api.page.records import finite

Json = dict[str, Any]
# Sequences whose block table is asked for, until one of them still lives.
_TRIED: Final = 4
_MOST_BLOCK: Final = (1 << 32) - 1
_MOST_SEQUENCE: Final = (1 << 64) - 1


def map_asked(query: Query) -> tuple[pb.GetBlockMapRequest, int | None]:
    """Return which blocks are asked for, and which sequence. Raises InvalidRequest for a wrong value."""
    wanted = pb.GetBlockMapRequest(
        worker_id=query.needed("worker"),
        first_block=query.number("first", 0, _MOST_BLOCK),
        limit=query.number("limit", MAX_MAPPED_BLOCKS, MAX_MAPPED_BLOCKS),
    )
    return wanted, query.number("sequence", 0, _MOST_SEQUENCE) if query.text("sequence") else None


def block_asked(query: Query) -> pb.GetBlockRequest:
    """Return which block is asked for. Raises InvalidRequest for a wrong value."""
    return pb.GetBlockRequest(worker_id=query.needed("worker"), block=query.number("block", 0, _MOST_BLOCK))


class Blocks:
    def __init__(self, manager: ManagerCalls) -> None:
        self._manager = manager

    async def map(self, query: Query) -> Json:
        """Return a page of a worker's blocks, a byte each in base64, its largest sequences, and a block table.

        Where the pool has groups, there is a byte for each page, and `groups` has the groups of their blocks. The block
        table is that of `sequence`, while it lives, else that of the sequence with the most blocks.
        """
        wanted, asked = map_asked(query)
        found = await self._manager.block_map(wanted)
        largest = [each.sequence for each in found.sequences[:_TRIED]]
        return {
            "num_blocks": found.num_blocks,
            "block_size": found.block_size,
            "first": found.first_block,
            "uses": base64.b64encode(found.uses).decode(),
            "groups": base64.b64encode(found.groups).decode(),
            "sequences": [_sequence(each) for each in found.sequences],
            "num_sequences": found.num_sequences,
            "table": await self._table(wanted.worker_id, ([] if asked is None else [asked]) + largest),
        }

    async def _table(self, worker_id: str, sequences: list[int]) -> Json | None:
        """Return the block table of the first of these sequences that still lives: they end at any moment."""
        for sequence in sequences:
            wanted = pb.GetBlockTableRequest(worker_id=worker_id, sequence=sequence)
            try:
                return _table((await self._manager.block_tables(wanted)).tables[0])
            except NotFound:
                continue
        return None

    async def one(self, query: Query) -> Json:
        """Return everything about one block; `pages` is empty where a pool counts blocks."""
        found = await self._manager.block(block_asked(query))
        return {
            "block": found.block,
            "use": found.use,
            "references": found.references,
            "index": found.index,
            "hash": found.block_hash.hex(),
            "holders": [_sequence(each) for each in found.holders],
            "figures": finite(found.figures),
            "group": found.group,
            "pages": unpack_blocks(found.pages),
        }


def _table(table: pb.BlockTable) -> Json:
    """Return the physical block of each logical one, -1 where it was released."""
    return {
        "sequence": str(table.sequence),
        "request": table.request_id,
        "phase": _phase(table.phase),
        "blocks": list(table.block_ids),
        "shared": table.n_shared,
        "sealed": table.sealed_blocks,
    }


def _sequence(use: pb.SequenceUse) -> Json:
    return {
        "sequence": str(use.sequence),
        "request": use.request_id,
        "tenant": use.tenant,
        "phase": _phase(use.phase),
        "blocks": use.blocks,
        "shared": use.n_shared,
        "max_blocks": use.max_blocks,
    }


def _phase(phase: pb.SequencePhase.ValueType) -> str:
    return pb.SequencePhase.Name(phase).removeprefix("SEQUENCE_PHASE_").lower()
