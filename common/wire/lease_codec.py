"""The messages of the lease protocol to and from their protos; the inventory has a file of its own (`inventory_codec`).

Worker and manager both use it. Any invalid message of a peer raises ProtocolViolation, never another error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from common.contracts.errors import ProtocolViolation
from common.contracts.hashing import KEY_BYTES, PARTIAL_HASHES
from common.contracts.lease import (
    Admit,
    Attach,
    AttachOk,
    AttachRejected,
    Copy,
    GrantBatch,
    Preempt,
    Report,
    Reserve,
    TierCopy,
)
from common.contracts.limits import (
    MAX_ADDRESS_CHARS,
    MAX_REQUEST_ID_CHARS,
    MAX_TENANT_CHARS,
    MAX_TRACEPARENT_CHARS,
    MAX_TRACESTATE_CHARS,
)
from common.contracts.types import BlockHash, BlockId, FinishReason, SequenceId
from common.untrusted.ids import ID_WORDS, is_id
from common.wire import packing, transfer_codec
from common.wire.enum_codec import finish_from_proto, finish_to_proto, miss_from_proto, miss_to_proto
from common.wire.identity_codec import (
    identity_from_proto,
    identity_to_proto,
    mismatches_from_proto,
    mismatches_to_proto,
)
from common.wire.retention_codec import blocks_from_proto, blocks_to_proto
from quire.kvmanager.v1 import kvmanager_pb2

LeftT = TypeVar("LeftT")
RightT = TypeVar("RightT")

INCARNATION_BYTES: Final = 16
_NO_SPACES: Final = re.compile(r"[\x21-\x7e]*")
# Of a tenant; the router's file of tenants has the same bound.
MAX_WEIGHT: Final = 1000.0


# ---------------------------------------------------------------- W -> M


def attach_to_proto(attach: Attach) -> kvmanager_pb2.Attach:
    """Return the proto of an Attach; the session travels in the envelope."""
    return kvmanager_pb2.Attach(
        worker_id=attach.worker_id,
        incarnation=attach.incarnation,
        epoch_seen=attach.epoch_seen,
        identity=identity_to_proto(attach.identity),
        num_blocks=attach.num_blocks,
        address=attach.address,
        prefix_caching=attach.prefix_caching,
        max_num_seqs=attach.max_num_seqs,
        reset=attach.reset,
        host_frames=attach.host_frames,
        disk_frames=attach.disk_frames,
        data_address=attach.data_address,
        image_format=attach.image_format,
    )


def attach_from_proto(message: kvmanager_pb2.Attach, session: int) -> Attach:
    """Return the Attach of `session`. Raises ProtocolViolation when it names no worker, incarnation or pool."""
    if not is_id(message.worker_id) or len(message.incarnation) != INCARNATION_BYTES:
        what = f"Attach needs a worker id of {ID_WORDS} and an incarnation of {INCARNATION_BYTES} bytes"
        raise ProtocolViolation(what)
    for address in (message.address, message.data_address):
        if len(address) > MAX_ADDRESS_CHARS or not _NO_SPACES.fullmatch(address):
            raise ProtocolViolation(f"the worker's address is not HOST:PORT of at most {MAX_ADDRESS_CHARS} characters")
    if len(message.image_format) not in (0, KEY_BYTES):
        raise ProtocolViolation(f"an image format has {KEY_BYTES} bytes; this one has {len(message.image_format)}")
    if not (message.num_blocks and message.max_num_seqs and message.identity.block_size):
        raise ProtocolViolation("Attach needs blocks, a block size and at least one sequence")
    return Attach(
        worker_id=message.worker_id,
        incarnation=message.incarnation,
        session=session,
        epoch_seen=message.epoch_seen,
        identity=identity_from_proto(message.identity),
        num_blocks=message.num_blocks,
        address=message.address,
        prefix_caching=message.prefix_caching,
        max_num_seqs=message.max_num_seqs,
        reset=message.reset,
        host_frames=message.host_frames,
        disk_frames=message.disk_frames,
        data_address=message.data_address,
        image_format=message.image_format,
    )


def reserve_to_proto(reserve: Reserve) -> kvmanager_pb2.Reserve:
    return kvmanager_pb2.Reserve(
        sequence=reserve.sequence,
        num_tokens=reserve.num_tokens,
        max_len=reserve.max_len,
        priority=reserve.priority,
        block_hashes=packing.pack_hashes(reserve.block_hashes),
        fork_of=reserve.fork_of,
        request_id=reserve.request_id,
        traceparent=reserve.traceparent,
        tracestate=reserve.tracestate,
        tenant=reserve.tenant,
        weight=reserve.weight,
        computes_all=reserve.computes_all,
        retention=blocks_to_proto(reserve.retention),
        partial_hashes=packing.pack_hashes(reserve.partial_hashes),
    )


def reserve_from_proto(message: kvmanager_pb2.Reserve) -> Reserve:
    """Texts that are longer than any that a router sends are cut: one sequence must not end the session of all."""
    return Reserve(
        sequence=SequenceId(message.sequence),
        num_tokens=message.num_tokens,
        max_len=message.max_len,
        priority=message.priority,
        block_hashes=packing.unpack_hashes(message.block_hashes),
        fork_of=SequenceId(message.fork_of) if message.HasField("fork_of") else None,
        request_id=message.request_id[:MAX_REQUEST_ID_CHARS],
        traceparent=message.traceparent if len(message.traceparent) <= MAX_TRACEPARENT_CHARS else "",
        tracestate=message.tracestate if len(message.tracestate) <= MAX_TRACESTATE_CHARS else "",
        tenant=message.tenant[:MAX_TENANT_CHARS],
        weight=valid_weight(message.weight),
        computes_all=message.computes_all,
        retention=blocks_from_proto(message.retention) if message.retention else (),
        partial_hashes=packing.unpack_hashes(message.partial_hashes),
    )


def valid_weight(weight: float) -> float:
    """Return a tenant's weight as it came; 1 where it is unset or no weight at all."""
    return weight if 0.0 < weight <= MAX_WEIGHT else 1.0


def report_to_proto(report: Report) -> kvmanager_pb2.Report:
    """Return the proto of a Report; empty columns cost nothing."""
    message = kvmanager_pb2.Report(
        step=report.step,
        reserve=map(reserve_to_proto, report.reserve),
        returned=packing.pack_blocks(report.returned),
        finished_sequences=packing.pack_sequences(sequence for sequence, _ in report.finished),
        finished_reasons=(finish_to_proto(reason) for _, reason in report.finished),
        lease_want=report.lease_want,
        reset=report.reset,
    )
    if report.bind:
        message.bind_sequences = packing.pack_sequences(sequence for sequence, _ in report.bind)
        message.bind_blocks = packing.pack_blocks(block for _, block in report.bind)
    if report.seal:
        message.seal_blocks = packing.pack_blocks(block for block, _ in report.seal)
        message.seal_hashes = packing.pack_hashes(key for _, key in report.seal)
    message.trim_sequences, message.trim_counts = _pack_pairs(report.trim)
    message.preempted_sequences, message.preempted_num_tokens = _pack_pairs(report.preempted)
    message.computed_sequences, message.computed_lengths = _pack_pairs(report.computed)
    if report.partials:
        message.partial_of = packing.pack_hashes(of for of, _ in report.partials)
        message.partial_hashes = packing.pack_hashes(each for _, parts in report.partials for each in parts)
    if report.copied:
        message.copied = packing.pack_sequences(report.copied)
    if report.bind_groups:
        message.bind_groups = bytes(report.bind_groups)
    if report.bind_pages:
        message.bind_pages = packing.pack_blocks(report.bind_pages)
    if report.trim_groups:
        message.trim_groups = bytes(report.trim_groups)
    if report.stalled is not None:
        message.stalled.sequences = packing.pack_sequences(report.stalled)
    transfer_codec.pack_report(report, message)
    return message


def report_from_proto(message: kvmanager_pb2.Report) -> Report:
    """Raises ProtocolViolation when the columns of a table differ in length.

    A manager reads thousands of reports a second, and most of their columns are empty: those are read and passed over
    here, without a call for each.
    """
    reserve, trim, returned = message.reserve, message.trim_sequences or message.trim_counts, message.returned
    binds, seals = message.bind_sequences or message.bind_blocks, message.seal_blocks or message.seal_hashes
    preempted = message.preempted_sequences or message.preempted_num_tokens
    computed = message.computed_sequences or message.computed_lengths
    return Report(
        message.step,
        tuple(map(reserve_from_proto, reserve)) if reserve else (),
        _unpack_binds(message) if binds else (),
        _unpack_seals(message) if seals else (),
        _unpack_pairs("trim", message.trim_sequences, message.trim_counts) if trim else (),
        tuple(packing.unpack_blocks(returned)) if returned else (),
        _unpack_pairs("preempted", message.preempted_sequences, message.preempted_num_tokens) if preempted else (),
        _unpack_finished(message) if message.finished_sequences or message.finished_reasons else (),
        tuple(packing.unpack_sequences(message.stalled.sequences)) if message.HasField("stalled") else None,
        message.lease_want,
        _unpack_pairs("computed", message.computed_sequences, message.computed_lengths) if computed else (),
        message.reset,
        _unpack_partials(message) if message.partial_of or message.partial_hashes else (),
        tuple(packing.unpack_sequences(message.copied)) if message.copied else (),
        *(_unpack_groups(message) if message.bind_groups or message.trim_groups or message.bind_pages else _NO_GROUPS),
        transfer_codec.unpack_ends(message) if message.ended_ids or message.ended_ends else (),
        transfer_codec.costs_from_proto(message.transfer_costs) if message.HasField("transfer_costs") else None,
        message.disk_closed,
        message.draining,
    )


_NO_GROUPS: Final = ((), (), ())


def _unpack_groups(message: kvmanager_pb2.Report) -> tuple[tuple[int, ...], tuple[BlockId, ...], tuple[int, ...]]:
    return tuple(message.bind_groups), tuple(packing.unpack_blocks(message.bind_pages)), tuple(message.trim_groups)


def _pack_pairs(pairs: Iterable[tuple[SequenceId, int]]) -> tuple[bytes, bytes]:
    if not pairs:
        return b"", b""
    return packing.pack_sequences(each for each, _ in pairs), packing.pack_u32(value for _, value in pairs)


def _unpack_pairs(what: str, sequences: bytes, values: bytes) -> tuple[tuple[SequenceId, int], ...]:
    return _rows(what, packing.unpack_sequences(sequences), packing.unpack_u32(values))


def _unpack_binds(message: kvmanager_pb2.Report) -> tuple[tuple[SequenceId, BlockId], ...]:
    return _rows("bind", packing.unpack_sequences(message.bind_sequences), packing.unpack_blocks(message.bind_blocks))


def _unpack_seals(message: kvmanager_pb2.Report) -> tuple[tuple[BlockId, BlockHash], ...]:
    return _rows("seal", packing.unpack_blocks(message.seal_blocks), packing.unpack_hashes(message.seal_hashes))


def _unpack_partials(message: kvmanager_pb2.Report) -> tuple[tuple[BlockHash, tuple[BlockHash, ...]], ...]:
    of, parts = packing.unpack_hashes(message.partial_of), packing.unpack_hashes(message.partial_hashes)
    each = [parts[at : at + PARTIAL_HASHES] for at in range(0, len(parts), PARTIAL_HASHES)]
    if len(parts) != PARTIAL_HASHES * len(of):
        raise ProtocolViolation(f"{len(of)} blocks have {len(parts)} partial hashes; expected {PARTIAL_HASHES} each")
    return tuple(zip(of, each, strict=True))


def _unpack_finished(message: kvmanager_pb2.Report) -> tuple[tuple[SequenceId, FinishReason], ...]:
    reasons = list(map(finish_from_proto, message.finished_reasons))
    return _rows("finished", packing.unpack_sequences(message.finished_sequences), reasons)


def _rows(what: str, left: Sequence[LeftT], right: Sequence[RightT]) -> tuple[tuple[LeftT, RightT], ...]:
    if len(left) != len(right):
        packing.parallel(what, left, right)
    return tuple(zip(left, right, strict=True))


# ---------------------------------------------------------------- M -> W


def attach_ok_to_proto(ok: AttachOk) -> kvmanager_pb2.AttachOk:
    return kvmanager_pb2.AttachOk(epoch=ok.epoch, lease_target=ok.lease_target, serve_key=ok.serve_key)


def attach_ok_from_proto(message: kvmanager_pb2.AttachOk) -> AttachOk:
    return AttachOk(message.epoch, message.lease_target, message.serve_key)


def rejected_to_proto(rejected: AttachRejected) -> kvmanager_pb2.AttachRejected:
    """Return the proto of an AttachRejected; `ours` in a mismatch is the manager's value."""
    differences = mismatches_to_proto(rejected.mismatches)
    return kvmanager_pb2.AttachRejected(reason=rejected.reason, differences=differences, retry=rejected.retry)


def rejected_from_proto(message: kvmanager_pb2.AttachRejected) -> AttachRejected:
    """Return the AttachRejected in a proto; `ours` in a mismatch is now the worker's value."""
    return AttachRejected(message.reason, mismatches_from_proto(message.differences), message.retry)


def batch_to_proto(batch: GrantBatch) -> kvmanager_pb2.GrantBatch:
    message = kvmanager_pb2.GrantBatch(
        lease_target=batch.lease_target,
        admit=map(_admit_to_proto, batch.admit),
        lease=packing.pack_blocks(batch.lease),
        reset=batch.reset,
        cancel=packing.pack_sequences(batch.cancel),
    )
    if batch.copy:
        message.copy_src = packing.pack_blocks(each.src for each in batch.copy)
        message.copy_dst = packing.pack_blocks(each.dst for each in batch.copy)
        message.copy_len = packing.pack_u32(each.length for each in batch.copy)
    if batch.preempt:
        message.preempt_sequences = packing.pack_sequences(each.sequence for each in batch.preempt)
        message.preempt_decision_ids.extend(each.decision_id for each in batch.preempt)
    if batch.tier:
        message.tier_blocks = packing.pack_blocks(each.block for each in batch.tier)
        message.tier_frames = packing.pack_blocks(each.frame for each in batch.tier)
        message.tier_loads = bytes(each.load for each in batch.tier)
    if batch.transfers:
        transfer_codec.pack_transfers(batch.transfers, message)
    return message


def batch_from_proto(message: kvmanager_pb2.GrantBatch) -> GrantBatch:
    """Raises ProtocolViolation when the columns of a table differ in length."""
    return GrantBatch(
        lease_target=message.lease_target,
        copy=_unpack_copies(message),
        admit=tuple(map(_admit_from_proto, message.admit)),
        lease=tuple(packing.unpack_blocks(message.lease)),
        reset=message.reset,
        preempt=_unpack_preempts(message),
        cancel=tuple(packing.unpack_sequences(message.cancel)),
        tier=_unpack_tier(message) if message.tier_blocks or message.tier_frames or message.tier_loads else (),
        transfers=transfer_codec.unpack_transfers(message) if message.transfer_ids or message.transfer_hashes else (),
    )


def _unpack_tier(message: kvmanager_pb2.GrantBatch) -> tuple[TierCopy, ...]:
    blocks, frames = packing.unpack_blocks(message.tier_blocks), packing.unpack_blocks(message.tier_frames)
    loads = list(map(bool, message.tier_loads))
    packing.parallel("tier", blocks, frames, loads)
    return tuple(map(TierCopy, blocks, frames, loads))


def _admit_to_proto(admit: Admit) -> kvmanager_pb2.Admit:
    message = kvmanager_pb2.Admit(
        sequence=admit.sequence,
        block_table=packing.pack_blocks(admit.block_table),
        n_shared=admit.n_shared,
        cached_tokens=admit.cached_tokens,
        miss_reason=miss_to_proto(admit.miss_reason),
        diverged_at=admit.diverged_at,
        decision_id=admit.decision_id,
    )
    if admit.fetched is not None:
        message.fetched.CopyFrom(kvmanager_pb2.Fetched(**admit.fetched._asdict()))
    if admit.runs or admit.pages:
        message.runs.extend(map(packing.pack_blocks, admit.runs))
        message.pages = packing.pack_blocks(admit.pages)
    return message


def _admit_from_proto(message: kvmanager_pb2.Admit) -> Admit:
    return Admit(
        sequence=SequenceId(message.sequence),
        block_table=tuple(packing.unpack_indexes(message.block_table)),
        n_shared=message.n_shared,
        cached_tokens=message.cached_tokens,
        miss_reason=miss_from_proto(message.miss_reason),
        diverged_at=message.diverged_at,
        decision_id=message.decision_id,
        runs=tuple([tuple(packing.unpack_indexes(run)) for run in message.runs]),
        pages=tuple(packing.unpack_blocks(message.pages)),
        fetched=transfer_codec.fetched_from_proto(message.fetched) if message.HasField("fetched") else None,
    )


def _unpack_copies(message: kvmanager_pb2.GrantBatch) -> tuple[Copy, ...]:
    if not message.copy_src and not message.copy_dst and not message.copy_len:
        return ()
    sources, targets = packing.unpack_blocks(message.copy_src), packing.unpack_blocks(message.copy_dst)
    lengths = packing.unpack_u32(message.copy_len)
    packing.parallel("copy", sources, targets, lengths)
    return tuple(map(Copy, sources, targets, lengths))


def _unpack_preempts(message: kvmanager_pb2.GrantBatch) -> tuple[Preempt, ...]:
    sequences = packing.unpack_sequences(message.preempt_sequences)
    packing.parallel("preempt", sequences, message.preempt_decision_ids)
    return tuple(map(Preempt, sequences, message.preempt_decision_ids))
