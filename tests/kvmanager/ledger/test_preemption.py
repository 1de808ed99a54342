"""Whose blocks are taken back, when, and how often at most."""

from __future__ import annotations

import pytest

from common.contracts.types import DecisionKind, FinishReason, SequenceId, SequencePhase
from kvmanager.ledger.ledger import Ledger
from tests.support.kvmanager.fake_worker import FakeWorker
from tests.support.kvmanager.ledgers import admit, finish, hashes, make_ledger, play, prompt, reserve, seal


def full_pool(priorities: tuple[int, ...] = (0, 0, 0)) -> Ledger:
    """Return a pool of 6 blocks of which each of three running sequences holds two, and needs more."""
    ledger = make_ledger(6)
    for number, priority in enumerate(priorities, start=1):
        admit(ledger, reserve(number, prompt(16, start=100 * number), max_len=90, priority=priority))
    play(ledger, lease_want=3)
    play(ledger, bind=tuple((number, number + 2) for number in (1, 2, 3)))
    assert (ledger.pool_counts().running, ledger.pool_counts().free, ledger.pool_counts().leased) == (3, 0, 0)
    return ledger


def preempted_by(ledger: Ledger, *stalled: int) -> list[int]:
    batch = play(ledger, stalled=tuple(map(SequenceId, stalled)), lease_want=len(stalled))
    return [order.sequence for order in batch.preempt] if batch else []


@pytest.mark.parametrize(
    ("priorities", "victim"), [((0, 0, 0), 3), ((0, 0, 5), 2), ((0, 5, 5), 1), ((1, 0, 1), 2), ((-1, 0, 0), 1)]
)
def test_the_victim_is_the_lowest_priority_then_the_latest(priorities: tuple[int, ...], victim: int) -> None:
    assert preempted_by(full_pool(priorities), 1) == [victim]


def test_one_preemption_is_outstanding_at_a_time() -> None:
    ledger = full_pool()
    assert preempted_by(ledger, 1) == [3]
    assert preempted_by(ledger, 1, 2) == []
    assert ledger.pool_counts().preempting == 1
    batch = play(ledger, preempted=((3, 20),), stalled=(1, 2), lease_want=2)
    assert batch is not None
    assert (batch.preempt, batch.lease) == ((), (5, 2))


def test_as_many_are_preempted_at_once_as_those_that_stall_need() -> None:
    ledger = make_ledger(8)
    for number in range(1, 5):
        admit(ledger, reserve(number, prompt(16, start=100 * number), max_len=120))
    play(ledger, lease_want=4)
    play(ledger, bind=tuple((number, number + 3) for number in range(1, 5)))
    batch = play(ledger, stalled=(1, 2, 3, 4), lease_want=4)
    assert batch is not None
    assert [order.sequence for order in batch.preempt] == [4, 3], "two blocks do not serve three"
    assert play(ledger, preempted=((4, 33),), stalled=(1, 2), lease_want=2) is not None
    assert ledger.pool_counts().preempting == 1
    assert ledger.pool_counts().leased == 2


def test_two_victims_are_chosen_where_one_frees_too_little() -> None:
    ledger = make_ledger(7)
    for number in range(1, 7):
        admit(ledger, reserve(number, prompt(10, start=100 * number), max_len=90))
    play(ledger, lease_want=1)
    play(ledger, bind=((1, 6),))
    preempted = preempted_by(ledger, 2, 3, 4, 5, 6)
    assert preempted == [6, 5, 4], "each frees a block, and two go on"
    assert preempted_by(ledger, 2, 3) == [], "no more before these are reported"
    first, second, third = (each for each in ledger.drain_decisions() if each.kind is DecisionKind.PREEMPTION)
    assert (first.victim, second.victim, third.victim) == ("r6", "r5", "r4")
    assert {each.beneficiary for each in (first, second, third)} == {"r2"}
    assert [len(each.candidates) for each in (first, second, third)] == [6, 0, 0], "of one order, once"


@pytest.mark.parametrize(
    ("priorities", "stalled", "victims", "beneficiary"),
    [
        ((0, 0, 0), (3,), [3], "r1"),
        ((0, 0, 5), (2,), [2], "r3"),
        ((0, 5, 0), (1, 3), [3], "r1"),
        ((0, 0, 0), (2, 3), [3], "r2"),
    ],
)
def test_who_goes_on_has_the_blocks_and_never_a_victim(
    priorities: tuple[int, ...], stalled: tuple[int, ...], victims: list[int], beneficiary: str
) -> None:
    """Where all that stall are victims, it is the most senior one that runs on."""
    ledger = full_pool(priorities)
    assert preempted_by(ledger, *stalled) == victims
    records = [each for each in ledger.drain_decisions() if each.kind is DecisionKind.PREEMPTION]
    assert {each.beneficiary for each in records} == {beneficiary}


def test_nobody_is_preempted_for_a_sequence_that_runs_alone() -> None:
    ledger = make_ledger(2)
    admit(ledger, reserve(1, prompt(32), max_len=32))
    assert preempted_by(ledger, 1) == []


def test_a_draining_sequence_is_no_victim() -> None:
    ledger = full_pool()
    ledger.state.sequences.halt_sequence(ledger.state.sequences.live[SequenceId(3)], SequencePhase.DRAINING_FINISH)
    assert preempted_by(ledger, 1) == [2]


@pytest.mark.parametrize("left", ["free", "cached", "leased"])
def test_nobody_is_preempted_while_a_block_can_be_had(left: str) -> None:
    ledger = make_ledger(4)
    admit(ledger, reserve(1, prompt(16), max_len=48), reserve(2, prompt(16, start=90), max_len=48))
    if left == "cached":
        admit(ledger, reserve(3, prompt(16, start=500)))
        seal(ledger, 3, hashes(prompt(16, start=500)))
        finish(ledger, 3)
    if left == "leased":
        play(ledger, lease_want=2)
    assert preempted_by(ledger, 1) == []
    assert ledger.pool_counts().leased == (2 if left == "leased" else 1)


def test_a_stalled_sequence_that_left_holds_nobody_up() -> None:
    ledger = full_pool()
    finish(ledger, 3)
    play(ledger, lease_want=2, stalled=(1,))
    play(ledger, finished=((1, FinishReason.STOP),))
    (granted,) = admit(ledger, reserve(4, prompt(16, start=900)))
    assert granted.sequence == 4
    assert ledger.state.sequences.stalled == (1,)


def test_blocks_of_a_victim_are_not_free_before_its_report() -> None:
    ledger = full_pool()
    preempted_by(ledger, 1)
    assert (ledger.pool_counts().in_use, ledger.pool_counts().free) == (6, 0)
    batch = play(ledger, preempted=((3, 20),), stalled=(1,), lease_want=1)
    assert batch is not None
    assert batch.lease == (5,)


@pytest.mark.parametrize("order", ["finish wins", "preempted, then finished"])
def test_a_finish_that_crosses_the_order(order: str) -> None:
    ledger = full_pool()
    preempted_by(ledger, 1)
    end = ((SequenceId(3), FinishReason.STOP),)
    if order == "finish wins":
        play(ledger, finished=end)
    else:
        play(ledger, preempted=((3, 20),), finished=end)
    assert SequenceId(3) not in ledger.state.sequences.live
    assert (ledger.pool_counts().preempting, ledger.pool_counts().waiting, ledger.pool_counts().in_use) == (0, 0, 4)
    assert play(ledger, preempted=((3, 21),), finished=end) is None


def test_nobody_is_admitted_with_a_preemption() -> None:
    ledger = full_pool()
    batch = play(ledger, reserve=(reserve(4, prompt(5)),), stalled=(1,), lease_want=1)
    assert batch is not None
    assert ([each.sequence for each in batch.preempt], batch.admit) == ([3], ())
    assert (ledger.pool_counts().deferred, ledger.pool_counts().capacity) == (1, 0)


def test_nobody_is_admitted_while_a_sequence_stalls() -> None:
    ledger = full_pool()
    preempted_by(ledger, 1, 2)
    batch = play(ledger, preempted=((3, 20),))
    assert batch is not None
    assert (batch.lease, batch.admit) == ((5, 2), ())


def test_a_preempted_sequence_keeps_its_place() -> None:
    ledger = full_pool()
    play(ledger, reserve=(reserve(4, prompt(5)), reserve(5, prompt(5, start=50), priority=1)))
    preempted_by(ledger, 1)
    play(ledger, preempted=((3, 20),), stalled=(1,), lease_want=1)
    assert list(ledger.state.sequences.queue) == [5, 3, 4]
    assert ledger.pool_counts().totals.preemptions == 1


def test_the_record_names_victim_beneficiary_and_what_was_lost() -> None:
    ledger = full_pool()
    play(ledger, seal=((2, hashes(prompt(16, start=300))[0]),), computed=((1, 30), (2, 30), (3, 19)))
    ledger.drain_decisions()
    batch = play(ledger, stalled=(2, 1), lease_want=2)
    assert batch is not None
    (decision,) = ledger.drain_decisions()
    assert (decision.kind, decision.decision_id) == (DecisionKind.PREEMPTION, batch.preempt[0].decision_id)
    assert (decision.chosen, decision.victim, decision.beneficiary) == ("r3", "r3", "r1")
    assert [candidate.name for candidate in decision.candidates] == ["r3", "r2", "r1"]
    assert dict(decision.candidates[0].terms) == {
        "priority": 0, "arrival": 2, "private_blocks": 2, "num_tokens": 16, "work_lost": 19, "preemptions": 0,
    }  # fmt: skip
    assert dict(decision.figures) == {
        "tokens_lost": 3, "work_lost": 19, "blocks_freed": 2, "stalled": 2, "running": 3,
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_preemptions_are_bounded_and_the_most_senior_has_none(seed: int) -> None:
    """A sequence is preempted at most once for each block by which it and its seniors may still grow."""
    block_size, num_tokens, max_len, requests = 4, 6, 40, 6
    ledger, worker = make_ledger(12, block_size), FakeWorker(12, block_size, vocabulary=50)
    for number in range(requests):
        worker.submit(prompt(num_tokens, start=1000 * (number + seed)), max_len + seed)
    counts = dict.fromkeys(worker.live, 0)
    for _ in range(5000):
        worker.step()
        report = worker.report()
        for number, _ in report.preempted:
            counts[number] += 1
        ledger.apply_report(report)
        ledger.check_invariants()
        worker.deliver(ledger.schedule())
        if not worker.live:
            break
    growth = -(-(max_len + seed) // block_size) - -(-num_tokens // block_size)
    assert not worker.live
    assert counts[SequenceId(0)] == 0
    assert sum(counts.values()) > 0
    assert all(count <= (number + 1) * growth for number, count in counts.items())
