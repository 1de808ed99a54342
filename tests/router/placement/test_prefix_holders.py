"""How far workers hold a chain: windows, monotone narrowing, and entries of dead generations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.contracts.index_format import pack_entry, unpack_entries
from router.placement.prefix_holders import PrefixHolders, windows

LIVE = {0: ("w0", 100), 1: ("w1", 200)}


def value(*slots: int, generations: tuple[int, ...] = (100, 200)) -> bytes:
    return b"".join(pack_entry(slot, generations[slot]) for slot in slots)


def matcher() -> PrefixHolders:
    return PrefixHolders(LIVE, unpack_entries)


def test_windows_grow_and_then_repeat() -> None:
    sizes = [len(window) for window in windows(32 + 128 + 512 + 512 + 7)]
    assert sizes == [32, 128, 512, 512, 7]


def test_windows_cover_the_chain_without_gap() -> None:
    assert [at for window in windows(700) for at in window] == list(range(700))


def test_an_empty_chain_has_no_window() -> None:
    assert list(windows(0)) == []


def test_each_worker_is_followed_to_its_own_end() -> None:
    match = matcher()
    assert match.feed([value(0, 1), value(1, 0), value(1)])
    assert not match.feed([None, value(0, 1)])
    assert match.hits() == {"w0": 2, "w1": 3}


def test_what_lies_behind_a_hole_does_not_count() -> None:
    match = matcher()
    assert not match.feed([value(0), value(1), value(0, 1)])
    assert match.hits() == {"w0": 1}


def test_a_chain_held_to_its_end_counts_whole() -> None:
    match = matcher()
    assert match.feed([value(0)] * 32)
    assert match.feed([value(0)] * 8)
    assert match.hits() == {"w0": 40}


def test_a_first_block_that_nobody_holds_ends_the_search() -> None:
    match = matcher()
    assert not match.feed([None, value(0)])
    assert match.hits() == {}


def test_an_entry_of_an_old_generation_does_not_count_and_is_named() -> None:
    match = matcher()
    assert match.feed([value(0, 1, generations=(99, 200))])
    assert match.hits() == {"w1": 1}
    assert match.unknown == {0}


def test_a_slot_without_owner_is_named() -> None:
    match = matcher()
    assert not match.feed([pack_entry(7, 1)])
    assert match.unknown == {7}


@given(st.lists(st.sets(st.sampled_from([0, 1])), max_size=40), st.integers(1, 40))
def test_hits_are_the_leading_blocks_that_a_worker_holds(held: list[set[int]], window: int) -> None:
    match = matcher()
    for start in range(0, len(held), window):
        if not match.feed([value(*sorted(slots)) or None for slots in held[start : start + window]]):
            break
    expected = {}
    for slot, (worker_id, _) in LIVE.items():
        leading = next((at for at, slots in enumerate(held) if slot not in slots), len(held))
        if leading:
            expected[worker_id] = leading
    assert match.hits() == expected


def test_the_entries_of_a_block_are_not_scanned_for_each_worker() -> None:
    """A value may have a thousand entries, and each block of a window another value."""

    class Entries(list[tuple[int, int]]):
        def __contains__(self, entry: object) -> bool:
            raise AssertionError(f"scanned for {entry}")

    match = PrefixHolders(LIVE, lambda value: Entries(unpack_entries(value)))
    assert match.feed([value(0, 1), value(1, 0), value(1)])
    assert match.hits() == {"w0": 2, "w1": 3}
