"""The bytes of a segment: exact, cut anywhere, damaged anywhere."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contracts.limits import MAX_LOG_FRAME_BYTES
from common.decisions.disk.core.segment import (
    FRAME_HEAD_BYTES,
    HEAD_BYTES,
    Frame,
    Timed,
    body_of,
    contents_of,
    frame_of,
    head,
    packed,
    records_of,
)

RECORDS = st.lists(st.tuples(st.integers(0, 2**62), st.binary(max_size=40)), min_size=1, max_size=5)


def read(data: bytes) -> list[bytes]:
    """Return the records of a segment, oldest first."""
    return [each for frame in contents_of(data).frames for each in records_of(body_of(data, frame))]


def segment_of(groups: list[list[Timed]]) -> bytes:
    return head() + b"".join(map(frame_of, groups))


def test_a_segment_is_these_bytes() -> None:
    body = zlib.compress(b"\x03\0\0\0abc" + b"\x01\0\0\0d", 1)
    fields = struct.pack("<IIqqII", len(body), zlib.crc32(body), 5, 9, 2, 7)
    data = b"QUIREd\x01\0" + fields + struct.pack("<I", zlib.crc32(fields)) + body
    assert head() + frame_of([(9, b"abc"), (5, b"d")], dropped=7) == data
    start = HEAD_BYTES + FRAME_HEAD_BYTES
    contents = contents_of(data)
    assert contents.frames == (Frame(start, len(data), first=0, count=2, first_ns=5, last_ns=9, dropped=7),)
    assert (contents.end, contents.faults, read(data)) == (len(data), (), [b"abc", b"d"])


def test_frames_number_their_records_on() -> None:
    frames = contents_of(segment_of([[(1, b"a"), (2, b"b")], [(3, b"c")]])).frames
    assert [(each.first, each.count) for each in frames] == [(0, 2), (2, 1)]


@given(st.lists(RECORDS, max_size=4), st.data())
def test_a_cut_loses_whole_frames_at_the_end_and_nothing_else(groups: list[list[Timed]], data: st.DataObject) -> None:
    whole = segment_of(groups)
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    contents = contents_of(cut)
    kept = groups[: len(contents.frames)]
    assert read(cut) == [record for group in kept for _, record in group]
    assert contents.faults == ()
    # Every frame is read that lies before the cut, and the next one is written just behind it.
    assert contents.end == (len(segment_of(kept)) if len(cut) >= HEAD_BYTES else 0)
    assert len(kept) == len(groups) or len(segment_of(groups[: len(kept) + 1])) > len(cut)


@given(st.lists(RECORDS, min_size=1, max_size=4), st.data())
def test_no_damage_makes_another_record(groups: list[list[Timed]], data: st.DataObject) -> None:
    whole = bytearray(segment_of(groups))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    damaged = bytes(whole)
    contents = contents_of(damaged)
    written = [record for group in groups for _, record in group]
    found = iter(written)
    assert all(each in found for each in read(damaged)), "records appeared, or changed their order"
    assert contents.faults or contents.end != len(damaged)


@given(st.binary(max_size=200))
def test_any_bytes_can_be_read(noise: bytes) -> None:
    contents_of(noise)
    contents_of(head() + noise)


def test_a_damaged_body_costs_its_own_frame_alone() -> None:
    groups: list[list[Timed]] = [[(1, b"a")], [(2, b"b"), (3, b"c")], [(4, b"d")]]
    data = bytearray(segment_of(groups))
    data[len(segment_of(groups[:1])) + FRAME_HEAD_BYTES + 3] ^= 1
    at = len(segment_of(groups[:1]))
    assert read(bytes(data)) == [b"a", b"d"]
    contents = contents_of(bytes(data))
    assert contents.faults == (f"is corrupt at byte {at}: 2 of its records are not read",)
    assert (contents.end, [each.first for each in contents.frames]) == (len(data), [0, 3])


def test_a_damaged_head_of_a_frame_ends_the_segment_which_is_not_written_on() -> None:
    data = bytearray(segment_of([[(1, b"a")], [(2, b"b")]]))
    at = len(segment_of([[(1, b"a")]]))
    data[at] ^= 1
    contents = contents_of(bytes(data))
    assert (read(bytes(data)), contents.end) == ([b"a"], None)
    assert contents.faults == (f"is corrupt at byte {at}: the last {len(data) - at} bytes of it are not read",)


def test_zeros_at_the_end_are_a_write_that_never_came() -> None:
    whole = segment_of([[(1, b"a")]])
    contents = contents_of(whole + bytes(100))
    assert (contents.end, contents.faults, len(contents.frames)) == (len(whole), (), 1)


def test_other_files_and_other_versions_are_refused_in_words() -> None:
    (no_segment,) = contents_of(b"GGUF\x03\0\0\0").faults
    assert no_segment == "is no segment of a decision log; remove the file if it is in the wrong folder"
    (version,) = contents_of(b"QUIREd\x09\0").faults
    assert version == "has version 9 of the format, and this Quire reads version 1; use the Quire that wrote it"


def test_a_frame_that_would_fill_the_memory_is_refused() -> None:
    data = head() + frame_of([(1, bytes(MAX_LOG_FRAME_BYTES))])
    with pytest.raises(ValueError, match="more than"):
        body_of(data, contents_of(data).frames[0])


def test_lengths_that_do_not_add_up_are_refused() -> None:
    for body in (b"\x05\0\0\0abc", b"\x01\0"):
        with pytest.raises(ValueError, match="do not add up"):
            records_of(body)


def test_records_are_packed_into_frames_of_about_a_size() -> None:
    records: list[Timed] = [(number, bytes(size)) for number, size in enumerate((6, 6, 1, 30, 2))]
    sizes = [[len(each) for _, each in group] for group in packed(records, 20)]
    assert sizes == [[6, 6], [1], [30], [2]]
    assert packed([], 20) == []
