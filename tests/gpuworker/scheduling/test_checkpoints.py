"""A worker whose pool has checkpoints of states: exact pages on tiny pools.

Blocks have 4 slots. One of K and V is a page, a checkpoint has 3 of them.
"""

from __future__ import annotations

from typing import Any

import pytest

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import Admit, CachedBlock, GrantBatch
from common.contracts.types import TRIMMED, BlockId, KvGroup, KvGroupKind, SequenceId
from gpuworker.scheduling.batch_plan import Checkpoint, StepPlan
from gpuworker.scheduling.outcomes import Applied
from tests.suites.protocol.agent_copies import agent_key
from tests.support.gpuworker.agent_harness import EOS, Driver, blocks, keys, report_of

GROUPS = (KvGroup(KvGroupKind.FULL, 0, 1, ()), KvGroup(KvGroupKind.STATE, 0, 3, ()))
FIRST, SECOND, THIRD = keys(range(12), 4)


def admission(sequence: int, table: list[int], run: list[int], pages: list[int], shared: int = 0) -> Admit:
    return Admit(SequenceId(sequence), blocks(table), shared, shared * 4, runs=(blocks(run),), pages=blocks(pages))


def granted(worker: Driver, *admits: Admit) -> Applied:
    return worker.agent.apply_grant(GrantBatch(worker.lease_target, admit=admits))


def begun(**config: Any) -> Driver:
    """Return a worker with a sequence of nine tokens that is to leave a checkpoint behind its second block."""
    worker = Driver(num_blocks=40, groups=GROUPS, **config)
    worker.submit(0, range(9), max_tokens=8)
    granted(worker, admission(0, [0, 1, 2], [TRIMMED, 3], [4, 5]))
    return worker


def ended() -> Driver:
    """Return a worker whose sequence has left its checkpoint and ended."""
    worker = begun()
    worker.step()
    worker.step()
    worker.agent.cancel_sequence(SequenceId(0))
    assert worker.agent.departures().forgotten == (0,)
    report_of(worker)
    return worker


def going_on(max_tokens: int = 4) -> Driver:
    """Return a worker with a second sequence, which goes on from the checkpoint and is to leave another one."""
    worker = ended()
    worker.submit(1, range(13), max_tokens)
    granted(worker, admission(1, [0, 1, 10, 11], [TRIMMED, 3, 12], [13, 14], shared=2))
    return worker


def parts(plan: StepPlan) -> list[tuple[int, int]]:
    return [(row.start, row.length) for row in plan.rows]


def states(sequence: int, *pages: int) -> tuple[Checkpoint, ...]:
    return (Checkpoint(SequenceId(sequence), blocks(list(pages))),)


# ---------------------------------------------------------------- saving


def test_a_chunk_ends_at_a_checkpoint_and_leaves_it() -> None:
    worker = begun()
    first, second = worker.plan(), worker.plan()
    assert (parts(first), first.loads, first.saves) == ([(0, 8)], (), states(0, 3, 4, 5))
    assert first.rows[0].tables == ((0, 1, 2), (TRIMMED, 3)), "checkpoints are named by their first pages"
    assert (parts(second), second.loads, second.saves) == ([(8, 1)], (), ())
    assert (first.rows[0].samples, second.rows[0].samples) == (False, True)


def test_a_chunk_that_ends_elsewhere_leaves_none() -> None:
    worker = begun(max_num_batched_tokens=3)
    plans = []
    for _ in range(4):
        plans.append(worker.plan())
        worker.complete(plans[-1])
    assert [parts(plan) for plan in plans] == [[(0, 3)], [(3, 3)], [(6, 2)], [(8, 1)]]
    assert [plan.saves for plan in plans] == [(), (), states(0, 3, 4, 5), ()]


def test_each_of_two_checkpoints_ends_a_chunk() -> None:
    worker = Driver(num_blocks=40, groups=GROUPS)
    worker.submit(0, range(14))
    granted(worker, admission(0, [0, 1, 2, 3], [4, TRIMMED, 7], [5, 6, 8, 9]))
    plans = []
    for _ in range(3):
        plans.append(worker.plan())
        worker.complete(plans[-1])
    assert [parts(plan) for plan in plans] == [[(0, 4)], [(4, 8)], [(12, 2)]]
    assert [plan.saves for plan in plans] == [states(0, 4, 5, 6), states(0, 7, 8, 9), ()]
    report = report_of(worker)
    assert report.seal == ((0, FIRST), (4, FIRST), (1, SECOND), (2, THIRD), (7, THIRD))
    assert (report.trim, report.trim_groups) == (((0, 3),), (1,))


def test_a_checkpoint_is_sealed_and_released_with_the_report_of_its_step() -> None:
    worker = begun()
    plan = worker.plan()
    assert report_of(worker).seal == ()
    worker.complete(plan)
    report = report_of(worker)
    assert report.seal == ((0, FIRST), (1, SECOND), (3, SECOND))
    assert (report.trim, report.trim_groups) == (((0, 2),), (1,))
    inventory = worker.agent.inventory()
    assert inventory.sequences[0].runs == ((TRIMMED, TRIMMED),)
    assert inventory.cached_blocks[-1] == CachedBlock(BlockId(3), SECOND, 1, 1)
    assert (inventory.block_groups, inventory.block_pages) == ((0, 0, 0, 1), (0, 1, 2, 3, 4, 5))


def test_a_checkpoint_is_kept_while_the_step_that_saves_it_is_in_flight() -> None:
    worker = begun(max_num_batched_tokens=4)
    first, second = worker.plan(), worker.plan()
    assert (first.saves, second.saves) == ((), states(0, 3, 4, 5))
    worker.complete(first)
    assert worker.agent.inventory().sequences[0].runs == ((TRIMMED, 3),)
    with pytest.raises(ProtocolViolation, match="block 4 was granted anew while the worker still holds it"):
        worker.lease([4])
    worker.complete(second)
    worker.lease([4])


def test_a_sequence_without_hashes_releases_its_checkpoint_unsealed() -> None:
    worker = Driver(num_blocks=40, groups=GROUPS)
    worker.submit(0, range(9), no_cache=True)
    granted(worker, admission(0, [0, 1, 2], [TRIMMED, 3], [4, 5]))
    worker.step()
    report = report_of(worker)
    assert (report.seal, report.trim) == ((), ((0, 2),))


@pytest.mark.parametrize("how", ["preempt", "cancel"])
def test_a_sequence_that_leaves_while_its_checkpoint_is_saved_seals_it(how: str) -> None:
    worker = begun()
    plan = worker.plan()
    if how == "preempt":
        worker.preempt(0)
    else:
        worker.agent.cancel_sequence(SequenceId(0))
    report_of(worker)
    worker.complete(plan)
    report = report_of(worker)
    assert (report.seal, report.trim) == (((0, FIRST), (1, SECOND), (3, SECOND)), ())
    assert (len(report.preempted), len(report.finished)) == ((1, 0) if how == "preempt" else (0, 1))
    assert [each.block for each in worker.agent.inventory().cached_blocks] == [0, 1, 3]
    worker.agent.check_invariants()


@pytest.mark.parametrize("how", ["preempt", "cancel"])
def test_a_sequence_that_leaves_before_its_checkpoint_claims_none(how: str) -> None:
    worker = begun(max_num_batched_tokens=4)
    worker.step()
    if how == "preempt":
        worker.preempt(0)
    else:
        worker.agent.cancel_sequence(SequenceId(0))
    report = report_of(worker)
    assert (report.seal, report.trim) == (((0, FIRST),), ())
    assert [each.block for each in worker.agent.inventory().cached_blocks] == [0]
    worker.lease([1, 2, 3, 4, 5])


def test_an_inventory_has_a_checkpoint_that_is_to_be_saved() -> None:
    worker = begun()
    plan = worker.plan()
    inventory = worker.agent.inventory()
    assert (inventory.sequences[0].runs, inventory.cached_blocks) == (((TRIMMED, 3),), ())
    assert (inventory.block_groups, inventory.block_pages) == ((0, 0, 0, 1), (0, 1, 2, 3, 4, 5))
    worker.agent.attached(0)
    worker.complete(plan)
    assert report_of(worker).seal == ((0, FIRST), (1, SECOND), (3, SECOND))


# ---------------------------------------------------------------- loading


def test_the_first_row_behind_a_hit_loads_it_and_no_other() -> None:
    worker = going_on()
    first, second = worker.plan(), worker.plan()
    assert (parts(first), first.loads, first.saves) == ([(8, 4)], states(1, 3, 4, 5), states(1, 12, 13, 14))
    assert (parts(second), second.loads, second.saves) == ([(12, 1)], (), ())
    worker.complete(first)
    assert report_of(worker).trim == ((1, 3),)
    assert worker.agent.usage(SequenceId(1)).cached_tokens == 8


def test_a_hit_is_held_until_the_step_that_loads_it_has_run() -> None:
    worker = going_on()
    with pytest.raises(ProtocolViolation, match="block 3 was granted anew while the worker still holds it"):
        worker.lease([3])
    plan = worker.plan()
    with pytest.raises(ProtocolViolation, match="block 5 was granted anew while the worker still holds it"):
        worker.lease([5])
    worker.complete(plan)
    worker.lease([3, 4, 5])
    assert [each.block for each in worker.agent.inventory().cached_blocks] == [0, 1, 10, 12]


def test_a_preempted_sequence_does_not_load_what_its_former_grant_named() -> None:
    worker = going_on()
    worker.preempt(1)
    worker.agent.departures()
    granted(worker, admission(1, [20, 21, 22, 23], [], []))
    plan = worker.plan()
    assert (parts(plan), plan.loads, plan.saves) == ([(0, 13)], (), ())


def test_two_sequences_load_one_checkpoint() -> None:
    worker = ended()
    worker.submit(1, range(9))
    worker.submit(2, [*range(8), 99])
    granted(worker, admission(1, [0, 1, 10], [TRIMMED, 3], [], shared=2))
    granted(worker, admission(2, [0, 1, 11], [TRIMMED, 3], [], shared=2))
    plan = worker.plan()
    assert plan.loads == (*states(1, 3, 4, 5), *states(2, 3, 4, 5))
    worker.complete(plan)
    worker.agent.check_invariants()


def test_a_reset_does_not_take_a_checkpoint_from_a_sequence_that_is_to_load_it() -> None:
    worker = going_on()
    worker.agent.apply_grant(GrantBatch(0, reset=1))
    assert worker.plan().loads == states(1, 3, 4, 5)


# ---------------------------------------------------------------- the tail


def decoding(max_tokens: int = 12) -> Driver:
    """Return a worker with a sequence of nine tokens, a checkpoint behind its second block, and a tail of pages 6 to 8.

    Two steps have run: position 9 is computed next.
    """
    worker = Driver(num_blocks=40, groups=GROUPS, lease_target=4)
    worker.lease([20, 21, 22, 23])
    worker.submit(0, range(9), max_tokens)
    granted(worker, admission(0, [0, 1, 2], [TRIMMED, 3, 6], [4, 5, 7, 8]))
    worker.step()
    worker.step()
    report_of(worker)
    return worker


TAIL = states(0, 6, 7, 8)


def test_each_full_block_of_a_decode_leaves_its_states_in_the_tail() -> None:
    worker = decoding()
    plans = []
    for _ in range(8):
        plans.append(worker.plan())
        worker.complete(plans[-1])
    assert [plan.rows[0].start for plan in plans if plan.saves] == [11, 15]
    assert [plan.saves for plan in plans if plan.saves] == [TAIL, TAIL]
    assert [each.block for each in worker.agent.inventory().cached_blocks] == [0, 1, 2, 20, 3], "it is not sealed"
    worker.agent.check_invariants()


@pytest.mark.parametrize("how", ["preempt", "cancel"])
def test_a_sequence_that_leaves_seals_the_states_behind_its_last_full_block(how: str) -> None:
    worker = decoding()
    for _ in range(4):
        worker.step()
    if how == "preempt":
        worker.preempt(0)
    else:
        worker.agent.cancel_sequence(SequenceId(0))
    (*_, tail) = report_of(worker).seal
    assert tail == (6, keys([*range(9), 50, 50, 50], 4)[2])
    assert worker.agent.inventory().cached_blocks[-1].block == 6
    worker.agent.check_invariants()
    worker.lease([6, 7, 8])


def test_a_tail_is_not_sealed_that_no_block_was_saved_in() -> None:
    worker = decoding()
    worker.step()
    worker.agent.cancel_sequence(SequenceId(0))
    assert report_of(worker).seal == ()
    worker.lease([6, 7, 8])


def test_a_tail_is_not_sealed_while_a_step_overwrites_it_for_tokens_that_are_not_accepted() -> None:
    """Position 15 is planned with a token that turns out to end the sequence: the states of block 2 are gone then."""
    worker = decoding()
    for _ in range(5):
        worker.step()
    first, second = worker.plan(), worker.plan()
    assert (first.saves, second.saves, second.rows[0].start) == ((), TAIL, 15)
    worker.complete(first, EOS)
    assert report_of(worker).finished == ()
    worker.complete(second)
    report = report_of(worker)
    assert (len(report.finished), report.seal[-1]) == (1, (6, keys([*range(9), *[50] * 6, EOS], 4)[3]))


def test_the_tail_of_a_prompt_that_ends_with_a_block_has_its_states_at_once() -> None:
    worker = Driver(num_blocks=40, groups=GROUPS)
    worker.submit(0, range(12))
    granted(worker, admission(0, [0, 1, 2], [TRIMMED, 3, 6], [4, 5, 7, 8]))
    assert [plan.saves for plan in (worker.plan(), worker.plan())] == [states(0, 3, 4, 5), TAIL]


def test_an_inventory_has_the_tail_behind_the_checkpoints() -> None:
    worker = decoding()
    assert worker.agent.inventory().sequences[0].runs == ((TRIMMED, TRIMMED, 6),)
    worker.agent.attached(4)
    for _ in range(7):
        worker.step()
    assert worker.agent.inventory().sequences[0].runs == ((TRIMMED, TRIMMED, TRIMMED, 6),)


def test_a_sequence_goes_on_from_a_tail() -> None:
    worker = decoding()
    for _ in range(4):
        worker.step()
    worker.agent.cancel_sequence(SequenceId(0))
    report_of(worker)
    worker.submit(1, [*range(9), 50, 50, 50, 7])
    granted(worker, admission(1, [0, 1, 2, 30], [TRIMMED, TRIMMED, 6], [], shared=3))
    plan = worker.plan()
    assert (parts(plan), plan.loads) == ([(12, 1)], states(1, 6, 7, 8))


# ---------------------------------------------------------------- growth


def test_a_sequence_binds_no_blocks_for_states() -> None:
    worker = begun()
    worker.lease([20, 21])
    for _ in range(6):
        worker.step()
    report = report_of(worker)
    assert (report.bind, report.bind_groups, report.bind_pages) == (((0, 20),), (0,), ())


def test_the_want_counts_pages_of_k_and_v_alone() -> None:
    """16 of 17 tokens have a slot: four places, and three of them are there."""
    worker = begun()
    assert report_of(worker).lease_want == 1


# ---------------------------------------------------------------- grants that are refused

BAD: list[tuple[Admit, str]] = [
    (admission(1, [0, 1, 10, 11], [TRIMMED, 3, 12], [13], shared=2), "further pages, with 1 of them"),
    (admission(1, [0, 1, 10, 11], [TRIMMED, 3, 12], [13, 14, 15], shared=2), "2 further pages, with 3 of them"),
    (
        admission(1, [0, 1, 10], [TRIMMED, 3, 12, 15], [13, 14, 16, 17], shared=2),
        "place 3, which its 13 tokens do not pass",
    ),
    (admission(1, [0, 1, 10], [TRIMMED], [], shared=2), "runs of 1 blocks beside a table of 3, 2 shared"),
    (
        admission(1, [0, 1, 10], [TRIMMED, TRIMMED], [], shared=2),
        "a table of group 1 without its first 2 blocks; it may lack 1",
    ),
    (admission(1, [0, 1, 10], [TRIMMED, 1], [], shared=2), "shares block 1 in group 1: it is not there"),
    (admission(1, [0, 1, 10], [TRIMMED, 4], [], shared=2), "shares block 4 in group 1: it is not there"),
    (admission(1, [0, 10], [3], [], shared=1), "granted block 3 as the state behind place 0, which it does not hold"),
    (
        admission(1, [0, 2, 10], [TRIMMED, 3], [], shared=2),
        "behind place 1, and block 2 before that, which is not full",
    ),
    (
        admission(1, [0, 1, 10, 11, 15], [TRIMMED, 3, TRIMMED, TRIMMED, 12], [13, 14], shared=2),
        "place 4, which its 13 tokens do not p",
    ),
    (admission(1, [0, 1, 10], [TRIMMED, 3, 4], [13, 14], shared=2), "grants page 4 anew, and shares block 3 of it"),
    (admission(1, [0, 1, 10], [TRIMMED, 3, 12], [13, 10], shared=2), "block 10 was granted anew while"),
    (admission(1, [0, 1, 10], [TRIMMED, 3, 12], [13, 40], shared=2), "named block 40; this worker has 0 to 39"),
]


@pytest.mark.parametrize(("admit", "words"), BAD, ids=[words for _, words in BAD])
def test_a_grant_that_is_not_sound_is_refused(admit: Admit, words: str) -> None:
    worker = ended()
    worker.submit(1, range(13))
    before = agent_key(worker.agent)
    with pytest.raises(ProtocolViolation, match=words):
        granted(worker, admit)
    assert agent_key(worker.agent) == before, "nothing of it was applied"


def test_the_states_of_other_tokens_are_no_hit() -> None:
    worker = ended()
    worker.submit(1, [*range(7), 50, 51])
    with pytest.raises(ProtocolViolation, match="block 3 as the state behind place 1, which it does not hold"):
        granted(worker, admission(1, [0, 1, 10], [TRIMMED, 3], [], shared=2))


def test_a_checkpoint_that_is_not_saved_is_no_hit() -> None:
    worker = begun(max_num_batched_tokens=8)
    worker.plan()
    worker.submit(1, range(9))
    with pytest.raises(ProtocolViolation, match="block 3 as the state behind place 1, which it does not hold"):
        granted(worker, admission(1, [0, 1, 10], [TRIMMED, 3], [], shared=2))


def test_a_checkpoint_that_the_same_batch_grants_is_no_hit() -> None:
    worker = Driver(num_blocks=40, groups=GROUPS)
    worker.submit(0, range(9))
    worker.submit(1, range(9))
    first = admission(0, [0, 1, 2], [TRIMMED, 3], [4, 5])
    with pytest.raises(ProtocolViolation, match="block 3 as the state behind place 1, which it does not hold"):
        granted(worker, first, admission(1, [0, 1, 10], [TRIMMED, 3], [], shared=2))
