"""Tenants at one worker: who is admitted next, and who gives way."""

from __future__ import annotations

import pytest

from common.contracts.types import DecisionKind, SequenceId
from kvmanager.ledger.audit import InvariantBroken
from kvmanager.ledger.ledger import Ledger
from kvmanager.ledger.shares import TenantShares
from tests.support.kvmanager.ledgers import admit, finish, make_ledger, play, prompt, reserve


def ask(
    ledger: Ledger, tenant: str, *numbers: int, blocks: int = 1, priority: int = 0, weight: float = 1.0
) -> list[int]:
    """Reserve sequences of so many blocks for a tenant; return the numbers of those that were admitted at once."""
    wanted = (
        reserve(number, prompt(16 * blocks, 1000 * number), tenant=tenant, priority=priority, weight=weight)
        for number in numbers
    )
    return [each.sequence for each in admit(ledger, *wanted)]


def admitted_after(ledger: Ledger, *numbers: int) -> list[int]:
    """Let sequences finish; return those that are admitted then."""
    batch = finish(ledger, *numbers)
    return [each.sequence for each in batch.admit] if batch else []


def preempted(ledger: Ledger) -> list[int]:
    return [each.id for each in ledger.state.sequences.live.values() if each.id in ledger.state.sequences.preempting]


def gives_way(ledger: Ledger) -> list[int]:
    """Report the outstanding preemption as done; return those that are admitted then."""
    (victim,) = preempted(ledger)
    batch = play(ledger, preempted=((victim, ledger.state.sequences.live[SequenceId(victim)].num_tokens),))
    return [each.sequence for each in batch.admit] if batch else []


def test_a_tenant_alone_gets_every_place_in_order() -> None:
    ledger = make_ledger(100, max_num_seqs=8)
    assert ask(ledger, "red", *range(1, 11)) == list(range(1, 9))
    assert admitted_after(ledger, 3) == [9]
    assert preempted(ledger) == []


def test_the_tenant_of_the_least_load_is_next_whatever_the_arrival() -> None:
    ledger = make_ledger(100, max_num_seqs=4)
    ask(ledger, "red", 1, 2)
    ask(ledger, "blue", 3, 4)
    assert ask(ledger, "red", 5, 6) == []
    assert ask(ledger, "blue", 7) == []
    assert admitted_after(ledger, 4) == [7]
    assert admitted_after(ledger, 1) == [5]


def test_weights_divide_the_places() -> None:
    ledger = make_ledger(100, max_num_seqs=4)
    ask(ledger, "heavy", 1, 2, 3, weight=3.0)
    ask(ledger, "light", 4)
    ask(ledger, "light", 5)
    ask(ledger, "heavy", 6, weight=3.0)
    shares = TenantShares(ledger.state.config, ledger.state.sequences.tenants)
    assert (shares.load_of("heavy"), shares.load_of("light")) == (1.0, 1.0)
    assert preempted(ledger) == []
    assert admitted_after(ledger, 2) == [6]


def test_a_tenant_below_its_share_takes_the_place_of_the_latest_of_another() -> None:
    ledger = make_ledger(100, max_num_seqs=4)
    ask(ledger, "red", 1, 2, 3, 4)
    assert ask(ledger, "blue", 5) == []
    assert preempted(ledger) == [4]
    assert gives_way(ledger) == [5]
    # Blue is at 1 of 4 places with the next one at its share; then it waits.
    assert ask(ledger, "blue", 6, 7) == []
    assert gives_way(ledger) == [6]
    assert preempted(ledger) == []
    record = next(each for each in ledger.drain_decisions() if each.kind is DecisionKind.PREEMPTION)
    assert (record.victim, record.beneficiary) == ("r4", "r5")
    assert record.reasons[0] == "a tenant below its share waits"


def test_a_tenant_below_its_share_takes_blocks_of_another() -> None:
    ledger = make_ledger(8, max_num_seqs=16, watermark=0.0)
    ask(ledger, "red", 1, 2, blocks=4)
    assert ask(ledger, "blue", 3, blocks=3) == []
    assert preempted(ledger) == [2]
    assert gives_way(ledger) == [3]


def test_nobody_gives_way_when_that_would_not_be_enough() -> None:
    ledger = make_ledger(8, max_num_seqs=16, watermark=0.0)
    ask(ledger, "red", 1, blocks=6)
    ask(ledger, "red", 2, blocks=2)
    assert ask(ledger, "blue", 3, blocks=4) == []
    assert preempted(ledger) == []


def test_the_last_sequence_of_a_tenant_and_the_most_senior_one_stay() -> None:
    ledger = make_ledger(8, max_num_seqs=16, watermark=0.0)
    ask(ledger, "white", 1)
    ask(ledger, "red", 2, blocks=6)
    assert ask(ledger, "blue", 3, blocks=4) == []
    assert preempted(ledger) == []
    alone = make_ledger(100, max_num_seqs=1)
    ask(alone, "red", 1)
    assert ask(alone, "blue", 2) == []
    assert preempted(alone) == []


def test_a_preempted_tenant_does_not_preempt_back() -> None:
    ledger = make_ledger(100, max_num_seqs=4)
    ask(ledger, "red", 1, 2, 3, 4)
    ask(ledger, "blue", 5)
    gives_way(ledger)
    ask(ledger, "blue", 6)
    gives_way(ledger)
    for _ in range(3):
        play(ledger)
        assert preempted(ledger) == []
    assert admitted_after(ledger, 5) == [3]


@pytest.mark.parametrize("limit", ["places", "blocks"])
def test_a_higher_priority_preempts_to_be_admitted(limit: str) -> None:
    ledger = make_ledger(100 if limit == "places" else 3, max_num_seqs=3 if limit == "places" else 16, watermark=0.0)
    ask(ledger, "red", 1, 2, 3)
    assert ask(ledger, "red", 4, priority=1) == []
    assert preempted(ledger) == [3]
    assert gives_way(ledger) == [4]
    assert ask(ledger, "red", 5, priority=0) == []
    assert preempted(ledger) == []


def test_tenants_at_their_share_leave_places_free_for_others() -> None:
    ledger = make_ledger(100, max_num_seqs=32)
    assert len(ask(ledger, "red", *range(1, 21))) == 20
    assert ask(ledger, "blue", 101) == [101]
    assert len(ask(ledger, "red", *range(21, 41))) == 9, "two of 32 places stay free"
    assert ask(ledger, "blue", 102, 103) == [102, 103]


def test_a_stalled_pool_takes_from_the_tenant_of_the_greatest_load() -> None:
    ledger = make_ledger(6, watermark=0.0)
    for number, tenant in ((1, "red"), (2, "red"), (3, "blue")):
        admit(ledger, reserve(number, prompt(16, start=100 * number), max_len=90, tenant=tenant))
    play(ledger, lease_want=3)
    play(ledger, bind=tuple((number, number + 2) for number in (1, 2, 3)))
    batch = play(ledger, stalled=(SequenceId(1),), lease_want=1)
    assert batch is not None
    assert [each.sequence for each in batch.preempt] == [2]


def used(ledger: Ledger, tenant: str) -> tuple[int, int, int]:
    use = ledger.state.sequences.tenants[tenant]
    return use.live, use.running, use.blocks


def test_what_a_tenant_holds_follows_each_report() -> None:
    ledger = make_ledger(20, max_num_seqs=2, window=40)
    admit(ledger, reserve(1, prompt(32), max_len=160, tenant="red"), reserve(2, prompt(16, 90), tenant="red"))
    assert ask(ledger, "red", 3) == []
    assert used(ledger, "red") == (3, 2, 3)
    batch = play(ledger, lease_want=2)
    assert batch is not None
    play(ledger, bind=((1, batch.lease[0]), (1, batch.lease[1])), lease_want=2)
    assert used(ledger, "red") == (3, 2, 5)
    play(ledger, trim=((1, 1),), lease_want=2)
    assert used(ledger, "red") == (3, 2, 4)
    assert admitted_after(ledger, 1) == [3]
    assert used(ledger, "red") == (2, 2, 2)
    finish(ledger, 2, 3)
    assert "red" not in ledger.state.sequences.tenants


def test_the_audit_finds_a_tenant_that_is_miscounted() -> None:
    ledger = make_ledger(20)
    ask(ledger, "red", 1)
    ledger.state.sequences.tenants["red"] = ledger.state.sequences.tenants["red"].more(0, 1)
    with pytest.raises(InvariantBroken, match="tenants"):
        ledger.check_invariants()
