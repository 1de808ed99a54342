"""Whose blocks are taken back where several could give theirs: the least work to lose, and nobody too often."""

from __future__ import annotations

from typing import Any

import pytest

from common.contracts.lease import Inventory, InventorySequence
from common.contracts.types import BlockId, DecisionKind, SequenceId, SequencePhase
from kvmanager.ledger.ledger import Ledger
from tests.support.kvmanager.fake_worker import FakeWorker
from tests.support.kvmanager.ledgers import admit, block_table, finish, hashes, make_ledger, play, prompt, reserve, seal


def running(num_blocks: int, *prompts: int, **options: Any) -> Ledger:
    """Return a ledger without a free block. So many sequences run, each with such a prompt and room to grow."""
    ledger = make_ledger(num_blocks, **options)
    for number, length in enumerate(prompts, start=1):
        admit(ledger, reserve(number, prompt(length, start=1000 * number), max_len=length + 48))
    use_up(ledger)
    assert ledger.pool_counts().running == len(prompts)
    return ledger


def use_up(ledger: Ledger) -> None:
    """Bind all free blocks to the first sequence."""
    play(ledger, lease_want=ledger.pool_counts().free)
    play(ledger, bind=tuple((1, block) for block in leased(ledger)))
    assert (ledger.pool_counts().free, ledger.pool_counts().leased) == (0, 0)


def preempted(ledger: Ledger, *stalled: int, **columns: Any) -> list[int]:
    batch = play(ledger, stalled=tuple(map(SequenceId, stalled)), lease_want=len(stalled), **columns)
    return [order.sequence for order in batch.preempt] if batch else []


# ---------------------------------------------------------------- the least work


@pytest.mark.parametrize(("policy", "victim"), [("work", 2), ("arrival", 3)])
def test_the_victim_loses_the_least_work(policy: str, victim: int) -> None:
    ledger = running(10, 16, 16, 112, preemption=policy)
    for number, length in ((1, 16), (2, 16), (3, 112)):
        seal(ledger, number, hashes(prompt(length, start=1000 * number)))
    assert preempted(ledger, 1) == [victim]


def test_blocks_that_others_hold_are_no_work_to_lose() -> None:
    ledger, common = make_ledger(12), prompt(96)
    admit(ledger, reserve(1, [*common, 1], max_len=130))
    seal(ledger, 1, hashes(common))
    admit(ledger, reserve(2, prompt(40, start=500), max_len=90), reserve(3, [*common, 2], max_len=130))
    seal(ledger, 2, hashes(prompt(40, start=500)))
    play(ledger, lease_want=1)
    play(ledger, bind=((1, block_table(ledger, 2)[-1] + 2),))
    assert ledger.pool_counts().free == 0
    assert preempted(ledger, 1) == [3], "97 tokens, of which 96 stay with the first"


def test_where_nothing_is_sealed_the_reported_lengths_count() -> None:
    ledger = make_ledger(7)
    for number in (1, 2, 3):
        admit(ledger, reserve(number, prompt(32, start=100 * number), max_len=90, block_hashes=()))
    use_up(ledger)
    assert preempted(ledger, 1, computed=((1, 30), (2, 20), (3, 31))) == [2]


def test_a_prompt_that_has_only_begun_goes_before_one_that_is_computed() -> None:
    ledger = running(13, 16, 64, 112)
    seal(ledger, 2, hashes(prompt(64, start=2000)))
    seal(ledger, 3, hashes(prompt(112, start=3000))[:1])
    assert preempted(ledger, 1) == [3]


def test_a_lower_priority_goes_first_whatever_it_loses() -> None:
    ledger = make_ledger(9)
    admit(ledger, reserve(1, prompt(16), max_len=64, priority=1), reserve(2, prompt(96, start=900), max_len=140))
    admit(ledger, reserve(3, prompt(16, start=100), max_len=64, priority=1))
    seal(ledger, 2, hashes(prompt(96, start=900)))
    use_up(ledger)
    assert preempted(ledger, 1) == [2]


def test_a_victim_that_turns_out_to_be_needless_stays() -> None:
    """The cheapest comes first, and then one without which there is too little: that one alone is enough."""
    ledger = running(10, 16, 16, 112)
    for number, length in ((1, 16), (2, 16), (3, 112)):
        seal(ledger, number, hashes(prompt(length, start=1000 * number)))
    batch = play(ledger, reserve=(reserve(4, prompt(70, start=9000), priority=1),))
    assert batch is not None
    assert [order.sequence for order in batch.preempt] == [3]


# ---------------------------------------------------------------- preempt to admit


def test_as_many_are_preempted_at_once_as_a_higher_priority_needs() -> None:
    ledger = running(9, 30, 30, 30, 30)
    ledger.drain_decisions()
    batch = play(ledger, reserve=(reserve(5, prompt(90, start=9000), priority=1),))
    assert batch is not None
    assert [order.sequence for order in batch.preempt] == [4, 3, 2], "six blocks, for three of two"
    found = [each for each in ledger.drain_decisions() if each.kind is DecisionKind.PREEMPTION]
    assert {(each.beneficiary, each.reasons[0]) for each in found} == {("r5", "a higher priority waits")}
    batch = play(ledger, preempted=((2, 31), (3, 31), (4, 31)))
    assert batch is not None
    assert [each.sequence for each in batch.admit] == [5]


def test_nobody_is_preempted_where_all_of_them_do_not_suffice() -> None:
    ledger = make_ledger(8)
    admit(ledger, reserve(1, prompt(64), max_len=70, priority=2), reserve(2, prompt(30, start=500), max_len=40))
    batch = play(ledger, reserve=(reserve(3, prompt(100, start=9000), priority=1),))
    assert batch is None or not batch.preempt


def test_a_tenant_below_its_share_takes_no_more_than_makes_the_other_one_equal() -> None:
    ledger = make_ledger(8)
    for number in range(1, 5):
        admit(ledger, reserve(number, prompt(30, start=100 * number), tenant="red"))
    batch = play(ledger, reserve=(reserve(5, prompt(60, start=9000), tenant="blue"),))
    assert batch is not None
    assert [order.sequence for order in batch.preempt] == [4, 3]
    assert play(ledger, preempted=((3, 30), (4, 30))) is not None
    assert ledger.state.sequences.live[SequenceId(5)].block_table


# ---------------------------------------------------------------- the bound


def preempt_often(ledger: Ledger, times: int) -> None:
    """Let the second of two sequences be preempted for the first one so many times, and be admitted again."""
    for _ in range(times):
        assert preempted(ledger, 1) == [2]
        play(ledger, preempted=((2, 17),), stalled=(1,), lease_want=1)
        play(ledger, returned=tuple(leased(ledger)), stalled=())
    assert ledger.state.sequences.live[SequenceId(2)].preemptions == times


def leased(ledger: Ledger) -> list[int]:
    return [block for block, of in enumerate(ledger.state.store.blocks.state) if of.value == "leased"]


def pressed(max_preemptions: int) -> Ledger:
    """Return a pool of 6 blocks: the first sequence holds 4 of its 5, the second may grow to 3."""
    ledger = make_ledger(6, max_preemptions=max_preemptions, watermark=0.0)
    admit(ledger, reserve(1, prompt(64), max_len=80), reserve(2, prompt(17, start=900), max_len=33))
    return ledger


def test_after_the_last_preemption_a_sequence_is_admitted_with_all_that_it_may_need() -> None:
    ledger = pressed(max_preemptions=2)
    preempt_often(ledger, 1)
    assert len(block_table(ledger, 2)) == 2
    preempt_often_to_the_bound(ledger)
    assert block_table(ledger, 2) == (), "two blocks are there, and it waits for the third"
    batch = finish(ledger, 1)
    assert batch is not None
    assert len(block_table(ledger, 2)) == 2, "33 tokens have 32 slots"


def preempt_often_to_the_bound(ledger: Ledger) -> None:
    assert preempted(ledger, 1) == [2]
    play(ledger, preempted=((2, 17),), stalled=(1,), lease_want=1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("session", [8000, 30], ids=["one manager", "many managers"])
def test_no_sequence_is_preempted_more_often_than_the_bound(seed: int, most: int, session: int) -> None:
    block_size, requests = 4, 8
    ledger, worker = make_ledger(12, block_size, max_preemptions=most), FakeWorker(12, block_size, vocabulary=50)
    for number in range(requests):
        worker.submit(prompt(4 + number % 5, start=1000 * (number + seed)), 36 + (seed * number) % 9)
    counts = dict.fromkeys(worker.live, 0)
    for step in range(8000):
        if step % session == session - 1:
            ledger = make_ledger(12, block_size, max_preemptions=most)
            ledger.rebuild(worker.inventory())
        worker.step()
        report = worker.report()
        for number, _ in report.preempted:
            counts[number] += 1
        ledger.apply_report(report)
        ledger.check_invariants()
        worker.deliver(ledger.schedule())
        if not worker.live:
            break
    assert not worker.live, "every sequence ends"
    assert max(counts.values()) <= most
    assert sum(counts.values()) > 0


def test_a_spared_sequence_gives_way_to_a_higher_priority() -> None:
    ledger = make_ledger(7, max_preemptions=1)
    admit(ledger, reserve(1, prompt(40), priority=1), reserve(2, prompt(40, start=500)))
    ledger.state.sequences.live[SequenceId(2)].preemptions = 1
    batch = play(ledger, reserve=(reserve(3, prompt(40, start=9000), priority=1),))
    assert batch is not None
    assert [order.sequence for order in batch.preempt] == [2]


def test_a_spared_sequence_gives_way_to_no_other_tenant() -> None:
    ledger = make_ledger(6, max_preemptions=1)
    for number in (1, 2, 3):
        admit(ledger, reserve(number, prompt(30, start=100 * number), max_len=32, tenant="red"))
        ledger.state.sequences.live[SequenceId(number)].preemptions = 1
    batch = play(ledger, reserve=(reserve(5, prompt(30, start=9000), tenant="blue"),))
    assert batch is None or not batch.preempt


def test_where_all_others_are_spared_the_stalled_one_waits_for_an_end() -> None:
    ledger = running(7, 40, 40, max_preemptions=1)
    ledger.state.sequences.live[SequenceId(2)].preemptions = 1
    assert preempted(ledger, 1) == []
    batch = finish(ledger, 2)
    assert batch is not None
    assert len(batch.lease) == 1


def test_with_windows_a_spared_sequence_is_chosen_last() -> None:
    ledger = make_ledger(8, 4, window=8, max_preemptions=1)
    for number in (1, 2, 3):
        admit(ledger, reserve(number, prompt(8, start=100 * number), max_len=30, block_size=4))
    use_up(ledger)
    ledger.state.sequences.live[SequenceId(3)].preemptions = 5
    assert preempted(ledger, 1) == [2]
    play(ledger, preempted=((2, 9),))
    assert ledger.pool_counts().preempting == 0


def test_without_a_bound_the_least_work_is_lost_every_time() -> None:
    ledger = running(7, 40, 40, max_preemptions=0)
    ledger.state.sequences.live[SequenceId(2)].preemptions = 100
    assert preempted(ledger, 1) == [2]


# ---------------------------------------------------------------- a new manager


def attached_again(*counts: int, max_preemptions: int = 2, blocks: int = 3) -> Ledger:
    """Return a ledger of a new session: sequences of at most 3 blocks, preempted so often, that have `blocks` each."""
    ledger = make_ledger(len(counts) * blocks, max_preemptions=max_preemptions, watermark=0.0)
    entries = []
    for number, count in enumerate(counts):
        table = tuple(BlockId(number * blocks + index) for index in range(blocks))
        entry = reserve(number + 1, prompt(17, start=100 * number), max_len=48)
        entries.append(InventorySequence(entry, SequencePhase.RUNNING, number, table, count))
    ledger.rebuild(Inventory(tuple(entries)))
    return ledger


def test_a_new_manager_spares_who_was_preempted_often() -> None:
    ledger = attached_again(0, 0, 2)
    batch = play(ledger, reserve=(reserve(9, prompt(17, start=9000), max_len=48, tenant="other"),))
    assert batch is not None
    assert [order.sequence for order in batch.preempt] == [2], "the third has the latest arrival"


@pytest.mark.parametrize("counts", [(2, 2), (7, 2)])
def test_sequences_without_all_their_blocks_do_not_wait_for_each_other(counts: tuple[int, int]) -> None:
    """Their last manager had another bound, or none: both were preempted often, and may lack blocks."""
    ledger = attached_again(*counts, blocks=2)
    assert preempted(ledger, 1, 2) == [2]
    play(ledger, preempted=((2, 17),), stalled=(1,), lease_want=1)
    assert ledger.state.sequences.live[SequenceId(2)].preemptions == 2, "from here on it is spared"
