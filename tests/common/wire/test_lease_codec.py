"""The lease protocol over the wire: everything survives the round trip, and nonsense is a ProtocolViolation."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contracts import lease
from common.contracts.errors import Mismatch, ProtocolViolation
from common.contracts.types import BlockHash, BlockId, FinishReason, PoolIdentity, SequenceId, SequencePhase
from common.wire import lease_codec, packing
from common.wire.identity_codec import identity_from_proto, identity_to_proto
from common.wire.inventory_codec import InventoryAssembler, InventoryBounds, inventory_chunks
from quire.kvmanager.v1 import kvmanager_pb2
from quire.types.v1 import types_pb2
from tests.support import wire_strategies as strategies

BOUNDS = InventoryBounds(messages=10_000, bytes=1 << 24, blocks=10_000, frames=10_000, saved=10_000)


@given(strategies.identities)
def test_identity_survives_the_wire(identity: PoolIdentity) -> None:
    packed = identity_to_proto(identity).SerializeToString()
    assert identity_from_proto(types_pb2.PoolIdentity.FromString(packed)) == identity


@given(strategies.attaches)
def test_attach_survives_the_wire(attach: lease.Attach) -> None:
    packed = lease_codec.attach_to_proto(attach).SerializeToString()
    assert lease_codec.attach_from_proto(kvmanager_pb2.Attach.FromString(packed), attach.session) == attach


@given(strategies.reports)
def test_report_survives_the_wire(report: lease.Report) -> None:
    packed = lease_codec.report_to_proto(report).SerializeToString()
    assert lease_codec.report_from_proto(kvmanager_pb2.Report.FromString(packed)) == report


@given(strategies.batches)
def test_batch_survives_the_wire(batch: lease.GrantBatch) -> None:
    packed = lease_codec.batch_to_proto(batch).SerializeToString()
    assert lease_codec.batch_from_proto(kvmanager_pb2.GrantBatch.FromString(packed)) == batch


@given(st.builds(lease.AttachOk, strategies.u64, strategies.u32), strategies.rejections)
def test_answers_to_an_attach_survive_the_wire(ok: lease.AttachOk, rejected: lease.AttachRejected) -> None:
    packed = lease_codec.attach_ok_to_proto(ok).SerializeToString()
    assert lease_codec.attach_ok_from_proto(kvmanager_pb2.AttachOk.FromString(packed)) == ok
    packed = lease_codec.rejected_to_proto(rejected).SerializeToString()
    received = lease_codec.rejected_from_proto(kvmanager_pb2.AttachRejected.FromString(packed))
    swapped = tuple(Mismatch(each.field, each.theirs, each.ours, each.flag) for each in rejected.mismatches)
    assert received == lease.AttachRejected(rejected.reason, swapped, rejected.retry)


@given(strategies.inventories, st.integers(300, 2000))
def test_inventory_survives_chunks_of_any_size(inventory: lease.Inventory, limit: int) -> None:
    assembler = InventoryAssembler(BOUNDS)
    *early, last = [
        assembler.add(kvmanager_pb2.Inventory.FromString(chunk.SerializeToString()))
        for chunk in inventory_chunks(inventory, limit)
    ]
    assert early == [None] * len(early)
    assert last == inventory


def test_chunks_of_a_large_inventory_stay_below_the_limit() -> None:
    block_hashes = tuple(BlockHash(index.to_bytes(16, "little")) for index in range(400))
    sequences = tuple(
        lease.InventorySequence(
            lease.Reserve(SequenceId(number), 6400, 8000, block_hashes=block_hashes, request_id=f"request-{number}"),
            SequencePhase.RUNNING,
            number,
            tuple(map(BlockId, range(400))),
        )
        for number in range(100)
    )
    cached_blocks = tuple(
        lease.CachedBlock(BlockId(index), block_hashes[index % 400], -1, 2**64 - 1) for index in range(40_000)
    )
    chunks = inventory_chunks(lease.Inventory(sequences, tuple(map(BlockId, range(70_000))), cached_blocks))
    assert max(chunk.ByteSize() for chunk in chunks) <= 256 * 1024
    assert len(chunks) == 4 + 2 + 5  # 8 KB a sequence, 4 B a pool block, 32 B a claim


def test_a_report_of_a_step_is_as_small_as_promised() -> None:
    report = lease.Report(
        step=10_000,
        bind=tuple((SequenceId(number), BlockId(5000 + number)) for number in range(4)),
        seal=tuple((BlockId(number), BlockHash(bytes([number]) * 16)) for number in range(4)),
        lease_want=128,
    )
    assert lease_codec.report_to_proto(report).ByteSize() <= 150


def test_the_highest_sequence_id_keeps_its_value() -> None:
    admit = lease.Admit(SequenceId(2**64 - 1), (BlockId(7),), 1)
    message = lease_codec.batch_to_proto(lease.GrantBatch(0, admit=(admit,)))
    assert lease_codec.batch_from_proto(message).admit == (admit,)


def test_no_stalled_set_differs_from_an_empty_one() -> None:
    for stalled in (None, ()):
        assert (
            lease_codec.report_from_proto(lease_codec.report_to_proto(lease.Report(stalled=stalled))).stalled == stalled
        )


@pytest.mark.parametrize(
    "report",
    [
        kvmanager_pb2.Report(bind_sequences=bytes(16), bind_blocks=bytes(4)),
        kvmanager_pb2.Report(bind_blocks=bytes(4)),
        kvmanager_pb2.Report(seal_blocks=bytes(4)),
        kvmanager_pb2.Report(seal_blocks=bytes(4), seal_hashes=bytes(15)),
        kvmanager_pb2.Report(returned=bytes(3)),
        kvmanager_pb2.Report(trim_sequences=bytes(8)),
        kvmanager_pb2.Report(trim_sequences=bytes(4), trim_counts=bytes(4)),
        kvmanager_pb2.Report(preempted_num_tokens=bytes(4)),
        kvmanager_pb2.Report(computed_lengths=bytes(5)),
        kvmanager_pb2.Report(finished_sequences=bytes(8)),
        kvmanager_pb2.Report(finished_sequences=bytes(8), finished_reasons=[types_pb2.FINISH_REASON_UNSPECIFIED]),
        kvmanager_pb2.Report(reserve=[kvmanager_pb2.Reserve(block_hashes=bytes(17))]),
    ],
)
def test_malformed_report_is_a_protocol_violation(report: kvmanager_pb2.Report) -> None:
    with pytest.raises(ProtocolViolation):
        lease_codec.report_from_proto(report)


@pytest.mark.parametrize(
    "batch",
    [
        kvmanager_pb2.GrantBatch(copy_src=bytes(4), copy_dst=bytes(4)),
        kvmanager_pb2.GrantBatch(copy_len=bytes(4)),
        kvmanager_pb2.GrantBatch(preempt_sequences=bytes(8)),
        kvmanager_pb2.GrantBatch(admit=[kvmanager_pb2.Admit(block_table=bytes(4))]),  # no miss reason
    ],
)
def test_malformed_batch_is_a_protocol_violation(batch: kvmanager_pb2.GrantBatch) -> None:
    with pytest.raises(ProtocolViolation):
        lease_codec.batch_from_proto(batch)


@pytest.mark.parametrize(
    "chunk",
    [
        kvmanager_pb2.Inventory(cached_blocks=bytes(4), last=True),
        kvmanager_pb2.Inventory(sequences=[kvmanager_pb2.InventorySequence()], last=True),  # no phase
        kvmanager_pb2.Inventory(pool=bytes(2), last=True),
    ],
)
def test_malformed_inventory_is_a_protocol_violation(chunk: kvmanager_pb2.Inventory) -> None:
    with pytest.raises(ProtocolViolation):
        InventoryAssembler(BOUNDS).add(chunk)


@pytest.mark.parametrize(
    ("bounds", "what"),
    [
        (InventoryBounds(2, 1 << 20, 8), "3 messages"),
        (InventoryBounds(9, 100, 8), "bytes"),
        (InventoryBounds(9, 1 << 20, 8, sequences=2), "3 sequences"),
        (InventoryBounds(9, 1 << 20, 5), "6 entries of cached_blocks"),
    ],
)
def test_an_inventory_beyond_its_bounds_is_a_protocol_violation(bounds: InventoryBounds, what: str) -> None:
    chunk = kvmanager_pb2.Inventory(
        sequences=[kvmanager_pb2.InventorySequence(phase=kvmanager_pb2.SEQUENCE_PHASE_WAITING)],
        cached_blocks=bytes(8),
        cached_hashes=bytes(32),
        pool=bytes(4),
    )
    assembler = InventoryAssembler(bounds)
    with pytest.raises(ProtocolViolation, match=what):
        list(map(assembler.add, [chunk] * 4))


NEGATIVE = packing.pack_blocks([BlockId(-1)])
BELOW = packing.pack_blocks([BlockId(-2)])


@pytest.mark.parametrize(
    "message",
    [
        kvmanager_pb2.GrantBatch(lease=NEGATIVE),
        kvmanager_pb2.GrantBatch(copy_src=NEGATIVE, copy_dst=bytes(4), copy_len=bytes(4)),
        kvmanager_pb2.GrantBatch(copy_src=bytes(4), copy_dst=NEGATIVE, copy_len=bytes(4)),
        kvmanager_pb2.GrantBatch(admit=[kvmanager_pb2.Admit(block_table=BELOW)]),
    ],
)
def test_a_grant_of_a_negative_block_is_a_protocol_violation(message: kvmanager_pb2.GrantBatch) -> None:
    with pytest.raises(ProtocolViolation, match="is not a block"):
        lease_codec.batch_from_proto(message)


def test_a_block_table_of_an_inventory_may_have_trimmed_places_and_no_other_negative_block() -> None:
    for number, is_allowed in ((-1, True), (-2, False)):
        sequence = kvmanager_pb2.InventorySequence(
            phase=kvmanager_pb2.SEQUENCE_PHASE_RUNNING, block_table=packing.pack_blocks([BlockId(number)])
        )
        chunk = kvmanager_pb2.Inventory(sequences=[sequence], last=True)
        with nullcontext() if is_allowed else pytest.raises(ProtocolViolation, match="is not a block"):
            InventoryAssembler(BOUNDS).add(chunk)


@pytest.mark.parametrize("address", ["host:1\nfake line", "a b:1", "\x00", "h" * 300])
def test_an_address_that_spoils_log_lines_is_a_protocol_violation(address: str) -> None:
    message = kvmanager_pb2.Attach(worker_id="w", incarnation=bytes(16), num_blocks=1, max_num_seqs=1, address=address)
    message.identity.block_size = 16
    with pytest.raises(ProtocolViolation, match="HOST:PORT"):
        lease_codec.attach_from_proto(message, 1)


@pytest.mark.parametrize("parts", [0, 2, 4])
def test_partial_hashes_that_are_not_three_a_block_are_a_protocol_violation(parts: int) -> None:
    message = kvmanager_pb2.Report(partial_of=bytes(16), partial_hashes=bytes(16 * parts))
    with pytest.raises(ProtocolViolation, match=f"1 blocks have {parts} partial hashes; expected 3 each"):
        lease_codec.report_from_proto(message)


def test_texts_that_no_router_sends_are_cut() -> None:
    reserve = lease.Reserve(SequenceId(1), 5, 9, request_id="r" * 1000, traceparent="t" * 1000, tenant="n" * 1000)
    reserve = replace(reserve, tracestate="s" * 1000)
    received = lease_codec.reserve_from_proto(lease_codec.reserve_to_proto(reserve))
    assert (received.request_id, received.traceparent, received.tenant) == ("r" * 128, "", "n" * 64)
    assert received.tracestate == ""


@pytest.mark.parametrize("field", ["worker_id", "incarnation", "num_blocks", "max_num_seqs", "identity"])
def test_attach_without_a_needed_field_is_a_protocol_violation(field: str) -> None:
    message = kvmanager_pb2.Attach(worker_id="w", incarnation=bytes(16), num_blocks=1, max_num_seqs=1)
    message.identity.block_size = 16
    message.ClearField(field)  # type: ignore[arg-type]
    with pytest.raises(ProtocolViolation):
        lease_codec.attach_from_proto(message, 1)


def test_each_side_sees_its_own_value_as_ours() -> None:
    rejected = lease.AttachRejected("identity", (Mismatch("block_size", "16", "32", "--block-size"),))
    message = lease_codec.rejected_to_proto(rejected)
    assert (message.differences[0].manager, message.differences[0].worker) == ("16", "32")
    received = lease_codec.rejected_from_proto(message)
    assert str(received.mismatches[0]) == "block_size: here 32, there 16 (change it with --block-size)"


@given(st.sampled_from(FinishReason))
def test_every_finish_reason_has_a_proto(reason: FinishReason) -> None:
    report = lease.Report(finished=((SequenceId(1), reason),))
    assert lease_codec.report_from_proto(lease_codec.report_to_proto(report)) == report
