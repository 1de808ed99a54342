"""Orders of transfers, and how transfers ended, to and from the protos of batch and report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import Report
from common.contracts.limits import MAX_REQUEST_ID_CHARS
from common.contracts.transfers import (
    FROM_PEER,
    Fetched,
    Medium,
    PeerSource,
    Place,
    Transfer,
    TransferCosts,
    TransferEnd,
)
from common.contracts.types import BlockHash, BlockId
from common.wire import packing
from quire.kvmanager.v1 import kvmanager_pb2

_ROOT = BlockHash(b"")
_ANY_HASH = BlockHash(bytes(16))  # stands for the parent of a prompt's first block, which has none


def pack_transfers(transfers: tuple[Transfer, ...], message: kvmanager_pb2.GrantBatch) -> None:
    """Write orders into a batch."""
    message.transfer_ids = packing.pack_u64(each.id for each in transfers)
    message.transfer_hashes = packing.pack_hashes(each.hash for each in transfers)
    message.transfer_parent_hashes = packing.pack_hashes(each.parent or _ANY_HASH for each in transfers)
    message.transfer_depths = packing.pack_u32(each.depth for each in transfers)
    message.transfer_sources = bytes(each.source.medium for each in transfers)
    peers = _numbered(each.peer for each in transfers)
    message.transfer_source_indexes = packing.pack_blocks(
        each.source.index if each.peer is None else peers[each.peer] for each in transfers
    )
    message.transfer_peers.extend(map(_peer_to_proto, peers))
    message.transfer_targets = bytes(each.target.medium for each in transfers)
    message.transfer_target_indexes = packing.pack_blocks(each.target.index for each in transfers)
    if any(each.group or each.others for each in transfers):
        message.transfer_groups = bytes(each.group for each in transfers)
        message.transfer_others = packing.pack_u32(len(each.others) for each in transfers)
        message.transfer_other_sources = packing.pack_blocks(read for each in transfers for read, _ in each.others)
        message.transfer_other_targets = packing.pack_blocks(write for each in transfers for _, write in each.others)


def _numbered(peers: Iterable[PeerSource | None]) -> dict[PeerSource, BlockId]:
    """Return the place of each source in the list of a batch."""
    named = dict.fromkeys(each for each in peers if each is not None)
    return {peer: BlockId(place) for place, peer in enumerate(named)}


def _peer_to_proto(peer: PeerSource) -> kvmanager_pb2.PeerSource:
    return kvmanager_pb2.PeerSource(
        worker_id=peer.worker_id,
        incarnation=peer.public_incarnation,
        address=peer.address,
        token=peer.token,
        expires=peer.expires,
    )


def _peers_of(message: kvmanager_pb2.GrantBatch, sources: list[Place]) -> list[PeerSource | None]:
    """Return the peer of each transfer, None where it comes from elsewhere."""
    peers = [PeerSource(p.worker_id, p.incarnation, p.address, p.token, p.expires) for p in message.transfer_peers]
    for place in sources:
        if place.medium is Medium.PEER and place.index >= len(peers):
            raise ProtocolViolation(f"a transfer names peer {place.index} of {len(peers)}")
    return [peers[place.index] if place.medium is Medium.PEER else None for place in sources]


def unpack_transfers(message: kvmanager_pb2.GrantBatch) -> tuple[Transfer, ...]:
    """Return the orders of a batch.

    Raises ProtocolViolation for columns of other lengths, or a transfer between places between which nothing transfers.
    """
    ids, hashes = packing.unpack_u64(message.transfer_ids), packing.unpack_hashes(message.transfer_hashes)
    parents = packing.unpack_hashes(message.transfer_parent_hashes)
    depths = packing.unpack_u32(message.transfer_depths)
    sources = _places(message.transfer_sources, packing.unpack_blocks(message.transfer_source_indexes))
    targets = _places(message.transfer_targets, packing.unpack_blocks(message.transfer_target_indexes))
    packing.parallel("transfers", ids, hashes, parents, depths, sources, targets)
    groups, others = _groups_of(message, len(ids))
    chained = [parent if at or group else _ROOT for parent, at, group in zip(parents, depths, groups, strict=True)]
    peers = _peers_of(message, sources)
    sources = [place if peer is None else FROM_PEER for place, peer in zip(sources, peers, strict=True)]
    transfers = tuple(map(Transfer, ids, hashes, chained, depths, sources, targets, peers, groups, others))
    for each in transfers:
        if (each.source.medium, each.target.medium) not in _WAYS:
            what = f"from {each.source.medium.name.lower()} to {each.target.medium.name.lower()}"
            raise ProtocolViolation(
                f"transfer {each.id} goes {what}; expected block or host to disk, or disk or peer to host"
            )
    return transfers


_WAYS: Final = {
    (Medium.BLOCK, Medium.DISK),
    (Medium.HOST, Medium.DISK),
    (Medium.DISK, Medium.HOST),
    (Medium.PEER, Medium.HOST),
}


def _groups_of(
    message: kvmanager_pb2.GrantBatch, count: int
) -> tuple[Sequence[int], Sequence[tuple[tuple[BlockId, BlockId], ...]]]:
    """Return the group of each of so many transfers, and its further pages at both ends."""
    if not message.transfer_groups and not message.transfer_others:
        packing.parallel("transfers", message.transfer_other_sources, message.transfer_other_targets, b"")
        return bytes(count), [()] * count
    counts, found, at = packing.unpack_u32(message.transfer_others), list[tuple[tuple[BlockId, BlockId], ...]](), 0
    packing.parallel("transfers", message.transfer_groups, counts, range(count))
    sources = packing.unpack_blocks(message.transfer_other_sources)
    targets = packing.unpack_blocks(message.transfer_other_targets)
    packing.parallel("transfers", sources, targets)
    if sum(counts) != len(sources):
        raise ProtocolViolation(f"transfers have {len(sources)} further pages, and name {sum(counts)}")
    for each in counts:
        found.append(tuple(zip(sources[at : at + each], targets[at : at + each], strict=True)))
        at += each
    return message.transfer_groups, found


def _places(media: bytes, indexes: list[BlockId]) -> list[Place]:
    packing.parallel("transfers", media, indexes)
    try:
        return [Place(Medium(medium), index) for medium, index in zip(media, indexes, strict=True)]
    except ValueError as error:
        raise ProtocolViolation(f"a transfer names a medium that there is not: {error}") from None


def pack_report(report: Report, message: kvmanager_pb2.Report) -> None:
    """Write what a report says of transfers into its proto."""
    if report.ended:
        message.ended_ids = packing.pack_u64(number for number, _ in report.ended)
        message.ended_ends = bytes(end for _, end in report.ended)
    if report.transfer_costs is not None:
        message.transfer_costs.compute_seconds = report.transfer_costs.compute
        message.transfer_costs.read_seconds = report.transfer_costs.read
        message.transfer_costs.peer_seconds = report.transfer_costs.peer
        message.transfer_costs.peer_setup_seconds = report.transfer_costs.peer_setup
        message.transfer_costs.copy_seconds = report.transfer_costs.copy
    if report.disk_closed:
        message.disk_closed = True
    if report.draining:
        message.draining = True


def unpack_ends(message: kvmanager_pb2.Report) -> tuple[tuple[int, TransferEnd], ...]:
    """Raises ProtocolViolation for columns of other lengths, or an end that there is not."""
    ids = packing.unpack_u64(message.ended_ids)
    packing.parallel("moved", ids, message.ended_ends)
    try:
        return tuple(zip(ids, map(TransferEnd, message.ended_ends), strict=True))
    except ValueError as error:
        raise ProtocolViolation(f"a transfer ended in a way that there is not: {error}") from None


def fetched_from_proto(message: kvmanager_pb2.Fetched) -> Fetched:
    """Return what a sequence waited for; a source that is no name is cut."""
    source = message.source[:MAX_REQUEST_ID_CHARS]
    return Fetched(message.blocks, message.asked, _seconds(message.seconds), source)


def costs_from_proto(message: kvmanager_pb2.TransferCosts) -> TransferCosts:
    """Return the costs; what is no number of seconds counts as 0, not known."""
    peer = message.peer_seconds, message.peer_setup_seconds
    return TransferCosts(*map(_seconds, (message.compute_seconds, message.read_seconds, *peer, message.copy_seconds)))


def _seconds(value: float) -> float:
    return value if math.isfinite(value) and value > 0.0 else 0.0
