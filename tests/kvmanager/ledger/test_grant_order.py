"""Who takes the next free block: running sequences, a begun prompt, one that is old, the highest priority."""

from __future__ import annotations

from typing import Any

import pytest

from common.contracts.lease import GrantBatch
from common.contracts.types import BlockId, DecisionKind, SequenceId
from kvmanager.contracts.block import LEASED
from kvmanager.ledger import chunked_grants
from kvmanager.ledger.ledger import Ledger
from kvmanager.ledger.watchdog import waits_for_a_grant
from tests.support.kvmanager.ledgers import admit, block_table, finish, make_ledger, play, prompt, reserve

OLD_S = 30.0


def begun_ledger(num_blocks: int = 10, **options: Any) -> Ledger:
    """Return a pool of 10 blocks: sequence 1 holds 4, and sequence 2 has begun with 4 of the 8 that its prompt takes.

    Each turn may go to an old sequence.
    """
    ledger = make_ledger(num_blocks, first_part=32, in_turn=options.pop("in_turn", 0), max_wait=OLD_S, **options)
    admit(ledger, reserve(1, prompt(60), max_len=80))
    (begun,) = admit(ledger, reserve(2, prompt(128, start=500), max_len=136))
    assert (begun.sequence, len(begun.block_table)) == (2, 4)
    return ledger


def grow_old(ledger: Ledger) -> None:
    ledger.state.clock.advance(OLD_S)  # type: ignore[attr-defined]


def arrive(ledger: Ledger, number: int, tokens: int, **options: Any) -> GrantBatch | None:
    return play(ledger, reserve=(reserve(number, prompt(tokens, start=1000 * number), **options),))


def finish_preempted(ledger: Ledger, batch: GrantBatch | None, *numbers: int) -> GrantBatch | None:
    """Report the preemptions that a batch must order."""
    assert batch is not None
    assert [order.sequence for order in batch.preempt] == list(numbers)
    known = {number: ledger.state.sequences.live[SequenceId(number)].num_tokens for number in numbers}
    return play(ledger, preempted=tuple((SequenceId(number), known[number]) for number in numbers))


def return_leases(ledger: Ledger) -> GrantBatch | None:
    """Report what the worker returns where its lease target is 0."""
    assert ledger.state.worker.last_sent_target == 0
    return play(
        ledger, returned=tuple(BlockId(n) for n, of in enumerate(ledger.state.store.blocks.state) if of is LEASED)
    )


# ---------------------------------------------------------------- a begun prompt, an old sequence, a higher priority


def test_an_old_sequence_and_a_higher_priority_do_not_keep_a_begun_prompt_from_its_blocks() -> None:
    ledger = begun_ledger()
    arrive(ledger, 3, 60)
    grow_old(ledger)
    arrive(ledger, 4, 60, priority=5)
    assert ledger.state.admission.blocked_by == "prompt", (
        "it is the turn of the old one, which waits for the begun prompt"
    )
    finish(ledger, 1)
    assert ledger.state.store.pool.leased == 4, "all that the begun prompt lacks"


def test_a_higher_priority_that_needs_nearly_the_whole_pool_preempts_a_begun_prompt() -> None:
    """The watermark is for those that run beside it, and nobody does."""
    ledger = make_ledger(200, first_part=32, watermark=0.01)
    admit(ledger, reserve(1, prompt(1000), max_len=1008))
    (begun,) = admit(ledger, reserve(2, prompt(190 * 16, start=5000), max_len=190 * 16 + 8))
    assert len(begun.block_table) < 190
    finish(ledger, 1)
    assert ledger.state.sequences.find_begun_prompt() is not None
    finish_preempted(ledger, arrive(ledger, 3, 199 * 16, priority=1), 2)
    batch = return_leases(ledger)
    assert batch is not None
    assert [each.sequence for each in batch.admit] == [3]


def test_a_begun_prompt_takes_what_a_higher_priority_cannot_use_yet() -> None:
    # Sequence 1 has the higher priority's own priority, so that it gives it nothing.
    ledger = make_ledger(12, first_part=32, max_wait=OLD_S)
    admit(ledger, reserve(1, prompt(60), max_len=64, priority=5), reserve(2, prompt(40, start=300), max_len=48))
    (begun,) = admit(ledger, reserve(3, prompt(128, start=500), max_len=136))
    assert begun.sequence == 3
    lacking = 8 - len(begun.block_table)
    batch = arrive(ledger, 4, 12 * 16, priority=5)
    assert batch is None or not batch.preempt, "twelve blocks are not to be had while sequence 1 runs"
    finish(ledger, 2)
    assert ledger.state.admission.blocked_by == "capacity"
    assert ledger.state.store.pool.leased == lacking


def test_a_higher_priority_that_fits_goes_before_a_begun_prompt() -> None:
    ledger = begun_ledger()
    batch = arrive(ledger, 3, 10, priority=5)
    assert batch is not None
    assert [each.sequence for each in batch.admit] == [3]
    assert not batch.preempt
    assert ledger.state.sequences.find_begun_prompt() is not None


def test_blocks_that_a_preemption_frees_for_a_higher_priority_do_not_go_to_a_begun_prompt() -> None:
    ledger = make_ledger(16, first_part=32, chunked_grants=True)
    admit(ledger, reserve(1, prompt(60), max_len=64), reserve(2, prompt(60, start=300), max_len=64))
    (begun,) = admit(ledger, reserve(3, prompt(192, start=500), max_len=200))
    assert begun.sequence == 3
    batch = arrive(ledger, 4, 160, priority=5)
    assert batch is not None
    victims = [order.sequence for order in batch.preempt]
    assert len(victims) >= 2
    first, *others = victims
    batch = play(ledger, preempted=((first, ledger.state.sequences.live[first].num_tokens),))
    assert batch is None or not batch.lease, "the order is not carried out yet"
    batch = play(ledger, preempted=tuple((each, ledger.state.sequences.live[each].num_tokens) for each in others))
    assert batch is not None
    assert batch.admit[0].sequence == 4


def test_an_old_begun_prompt_takes_its_turn_and_is_protected() -> None:
    ledger = begun_ledger()
    grow_old(ledger)
    batch = arrive(ledger, 3, 100, priority=5)
    assert batch is None or not batch.preempt
    part = ledger.state.sequences.find_begun_prompt()
    assert part is not None
    assert part.by_age
    assert ledger.state.admission.blocked_by == "prompt"
    assert ledger.state.admission.admitted_in_turn == 0, "that was its turn"


@pytest.mark.parametrize("in_turn", [3, 7])
def test_it_waits_for_the_turn_by_age(in_turn: int) -> None:
    ledger = begun_ledger(in_turn=in_turn)
    grow_old(ledger)
    assert ledger.state.admission.admitted_in_turn == 2
    batch = arrive(ledger, 3, 100, priority=5)
    assert batch is not None
    assert SequenceId(2) in [order.sequence for order in batch.preempt]


def test_time_in_the_queue_counts_for_a_begun_prompt_once() -> None:
    ledger = make_ledger(10, first_part=32, in_turn=0, max_wait=OLD_S)
    admit(ledger, reserve(1, prompt(140), max_len=144))
    assert arrive(ledger, 2, 128, max_len=136) is None
    ledger.state.clock.advance(20.0)  # type: ignore[attr-defined]
    admit(ledger, reserve(5, prompt(10, start=900), max_len=12))
    finish(ledger, 1)
    sequence = ledger.state.sequences.live[SequenceId(2)]
    assert sequence.waited == 20.0


# ---------------------------------------------------------------- preemptions that free enough


def test_nobody_is_preempted_for_blocks_that_the_waiting_sequence_shares_anyway() -> None:
    """A victim's blocks that are hits of the one that waits bring nothing: it needs as many others as before."""
    shared = prompt(96)
    ledger = make_ledger(12, watermark=0.0)
    admit(ledger, reserve(1, prompt(48, start=300), max_len=48, priority=5))
    admit(ledger, reserve(2, [*shared, *prompt(16, start=700)], max_len=112))
    assert len(block_table(ledger, 2)) == 7
    batch = arrive_sharing(ledger, 3, [*shared, *prompt(80, start=800)], priority=5)
    # It shares six blocks and lacks five; two are free, and only one of the victim's seven is not shared.
    assert batch is None or not batch.preempt
    batch = finish(ledger, 1)
    assert batch is not None
    assert [each.sequence for each in batch.admit] == [3]


def arrive_sharing(ledger: Ledger, number: int, tokens: list[int], **options: Any) -> GrantBatch | None:
    return play(ledger, reserve=(reserve(number, tokens, max_len=len(tokens), **options),))


def test_a_lease_pool_that_nobody_needs_any_more_counts_as_free() -> None:
    ledger = make_ledger(10, watermark=0.0)
    admit(ledger, reserve(1, prompt(60), max_len=160))
    leased = play(ledger, lease_want=2)
    assert leased is not None
    assert len(leased.lease) == 2
    finish_preempted(ledger, arrive(ledger, 2, 160, priority=5), 1)
    batch = return_leases(ledger)
    assert batch is not None
    assert [each.sequence for each in batch.admit] == [2]


# ---------------------------------------------------------------- turns by age


def test_one_that_was_preempted_and_is_young_keeps_no_later_arrival_from_its_turn() -> None:
    ledger = make_ledger(4, in_turn=1, max_wait=OLD_S)
    admit(ledger, reserve(1, prompt(60)))
    finish_preempted(ledger, arrive(ledger, 2, 60, priority=5), 1)
    arrive(ledger, 3, 60)
    grow_old(ledger)
    ledger.state.sequences.live[SequenceId(1)].queued_at = OLD_S  # it ran in between
    batch = finish(ledger, 2)
    assert batch is not None
    assert [each.sequence for each in batch.admit] == [3]


# ---------------------------------------------------------------- work that stands still nevertheless


def test_a_begun_prompt_gives_up_its_part_where_work_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_grants, "lease_want", lambda _state, _begun: 0)
    ledger = begun_ledger(backfill=False)
    finish(ledger, 1)
    play(ledger, stalled=(SequenceId(2),))
    arrive(ledger, 3, 60)
    return_leases(ledger)
    why = waits_for_a_grant(ledger.pool_counts())
    assert why == "1 sequences wait, 1 run and lack blocks, 6 of 10 blocks are free and none was granted"
    batch = ledger.break_stall(why)
    ledger.check_invariants()
    assert batch is not None
    assert [order.sequence for order in batch.preempt] == [2]
    (record,) = [each for each in ledger.drain_decisions() if each.kind is DecisionKind.PREEMPTION]
    assert (record.victim, record.beneficiary, record.reasons[0]) == ("r2", "r3", why)
    assert ledger.pool_counts().totals.broken_stalls == 1
    assert ledger.break_stall(why) is None, "one order at a time"
    batch = play(ledger, preempted=((SequenceId(2), 128),))
    assert batch is not None
    assert [(each.sequence, len(each.block_table)) for each in batch.admit] == [(2, 8)], "whole, and before the later"


def test_where_none_runs_only_a_new_session_helps() -> None:
    ledger = make_ledger(4)
    assert ledger.break_stall("nothing goes on") is None
    admit(ledger, reserve(1, prompt(60)))
    assert ledger.break_stall("it runs and lacks nothing") is None
