"""Simpler rules of begun prompts and of those that pass, where the pool has groups."""

from __future__ import annotations

from typing import Final
from unittest import mock

from common.contracts.types import TRIMMED, BlockId
from gpuworker.scheduling.step_scheduler import StepScheduler
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.contracts.sequence import Run, Sequence
from kvmanager.ledger import backfill, block_granter, chunked_grants, report_applier
from kvmanager.ledger.backfill import Growth, Holder, Reservation
from kvmanager.ledger.ledger_state import LedgerState

_count_lacking, _held_blocks = chunked_grants.count_lacking, Sequence.held_blocks
_admits, _may_pass, _holder_of = Reservation.admits, block_granter._may_pass, backfill.holder_of
_bind_place = StepScheduler._bind_place
_end_planned, _release_block_table = report_applier._end_planned, report_applier.release_block_table
EVERYTHING: Final = 1 << 30


# ---------------------------------------------------------------- what a begun prompt lacks


def lack_the_first_group(config: LedgerConfig, begun: Sequence) -> int:
    """The need of windows is counted once, with the first part."""
    return begun.block_pages * begun.lacking(config.block_size)


def lack_each_run_whole(config: LedgerConfig, begun: Sequence) -> int:
    """Each run needs a block at each place, as the first group does."""
    places = begun.lacking(config.block_size)
    pages = begun.block_pages + sum(run.pages for run in begun.runs if not run.checkpoints)
    return places * pages


def have_room_for_checkpoints(_config: LedgerConfig, _sequence: Sequence) -> int:
    """A begun prompt leaves checkpoints, whether or not its own blocks fit beside them."""
    return EVERYTHING


def release_the_first_group(sequence: Sequence) -> list[BlockId]:
    """A prompt that is preempted between two parts gives back the first group's blocks alone."""
    if sequence.runs and sequence.lacking(2):
        return [block for block in reversed(sequence.block_table) if block != TRIMMED]
    return _held_blocks(sequence)


def end_what_stands_beside_blocks(state: LedgerState, sequence: Sequence) -> None:
    """Who waits for a checkpoint behind the part of a begun prompt is not told that it will not come."""
    covered = len(sequence.block_table)

    def end_planned(state: LedgerState, sequence: Sequence, run: Run, count: int) -> None:
        _end_planned(state, sequence, run, min(count, covered))

    with mock.patch.object(report_applier, "_end_planned", end_planned):
        _release_block_table(state, sequence)


# ---------------------------------------------------------------- who passes


def pass_by_the_first_group(reservation: Reservation, sequence: Sequence, now: int, extra: int = 0) -> bool:
    """A sequence passes if its blocks of the first group are left over."""
    most, sequence.most_held = sequence.most_held, sequence.block_pages * sequence.max_blocks
    try:
        return _admits(reservation, sequence, now, extra)
    finally:
        sequence.most_held = most


def fit_by_the_first_group(state: LedgerState, sequence: Sequence, growth: Growth, extra: int = 0) -> bool:
    most, sequence.most_held = sequence.most_held, sequence.block_pages * sequence.max_blocks
    try:
        return _may_pass(state, sequence, growth, extra)
    finally:
        sequence.most_held = most


def pass_whenever_it_fits(reservation: Reservation, _sequence: Sequence, _now: int, _extra: int = 0) -> bool:
    """What the next sequence was promised is not looked at."""
    return reservation.until is not None


def grow_in_the_first_group(sequence: Sequence, now: int, block_size: int, released: int = 0) -> Holder:
    """Those that run are taken to bind blocks of the first group alone."""
    return _holder_of(sequence, now, block_size, released)._replace(runs=())
