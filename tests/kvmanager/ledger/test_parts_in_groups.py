"""Prompts that begin with a part of their blocks, and sequences that pass, where the pool has groups: exact pages.

Blocks have 4 slots. A block of the first group has 2 pages, one of the window 3, a checkpoint of states 2. A window of
8 holds four blocks at once. So a prompt of 60 tokens takes 15 * 2 + 4 * 3 = 42 pages, and 2 more for its checkpoint.
"""

from __future__ import annotations

from typing import Any

import pytest

from common.contracts.lease import GrantBatch, Inventory, InventorySequence, Reserve
from common.contracts.types import (
    TRIMMED,
    BlockId,
    Decision,
    DecisionKind,
    KvGroup,
    KvGroupKind,
    SequenceId,
    SequencePhase,
)
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger.backfill import Growth, TableGrowth, holder_of
from kvmanager.ledger.chunked_grants import comes_first, count_lacking, left_to_others
from kvmanager.ledger.ledger import Ledger
from tests.support.kvmanager.ledgers import admit, finish, make_ledger, play, prompt, reserve

SIZE = 4
FULL, WINDOW = KvGroup(KvGroupKind.FULL, 0, 2, ()), KvGroup(KvGroupKind.WINDOW, 8, 3, ())
STATE = KvGroup(KvGroupKind.STATE, 0, 2, ())
THREE = (FULL, WINDOW, STATE)
HUGE = prompt(60, start=500)


def asked(number: int, tokens: list[int], max_len: int = 0, **options: Any) -> Reserve:
    return reserve(number, tokens, max_len, block_size=SIZE, **options)


def beside_one(
    num_pages: int, groups: tuple[KvGroup, ...] = THREE, tokens: int = 7, max_len: int = 0, **options: Any
) -> Ledger:
    """Return a pool in which a sequence runs, of two places if nothing is said."""
    ledger = make_ledger(num_pages, SIZE, groups=groups, first_part=8, watermark=0.0, **options)
    assert len(admit(ledger, asked(1, prompt(tokens), max_len or tokens + 1, block_hashes=()))) == 1
    return ledger


def begun_ledger(num_pages: int = 48, **options: Any) -> Ledger:
    """Return a pool beside whose first sequence the huge prompt has begun."""
    ledger = beside_one(num_pages, **options)
    (begun,) = admit(ledger, asked(2, HUGE, 61))
    assert begun.sequence == 2
    return ledger


def live(ledger: Ledger, number: int) -> Sequence:
    return ledger.state.sequences.live[SequenceId(number)]


def grant_record(ledger: Ledger, number: int) -> Decision:
    found = (each for each in ledger.drain_decisions() if each.kind is DecisionKind.GRANT)
    return next(each for each in found if each.request_id == f"r{number}")


def trim(ledger: Ledger, number: int, count: int, **columns: Any) -> GrantBatch | None:
    """Report that leading blocks have left the window."""
    return play(ledger, trim=((SequenceId(number), count),), trim_groups=(1,), **columns)


# ---------------------------------------------------------------- the first part


def test_a_part_has_places_in_every_group_and_the_checkpoint_of_the_whole_prompt() -> None:
    """38 pages are free, 5 stay for growth: 9 places take 18 + 12, and the checkpoint 2."""
    ledger = beside_one(48)
    (granted,) = admit(ledger, asked(2, HUGE, 61))
    assert (len(granted.block_table), len(granted.runs[0])) == (9, 4)
    assert granted.runs[1] == (*[TRIMMED] * 13, granted.runs[1][13]), "the last boundary before the last token"
    assert len(granted.pages) == 9 * 1 + 4 * 2 + 1 * 1
    assert ledger.state.store.pool.available == 38 - 9 * 2 - 4 * 3 - 2
    record = grant_record(ledger, 2)
    assert record.chosen == "0 shared blocks and 32 fresh pages"
    assert "begins with a part of its prompt's blocks, and gets 12 pages more as they come free" in record.reasons
    assert (dict(record.figures)["lacking_blocks"], dict(record.figures)["checkpoints"]) == (12.0, 1.0)
    assert ledger.state.admission.blocked_by == "prompt"


@pytest.mark.parametrize(("pages", "places"), [(47, 9), (49, 10), (51, 11), (55, 13), (57, 15), (59, 15)])
def test_a_place_more_for_each_two_pages_more(pages: int, places: int) -> None:
    assert len(live(begun_ledger(pages), 2).block_table) == places


@pytest.mark.parametrize("options", [{"chunked_grants": False}, {"runway": "max"}])
def test_a_prompt_waits_where_it_may_not_begin(options: dict[str, Any]) -> None:
    assert admit(beside_one(48, **options), asked(2, HUGE, 61)) == ()


def test_nobody_begins_on_what_those_that_run_may_come_to_hold() -> None:
    """The first one may bind two places more, of 5 pages each. So the part has three places fewer."""
    ledger = beside_one(53)
    (granted,) = admit(ledger, asked(2, HUGE, 61))
    assert len(granted.block_table) == 12
    ledger = beside_one(53, max_len=13)
    (granted,) = admit(ledger, asked(2, HUGE, 61))
    assert len(granted.block_table) == 9


def test_checkpoints_that_do_not_fit_beside_the_whole_sequence_are_left_out() -> None:
    """The sequence takes 15 pages of 16 in the end: its checkpoint of 2 would keep it from its last block for ever."""
    groups = (KvGroup(KvGroupKind.FULL, 0, 1, ()), STATE)
    for pages, places, checkpoints in ((16, 12, 0), (17, 11, 1)):
        ledger = beside_one(pages, groups, tokens=15)
        (granted,) = admit(ledger, asked(2, HUGE, 61))
        assert len(granted.block_table) == places
        assert sum(block != TRIMMED for block in granted.runs[0]) == checkpoints


def test_a_part_goes_without_checkpoints_rather_than_not_at_all() -> None:
    """Of 48 pages 15 are taken, and 5 stay for growth: 28 are eight places, the least."""
    (granted,) = admit(beside_one(48, tokens=11), asked(2, HUGE, 61))
    assert len(granted.block_table) == 8
    assert granted.runs[1] == ()


# ---------------------------------------------------------------- what it lacks


def test_what_it_lacks_is_what_it_holds_at_once_in_every_group() -> None:
    ledger = begun_ledger()
    begun, config = live(ledger, 2), ledger.state.config
    assert count_lacking(config, begun) == 6 * 2, "the window has its four blocks"
    trim(ledger, 2, 2)
    assert count_lacking(config, begun) == 6 * 2 + 2 * 3
    assert ledger.state.sequences.find_begun_prompt() is begun


def test_a_part_that_is_shorter_than_a_window_lacks_blocks_of_it() -> None:
    """A window of 37 holds eleven blocks at once, and the part has eight."""
    ledger = beside_one(44, (FULL, KvGroup(KvGroupKind.WINDOW, 37, 1, ())), tokens=19)
    (granted,) = admit(ledger, asked(2, HUGE, 61))
    assert (len(granted.block_table), len(granted.runs[0])) == (8, 8)
    assert count_lacking(ledger.state.config, live(ledger, 2)) == 7 * 2 + 3


def test_all_that_it_lacks_is_leased_when_the_other_one_ends() -> None:
    ledger = begun_ledger()
    batch = finish(ledger, 1)
    assert batch is not None
    # Of the places that it has, five have no block of the window yet: one of these is leased besides.
    assert ledger.state.store.pool.leased == batch.lease_target == 12 + 3


def test_its_next_chunk_is_leased_as_far_as_others_leave_that() -> None:
    ledger = begun_ledger(56)
    finish(ledger, 1)
    assert ledger.state.store.pool.leased == 2 * 2 + 3
    play(ledger, stalled=(SequenceId(2),), lease_want=24)
    assert ledger.state.store.pool.leased == 16, "all that are left"


def test_a_place_of_a_window_is_leased_before_any_part_is_dealt_out() -> None:
    ledger = begun_ledger()
    batch = play(ledger, stalled=(SequenceId(2),), lease_want=3)
    assert batch is not None
    assert len(batch.lease) >= 3
    assert left_to_others(ledger.state, live(ledger, 2)) == 3


def test_others_wait_until_all_is_leased_that_it_lacks_and_what_is_left_to_others() -> None:
    ledger = begun_ledger()
    begun = live(ledger, 2)
    finish(ledger, 1)
    waiting = Sequence(asked(3, prompt(3, start=900)), 9, SIZE, 0.0, THREE)
    assert ledger.state.store.pool.leased == 15
    assert not comes_first(ledger.state, begun, waiting)
    ledger.state.store.pool.leased = 14
    assert comes_first(ledger.state, begun, waiting)


# ---------------------------------------------------------------- ends, sessions


def test_a_preemption_between_two_parts_gives_every_page_back() -> None:
    ledger = begun_ledger()
    trim(ledger, 2, 1)
    assert ledger.pool_counts().in_use == 10 + 32 - 3
    play(ledger, preempted=((SequenceId(2), 60),))
    assert ledger.pool_counts().in_use == 10
    assert [len(run.table) for run in live(ledger, 2).runs] == [0, 0]


def test_who_waits_for_a_checkpoint_behind_the_part_waits_no_more_once_it_is_preempted() -> None:
    ledger = begun_ledger(max_num_seqs=2, least_saved=8)
    state = ledger.state
    state.sequences.planned.wait(SequenceId(9), live(ledger, 2).block_hashes[13])
    twin = state.sequences.register_sequence(asked(9, HUGE, 61), 9, 0.0)
    assert SequenceId(9) in state.sequences.planned.awaited
    play(ledger, preempted=((SequenceId(2), 60),))
    assert SequenceId(9) not in state.sequences.planned.awaited
    assert twin.phase is SequencePhase.WAITING
    assert SequenceId(9) in state.sequences.queue


def test_a_rebuild_knows_the_begun_prompt_and_its_checkpoint_behind_the_table() -> None:
    ledger = make_ledger(48, SIZE, groups=THREE)
    table, run = tuple(range(0, 18, 2)), tuple(range(18, 30, 3))
    states = (*[TRIMMED] * 13, 30)
    pages = [*range(18), *range(18, 30), 30, 31]
    groups = [*[0] * 9, *[1] * 4, 2]
    running = InventorySequence(
        asked(2, HUGE, 61), SequencePhase.RUNNING, 1, tuple(map(BlockId, table)), 0,
        (tuple(map(BlockId, run)), tuple(map(BlockId, states))),
    )  # fmt: skip
    ledger.rebuild(Inventory((running,), block_groups=groups, block_pages=tuple(map(BlockId, pages))))
    ledger.check_invariants()
    begun = ledger.state.sequences.find_begun_prompt()
    assert begun is live(ledger, 2)
    batch = play(ledger, stalled=(SequenceId(2),), lease_want=8)
    assert batch is not None
    assert len(batch.lease) >= 12


# ---------------------------------------------------------------- who passes


def test_growth_counts_what_is_held_at_once_and_what_is_bound_in_all() -> None:
    ledger = make_ledger(100, SIZE, groups=THREE)
    admit(ledger, asked(1, prompt(15), 40, block_hashes=()))
    holder = holder_of(live(ledger, 1), 0, SIZE)
    assert (holder.pages, holder.growth, holder.room) == (2, 6, 1)
    assert holder.runs == (TableGrowth(3, 0, 6, 1),), "the window holds its four blocks, and binds six more"
    assert [holder.grown(steps, SIZE) for steps in (1, 2, 5, 6, 100)] == [0, 2, 2, 4, 12]
    growth = Growth([live(ledger, 1)], 0, SIZE)
    assert [growth.blocks_after(steps) for steps in (1, 2, 6)] == [0, 2, 4]
    assert [growth.bound_after(steps) for steps in (1, 2, 6)] == [0, 5, 10]


def test_one_passes_whose_pages_of_all_groups_are_left_over() -> None:
    """27 pages are free and 10 come: 42 and their slack leave five, as many as one place takes."""
    for pages, passes in ((52, True), (51, False)):
        ledger = beside_one(pages, (FULL, WINDOW), chunked_grants=False)
        assert admit(ledger, asked(2, HUGE, 60)) == ()
        granted = admit(ledger, asked(3, [7], 4))
        assert [each.sequence for each in granted] == ([3] if passes else [])


def test_one_that_ends_in_time_passes_and_the_pages_of_its_checkpoint_count() -> None:
    ledger = beside_one(48, max_len=30, chunked_grants=False)
    assert admit(ledger, asked(2, HUGE, 60)) == ()
    (granted,) = admit(ledger, asked(3, prompt(9, start=900), 12))
    assert granted.sequence == 3
    assert granted.runs[1] == (TRIMMED, granted.runs[1][1])
    record = grant_record(ledger, 3)
    assert dict(record.figures)["passes"] == 1.0
    assert "tails" not in dict(record.figures), "it would hold that until its end"


@pytest.mark.parametrize(("pages", "checkpoints"), [(61, None), (62, 0), (63, 0), (64, 1)])
def test_who_passes_leaves_out_a_checkpoint_that_the_next_one_would_lack(pages: int, checkpoints: int | None) -> None:
    """It outlasts the first one. Beside 42 pages and 5 of slack, it takes 15, and its checkpoint 2."""
    ledger = beside_one(pages, tokens=31, chunked_grants=False)
    assert admit(ledger, asked(2, HUGE, 60)) == ()
    granted = admit(ledger, asked(3, prompt(9, start=900), 12))
    found = [sum(block != TRIMMED for block in each.runs[1]) for each in granted]
    assert found == ([] if checkpoints is None else [checkpoints])


@pytest.mark.parametrize("least_saved", [4, 64])
def test_one_that_is_to_wait_for_a_planned_checkpoint_does_not_pass(least_saved: int) -> None:
    ledger = beside_one(48, max_len=30, chunked_grants=False, least_saved=least_saved)
    assert admit(ledger, asked(2, HUGE, 60)) == ()
    waiting = asked(3, prompt(9, start=900), 12)
    ledger.state.sequences.planned.plan(waiting.block_hashes[1:2], SequenceId(1))
    assert len(admit(ledger, waiting)) == (least_saved == 64)
    assert (SequenceId(3) in ledger.state.sequences.queue) == (least_saved == 4)


def test_where_every_layer_has_a_window_a_small_one_passes_too() -> None:
    """A window of 8 takes four blocks. Of six, the first one holds two, and the next one lacks one."""
    ledger = make_ledger(6, SIZE, window=8, watermark=0.0)
    admit(ledger, asked(1, prompt(7), 20, block_hashes=()))
    assert admit(ledger, asked(2, HUGE, 61)) == ()
    assert [each.sequence for each in admit(ledger, asked(3, [7, 8], 4))] == [3]
    assert admit(ledger, asked(4, [9, 8], 60)) == (), "it may outlast the first one"
