"""Decode steps on the arrays of earlier ones: the same numbers as those of a step that is laid out anew."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.contracts.types import TRIMMED, BlockId, SequenceId
from gpuworker.attention.step_inputs import StagedStep, pack_pages, pack_rows
from gpuworker.memory.layout import Part
from gpuworker.native.library import best
from gpuworker.runner.decode_frames import DecodeFrame, DecodeFrames, only_decodes
from gpuworker.runner.launcher import LaidOutStep
from gpuworker.runner.native_executor import NativeExecutor
from gpuworker.sampling.rows import SampledRow
from gpuworker.sampling.sampler import SamplingBatch
from gpuworker.scheduling.batch_plan import Checkpoint, ScheduledRow, StepPlan, StepResult
from tests.support.checkpoints import checkpoint, hf_greedy
from tests.support.gpuworker.runner_harness import GREEDY, Driver, queued_on

BLOCK_SIZE, COLUMNS, TABLE_WIDTH = 4, 6, 100
CPU = torch.device("cpu")
Rows = list[ScheduledRow]


def blocks_of(start: int, trimmed: int, spare: int, shift: int) -> tuple[BlockId, ...]:
    """Return a block table that covers a position, and `spare` blocks more; `shift` makes it another one."""
    count = min(start // BLOCK_SIZE + 1 + spare, COLUMNS)
    return tuple(TRIMMED if i < min(trimmed, start // BLOCK_SIZE) else BlockId(shift + i) for i in range(count))


@st.composite
def steps(draw: st.DrawFn) -> list[Rows]:
    """Draw decode steps of the same sequences."""
    rows = st.builds(
        lambda start, *more: (start, blocks_of(start, *more)),
        st.integers(0, BLOCK_SIZE * COLUMNS - 1),
        st.integers(0, 2),
        st.integers(0, 1),
        st.sampled_from([10, 40]),
    )
    count = draw(st.integers(1, 4))
    return [
        [ScheduledRow(SequenceId(n), start, 1, blocks, True) for n, (start, blocks) in enumerate(step)]
        for step in draw(st.lists(st.lists(rows, min_size=count, max_size=count), min_size=2, max_size=5))
    ]


def laid_out(rows: Rows) -> LaidOutStep:
    """Return the arrays of a step as the runner makes them."""
    table = np.zeros((len(rows), COLUMNS), dtype=np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row.blocks)] = np.maximum(row.blocks, 0)
    start, batch_index = np.array([row.start for row in rows], np.int32), np.arange(len(rows), dtype=np.int32)[::-1]
    packed = pack_rows(start, np.ones_like(start), table, BLOCK_SIZE)
    staged = StagedStep(packed, batch_index, np.ones(len(rows), dtype=bool), TABLE_WIDTH)
    sampling = SamplingBatch([SampledRow(GREEDY, 1, ())] * len(rows), 7, CPU)
    return LaidOutStep(staged, staged.on(CPU), sampling.at(packed.context_len.astype(np.int64), batch_index), sampling)


def numbers(work: LaidOutStep, rows: Rows) -> dict[str, list[int]]:
    """Return all that a step reads; of the block tables the entries that the rows have."""
    assert work.inputs is not None
    metadata, device = work.inputs.metadata, work.inputs.metadata.device
    found: dict[str, Any] = {
        "positions": work.inputs.positions,
        "take": work.inputs.take,
        "keep": work.inputs.keep,
        "samples at": work.point.positions,
        "context": metadata.context_len,
        "context as a tensor": device.context_len,
        "slots": metadata.slot_mapping,
        "begins": metadata.query_start,
    }
    tables = {
        f"blocks {n}": table[n, : len(row.blocks)]
        for n, row in enumerate(rows)
        for table in (metadata.block_table, device.block_table)
    }
    return {name: each.tolist() for name, each in (found | tables).items()}


def over() -> Future[StepResult]:
    result: Future[StepResult] = Future()
    result.set_result(StepResult(1, {}))
    return result


@given(steps())
def test_a_moved_frame_has_the_numbers_of_a_new_layout(drawn: list[Rows]) -> None:
    first, *later = drawn
    frame = DecodeFrame(laid_out(first), first, BLOCK_SIZE, over())
    for rows in later:
        frame.move_to(rows)
        assert numbers(frame.work, rows) == numbers(laid_out(rows), rows)


# The one part of the first group, and the parts of a group whose blocks are two pages; two layers share a lane of the
# second one.
PARTS = (
    *(Part(0, 0, 1, 0, 0, 1, {0: (0,)}), Part(1, 0, 2, 0, 0, 1, {1: (0,)}), Part(1, 1, 2, 0, 0, 1, {2: (0,)})),
    *(Part(1, 1, 2, 1, 0, 2, {3: (1,)}), Part(1, 1, 2, 1, 1, 2, {4: (1,)})),
)


def with_tables(rows: Rows) -> Rows:
    """Return rows whose first group has their blocks untrimmed, and whose second one two pages for each block."""
    found = []
    for each in rows:
        full = tuple(BlockId(100 + column) if block is TRIMMED else block for column, block in enumerate(each.blocks))
        pages = tuple(
            TRIMMED if block == TRIMMED else BlockId(2 * block + page) for block in each.blocks for page in (0, 1)
        )
        found.append(each._replace(tables=(full, pages)))
    return found


def in_parts(rows: Rows) -> LaidOutStep:
    tables = [np.zeros((len(rows), COLUMNS * pages), dtype=np.int32) for pages in (1, 2)]
    for table, group in zip(tables, (0, 1), strict=True):
        for index, each in enumerate(rows):
            table[index, : len(each.tables[group])] = np.maximum(each.tables[group], 0)
    start = np.array([each.start for each in rows], np.int32)
    packed = pack_pages(start, np.ones_like(start), tables, PARTS, BLOCK_SIZE)
    return replace(laid_out(rows), staged=StagedStep(packed, start, np.ones(len(rows), dtype=bool), TABLE_WIDTH))


def read_of(step: StagedStep, rows: Rows) -> list[list[int]]:
    """Return what each part reads: the slots, and the blocks that are not trimmed."""
    packed, found = step.rows, []
    for part, (table, slots) in zip(PARTS, [(packed.block_table, packed.slot_mapping), *packed.others], strict=True):
        found.append(slots.tolist())
        for index, each in enumerate(rows):
            pages = each.tables[part.group]
            begin, end = pages.count(TRIMMED) // part.pages, len(pages) // part.pages
            found.append(table[index, begin:end].tolist())
    return found


@given(steps())
def test_a_moved_frame_has_the_pages_of_a_new_layout(drawn: list[Rows]) -> None:
    first, *later = map(with_tables, drawn)
    frame = DecodeFrame(in_parts(first), first, BLOCK_SIZE, over(), PARTS)
    for rows in later:
        frame.move_to(rows)
        assert read_of(frame.work.staged, rows) == read_of(in_parts(rows).staged, rows)


def row(sequence: int = 1, start: int = 5, length: int = 1, samples: bool = True) -> ScheduledRow:
    return ScheduledRow(SequenceId(sequence), start, length, blocks_of(start + length - 1, 0, 0, 10), samples)


@pytest.mark.parametrize("other", [row(length=2), row(samples=False)])
def test_only_steps_whose_rows_all_decode_are_repeated(other: ScheduledRow) -> None:
    assert only_decodes(StepPlan(1, (row(), row(2))))
    assert not only_decodes(StepPlan(1, (row(), other)))
    assert not only_decodes(StepPlan(1, ()))
    checkpoint = Checkpoint(SequenceId(1), (BlockId(3),))
    assert not only_decodes(StepPlan(1, (row(),), loads=(checkpoint,)))
    assert not only_decodes(StepPlan(1, (row(),), saves=(checkpoint,)))


def test_a_frame_is_taken_once_its_step_is_over_and_for_the_same_sequences_alone() -> None:
    frames, running = DecodeFrames(BLOCK_SIZE), Future[StepResult]()
    names, rows = (SequenceId(1),), [row()]
    kept = frames.keep(laid_out(rows), rows, names, running)
    assert frames.take(rows, names) is None
    running.set_result(StepResult(1, {}))
    assert frames.take(rows, (SequenceId(2),)) is None
    assert frames.take(rows, names) is kept
    frames.clear()
    assert frames.take(rows, names) is None


def test_a_frame_that_is_too_narrow_is_dropped() -> None:
    frames, names = DecodeFrames(BLOCK_SIZE), (SequenceId(1),)
    frames.keep(laid_out([row()]), [row()], names, over())
    last = BLOCK_SIZE * COLUMNS
    blocks = tuple(BlockId(n) for n in range(COLUMNS + 1))
    assert frames.take([row()._replace(start=last - 1, blocks=blocks)], names) is not None
    assert frames.take([row()._replace(start=last, blocks=blocks)], names) is None
    assert frames.take([row()], names) is None


@pytest.mark.skipif(best() is None, reason="the native library was not built")
def test_steps_of_a_steady_batch_are_described_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[int] = []
    describe = NativeExecutor._describe

    def counted(self: NativeExecutor, step: object) -> object:
        described.append(1)
        return describe(self, step)  # type: ignore[arg-type]

    monkeypatch.setattr(NativeExecutor, "_describe", counted)
    runner = queued_on(checkpoint("llama"), 4)
    driver = Driver(runner, 4)
    prompt = list(range(6, 20))
    stream = driver.add(prompt, 60)
    driver.run()
    runner.close()
    # Of 60 steps the prompt, two frames for the steps in flight, and again those two once the tables are too narrow.
    assert len(described) <= 7
    assert stream.output == hf_greedy(checkpoint("llama"), prompt, 60)
