"""The bytes of a file: what gzip reads, cut anywhere, damaged anywhere."""

from __future__ import annotations

import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contracts.limits import MAX_LOG_MEMBER_BYTES
from common.decisions.log_files import Member, Timed, body_of, end_of, is_ours, member_of, members_in, packed

LINES = st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"") + b"\n")
RECORDS = st.lists(st.tuples(st.integers(0, 2**62), LINES), min_size=1, max_size=5)


def file_of(groups: list[list[Timed]]) -> bytes:
    return b"".join(map(member_of, groups))


def lines_of(groups: list[list[Timed]]) -> bytes:
    return b"".join(line for group in groups for _, line in group)


def bodies(data: bytes) -> list[bytes]:
    """Return the lines of each member that is whole."""
    found = []
    for member in members_in(data):
        try:
            found.append(body_of(data, member)[0])
        except ValueError:
            continue
    return [each for each in found if each]


@given(st.lists(RECORDS, max_size=4))
def test_gzip_reads_a_file(groups: list[list[Timed]]) -> None:
    assert gzip.decompress(file_of(groups)) == lines_of(groups)


def test_a_member_tells_its_times_and_what_is_missing_without_being_decompressed() -> None:
    first, second = member_of([(9, b"a\n"), (5, b"b\n")], dropped=7), member_of([(11, b"c\n")])
    data = first + second
    assert members_in(data) == (
        Member(0, len(first), first_ns=5, last_ns=9, dropped=7),
        Member(len(first), len(data), first_ns=11, last_ns=11, dropped=0),
    )
    assert b"quire 5 9 7\0" in first
    assert body_of(data, members_in(data)[0]) == (b"a\nb\n", len(first))
    assert (end_of(data), is_ours(data), is_ours(data[:3]), is_ours(b"")) == (len(data), True, True, True)
    assert not is_ours(gzip.compress(b"of somebody else"))


@given(st.lists(RECORDS, max_size=4), st.data())
def test_a_cut_loses_one_member_at_the_end_and_nothing_else(groups: list[list[Timed]], data: st.DataObject) -> None:
    whole = file_of(groups)
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    found = bodies(cut)
    kept = groups[: len(found)]
    assert b"".join(found) == lines_of(kept)
    # Every member is read that lies before the cut, and the next one is written just behind it.
    assert end_of(cut) == len(file_of(kept))
    assert len(kept) == len(groups) or len(file_of(groups[: len(kept) + 1])) > len(cut)


@given(st.lists(RECORDS, min_size=1, max_size=4), st.data())
def test_damage_costs_the_lines_of_one_member_and_makes_no_other(
    groups: list[list[Timed]], data: st.DataObject
) -> None:
    damaged = bytearray(file_of(groups))
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    left = [lines_of([group]) for group in groups]
    found = bodies(bytes(damaged))
    hit = sum(len(file_of(groups[: count + 1])) <= at for count in range(len(groups)))
    assert found in (left, left[:hit] + left[hit + 1 :])


@given(st.binary(max_size=200))
def test_any_bytes_can_be_read(noise: bytes) -> None:
    for data in (noise, member_of([(1, b"a\n")]) + noise, member_of([(1, b"a\n")])[:30] + noise):
        bodies(data)
        end = end_of(data)
        assert end is None or 0 <= end <= len(data)


def test_zeros_at_the_end_are_a_write_that_never_came() -> None:
    whole = member_of([(1, b"a\n")])
    assert (end_of(whole + bytes(100)), bodies(whole + bytes(100))) == (len(whole), [b"a\n"])


@pytest.mark.parametrize("at", [0, 12, 30])
def test_a_file_is_not_written_on_behind_damage(at: int) -> None:
    whole = member_of([(1, b"a\n")])
    damaged = bytearray(member_of([(2, b"b\n")]))
    damaged[at] ^= 1
    assert end_of(whole + damaged) is None


def test_a_member_that_would_fill_the_memory_is_refused() -> None:
    data = member_of([(1, bytes(MAX_LOG_MEMBER_BYTES + 1))])
    with pytest.raises(ValueError, match="more than"):
        body_of(data, members_in(data)[0])


def test_records_are_packed_into_members_of_about_a_size() -> None:
    records: list[Timed] = [(number, bytes(size)) for number, size in enumerate((10, 10, 5, 34, 6))]
    sizes = [[len(each) for _, each in group] for group in packed(records, 20)]
    assert sizes == [[10, 10], [5], [34], [6]]
    assert packed([], 20) == []
