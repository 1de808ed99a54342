"""The blocks of a draft model: exact ids on tiny stores, and no block lost or given twice, whatever is asked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.contracts.types import BlockId, SequenceId
from gpuworker.scheduling.draft_store import DraftStore
from gpuworker.scheduling.drafting import Speculation
from gpuworker.scheduling.model_drafter import DraftState, ModelDrafter, Trust


def made() -> ModelDrafter:
    return ModelDrafter((1, 2, 3), Speculation(), Trust())


def state(drafter: ModelDrafter) -> DraftState:
    assert drafter.state is not None
    return drafter.state


def test_a_sequence_gets_blocks_as_it_grows() -> None:
    store, one = DraftStore(4, block_size=4, max_num_seqs=2), made()
    assert store.place(one, 5) == []
    assert (state(one).blocks, store.free_blocks) == ((0, 1), 2)
    assert store.place(one, 8) == []
    assert state(one).blocks == (0, 1)
    assert store.place(one, 9) == []
    assert state(one).blocks == (0, 1, 2)


def test_the_sequence_that_drafted_longest_ago_loses_its_blocks() -> None:
    store, one, two, three = DraftStore(3, 4, max_num_seqs=3), made(), made(), made()
    store.place(one, 4)
    store.place(two, 4)
    store.place(one, 4)
    assert store.place(three, 8) == [SequenceId(1)]
    assert two.state is None
    assert state(three).blocks == (1, 2)


def test_those_that_are_kept_lose_nothing() -> None:
    store, one, two = DraftStore(2, 4, max_num_seqs=2), made(), made()
    store.place(one, 8)
    assert store.place(two, 4, kept={state(one).sequence}) is None
    assert (two.state, state(one).blocks) == (None, (0, 1))


def test_a_text_longer_than_the_store_takes_nothing_from_others() -> None:
    store, one, two = DraftStore(2, 4, max_num_seqs=2), made(), made()
    store.place(one, 4)
    assert store.place(two, 12) is None
    assert state(one).blocks == (0,)


def test_a_sequence_loses_its_blocks_where_there_is_no_room() -> None:
    store, one, two = DraftStore(8, 4, max_num_seqs=1), made(), made()
    store.place(one, 4)
    assert store.place(two, 4) == [SequenceId(0)]
    assert (one.state, state(two).sequence) == (None, SequenceId(1))


def test_what_is_released_comes_back_and_is_taken_again_anew() -> None:
    store, one = DraftStore(2, 4, max_num_seqs=1), made()
    store.place(one, 8)
    assert store.release(one) == SequenceId(0)
    assert store.release(one) is None
    assert store.free_blocks == 2
    store.place(one, 4)
    assert state(one) == DraftState(SequenceId(1), (BlockId(0),), 0, 0)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30), st.booleans()), max_size=60))
def test_blocks_are_neither_lost_nor_given_twice(asked: list[tuple[int, int, bool]]) -> None:
    store, drafters = DraftStore(6, 4, max_num_seqs=3), [made() for _ in range(5)]
    for number, positions, kept in asked:
        drafter = drafters[number]
        holders = {state(each).sequence for each in drafters if each.state is not None}
        if not positions:
            store.release(drafter)
        else:
            before = [each.state for each in drafters]
            lost = store.place(drafter, positions, holders if kept else ())
            if lost is None:
                assert [each.state for each in drafters] == before
            else:
                assert len(state(drafter).blocks) * 4 >= positions
                assert not kept or not lost
        held = [block for each in drafters if each.state is not None for block in each.state.blocks]
        assert len(set(held)) == len(held) == 6 - store.free_blocks
        assert sum(each.state is not None for each in drafters) <= 3
