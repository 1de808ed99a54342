"""What a batch does to blocks, and what reports and inventories say of them."""

from __future__ import annotations

import pytest

from common.contracts.errors import NotFound, ProtocolViolation
from common.contracts.lease import Admit, CachedBlock, Copy, GrantBatch
from common.contracts.types import BlockId, SequenceId, SequencePhase
from gpuworker.scheduling.lease_agent import LeaseAgent
from tests.suites.protocol.agent_copies import agent_key, copy_agent
from tests.support.gpuworker.agent_harness import Driver, blocks, keys, report_of


def test_a_submission_is_reported_as_a_reservation() -> None:
    worker = Driver()
    worker.submit(0, range(6), max_tokens=5, priority=2, traceparent="t")
    (reserve,) = report_of(worker).reserve
    assert (reserve.sequence, reserve.num_tokens, reserve.max_len, reserve.priority) == (0, 6, 11, 2)
    assert (reserve.block_hashes, reserve.request_id, reserve.traceparent) == (keys(range(6), 4), "r0", "t")


def test_a_sequence_that_is_not_to_be_cached_has_no_chain_and_seals_nothing() -> None:
    worker = Driver()
    worker.submit(0, range(6), no_cache=True)
    worker.admit(0, [0, 1])
    assert report_of(worker).reserve[0].block_hashes == ()
    worker.step()
    worker.agent.cancel_sequence(SequenceId(0))
    report = report_of(worker)
    assert (len(report.finished), report.seal) == (1, ())


def test_shared_blocks_keep_their_content_and_fresh_ones_lose_it() -> None:
    worker = Driver()
    worker.submit(0, range(8))
    worker.admit(0, [0, 1])
    worker.step()
    worker.agent.cancel_sequence(SequenceId(0))
    worker.submit(1, [*range(4), 70, 71])
    worker.admit(1, [0, 1], shared=1)
    assert worker.agent.inventory().cached_blocks == (CachedBlock(BlockId(0), keys(range(4), 4)[0], -1, 1),)
    assert worker.rows() == [(1, 4, 2, (0, 1), True)]


def test_a_dropped_admission_resets_its_fresh_blocks_all_the_same() -> None:
    worker = Driver()
    worker.submit(0, range(8))
    worker.admit(0, [0, 1])
    worker.step()
    worker.agent.cancel_sequence(SequenceId(0))
    applied = worker.admit(1, [0, 1])  # the cancel of sequence 1 had not reached the manager
    assert (applied.admitted, applied.dropped) == ((), (1,))
    worker.submit(2, [*range(40, 44), 70])
    worker.admit(2, [0, 2], shared=1)
    assert worker.rows() == [(2, 0, 5, (0, 2), True)], "the old content of block 0 is not trusted"


def test_a_lease_drops_the_claim_at_once_and_the_fill_when_bound() -> None:
    worker = Driver()
    worker.submit(0, range(8))
    worker.admit(0, [0, 1])
    worker.step()
    worker.agent.cancel_sequence(SequenceId(0))
    worker.lease([0])
    inventory = worker.agent.inventory()
    assert (inventory.pool, inventory.cached_blocks) == ((0,), ())


def test_a_claim_without_its_parents_claim_is_left_out() -> None:
    worker = Driver()
    worker.submit(0, range(12))
    worker.admit(0, [0, 1, 2])
    worker.step()
    worker.agent.cancel_sequence(SequenceId(0))
    first, second, third = keys(range(12), 4)
    assert worker.agent.inventory().cached_blocks == (
        CachedBlock(BlockId(0), first, -1, 1),
        CachedBlock(BlockId(1), second, 0, 1),
        CachedBlock(BlockId(2), third, 1, 1),
    )
    worker.agent.attached(1)
    worker.lease([1])
    assert worker.agent.inventory().cached_blocks == (CachedBlock(BlockId(0), first, -1, 1),)


def test_a_pool_above_the_target_gives_back_the_last_leased() -> None:
    worker = Driver()
    worker.lease([1, 2, 3], target=1)
    assert worker.agent.plan() is None
    assert report_of(worker).returned == (3, 2)
    assert worker.agent.counts().pool == 1


def test_without_a_session_nothing_is_given_back() -> None:
    worker = Driver()
    worker.lease([1, 2, 3], target=1)
    worker.agent.detach()
    worker.agent.plan()
    assert worker.agent.inventory().pool == (1, 2, 3)


def test_a_copy_fills_what_its_source_holds_at_that_point() -> None:
    worker = Driver(max_num_batched_tokens=2)
    worker.submit(0, range(7), max_tokens=2)
    worker.submit(1, range(7), max_tokens=2, fork_of=0)
    worker.admit(0, [0, 1])
    for _ in range(3):
        worker.step()  # six of seven positions are computed
    copy = Copy(BlockId(1), BlockId(2), 7)
    worker.admit(1, [0, 2], shared=1, copy=(copy,))
    plan = worker.plan()
    assert plan.copies == (copy,)
    assert [(r.sequence, r.start, r.length) for r in plan.rows] == [(0, 6, 1), (1, 6, 1)]


def test_a_copy_never_covers_the_last_known_token() -> None:
    worker = Driver()
    worker.submit(0, range(7))
    worker.submit(1, range(7), fork_of=0)
    worker.admit(0, [0, 1])
    worker.step()
    worker.admit(1, [0, 2], shared=1, copy=(Copy(BlockId(1), BlockId(2), 7),))
    assert worker.rows()[1] == (1, 6, 1, (0, 2), True), "its logits are needed, so slot 6 is computed again"


def test_a_full_block_is_copied_but_for_its_last_slot() -> None:
    worker = Driver()
    worker.submit(0, range(8))
    worker.submit(1, range(8), fork_of=0)
    worker.admit(0, [0, 1])
    worker.step()
    worker.admit(1, [0, 2], shared=1, copy=(Copy(BlockId(1), BlockId(2), 8),))
    assert worker.rows()[0] == (1, 7, 1, (0, 2), True)


@pytest.mark.parametrize(
    "batch",
    [
        GrantBatch(0, admit=(Admit(SequenceId(1), blocks([0]), 0),)),
        GrantBatch(1, lease=blocks([0])),
        GrantBatch(1, lease=blocks([3, 3])),
        GrantBatch(1, admit=(Admit(SequenceId(1), blocks([3]), 0),), lease=blocks([3])),
    ],
    ids=["admit", "lease", "lease twice", "admit and lease"],
)
def test_a_grant_of_a_block_that_is_still_held_is_a_protocol_violation(batch: GrantBatch) -> None:
    worker = Driver()
    worker.submit(0, range(4))
    worker.submit(1, range(4))
    worker.admit(0, [0])
    before = agent_key(worker.agent)
    with pytest.raises(ProtocolViolation, match="still holds it"):
        worker.agent.apply_grant(batch)
    assert agent_key(worker.agent) == before, "nothing of the batch was applied"


def test_an_admission_must_leave_a_token_to_compute() -> None:
    worker = Driver()
    worker.submit(0, range(8))
    worker.admit(0, [0, 1])
    worker.step()
    worker.submit(1, range(8))
    with pytest.raises(ProtocolViolation, match="all of its tokens"):
        worker.admit(1, [0, 1], shared=2)


def test_columns_of_a_batch_take_effect_in_their_order() -> None:
    worker = Driver()
    worker.submit(0, range(4))
    both = worker.agent.apply_grant(
        GrantBatch(0, admit=(worker.admission(0, [2]),), cancel=(SequenceId(0),)),
    )
    assert [admit.sequence for admit in both.admitted] == [0]
    assert worker.agent.departures().forgotten == (0,)


def test_an_inventory_has_waiting_running_and_draining_sequences() -> None:
    worker = Driver(num_blocks=16)
    for sequence in range(4):
        worker.submit(sequence, range(10 * sequence, 10 * sequence + 5))
    for sequence in range(3):
        worker.admit(sequence, [2 * sequence, 2 * sequence + 1])
    worker.plan()
    worker.preempt(1)
    worker.agent.cancel_sequence(SequenceId(2))
    found = {s.reserve.sequence: (s.phase, s.arrival, s.block_table) for s in worker.agent.inventory().sequences}
    assert found == {
        0: (SequencePhase.RUNNING, 0, (0, 1)),
        1: (SequencePhase.DRAINING_PREEMPT, 1, (2, 3)),
        2: (SequencePhase.DRAINING_FINISH, 2, (4, 5)),
        3: (SequencePhase.WAITING, 3, ()),
    }


def test_content_before_an_inventory_is_not_reported_after_it() -> None:
    worker = Driver()
    worker.submit(0, range(6))
    worker.admit(0, [0, 1])
    plan = worker.plan()
    worker.agent.detach()
    worker.submit(1, range(3))
    worker.agent.inventory()
    worker.complete(plan)
    assert worker.agent.take_report() is None, "the manager has not answered yet"
    worker.agent.attached(0)
    report = report_of(worker)
    assert report.reserve == ()
    assert report.seal == ((0, keys(range(4), 4)[0]),)


def test_steps_go_on_without_a_session() -> None:
    worker = Driver()
    worker.submit(0, range(6), max_tokens=2)
    worker.admit(0, [0, 1])
    worker.agent.detach()
    tokens = [worker.step(50 + n).tokens for n in range(2)]
    assert tokens == [{0: (50,)}, {0: (51,)}]
    assert worker.agent.take_report() is None
    assert not worker.agent.has_work


def test_levels_are_reported_again_after_an_attach() -> None:
    worker = Driver(runway_slots=8)
    worker.submit(0, range(4))
    worker.admit(0, [0])
    worker.step()
    assert worker.agent.plan() is None
    first = report_of(worker)
    assert (first.stalled, first.lease_want) == ((0,), 1)
    assert worker.agent.take_report() is None
    worker.agent.inventory()
    worker.agent.attached(0)
    again = report_of(worker)
    assert (again.stalled, again.lease_want) == ((0,), 1)


def test_a_worker_that_is_still_stalled_after_a_batch_says_so() -> None:
    worker = Driver()
    worker.submit(0, range(4))
    worker.admit(0, [0])
    worker.step()
    worker.agent.plan()
    report_of(worker)
    worker.agent.apply_grant(GrantBatch(0))
    worker.agent.plan()
    assert report_of(worker).stalled is None, "the set is as it was reported; only the report is new"
    assert worker.agent.take_report() is None


def test_a_sequence_that_is_preempted_stalls_no_more() -> None:
    worker = Driver()
    worker.submit(0, range(4))
    worker.admit(0, [0])
    worker.step()
    worker.agent.plan()
    assert report_of(worker).stalled == (0,)
    worker.preempt(0)
    report = report_of(worker)
    assert (report.preempted, report.stalled) == (((0, 5),), ())


def test_lease_want_counts_the_blocks_of_the_next_slots_up_to_the_limit() -> None:
    worker = Driver(num_blocks=16, runway_slots=8)
    worker.submit(0, range(3), max_tokens=40)
    worker.submit(1, range(3), max_tokens=2)
    worker.admit(0, [0])
    worker.admit(1, [1])
    worker.step()
    # Sequence 0 writes slots 3..10 next: blocks 1 and 2. Sequence 1 writes slot 3 and no more.
    assert report_of(worker).lease_want == 2


def test_computed_lengths_alone_are_not_reported() -> None:
    worker = Driver()
    worker.submit(0, range(3), max_tokens=10)
    report_of(worker)
    worker.admit(0, [0, 1, 2])
    for _ in range(8):
        worker.step()
        report = worker.agent.take_report()
        assert report is None or not report.computed


def test_a_report_that_may_cause_a_preemption_has_computed_lengths_at_most_every_fourth_step() -> None:
    worker = Driver(num_blocks=16)
    worker.submit(0, range(3), max_tokens=10)
    worker.admit(0, [0, 1, 2])
    lengths = []
    for other in range(1, 7):
        worker.step()
        worker.submit(other, range(3), max_tokens=2)
        lengths.append(report_of(worker).computed)
    assert lengths == [((0, 3),), (), (), (), ((0, 7),), ()]


def test_the_report_of_a_stalled_sequence_has_computed_lengths() -> None:
    worker = Driver()
    worker.submit(0, range(3), max_tokens=10)
    report_of(worker)
    worker.admit(0, [0])
    worker.step()
    worker.step()
    assert worker.agent.plan() is None
    report = report_of(worker)
    assert (report.stalled, report.computed) == ((0,), ((0, 4),))


def test_usage_of_an_ended_sequence_is_in_its_finish() -> None:
    worker = Driver()
    worker.submit(0, range(6), max_tokens=1)
    worker.admit(0, [0, 1])
    (finished,) = worker.step().finished
    assert (finished.usage.prompt_tokens, finished.usage.output_tokens) == (6, 1)
    with pytest.raises(NotFound):
        worker.agent.usage(SequenceId(0))


def test_a_clone_goes_its_own_way() -> None:
    worker = Driver()
    worker.submit(0, range(6))
    worker.admit(0, [0, 1])
    twin = copy_agent(worker.agent)
    assert agent_key(twin) == agent_key(worker.agent)
    worker.step()
    assert agent_key(twin) != agent_key(worker.agent)
    assert isinstance(twin, LeaseAgent)
    assert twin.plan() is not None
    twin.check_invariants()
    assert blocks([0, 1]) == twin.inventory().sequences[0].block_table
