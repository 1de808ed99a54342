"""A worker whose pool has groups of layers: exact pages on tiny pools.

Blocks have 4 slots. One of the first group has 2 pages, one of the run 3. A window of 6 reads the run: position 10
reads 5 to 10, so the first block is behind it.
"""

from __future__ import annotations

from typing import Any

import pytest

from common.contracts.errors import InvalidRequest, ProtocolViolation
from common.contracts.lease import Admit, CachedBlock, GrantBatch
from common.contracts.types import TRIMMED, BlockId, KvGroup, KvGroupKind, SequenceId
from gpuworker.scheduling.drafting import Speculation
from gpuworker.scheduling.outcomes import Applied
from tests.suites.protocol.agent_copies import agent_key
from tests.support.gpuworker.agent_harness import Driver, blocks, keys, report_of
from tests.support.gpuworker.drafted_rows import FIRST, drafting, sampled

FULL, WINDOW = KvGroup(KvGroupKind.FULL, 0, 2, ()), KvGroup(KvGroupKind.WINDOW, 6, 3, ())
GROUPS = (FULL, WINDOW)


def admission(sequence: int, table: list[int], run: list[int], pages: list[int], shared: int = 0) -> Admit:
    cached = shared * 4
    return Admit(SequenceId(sequence), blocks(table), shared, cached, runs=(blocks(run),), pages=blocks(pages))


def granted(worker: Driver, *admits: Admit) -> Applied:
    return worker.agent.apply_grant(GrantBatch(worker.lease_target, admit=admits))


def begun(**config: Any) -> Driver:
    """Return a worker with a sequence of ten tokens that has two places of its tables, and a pool for a third."""
    worker = Driver(num_blocks=40, groups=GROUPS, **config)
    worker.submit(0, range(10), max_tokens=12)
    granted(worker, admission(0, [0, 2], [4, 7], [1, 3, 5, 6, 8, 9]))
    worker.lease([10, 11, 12, 13, 14])
    return worker


def test_a_row_has_the_pages_of_each_table() -> None:
    (row,) = begun().plan().rows
    assert (row.start, row.length) == (0, 10)
    assert row.blocks == (0, 2, 10)
    assert row.tables == ((0, 1, 2, 3, 10, 11), (4, 5, 6, 7, 8, 9, 12, 13, 14))


def test_a_place_is_bound_in_every_group() -> None:
    worker = begun()
    report_of(worker)
    worker.plan()
    report = report_of(worker)
    assert (report.bind, report.bind_groups, report.bind_pages) == (((0, 10), (0, 12)), (0, 1), (11, 13, 14))


def test_a_place_is_bound_in_every_group_or_in_none() -> None:
    worker = Driver(num_blocks=40, groups=GROUPS)
    worker.submit(0, range(10), max_tokens=12)
    granted(worker, admission(0, [0, 2], [4, 7], [1, 3, 5, 6, 8, 9]))
    worker.lease([10, 11, 12, 13])
    first = worker.plan()
    assert [(row.start, row.length, row.blocks) for row in first.rows] == [(0, 8, (0, 2))]
    assert worker.agent.plan() is None
    assert (worker.agent.stalled, worker.agent.counts().pool) == ((), 4), "who has a step in flight is not stalled"
    worker.complete(first)
    assert worker.agent.plan() is None
    assert (worker.agent.stalled, worker.agent.counts().pool) == ((0,), 4)
    worker.lease([14], target=5)
    assert worker.rows() == [(0, 8, 2, (0, 2, 10), True)]


def test_a_run_that_is_shorter_is_bound_where_it_ends() -> None:
    worker = Driver(num_blocks=40, groups=GROUPS)
    worker.submit(0, range(10), max_tokens=12)
    granted(worker, admission(0, [0, 2, 4], [6, 9], [1, 3, 5, 7, 8, 10, 11]))
    worker.lease([20, 21, 22])
    (row,) = worker.plan().rows
    assert (row.length, row.tables[1]) == (10, (6, 7, 8, 9, 10, 11, 20, 21, 22))
    report = report_of(worker)
    assert (report.bind, report.bind_groups, report.bind_pages) == (((0, 20),), (1,), (21, 22))


def test_seals_of_a_place_begin_with_the_first_group() -> None:
    worker = begun()
    worker.step()
    first, second = keys(range(8), 4)
    assert report_of(worker).seal == ((0, first), (4, first), (2, second), (7, second))


def test_a_run_is_trimmed_and_the_first_group_is_not() -> None:
    worker = begun()
    worker.step()
    report = report_of(worker)
    assert (report.trim, report.trim_groups) == (((0, 1),), (1,))
    (row,) = worker.plan().rows
    assert row.blocks == (0, 2, 10)
    assert row.tables[1] == (*[TRIMMED] * 3, 7, 8, 9, 12, 13, 14)
    (entry,) = worker.agent.inventory().sequences
    assert (entry.block_table, entry.runs) == ((0, 2, 10), ((TRIMMED, 7, 12),))


def test_what_a_step_in_flight_reads_is_not_trimmed() -> None:
    worker = begun()
    first, second = worker.plan(), worker.plan()
    worker.complete(first)
    assert second.rows[0].start == 10
    (entry,) = worker.agent.inventory().sequences
    assert entry.runs == ((TRIMMED, 7, 12),), "position 10 reads block 1"


def test_the_want_counts_pages() -> None:
    """21 of 22 tokens have a slot: six places, and two of them are there."""
    worker = Driver(num_blocks=60, groups=GROUPS)
    worker.submit(0, range(6), max_tokens=16)
    granted(worker, admission(0, [0, 2], [4, 7], [1, 3, 5, 6, 8, 9]))
    assert report_of(worker).lease_want == (6 - 2) * 5
    worker.step()
    assert report_of(worker).lease_want == (6 - 2) * 5


def test_what_can_never_run_is_refused_in_pages() -> None:
    worker = Driver(num_blocks=23, groups=GROUPS)
    with pytest.raises(InvalidRequest, match=r"\(prompt 20\) need 24 pages; the worker has 23"):
        worker.submit(0, range(20), max_tokens=4)


# ---------------------------------------------------------------- what an inventory has


def ended(worker: Driver) -> None:
    worker.step()
    worker.agent.cancel_sequence(SequenceId(0))
    assert worker.agent.departures().forgotten == (0,)


def test_an_inventory_names_every_page_of_held_and_claimed_blocks() -> None:
    worker = begun()
    worker.step()
    inventory = worker.agent.inventory()
    first, second = keys(range(8), 4)
    assert inventory.cached_blocks == (
        CachedBlock(BlockId(0), first, -1, 1),
        CachedBlock(BlockId(2), second, 0, 1),
        CachedBlock(BlockId(4), first, 0, 1),
        CachedBlock(BlockId(7), second, 1, 1),
    )
    assert inventory.block_groups == (0, 0, 0, 1, 1, 1)
    assert inventory.block_pages == (0, 1, 2, 3, 10, 11, 7, 8, 9, 12, 13, 14, 4, 5, 6)
    assert inventory.pool == ()


@pytest.mark.parametrize("page", [4, 5, 6])
def test_every_page_that_begins_a_new_life_voids_the_claim_of_its_block(page: int) -> None:
    worker = begun()
    ended(worker)
    worker.lease([page])
    inventory = worker.agent.inventory()
    assert [each.block for each in inventory.cached_blocks] == [0, 2, 7]
    assert not {4, 5, 6} & set(inventory.block_pages)
    assert inventory.pool == (page,)


@pytest.mark.parametrize("page", [0, 1])
def test_a_claim_of_a_run_is_left_out_without_that_of_the_first_group(page: int) -> None:
    worker = begun()
    ended(worker)
    worker.lease([page])
    assert worker.agent.inventory().cached_blocks == ()


def test_a_new_block_of_pages_of_several_voids_them_all() -> None:
    worker = begun()
    ended(worker)
    worker.submit(1, range(50, 53))
    granted(worker, admission(1, [3], [8], [6, 2, 20]))
    first = keys(range(4), 4)[0]
    assert worker.agent.inventory().cached_blocks == (CachedBlock(BlockId(0), first, -1, 1),)


# ---------------------------------------------------------------- shared blocks, and grants that are refused


def again(worker: Driver, *admits: Admit) -> Applied:
    """Let the first sequence end, and grant the same tokens anew."""
    ended(worker)
    worker.submit(1, range(10))
    return granted(worker, *admits)


def test_a_sequence_begins_behind_the_places_that_it_shares() -> None:
    worker = begun()
    again(worker, admission(1, [0, 2, 20], [4, 7, 22], [21, 23, 24], shared=2))
    (row,) = worker.plan().rows
    assert (row.start, row.length, row.tables[1]) == (8, 2, (4, 5, 6, 7, 8, 9, 22, 23, 24))
    worker.agent.check_invariants()
    assert worker.agent.usage(SequenceId(1)).cached_tokens == 8


def test_a_run_may_lack_what_no_token_reads() -> None:
    """Position 12 reads 7 to 12."""
    worker = Driver(num_blocks=40, groups=GROUPS)
    worker.submit(0, range(14))
    granted(worker, admission(0, [0, 2, 10, 30], [4, 7, 12, 32], [1, 3, 11, 31, 5, 6, 8, 9, 13, 14, 33, 34]))
    ended(worker)
    worker.submit(1, range(14))
    granted(worker, admission(1, [0, 2, 10, 20], [TRIMMED, 7, 12, 22], [21, 23, 24], shared=3))
    (row,) = worker.plan().rows
    assert (row.start, row.length, row.tables[1]) == (12, 2, (*[TRIMMED] * 3, 7, 8, 9, 12, 13, 14, 22, 23, 24))
    worker.agent.check_invariants()


BAD: list[tuple[Admit, str]] = [
    (admission(1, [0, 2, 20], [4, 7, 22], [21, 23], shared=2), "blocks that have 3 further pages, with 2 of them"),
    (admission(1, [0, 2, 20], [4, 7, 22], [21, 23, 24, 25], shared=2), "3 further pages, with 4 of them"),
    (admission(1, [0, 2, 20], [4], [21], shared=2), "runs of 1 blocks beside a table of 3, 2 shared"),
    (admission(1, [0, 2], [4, 7, 22], [23, 24], shared=2), "runs of 3 blocks beside a table of 2, 2 shared"),
    (Admit(SequenceId(1), blocks([0, 2, 20]), 2, 8, pages=blocks([21])), "runs of no blocks beside a table of 3"),
    (
        admission(1, [0, 2, 20], [TRIMMED, 7, 22], [21, 23, 24], shared=2),
        "a table of group 1 without its first 1 blocks; it may lack 0",
    ),
    (admission(1, [0, 4, 20], [4, 7, 22], [21, 23, 24], shared=2), "shares block 4 in group 0: it is not there"),
    (admission(1, [0, 1, 20], [4, 7, 22], [21, 23, 24], shared=2), "shares block 1 in group 0: it is not there"),
    (admission(1, [0, 2, 20], [4, 2, 22], [21, 23, 24], shared=2), "shares block 2 in group 1: it is not there"),
    (admission(1, [0, 2, 20], [7, 4, 22], [21, 23, 24], shared=2), "block 7, which does not hold what block 0 of pl"),
    (admission(1, [0, 2, 20], [4, 12, 22], [21, 23, 24], shared=2), "block 12, which does not hold what block 2 of pl"),
    (admission(1, [0, 2, 20], [4, 7, 22], [21, 23, 21], shared=2), "block 21 was granted anew while"),
    (admission(1, [0, 2, 20], [4, 7, 22], [21, 23, 40], shared=2), "named block 40; this worker has 0 to 39"),
    (admission(1, [0, 2, 20], [4, 7, TRIMMED], [21, 23, 24], shared=2), "named block -1"),
    (admission(1, [TRIMMED, 2, 20], [4, 7, 22], [21, 23, 24], shared=2), "without its first 1 blocks, of 2 shared"),
    (admission(1, [0, 2, 20], [4, 7, 22], [21, 23, 5], shared=2), "grants page 5 anew, and shares block 4"),
]


@pytest.mark.parametrize(("admit", "words"), BAD, ids=[words for _, words in BAD])
def test_a_grant_that_is_not_sound_is_refused(admit: Admit, words: str) -> None:
    worker = begun()
    ended(worker)
    worker.submit(1, range(10))
    before = agent_key(worker.agent)
    with pytest.raises(ProtocolViolation, match=words):
        granted(worker, admit)
    assert agent_key(worker.agent) == before, "nothing of it was applied"


def test_a_page_of_a_shared_block_is_not_leased_in_the_same_batch() -> None:
    worker = begun()
    ended(worker)
    worker.submit(1, range(10))
    admit = admission(1, [0, 2, 20], [4, 7, 22], [21, 23, 24], shared=2)
    with pytest.raises(ProtocolViolation, match="grants page 3 anew, and shares block 2"):
        worker.agent.apply_grant(GrantBatch(1, admit=(admit,), lease=blocks([3])))


@pytest.mark.parametrize("page", [1, 5, 11])
def test_a_page_of_a_block_that_is_held_is_not_granted(page: int) -> None:
    worker = begun()
    worker.plan()
    with pytest.raises(ProtocolViolation, match=f"block {page} was granted anew while the worker still holds it"):
        worker.lease([page])


# ---------------------------------------------------------------- drafts


def test_right_drafts_fill_the_blocks_of_every_group() -> None:
    worker, _ = drafting(7, 8, 9, num_blocks=40, groups=GROUPS)
    worker.submit(0, range(6), 20, speculation=Speculation())
    granted(worker, admission(0, [0, 2], [4, 7], [1, 3, 5, 6, 8, 9]))
    worker.lease([10, 11, 12, 13, 14])
    worker.step(FIRST)
    report_of(worker)
    plan = worker.plan()
    assert plan.rows[0].drafts == (7, 8, 9)
    assert plan.rows[0].tables == ((0, 1, 2, 3, 10, 11), (4, 5, 6, 7, 8, 9, 12, 13, 14))
    sampled(worker, plan, 7, 8, 9, 1)
    report = report_of(worker)
    sealed = keys([*range(6), FIRST, 7], 4)[1]
    assert report.seal == ((2, sealed), (7, sealed))
    assert (report.trim, report.trim_groups) == (((0, 1),), (1,))


def test_drafts_that_lack_pages_do_not_stall_a_sequence() -> None:
    worker, _ = drafting(7, 8, 9, num_blocks=40, groups=GROUPS)
    worker.submit(0, range(6), 20, speculation=Speculation())
    granted(worker, admission(0, [0, 2], [4, 7], [1, 3, 5, 6, 8, 9]))
    worker.lease([10, 11, 12, 13])
    worker.step(FIRST)
    assert worker.plan().rows[0].drafts == (7,)
    assert (worker.agent.stalled, worker.agent.counts().pool) == ((), 4)
