"""Orders to transfer blocks, and their ends, over the wire: what contradicts itself is a ProtocolViolation in words."""

from __future__ import annotations

import math

import pytest

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import GrantBatch, Report
from common.contracts.transfers import Fetched, Medium, Place, Transfer, TransferCosts, TransferEnd
from common.contracts.types import BlockHash, BlockId, FrameId
from common.wire import lease_codec, transfer_codec
from quire.kvmanager.v1 import kvmanager_pb2

A, B, ROOT = BlockHash(b"a" * 16), BlockHash(b"b" * 16), BlockHash(b"")
SAVE = Transfer(7, A, ROOT, 0, Place(Medium.BLOCK, BlockId(3)), Place(Medium.DISK, FrameId(9)))
SAVE_OF_A_FRAME = Transfer(8, B, A, 1, Place(Medium.HOST, FrameId(2)), Place(Medium.DISK, FrameId(1)))
FETCH = Transfer(2**64 - 1, B, A, 1, Place(Medium.DISK, FrameId(1)), Place(Medium.HOST, FrameId(0)))


def packed(*transfers: Transfer) -> kvmanager_pb2.GrantBatch:
    return lease_codec.batch_to_proto(GrantBatch(0, transfers=transfers))


def test_a_first_block_has_no_parent_on_either_side() -> None:
    sent = packed(SAVE, SAVE_OF_A_FRAME, FETCH)
    assert sent.transfer_sources == bytes([1, 2, 4])
    assert sent.transfer_targets == bytes([4, 4, 2])
    received = kvmanager_pb2.GrantBatch.FromString(sent.SerializeToString())
    assert lease_codec.batch_from_proto(received).transfers == (SAVE, SAVE_OF_A_FRAME, FETCH)


@pytest.mark.parametrize(
    "column",
    [
        "transfer_ids",
        "transfer_hashes",
        "transfer_parent_hashes",
        "transfer_depths",
        "transfer_sources",
        "transfer_source_indexes",
        "transfer_targets",
        "transfer_target_indexes",
    ],
)
def test_columns_of_other_lengths_are_refused(column: str) -> None:
    for cut in (packed(SAVE, FETCH), packed(FETCH)):
        value = getattr(cut, column)
        width = len(value) // len(cut.transfer_sources or b"1")
        for wrong in (value[:-1], value[: len(value) - width], value + value[:width]):
            setattr(cut, column, wrong)
            with pytest.raises(ProtocolViolation):
                transfer_codec.unpack_transfers(cut)


@pytest.mark.parametrize("medium", [0, 3, 5, 255])
@pytest.mark.parametrize("column", ["transfer_sources", "transfer_targets"])
def test_a_medium_that_there_is_not_is_refused(medium: int, column: str) -> None:
    sent = packed(SAVE)
    setattr(sent, column, bytes([medium]))
    with pytest.raises(ProtocolViolation, match=f"a transfer names a medium that there is not: {medium}"):
        transfer_codec.unpack_transfers(sent)


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (Medium.BLOCK, Medium.BLOCK, "from block to block"),
        (Medium.BLOCK, Medium.HOST, "from block to host"),
        (Medium.HOST, Medium.BLOCK, "from host to block"),
        (Medium.HOST, Medium.HOST, "from host to host"),
        (Medium.DISK, Medium.BLOCK, "from disk to block"),
        (Medium.DISK, Medium.DISK, "from disk to disk"),
    ],
)
def test_a_transfer_between_other_places_is_refused(source: Medium, target: Medium, words: str) -> None:
    sent = packed(SAVE)
    sent.transfer_sources, sent.transfer_targets = bytes([source]), bytes([target])
    expected = f"transfer 7 goes {words}; expected block or host to disk, or disk or peer to host"
    with pytest.raises(ProtocolViolation, match=expected):
        transfer_codec.unpack_transfers(sent)


@pytest.mark.parametrize("end", TransferEnd)
def test_every_end_survives_the_wire(end: TransferEnd) -> None:
    sent = lease_codec.report_to_proto(Report(ended=((1, TransferEnd.DONE), (2**64 - 1, end)), disk_closed=True))
    received = lease_codec.report_from_proto(kvmanager_pb2.Report.FromString(sent.SerializeToString()))
    assert received.ended == ((1, TransferEnd.DONE), (2**64 - 1, end))
    assert received.disk_closed


@pytest.mark.parametrize("end", [5, 6, 255])
def test_an_end_that_there_is_not_is_refused(end: int) -> None:
    sent = lease_codec.report_to_proto(Report(ended=((1, TransferEnd.DONE),)))
    sent.ended_ends = bytes([end])
    with pytest.raises(ProtocolViolation, match=f"a transfer ended in a way that there is not: {end}"):
        lease_codec.report_from_proto(sent)


@pytest.mark.parametrize(("ids", "ends"), [(b"", b"\0"), (bytes(8), b""), (bytes(7), b"\0"), (bytes(8), bytes(2))])
def test_ends_of_other_lengths_are_refused(ids: bytes, ends: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        transfer_codec.unpack_ends(kvmanager_pb2.Report(ended_ids=ids, ended_ends=ends))


def test_a_report_without_transfers_says_nothing_of_them() -> None:
    sent = lease_codec.report_to_proto(Report())
    assert (sent.ended_ids, sent.ended_ends, sent.HasField("transfer_costs"), sent.disk_closed) == (
        b"",
        b"",
        False,
        False,
    )
    received = lease_codec.report_from_proto(sent)
    assert (received.ended, received.transfer_costs, received.disk_closed) == ((), None, False)
    assert not received.draining
    drains = lease_codec.report_to_proto(Report(draining=True))
    assert lease_codec.report_from_proto(kvmanager_pb2.Report.FromString(drains.SerializeToString())).draining


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
def test_costs_that_are_no_seconds_count_as_unknown(value: float) -> None:
    sent = kvmanager_pb2.TransferCosts(compute_seconds=value, read_seconds=0.5, copy_seconds=0.25)
    assert transfer_codec.costs_from_proto(sent) == TransferCosts(0.0, 0.5, copy=0.25)
    fetched = kvmanager_pb2.Fetched(blocks=3, asked=4, seconds=value, source="d" * 10_000)
    received = transfer_codec.fetched_from_proto(fetched)
    assert received[:3] == Fetched(3, 4, 0.0)[:3]
    assert len(received.source) < 10_000


OF_PAGES = Transfer(
    9, B, B, 0, Place(Medium.BLOCK, BlockId(3)), Place(Medium.DISK, FrameId(9)), group=2,
    others=((BlockId(5), FrameId(1)), (BlockId(4), FrameId(7))),
)  # fmt: skip


def test_contents_of_groups_have_their_pages_and_their_own_hash_as_parent() -> None:
    sent = packed(SAVE, OF_PAGES)
    assert (sent.transfer_groups, sent.transfer_others) == (bytes([0, 2]), bytes([0, 0, 0, 0, 2, 0, 0, 0]))
    assert lease_codec.batch_from_proto(sent).transfers == (SAVE, OF_PAGES)
    plain = packed(SAVE, FETCH)
    assert not plain.transfer_groups + plain.transfer_others + plain.transfer_other_sources


@pytest.mark.parametrize(
    "column", ["transfer_groups", "transfer_others", "transfer_other_sources", "transfer_other_targets"]
)
def test_columns_of_groups_of_other_lengths_are_refused(column: str) -> None:
    value = getattr(packed(SAVE, OF_PAGES), column)
    for wrong in (value[:-1], value[: len(value) // 2], value * 2, b""):
        cut = packed(SAVE, OF_PAGES)
        setattr(cut, column, wrong)
        with pytest.raises(ProtocolViolation):
            transfer_codec.unpack_transfers(cut)
