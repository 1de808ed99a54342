"""How far workers hold a chain: windows, monotone narrowing, and entries of dead generations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.index_format import pack_entry, unpack_entries
from router.core.prefix_match import PrefixMatch, RunMatch, windows

LIVE = {0: ("w0", 100), 1: ("w1", 200)}


def value(*slots: int, generations: tuple[int, ...] = (100, 200)) -> bytes:
    return b"".join(pack_entry(slot, generations[slot]) for slot in slots)


def matcher() -> PrefixMatch:
    return PrefixMatch(LIVE, unpack_entries)


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


def runs(length: int, window: int = 8, block_size: int = 4) -> RunMatch:
    return RunMatch(LIVE, unpack_entries, window, block_size, length)


def test_with_a_window_a_run_counts_that_reaches_back_as_far_as_a_token_sees() -> None:
    """With a window of 8, the first token behind 5 blocks of 4 sees the last two of them."""
    match = runs(9)
    assert match.feed([None, None, None, value(0), value(0, 1)])
    assert match.feed([value(1), None, value(0), None])
    assert match.hits() == {"w0": 5, "w1": 6}


def test_a_run_that_is_too_short_does_not_count() -> None:
    match = runs(6)
    match.feed([value(0), None, None, value(0), None, value(0)])
    assert match.hits() == {"w0": 1}


def test_a_run_up_to_the_last_block_counts_if_it_counts_without_that_block() -> None:
    """The manager gives no hit on the block of the last token; the hits before it need a block more."""
    short, long = runs(5), runs(5)
    short.feed([None, None, None, value(0), value(0)])
    long.feed([None, None, value(0), value(0), value(0)])
    assert (short.hits(), long.hits()) == ({}, {"w0": 5})


def test_entries_of_other_generations_end_no_run_and_are_named() -> None:
    match = runs(4)
    match.feed([value(0), value(0, 1, generations=(100, 7)), value(0)])
    assert match.hits() == {"w0": 3}
    assert match.unknown == {1}


@given(st.data(), st.integers(1, 20), st.sampled_from([1, 2, 4]), st.integers(1, 24))
def test_runs_are_those_that_a_search_of_each_depth_finds(
    data: st.DataObject, window: int, block_size: int, length: int
) -> None:
    held = [data.draw(st.lists(st.booleans(), min_size=length, max_size=length)) for _ in LIVE]
    match = runs(length, window, block_size)
    values = [value(*(slot for slot in LIVE if held[slot][at])) or None for at in range(length)]
    cut = data.draw(st.integers(0, length))
    match.feed(values[:cut])
    match.feed(values[cut:])
    wanted = {}
    for slot, (worker, _) in LIVE.items():
        for depth in range(1, length + 1):
            # Position p sees p - window + 1 to p. At the end of all blocks, the last token may be in the last one.
            next_token = block_size * (depth - (depth == length))
            seen = {max(0, at) // block_size for at in range(next_token - window + 1, next_token)}
            if held[slot][depth - 1] and all(held[slot][block] for block in {*seen, depth - 1} if block < depth):
                wanted[worker] = depth
    assert match.hits() == wanted
