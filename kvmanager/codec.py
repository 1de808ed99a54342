"""Encodes the answers to operator calls as messages."""

from __future__ import annotations

from common.wire.enum_codec import miss_to_proto, phase_to_proto
from kvmanager.core.block_map import BlockMap, BlockView, SequenceUse
from kvmanager.core.block_table import BlockTable
from kvmanager.core.counts import PoolCounts
from kvmanager.core.prefix_cache import PrefixMatch
from quire.kvmanager.v1 import kvmanager_pb2


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
    )


def map_to_proto(found: BlockMap) -> kvmanager_pb2.GetBlockMapResponse:
    return kvmanager_pb2.GetBlockMapResponse(
        num_blocks=found.num_blocks,
        block_size=found.block_size,
        first_block=found.first_block,
        uses=found.uses,
        sequences=map(_sequence_to_proto, found.sequences),
        num_sequences=found.num_sequences,
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
