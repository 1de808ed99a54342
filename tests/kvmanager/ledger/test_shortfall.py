"""The record of a wait: what a sequence lacks, who goes first, who holds the blocks; and for whom a prefix went."""

from __future__ import annotations

from common.contracts.clock import ManualClock
from common.contracts.types import Decision, DecisionKind, MissReason
from kvmanager.ledger.ledger import Ledger
from tests.support.kvmanager.ledgers import admit, finish, hashes, make_ledger, play, prompt, reserve, run_through


def drained(ledger: Ledger, kind: DecisionKind) -> list[Decision]:
    return [each for each in ledger.drain_decisions() if each.kind is kind]


def terms(record: Decision) -> dict[str, dict[str, float]]:
    return {each.name: dict(each.terms) for each in record.candidates}


def test_a_sequence_that_lacks_blocks_learns_who_holds_them() -> None:
    ledger = make_ledger(10)
    admit(ledger, reserve(1, prompt(64), tenant="red"), reserve(2, prompt(48, start=500), tenant="red"))
    assert admit(ledger, reserve(3, prompt(80, start=900), tenant="blue")) == ()
    (record,) = drained(ledger, DecisionKind.SHORTFALL)
    assert (record.request_id, record.chosen, record.beneficiary) == ("r3", "waits", "")
    assert record.reasons == ("too few blocks",)
    assert terms(record) == {
        "tenant red": {"blocks": 7, "sequences": 2},
        "r1": {"blocks": 4},
        "r2": {"blocks": 3},
    }
    assert dict(record.figures) == {
        "needed": 5, "head_needed": 5, "available": 3, "num_blocks": 10, "running": 2, "waiting": 1,
    }  # fmt: skip


def test_a_sequence_behind_another_learns_which_one_goes_first() -> None:
    ledger = make_ledger(10)
    admit(ledger, reserve(1, prompt(64)))
    assert admit(ledger, reserve(2, prompt(120, start=500)), reserve(3, prompt(16, start=900), max_len=40)) == ()
    head, behind = drained(ledger, DecisionKind.SHORTFALL)
    assert (head.request_id, head.reasons, head.beneficiary) == ("r2", ("too few blocks",), "")
    assert (behind.request_id, behind.reasons, behind.beneficiary) == ("r3", ("behind another sequence",), "r2")
    figures = dict(behind.figures)
    assert (figures["needed"], figures["head_needed"], figures["available"]) == (1, 8, 6)


def test_a_grant_counts_the_higher_priorities_that_went_first() -> None:
    clock = ManualClock()
    ledger = make_ledger(10, max_num_seqs=1, clock=clock)
    admit(ledger, reserve(1, prompt(16), priority=5))
    admit(ledger, reserve(2, prompt(16, start=500), priority=-1))
    admit(ledger, reserve(3, prompt(16, start=600), priority=0), reserve(4, prompt(16, start=700), priority=-1))
    clock.advance(1.0)
    for sequence in (1, 3, 2):
        finish(ledger, sequence)
    passed = {each.request_id: dict(each.figures).get("passed_by") for each in drained(ledger, DecisionKind.GRANT)}
    assert passed == {"r1": None, "r3": None, "r2": 1.0, "r4": 1.0}


def test_a_sequence_without_a_place_says_so() -> None:
    ledger = make_ledger(10, max_num_seqs=1)
    admit(ledger, reserve(1, prompt(16)))
    assert admit(ledger, reserve(2, prompt(16, start=500))) == ()
    (record,) = drained(ledger, DecisionKind.SHORTFALL)
    assert record.reasons == ("no place in the batch",)


def test_a_wait_is_recorded_once_and_one_that_ended_not_at_all() -> None:
    ledger = make_ledger(10)
    admit(ledger, reserve(1, prompt(64)))
    assert drained(ledger, DecisionKind.SHORTFALL) == []
    admit(ledger, reserve(2, prompt(120, start=500)))
    play(ledger)
    play(ledger)
    assert len(drained(ledger, DecisionKind.SHORTFALL)) == 1
    finish(ledger, 1)
    assert not ledger.state.sequences.queue.unexplained


def test_a_record_names_a_bounded_number_of_holders() -> None:
    ledger = make_ledger(64, chunked_grants=False)
    admit(ledger, *(reserve(n, prompt(16, start=100 * n), tenant=f"t{n}") for n in range(1, 31)))
    assert admit(ledger, reserve(99, prompt(640, start=9_000))) == ()
    (record,) = drained(ledger, DecisionKind.SHORTFALL)
    assert len(record.candidates) == 12
    assert sum(each.name.startswith("tenant ") for each in record.candidates) == 4


def test_a_victim_that_waits_again_has_a_record_of_that_wait() -> None:
    ledger = make_ledger(10)
    admit(ledger, reserve(1, prompt(16)))
    admit(ledger, reserve(2, prompt(80, start=500)))
    play(ledger, reserve=(reserve(3, prompt(112, start=900), priority=1),))
    ledger.drain_decisions()
    batch = play(ledger, preempted=((reserve(2, prompt(80)).sequence, 80),))
    assert batch is not None
    assert [each.sequence for each in batch.admit] == [3]
    (record,) = drained(ledger, DecisionKind.SHORTFALL)
    assert record.request_id == "r2"


def test_a_miss_by_eviction_names_the_sequence_that_needed_the_room() -> None:
    ledger = make_ledger(4)
    run_through(ledger, 1, prompt(48))
    run_through(ledger, 2, prompt(64, start=500))
    ledger.drain_decisions()
    (again,) = admit(ledger, reserve(3, prompt(48)))
    assert again.miss_reason is MissReason.EVICTED
    (record,) = drained(ledger, DecisionKind.GRANT)
    assert (record.reasons[0], record.beneficiary) == ("evicted", "r2")
    assert ledger.look_up_prompt(hashes(prompt(64, start=500)), 64).evicted_for == "r3"
