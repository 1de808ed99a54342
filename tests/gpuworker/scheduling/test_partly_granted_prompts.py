"""A prompt that was granted in part leaves decodes a part of their runway, and takes the rest of the pool."""

from __future__ import annotations

import pytest

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import Admit, GrantBatch
from common.contracts.types import TRIMMED, KvGroup, KvGroupKind, SequenceId
from gpuworker.scheduling.batch_plan import Checkpoint
from tests.support.gpuworker.agent_harness import Driver, blocks


def decode_and_prompt(pool: int, **config: int) -> Driver:
    """Return a worker with a decode of 4 tokens that may reach 28, a prompt of 20 with one of 5 blocks, and a pool."""
    worker = Driver(16, 4, lease_target=8, runway_slots=16, **config)
    worker.submit(1, range(4), max_tokens=24)
    worker.admit(1, [0])
    plan = worker.agent.plan()
    assert plan is not None
    worker.submit(2, range(50, 70), max_tokens=4)
    worker.admit(2, [1])
    worker.agent.apply_grant(GrantBatch(8, lease=blocks(list(range(8, 8 + pool)))))
    return worker


def lengths(worker: Driver) -> dict[int, int]:
    plan = worker.agent.plan()
    return {row.sequence: row.length for row in plan.rows} if plan is not None else {}


def test_it_takes_what_decodes_do_not_need_soon() -> None:
    worker = decode_and_prompt(pool=4)
    # The decode binds one of four blocks, and will bind four more within 16 slots. A third of these is two.
    assert lengths(worker) == {1: 1, 2: 4 + 4}
    assert worker.agent.counts().pool == 2


def test_it_takes_all_where_every_layer_has_a_window() -> None:
    worker = decode_and_prompt(pool=4, window=64)
    assert lengths(worker) == {1: 1, 2: 4 + 3 * 4}


def test_it_waits_with_its_step_done_and_goes_on_once_there_are_blocks() -> None:
    worker = decode_and_prompt(pool=2)
    assert lengths(worker) == {1: 1, 2: 4}
    assert worker.agent.counts().pool == 1, "it is kept for the decode"
    first, second = worker.agent._in_flight
    worker.complete(first)
    worker.complete(second)
    assert lengths(worker) == {1: 1}
    assert worker.agent.counts().stalled == 1
    worker.lease([10, 11, 12, 13])
    assert lengths(worker) == {1: 1, 2: 12}
    worker.agent.check_invariants()


# ---------------------------------------------------------------- where the pool has groups

THREE = (
    KvGroup(KvGroupKind.FULL, 0, 2, ()),
    KvGroup(KvGroupKind.WINDOW, 6, 3, ()),
    KvGroup(KvGroupKind.STATE, 0, 1, ()),
)
"""A place takes five pages. A token reads two places of the window, or three."""


def part(sequence: int, first: int, places: int, states: tuple[int, ...] = ()) -> Admit:
    """Return a grant of so many places, in pages from `first` on, and of a table of checkpoints."""
    table = tuple(range(first, first + 2 * places, 2))
    run = tuple(range(first + 2 * places, first + 5 * places, 3))
    others = [page for page in range(first, first + 5 * places) if page not in (*table, *run)]
    return Admit(SequenceId(sequence), blocks(list(table)), 0, 0, runs=(blocks(list(run)), blocks(list(states))),
                 pages=blocks(others))  # fmt: skip


def begun_in_groups(*further: Admit, pool: int = 20, **config: int) -> Driver:
    """Return a worker with a decode of 4 tokens, a prompt of 20 with two of its five places, and a pool."""
    worker = Driver(80, 4, groups=THREE, lease_target=40, runway_slots=8, **config)
    worker.submit(1, range(4), max_tokens=24)
    worker.agent.apply_grant(GrantBatch(40, admit=(part(1, 0, 1),)))
    assert worker.agent.plan() is not None
    worker.submit(2, range(50, 70), max_tokens=4)
    worker.agent.apply_grant(GrantBatch(40, admit=(part(2, 5, 2, (TRIMMED,) * 3 + (79,)),)))
    for each in further:
        worker.submit(int(each.sequence), range(100, 120), max_tokens=4)
        worker.agent.apply_grant(GrantBatch(40, admit=(each,)))
    worker.agent.apply_grant(GrantBatch(40, lease=blocks(list(range(30, 30 + pool)))))
    return worker


def test_behind_its_table_a_prompt_leaves_pages_to_decodes() -> None:
    """The decode binds a place of the four, and two more within 8 slots: of their ten pages a third is four."""
    worker = begun_in_groups()
    assert lengths(worker) == {1: 1, 2: 8 + 2 * 4}
    assert worker.agent.counts().pool == 20 - 5 - 2 * 5


@pytest.mark.parametrize(("pool", "places"), [(13, 0), (14, 1), (18, 1), (19, 2)])
def test_a_place_is_bound_whole_beside_what_is_left(pool: int, places: int) -> None:
    assert lengths(begun_in_groups(pool=pool))[2] == 8 + 4 * places


def test_it_leaves_a_place_to_each_prompt_whose_window_goes_on() -> None:
    """The third one has the first group's blocks of its four places, and the window's of two."""
    table, run = (50, 52, 54, 56), (58, 61)
    pages = [51, 53, 55, 57, 59, 60, 62, 63]
    other = Admit(SequenceId(3), blocks(list(table)), 0, 0, runs=(blocks(list(run)), ()), pages=blocks(pages))
    worker = begun_in_groups(other, pool=16)
    # Five pages are the decode's, four are left to decodes, and three to the third prompt.
    assert lengths(worker) == {1: 1, 2: 8, 3: 16}
    assert worker.agent.counts().pool == 16 - 5 - 2 * 3


def test_a_checkpoint_behind_the_table_is_saved_once_the_prompt_is_there() -> None:
    worker = begun_in_groups(pool=30)
    plan = worker.agent.plan()
    assert plan is not None
    assert {row.sequence: row.length for row in plan.rows} == {1: 1, 2: 16}, "the chunk ends at the checkpoint"
    assert plan.saves == (Checkpoint(SequenceId(2), blocks([79])),)


def test_no_tail_stands_behind_a_table_that_lacks_its_place() -> None:
    worker = Driver(80, 4, groups=THREE)
    worker.submit(2, range(20))
    with pytest.raises(ProtocolViolation, match="a checkpoint at place 4, which its 20 tokens do not pass"):
        worker.agent.apply_grant(GrantBatch(0, admit=(part(2, 5, 2, (TRIMMED,) * 4 + (79,)),)))


def test_a_run_of_k_and_v_is_not_longer_than_the_table() -> None:
    worker = Driver(80, 4, groups=THREE)
    worker.submit(2, range(20))
    longer = Admit(SequenceId(2), blocks([0]), 0, 0, runs=(blocks([2, 5]), ()), pages=blocks([1, 3, 4, 6, 7]))
    with pytest.raises(ProtocolViolation, match="runs of 2, 0 blocks beside a table of 1, 0 shared"):
        worker.agent.apply_grant(GrantBatch(0, admit=(longer,)))
