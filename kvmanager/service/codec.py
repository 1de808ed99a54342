"""Encodes the answers to operator calls as messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from common.contracts.errors import FieldViolation, InvalidRequest
from common.contracts.hashing import KEY_BYTES
from common.contracts.limits import MAX_PIN_NAME_CHARS, MAX_PIN_SECONDS, MAX_PINNED_TENANT_CHARS
from common.contracts.types import BlockHash
from common.untrusted.ids import is_id
from common.wire.enum_codec import miss_to_proto, phase_to_proto
from common.wire.packing import unpack_hashes
from kvmanager.cache.pins import Pin, PinAtWorker
from kvmanager.cache.prefix_cache import PrefixMatch
from kvmanager.contracts.counts import PoolCounts
from kvmanager.ledger.block_map import BlockMap, BlockView, SequenceUse
from kvmanager.ledger.block_table import BlockTable
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
        kept_pinned=counts.kept_pinned,
        pinned_evictions=counts.totals.pinned_evictions,
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
