"""The blocks of a draft model: exact ids on tiny stores, and no block lost or given twice, whatever is asked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.contracts.types import BlockId, SequenceId
from gpuworker.scheduling.draft_store import DraftStore
from gpuworker.scheduling.drafting import Speculation
from gpuworker.scheduling.model_drafter import ModelDrafter, Seat, Trust


def made() -> ModelDrafter:
    return ModelDrafter((1, 2, 3), Speculation(), Trust())


def seat(drafter: ModelDrafter) -> Seat:
    assert drafter.seat is not None
    return drafter.seat


def test_a_sequence_gets_blocks_as_it_grows() -> None:
    store, one = DraftStore(4, block_size=4, seats=2), made()
    assert store.place(one, 5) == []
    assert (seat(one).blocks, store.free_blocks) == ((0, 1), 2)
    assert store.place(one, 8) == []
    assert seat(one).blocks == (0, 1)
    assert store.place(one, 9) == []
    assert seat(one).blocks == (0, 1, 2)


def test_the_sequence_that_drafted_longest_ago_loses_its_blocks() -> None:
    store, one, two, three = DraftStore(3, 4, seats=3), made(), made(), made()
    store.place(one, 4)
    store.place(two, 4)
    store.place(one, 4)
    assert store.place(three, 8) == [SequenceId(1)]
    assert two.seat is None
    assert seat(three).blocks == (1, 2)


def test_those_that_are_kept_lose_nothing() -> None:
    store, one, two = DraftStore(2, 4, seats=2), made(), made()
    store.place(one, 8)
    assert store.place(two, 4, kept={seat(one).sequence}) is None
    assert (two.seat, seat(one).blocks) == (None, (0, 1))


def test_a_text_longer_than_the_store_takes_nothing_from_others() -> None:
    store, one, two = DraftStore(2, 4, seats=2), made(), made()
    store.place(one, 4)
    assert store.place(two, 12) is None
    assert seat(one).blocks == (0,)


def test_a_seat_is_taken_where_none_is_free() -> None:
    store, one, two = DraftStore(8, 4, seats=1), made(), made()
    store.place(one, 4)
    assert store.place(two, 4) == [SequenceId(0)]
    assert (one.seat, seat(two).sequence) == (None, SequenceId(1))


def test_what_is_released_comes_back_and_is_taken_again_anew() -> None:
    store, one = DraftStore(2, 4, seats=1), made()
    store.place(one, 8)
    assert store.release(one) == SequenceId(0)
    assert store.release(one) is None
    assert store.free_blocks == 2
    store.place(one, 4)
    assert seat(one) == Seat(SequenceId(1), (BlockId(0),), 0, 0)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30), st.booleans()), max_size=60))
def test_blocks_are_neither_lost_nor_given_twice(asked: list[tuple[int, int, bool]]) -> None:
    store, drafters = DraftStore(6, 4, seats=3), [made() for _ in range(5)]
    for number, positions, kept in asked:
        drafter = drafters[number]
        seated = {seat(each).sequence for each in drafters if each.seat is not None}
        if not positions:
            store.release(drafter)
        else:
            before = [each.seat for each in drafters]
            lost = store.place(drafter, positions, seated if kept else ())
            if lost is None:
                assert [each.seat for each in drafters] == before
            else:
                assert len(seat(drafter).blocks) * 4 >= positions
                assert not kept or not lost
        held = [block for each in drafters if each.seat is not None for block in each.seat.blocks]
        assert len(set(held)) == len(held) == 6 - store.free_blocks
        assert sum(each.seat is not None for each in drafters) <= 3
