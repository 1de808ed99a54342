"""How the attention of a step is cut into items: exact tables on tiny steps, and what holds for any step."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuworker.attention.interface import AttentionMetadata
from gpuworker.attention.step_inputs import attention_arrays, attention_metadata, pack_rows, to_device
from gpuworker.attention.work_list import Cut, WorkList, work_list

BLOCK = 4
WHOLE = Cut(queries=1, tile=8, smallest=1000, items=1)  # cuts nothing
STACKED = Cut(queries=4, tile=8, smallest=1000, items=1)


def step_of(rows: list[tuple[int, int]], table: list[list[int]] | None = None) -> AttentionMetadata:
    """A step of rows (start, length); each has blocks of its own unless `blocks` says otherwise."""
    start, length = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    width = -(-int((start + length).max(initial=1)) // BLOCK)
    blocks = np.arange(len(rows) * width).reshape(len(rows), width) if table is None else np.array(table)
    packed = pack_rows(start, length, blocks.astype(np.int32), BLOCK)
    return attention_metadata(packed, to_device(attention_arrays(packed), torch.device("cpu")))


def items(table: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> list[tuple[int, ...]]:
    return [tuple(row) for row in table.tolist()]


def test_decodes_that_are_not_cut_are_an_item_each() -> None:
    work = work_list(step_of([(4, 1), (10, 1)]), BLOCK, WHOLE, STACKED, None)
    # row, first query, queries, begin, end, lowest, highest, part; the longer chunk first
    assert items(work.single) == [(1, 1, 1, 0, 11, 10, 10, -1), (0, 0, 1, 0, 5, 4, 4, -1)]
    assert items(work.many) == []
    assert items(work.queries) == [(0, 4, -1, 1), (1, 10, -1, 1)]
    assert (work.partials, work.merged) == (0, 0)


def test_prefills_are_cut_into_blocks_of_queries_that_see_up_to_their_own_position() -> None:
    work = work_list(step_of([(3, 6), (0, 2)]), BLOCK, WHOLE, STACKED, None)
    assert items(work.many) == [(0, 4, 2, 0, 9, 7, 8, -1), (0, 0, 4, 0, 7, 3, 6, -1), (1, 6, 2, 0, 2, 0, 1, -1)]
    assert [query[1] for query in items(work.queries)] == [3, 4, 5, 6, 7, 8, 0, 1]


def test_a_long_context_is_cut_into_equal_chunks_of_whole_tiles() -> None:
    """34 + 1 positions over 2 items wanted are 18 each: two chunks of the long row, rounded up to tiles of 8."""
    work = work_list(step_of([(0, 1), (33, 1)]), BLOCK, Cut(1, 8, 8, 2), STACKED, None)
    assert items(work.single) == [(1, 1, 1, 0, 24, 33, 33, 0), (1, 1, 1, 24, 34, 33, 33, 1), (0, 0, 1, 0, 1, 0, 0, -1)]
    assert items(work.queries) == [(0, 0, -1, 1), (1, 33, 0, 2)]
    assert (work.partials, work.merged) == (2, 2)


def test_no_chunk_is_cut_shorter_than_is_worth_it() -> None:
    assert chunks(34, Cut(1, 8, 32, 10)) == [(0, 34)]
    assert chunks(64, Cut(1, 8, 32, 10)) == [(0, 32), (32, 64)]


def test_what_is_hardly_longer_than_a_chunk_is_not_cut() -> None:
    """65 positions over 2 items wanted are 33 each; nothing is gained by cutting 49 or fewer of them."""
    assert chunks(49, Cut(1, 1, 1, 2), rest=16) == [(0, 49)]
    assert chunks(50, Cut(1, 1, 1, 2), rest=15) == [(0, 25), (25, 50)]


def chunks(context: int, cut: Cut, rest: int = 0) -> list[tuple[int, ...]]:
    """How the context of a decode is cut, beside another one that has `rest`."""
    rows = [(context - 1, 1)] + [(rest - 1, 1)] * (rest > 0)
    work = work_list(step_of(rows), BLOCK, cut, STACKED, None)
    return sorted(row[3:5] for row in items(work.single) if row[0] == 0)


def test_a_prefill_with_few_queries_on_a_long_context_is_cut_too() -> None:
    work = work_list(step_of([(30, 2)]), BLOCK, WHOLE, Cut(4, 8, 8, 2), None)
    assert items(work.many) == [(0, 0, 2, 0, 16, 30, 31, 0), (0, 0, 2, 16, 32, 30, 31, 1)]
    assert items(work.queries) == [(0, 30, 0, 2), (1, 31, 2, 2)]
    assert (work.partials, work.merged) == (4, 2)


def test_a_shared_prefix_is_one_item_and_its_rows_keep_their_tails() -> None:
    table = [[1, 2, 3], [7, 8, 9], [1, 2, 5]]
    work = work_list(step_of([(9, 1), (11, 1), (8, 1)], table), BLOCK, WHOLE, STACKED, 8)
    assert items(work.many) == [(0, 0, 2, 0, 8, 8, 9, 0)]
    assert items(work.single) == [(1, 2, 1, 0, 12, 11, 11, -1), (0, 0, 1, 8, 10, 9, 9, 1), (2, 1, 1, 8, 9, 8, 8, 1)]
    assert items(work.queries) == [(0, 9, 0, 2), (2, 8, 2, 2), (1, 11, -1, 1)]
    assert (work.partials, work.merged) == (4, 2)


def test_nested_prefixes_number_their_parts_from_the_outside_in() -> None:
    table = [[1, 2, 3, 8], [1, 2, 3, 9], [1, 2, 6, 7]]
    work = work_list(step_of([(13, 1), (12, 1), (12, 1)], table), BLOCK, WHOLE, STACKED, 4)
    assert items(work.many) == [(0, 0, 3, 0, 8, 12, 13, 0), (0, 0, 2, 8, 12, 12, 13, 1)]
    assert sorted(row[3:5] + row[7:] for row in items(work.single)) == [(8, 13, 1), (12, 13, 2), (12, 14, 2)]
    assert [query[2:] for query in items(work.queries)] == [(0, 3), (3, 3), (6, 2)]


def test_a_prefix_with_more_rows_than_an_item_holds_takes_several() -> None:
    table = [[1, 2, 10 + row] for row in range(5)]
    work = work_list(step_of([(8, 1)] * 5, table), BLOCK, WHOLE, STACKED, 8)
    assert items(work.many) == [(0, 0, 4, 0, 8, 8, 8, 0), (4, 4, 1, 0, 8, 8, 8, 0)]


def test_a_padding_row_is_an_item_that_sees_nothing() -> None:
    step = step_of([(4, 1), (-1, 1)], [[3, 4], [0, 0]])
    work = work_list(step, BLOCK, WHOLE, STACKED, None)
    assert items(work.single) == [(0, 0, 1, 0, 5, 4, 4, -1), (1, 1, 1, 0, 0, -1, -1, -1)]


def test_a_step_without_rows() -> None:
    packed = pack_rows(*(np.zeros(0, dtype=np.int32),) * 2, np.zeros((0, 0), dtype=np.int32), BLOCK)
    step = attention_metadata(packed, to_device(attention_arrays(packed), torch.device("cpu")))
    work = work_list(step, BLOCK, WHOLE, STACKED, 1)
    assert (len(work.single), len(work.many), len(work.queries), work.partials, work.merged) == (0, 0, 0, 0, 0)


def seen(work: WorkList, step: AttentionMetadata) -> Counter[tuple[int, int, int]]:
    """How often each (token, block, offset) is attended; parts and partial results are checked on the way."""
    found: Counter[tuple[int, int, int]] = Counter()
    slots: Counter[int] = Counter()
    for row, first, count, begin, end, lowest, highest, part in items(np.concatenate((work.single, work.many))):
        chosen = work.queries[first : first + count]
        assert (lowest, highest) == (chosen[:, 1].min(), chosen[:, 1].max())
        for token, position, partial, parts in chosen.tolist():
            assert (part == -1) == (parts == 1) == (partial == -1)
            if part >= 0:
                assert part < parts
                slots[partial + part] += 1
            at = np.arange(begin, min(end, position + 1))
            found.update(
                (token, block, offset)
                for block, offset in zip(
                    step.block_table[row, at // BLOCK].tolist(), (at % BLOCK).tolist(), strict=True
                )
            )
    assert slots == Counter(range(work.partials))
    assert all(query[3] == 1 for query in items(work.queries[work.merged :]))
    return found


@st.composite
def steps(draw: st.DrawFn) -> AttentionMetadata:
    """Decodes that share prefixes of a tree of blocks, or pad, and prefills behind them."""
    trunk = list(range(1, 13))
    rows, table = [], []
    for row in range(draw(st.integers(0, 8))):
        shared = draw(st.integers(0, 12))
        branch = draw(st.integers(0, 2)) * 20
        table.append([block + branch * (at > 5) for at, block in enumerate(trunk[:shared])])
        table[-1] += [100 + 12 * row + at for at in range(12 - shared)]
        rows.append((draw(st.integers(-1, 47)), 1))
    for row in range(draw(st.integers(0, 3))):
        length = draw(st.integers(2, 20))
        rows.append((draw(st.integers(0, 48 - length)), length))
        table.append([300 + 12 * row + at for at in range(12)])
    return step_of(rows or [(0, 1)], table or [list(range(12))])


@settings(deadline=None)
@given(
    step=steps(),
    single=st.builds(Cut, st.just(1), st.sampled_from([4, 16]), st.sampled_from([8, 32]), st.integers(1, 12)),
    many=st.builds(Cut, st.integers(1, 5), st.sampled_from([4, 16]), st.sampled_from([8, 32]), st.integers(1, 12)),
    worth=st.none() | st.integers(1, 64),
)
def test_every_query_sees_each_slot_of_its_context_once(
    step: AttentionMetadata, single: Cut, many: Cut, worth: int | None
) -> None:
    expected: Counter[tuple[int, int, int]] = Counter()
    for row in range(step.num_rows):
        first, last = step.query_start[row : row + 2].tolist()
        for token in range(first, last):
            at = np.arange(step.context_len[row] - (last - 1 - token))
            pairs = zip(step.block_table[row, at // BLOCK].tolist(), (at % BLOCK).tolist(), strict=True)
            expected.update((token, block, offset) for block, offset in pairs)
    work = work_list(step, BLOCK, single, many, worth)
    assert seen(work, step) == expected
    assert len(work.single) <= step.num_decodes + single.items
