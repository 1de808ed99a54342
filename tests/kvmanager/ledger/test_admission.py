"""Who is refused, who waits for what, who may leave at any time, and what is counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.contracts.errors import ProtocolViolation
from common.contracts.lease import Admit, Report
from common.contracts.types import DecisionKind, FinishReason, MissReason
from kvmanager.ledger.ledger import Ledger
from tests.suites.protocol.ledger_copies import ledger_key
from tests.support.kvmanager.ledgers import (
    admit,
    block_table,
    finish,
    free_order,
    hashes,
    make_ledger,
    play,
    prompt,
    reserve,
    run_through,
    seal,
)


def admitted(granted: tuple[Admit, ...]) -> list[int]:
    return [each.sequence for each in granted]


def test_a_request_beyond_the_pool_is_refused_with_the_numbers() -> None:
    ledger = make_ledger(4)
    batch = play(ledger, reserve=(reserve(1, prompt(20), max_len=66), reserve(2, prompt(64))))
    assert batch is not None
    assert batch.cancel == (1,)
    assert admitted(batch.admit) == [2]
    refusal = next(each for each in ledger.drain_decisions() if each.kind is DecisionKind.REJECTION)
    assert (refusal.request_id, refusal.chosen) == ("r1", "refused")
    assert refusal.reasons == ("66 tokens need 5 blocks; the pool has 4",)
    assert dict(refusal.figures) == {"needed_blocks": 5, "num_blocks": 4, "max_len": 66}
    assert ledger.pool_counts().totals.rejections == 1


def test_the_last_token_of_an_output_needs_no_slot() -> None:
    ledger = make_ledger(4, runway="max")
    (granted,) = admit(ledger, reserve(1, prompt(64), max_len=65))
    assert len(granted.block_table) == 4
    finish(ledger, 1)
    (granted,) = admit(ledger, reserve(2, prompt(20, start=90), max_len=33))
    assert len(granted.block_table) == 2


def test_a_prompt_without_output_needs_a_slot_for_each_token() -> None:
    ledger = make_ledger(4)
    batch = play(ledger, reserve=(reserve(1, prompt(65), max_len=65),))
    assert batch is not None
    assert batch.cancel == (1,)


def test_a_refused_sequence_that_the_worker_then_finishes_changes_nothing() -> None:
    ledger = make_ledger(4)
    play(ledger, reserve=(reserve(1, prompt(65)),))
    before = ledger_key(ledger)
    assert finish(ledger, 1) is None
    assert ledger_key(ledger) == before


def test_a_request_for_the_whole_pool_runs_alone() -> None:
    ledger = make_ledger(4)
    admit(ledger, reserve(1, prompt(20), max_len=60))
    assert admit(ledger, reserve(2, prompt(60, start=90))) == ()
    batch = finish(ledger, 1)
    assert batch is not None
    assert admitted(batch.admit) == [2]


def test_all_or_nothing_a_request_that_does_not_fit_changes_nothing() -> None:
    ledger = make_ledger(4)
    run_through(ledger, 1, prompt(17))
    admit(ledger, reserve(2, prompt(20, start=90)))
    before = free_order(ledger)
    assert admit(ledger, reserve(3, prompt(60))) == ()
    assert free_order(ledger) == before


def test_a_sequence_that_will_grow_needs_a_block_more_beside_others() -> None:
    ledger = make_ledger(4)
    admit(ledger, reserve(1, prompt(20)))
    assert admit(ledger, reserve(2, prompt(20, start=90), max_len=60)) == ()
    finish(ledger, 2)
    assert admitted(admit(ledger, reserve(3, prompt(20, start=90)))) == [3]


def test_the_watermark_is_left_to_those_that_run() -> None:
    ledger = make_ledger(100, watermark=0.05, chunked_grants=False)
    assert admitted(admit(ledger, reserve(1, prompt(16 * 10)))) == [1]
    assert admit(ledger, reserve(2, prompt(16 * 86, start=1000))) == ()
    finish(ledger, 2)
    assert admitted(admit(ledger, reserve(3, prompt(16 * 85, start=1000)))) == [3]


def test_the_queue_goes_by_priority_then_arrival() -> None:
    ledger = make_ledger(4)
    admit(ledger, reserve(1, prompt(64)))
    for number, priority in ((2, 0), (3, 5), (4, 0), (5, 5)):
        play(ledger, reserve=(reserve(number, prompt(10, start=100 * number), priority=priority),))
    assert list(ledger.state.sequences.queue) == [3, 5, 2, 4]
    batch = finish(ledger, 1)
    assert batch is not None
    assert admitted(batch.admit) == [3, 5, 2, 4]


def test_only_the_head_lacks_capacity_the_others_are_deferred() -> None:
    ledger = make_ledger(4)
    admit(ledger, reserve(1, prompt(40)))
    assert admit(ledger, reserve(2, prompt(60, start=90)), reserve(3, prompt(5, start=190), max_len=15)) == ()
    assert list(ledger.state.sequences.queue) == [2, 3]
    pool = ledger.pool_counts()
    assert (pool.waiting, pool.capacity, pool.deferred) == (2, 1, 1)
    batch = finish(ledger, 1)
    assert batch is not None
    assert admitted(batch.admit) == [2]


def test_the_limit_of_sequences_defers() -> None:
    ledger = make_ledger(8, max_num_seqs=2)
    numbers = admitted(admit(ledger, *(reserve(n, prompt(5, start=100 * n)) for n in range(1, 5))))
    assert numbers == [1, 2]
    pool = ledger.pool_counts()
    assert (pool.running, pool.capacity, pool.deferred) == (2, 0, 2)
    batch = finish(ledger, 1)
    assert batch is not None
    assert admitted(batch.admit) == [3]


def queued(ledger: Ledger) -> None:
    play(ledger, reserve=(reserve(1, prompt(64)), reserve(2, prompt(40, start=500), max_len=64)))


def running(ledger: Ledger) -> None:
    play(ledger, reserve=(reserve(2, prompt(40, start=500), max_len=64),))


def mid_chunk(ledger: Ledger) -> None:
    running(ledger)
    seal(ledger, 2, hashes(prompt(40, start=500))[:1])


def decoding(ledger: Ledger) -> None:
    mid_chunk(ledger)
    play(ledger, seal=((1, hashes(prompt(40, start=500))[1]),), lease_want=1)
    play(ledger, bind=((2, 3),))


def preempted(ledger: Ledger) -> None:
    decoding(ledger)
    play(ledger, preempted=((2, 50),), reserve=())


@pytest.mark.parametrize("state", [queued, running, mid_chunk, decoding, preempted])
def test_abort_is_idempotent_in_every_state(state: Callable[[Ledger], None]) -> None:
    ledger = make_ledger(4)
    state(ledger)
    finish(ledger, 1, 2)
    after = ledger_key(ledger)
    finish(ledger, 2)
    play(ledger, preempted=((2, 55),), trim=((2, 1),))  # late news of one that is gone
    assert ledger_key(ledger) == after
    assert not ledger.state.sequences.live
    assert len(ledger.state.sequences.queue) == 0
    assert not ledger.state.store.cache.pending
    assert ledger.pool_counts().free + ledger.pool_counts().cached == 4


def test_preempted_and_then_cancelled_in_one_report_does_not_revive() -> None:
    ledger = make_ledger(4)
    admit(ledger, reserve(1, prompt(20)))
    play(ledger, preempted=((1, 20),), finished=((1, FinishReason.CANCELLED),))
    assert not ledger.state.sequences.live
    assert ledger.pool_counts().free == 4


def test_reserved_and_cancelled_in_one_report_leaves_nothing() -> None:
    ledger = make_ledger(4)
    play(ledger, reserve=(reserve(1, prompt(20)),), finished=((1, FinishReason.CANCELLED),))
    assert (ledger.pool_counts().free, ledger.pool_counts().waiting) == (4, 0)


def test_a_sequence_id_is_reserved_once() -> None:
    ledger = make_ledger(4)
    admit(ledger, reserve(1, prompt(20)))
    with pytest.raises(ProtocolViolation, match="reserved twice"):
        play(ledger, reserve=(reserve(1, prompt(20)),))


def test_hits_count_once_a_request_and_recompute_apart() -> None:
    ledger = make_ledger(20)
    run_through(ledger, 1, prompt(48))
    admit(ledger, reserve(2, prompt(48), max_len=60))
    play(ledger, preempted=((2, 50),))
    totals = ledger.pool_counts().totals
    assert block_table(ledger, 2)[:3] == (0, 1, 2)
    assert (totals.prefix_query_blocks, totals.prefix_hit_blocks) == (6, 2)
    assert (totals.recompute_query_blocks, totals.recompute_hit_blocks) == (3, 3)
    assert totals.misses_by_reason == {"never_seen": 1, "capped": 1}


def test_no_queries_is_not_no_hits() -> None:
    ledger = make_ledger(20)
    admit(ledger, reserve(1, prompt(15)))
    totals = ledger.pool_counts().totals
    assert (totals.admissions, totals.prefix_query_blocks) == (1, 0)
    assert totals.misses_by_reason == {"below_block": 1}


def test_an_admission_is_recorded_with_its_reason_and_figures() -> None:
    ledger = make_ledger(4)
    run_through(ledger, 1, prompt(48))
    ledger.drain_decisions()
    (granted,) = admit(ledger, reserve(2, prompt(17) + prompt(40, start=90), traceparent="00-1-2-01"))
    evicted, grant = ledger.drain_decisions()
    assert (grant.decision_id, grant.kind, grant.request_id) == (granted.decision_id, DecisionKind.GRANT, "r2")
    assert grant.chosen == "1 shared and 3 fresh blocks"
    assert grant.reasons == ("diverged_at", "never seen from block 1 on")
    assert grant.traceparent == "00-1-2-01"
    figures = dict(grant.figures)
    assert (figures["num_tokens"], figures["hit_blocks"], figures["fresh_blocks"], figures["evicted"]) == (57, 1, 3, 2)
    assert (evicted.kind, evicted.beneficiary, evicted.chosen) == (DecisionKind.EVICTION, "r2", "block 2, block 1")
    assert granted.miss_reason is MissReason.DIVERGED_AT
    assert granted.diverged_at == 1


def test_a_batch_may_be_bounded_and_the_next_ones_admit_the_others() -> None:
    """Three of four prompts fit; why the fourth one waits is recorded with the last batch alone."""
    whole, parts = make_ledger(8), make_ledger(8)
    reserves = tuple(reserve(number, prompt(30, start=90 * number)) for number in range(4))
    whole.apply_report(Report(reserve=reserves))
    parts.apply_report(Report(reserve=reserves))
    at_once, batches, more = whole.schedule(), [], []
    for _ in range(2):
        batches.append(parts.schedule(most=2))
        more.append((parts.has_more, [each.request_id for each in parts.drain_decisions()]))
    assert more == [(True, ["r0", "r1"]), (False, ["r2", "r3"])]
    assert at_once is not None
    assert [each.admit for each in batches if each] == [at_once.admit[:2], at_once.admit[2:]]
    assert ledger_key(parts) == ledger_key(whole)


def test_a_bound_that_the_queue_does_not_exceed_changes_nothing() -> None:
    ledger = make_ledger(8)
    ledger.apply_report(Report(reserve=(reserve(0, prompt(30)), reserve(1, prompt(30, start=90)))))
    batch = ledger.schedule(most=2)
    assert batch is not None
    assert (admitted(batch.admit), ledger.has_more) == ([0, 1], False)
