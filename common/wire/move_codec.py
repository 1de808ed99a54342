"""Orders to move blocks between a worker's tiers, and how moves ended, to and from the protos of batch and report."""

from __future__ import annotations

import math

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import Report
from common.contracts.limits import MAX_REQUEST_ID_CHARS
from common.contracts.moves import Fetched, Medium, Move, MoveCosts, MoveEnd, Place
from common.contracts.types import BlockHash, BlockId
from common.wire import packing
from quire.kvmanager.v1 import kvmanager_pb2

_ROOT = BlockHash(b"")
_ANY_HASH = BlockHash(bytes(16))  # stands for the parent of a prompt's first block, which has none


def pack_moves(moves: tuple[Move, ...], message: kvmanager_pb2.GrantBatch) -> None:
    """Write orders into a batch."""
    message.move_ids = packing.pack_u64(each.id for each in moves)
    message.move_hashes = packing.pack_hashes(each.hash for each in moves)
    message.move_parent_hashes = packing.pack_hashes(each.parent or _ANY_HASH for each in moves)
    message.move_depths = packing.pack_u32(each.depth for each in moves)
    message.move_sources = bytes(each.source.medium for each in moves)
    message.move_source_indexes = packing.pack_blocks(each.source.index for each in moves)
    message.move_targets = bytes(each.target.medium for each in moves)
    message.move_target_indexes = packing.pack_blocks(each.target.index for each in moves)


def unpack_moves(message: kvmanager_pb2.GrantBatch) -> tuple[Move, ...]:
    """Return the orders of a batch.

    Raises ProtocolViolation for columns of other lengths, or a move between places between which nothing moves.
    """
    ids, hashes = packing.unpack_u64(message.move_ids), packing.unpack_hashes(message.move_hashes)
    parents = packing.unpack_hashes(message.move_parent_hashes)
    depths = packing.unpack_u32(message.move_depths)
    sources = _places(message.move_sources, packing.unpack_blocks(message.move_source_indexes))
    targets = _places(message.move_targets, packing.unpack_blocks(message.move_target_indexes))
    packing.parallel("moves", ids, hashes, parents, depths, sources, targets)
    chained = [parent if depth else _ROOT for parent, depth in zip(parents, depths, strict=True)]
    moves = tuple(map(Move, ids, hashes, chained, depths, sources, targets))
    for each in moves:
        if (each.source.medium is Medium.DISK) == each.saves or each.target.medium is Medium.BLOCK:
            what = f"from {each.source.medium.name.lower()} to {each.target.medium.name.lower()}"
            raise ProtocolViolation(f"move {each.id} goes {what}; expected block or host to disk, or disk to host")
    return moves


def _places(media: bytes, indexes: list[BlockId]) -> list[Place]:
    packing.parallel("moves", media, indexes)
    try:
        return [Place(Medium(medium), index) for medium, index in zip(media, indexes, strict=True)]
    except ValueError as error:
        raise ProtocolViolation(f"a move names a medium that there is not: {error}") from None


def pack_report(report: Report, message: kvmanager_pb2.Report) -> None:
    """Write what a report says of moves into its proto."""
    if report.moved:
        message.moved_ids = packing.pack_u64(number for number, _ in report.moved)
        message.moved_ends = bytes(end for _, end in report.moved)
    if report.move_costs is not None:
        message.move_costs.compute_seconds = report.move_costs.compute
        message.move_costs.read_seconds = report.move_costs.read
    if report.disk_closed:
        message.disk_closed = True


def unpack_ends(message: kvmanager_pb2.Report) -> tuple[tuple[int, MoveEnd], ...]:
    """Raises ProtocolViolation for columns of other lengths, or an end that there is not."""
    ids = packing.unpack_u64(message.moved_ids)
    packing.parallel("moved", ids, message.moved_ends)
    try:
        return tuple(zip(ids, map(MoveEnd, message.moved_ends), strict=True))
    except ValueError as error:
        raise ProtocolViolation(f"a move ended in a way that there is not: {error}") from None


def fetched_from_proto(message: kvmanager_pb2.Fetched) -> Fetched:
    """Return what a sequence waited for; a source that is no name is cut."""
    source = message.source[:MAX_REQUEST_ID_CHARS]
    return Fetched(message.blocks, message.asked, _seconds(message.seconds), source)


def costs_from_proto(message: kvmanager_pb2.MoveCosts) -> MoveCosts:
    """Return the costs; what is no number of seconds counts as 0, not known."""
    return MoveCosts(*(_seconds(each) for each in (message.compute_seconds, message.read_seconds)))


def _seconds(value: float) -> float:
    return value if math.isfinite(value) and value > 0.0 else 0.0
