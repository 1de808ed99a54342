"""What records and counts say of frames of host memory: stores, loads, drops, evictions, preemptions, misses."""

from __future__ import annotations

from typing import Any

from common.contracts.transfers import TransferCosts
from common.contracts.types import Decision, DecisionKind, MissReason, SequenceId
from kvmanager.ledger.ledger import Ledger
from tests.support.kvmanager.ledgers import (
    admit,
    block_table,
    finish,
    hashes,
    make_ledger,
    play,
    prompt,
    reserve,
    run_through,
)

SHORT = prompt(32)
"""Two blocks, and the second of them holds the last token."""


def ledger_of(num_blocks: int = 4, frames: int = 4, **options: Any) -> Ledger:
    return make_ledger(num_blocks, host_frames=frames, **options)


def other(number: int, length: int = 64) -> list[int]:
    """Return a prompt that fills a pool of four blocks."""
    return prompt(length, 1000 * number)


def last(ledger: Ledger, kind: DecisionKind) -> Decision:
    return [each for each in ledger.drain_decisions() if each.kind is kind][-1]


def host_totals(ledger: Ledger) -> tuple[int, int, int]:
    """Return how many blocks were stored, loaded and dropped."""
    totals = ledger.pool_counts().totals
    return totals.host_stores, totals.host_loads, totals.host_drops


def host_frames(ledger: Ledger) -> tuple[int, int]:
    """Return the frames in all, and those that hold something."""
    counts = ledger.pool_counts()
    return counts.host_frames, counts.host_held


def test_stores_and_loads_are_counted_and_frames_keep_what_was_loaded() -> None:
    ledger = ledger_of(frames=6)
    run_through(ledger, 1, prompt(33))
    assert (host_frames(ledger), host_totals(ledger)) == ((6, 0), (0, 0, 0))
    run_through(ledger, 2, other(1))
    assert (host_frames(ledger), host_totals(ledger)) == ((6, 2), (2, 0, 0))
    granted = run_through(ledger, 3, prompt(33))
    assert (granted.n_shared, granted.cached_tokens) == (2, 32)
    assert (host_frames(ledger), host_totals(ledger)) == ((6, 5), (5, 2, 0)), "three of four were evicted for three"


def test_a_content_that_leaves_its_frame_is_dropped_unless_a_block_has_it() -> None:
    ledger = ledger_of(frames=2)
    run_through(ledger, 1, prompt(33))
    run_through(ledger, 2, other(1))
    assert host_totals(ledger) == (2, 0, 0)
    run_through(ledger, 3, other(2))
    assert (host_frames(ledger), host_totals(ledger)) == ((2, 2), (6, 0, 4)), "two of the first, two of the second"
    run_through(ledger, 4, other(1, 33))
    stores, loads, drops = host_totals(ledger)
    assert (loads, ledger.look_up_prompt(hashes(other(1, 33)), 33).hit_blocks) == (2, 2)
    run_through(ledger, 5, other(3, 17))
    assert host_totals(ledger) == (stores + 1, loads, drops), "what the frame held is in a block"


def test_an_eviction_says_which_contents_host_memory_keeps() -> None:
    ledger = ledger_of(frames=3)
    run_through(ledger, 1, other(1))
    run_through(ledger, 2, other(2))
    evicted = last(ledger, DecisionKind.EVICTION)
    assert evicted.reasons[-1] == "host memory: it keeps 3 of 4"
    figures = dict(evicted.figures)
    assert (figures["evicted"], figures["host_kept"], figures["host_stores"], figures["host_blocks"]) == (4, 3, 4, 3)
    kept = [dict(each.figures).get("host_kept", 0.0) for each in evicted.candidates]
    assert kept == [0.0, 1.0, 1.0, 1.0], "the deepest block goes first, and its frame is the first to be taken"


def test_a_worker_without_frames_says_nothing_of_them() -> None:
    ledger = ledger_of(frames=0)
    run_through(ledger, 1, other(1))
    run_through(ledger, 2, other(2))
    evicted = last(ledger, DecisionKind.EVICTION)
    assert not [name for name, _ in evicted.figures if name.startswith("host")]
    assert not [each for each in evicted.reasons if each.startswith("host memory")]
    assert (host_frames(ledger), host_totals(ledger)) == ((0, 0), (0, 0, 0))


def test_a_prompt_is_evicted_only_where_no_frame_has_it_either() -> None:
    ledger = ledger_of(frames=2)
    run_through(ledger, 1, prompt(33))
    run_through(ledger, 2, other(1))
    match = ledger.look_up_prompt(hashes(prompt(49)), 49)
    assert (match.hit_blocks, match.miss_reason) == (2, MissReason.DIVERGED_AT), "a frame has what was evicted"
    run_through(ledger, 3, other(2))
    assert ledger.look_up_prompt(hashes(prompt(33)), 33).miss_reason is MissReason.EVICTED
    granted = admit(ledger, reserve(4, prompt(33)))[0]
    assert (granted.n_shared, granted.miss_reason) == (0, MissReason.EVICTED)
    record = last(ledger, DecisionKind.GRANT)
    assert (record.reasons[0], record.beneficiary) == ("evicted", "r2")


def test_a_grant_says_how_many_blocks_are_loaded() -> None:
    ledger = ledger_of()
    run_through(ledger, 1, prompt(33))
    run_through(ledger, 2, other(1))
    ledger.drain_decisions()
    run_through(ledger, 3, prompt(33))
    record = last(ledger, DecisionKind.GRANT)
    assert "host memory: 2 of 2 cached blocks are loaded" in record.reasons
    assert dict(record.figures)["host_blocks"] == 2.0


def pressed(frames: int) -> Ledger:
    """Return a ledger whose five blocks two sequences have, all but one sealed; the second lacks its next block."""
    ledger = ledger_of(5, frames)
    admit(ledger, reserve(1, SHORT, 64), reserve(2, other(1, 32), 64))
    for number, tokens in ((1, SHORT), (2, other(1, 32))):
        play(ledger, seal=tuple(zip(block_table(ledger, number), hashes(tokens), strict=True)))
    batch = play(ledger, lease_want=1)
    assert batch is not None
    play(ledger, bind=((SequenceId(1), batch.lease[0]),))
    play(ledger, stalled=(SequenceId(2),), computed=((SequenceId(1), 33), (SequenceId(2), 32)), lease_want=1)
    return ledger


def test_a_preemption_says_what_can_be_loaded_of_what_it_loses() -> None:
    record = last(pressed(frames=4), DecisionKind.PREEMPTION)
    figures = dict(record.figures)
    assert (record.victim, figures["work_lost"], figures["tokens_lost"], figures["loadable_tokens"]) == (
        "r2",
        32,
        0,
        32,
    )
    what = "the sealed blocks of 32 tokens go to frames if they are evicted, and are loaded again"
    assert record.reasons[-1] == f"host memory: {what}"
    few, none = (last(pressed(frames), DecisionKind.PREEMPTION) for frames in (1, 0))
    assert dict(few.figures)["loadable_tokens"] == 16.0, "one frame keeps one block"
    assert "loadable_tokens" not in dict(none.figures)
    assert not [each for each in none.reasons if each.startswith("host memory")]


def test_a_preempted_sequence_loads_what_it_lost() -> None:
    ledger = pressed(frames=4)
    batch = play(ledger, preempted=((SequenceId(2), 33),), lease_want=2)
    assert batch is not None
    assert len(batch.lease) == 1
    assert [(each.frame, each.load) for each in batch.tier] == [(0, False)]
    finish(ledger, 1)
    record = last(ledger, DecisionKind.GRANT)
    assert (record.request_id, dict(record.figures)["host_blocks"]) == ("r2", 1.0)
    assert record.reasons[-2:] == (
        "host memory: 1 of 2 cached blocks are loaded",
        "computed again after a preemption",
    )
    assert host_totals(ledger) == (2, 1, 0)


DEAR = TransferCosts(compute=0.010, read=0.0, copy=0.0091)
CHEAP = TransferCosts(compute=0.010, read=0.0, copy=0.0089)


def test_what_is_dearer_to_load_than_to_compute_is_not_loaded_and_nothing_is_stored() -> None:
    ledger = ledger_of(frames=8)
    run_through(ledger, 1, prompt(33))
    run_through(ledger, 2, other(1))
    play(ledger, transfer_costs=DEAR)
    granted = run_through(ledger, 3, prompt(33))
    assert (granted.n_shared, granted.miss_reason) == (0, MissReason.UNFETCHED)
    decisions = ledger.drain_decisions()
    grant = [each for each in decisions if each.kind is DecisionKind.GRANT][-1]
    said = "host memory: loads do not pay: to copy a block takes 9.10 ms, to compute a block 10.00 ms"
    assert said in grant.reasons
    evicted = [each for each in decisions if each.kind is DecisionKind.EVICTION][-1]
    assert "host memory: 3 are not stored: to copy one takes longer than to compute it" in evicted.reasons
    totals = ledger.pool_counts().totals
    assert (totals.host_declined, host_totals(ledger)) == (3, (2, 0, 0))
    play(ledger, transfer_costs=CHEAP)
    assert run_through(ledger, 4, other(2)).n_shared == 0
    assert run_through(ledger, 5, prompt(33)).n_shared == 2
    assert host_totals(ledger)[1] == 2


def test_what_stands_before_the_content_of_a_frame_is_stored_although_stores_do_not_pay() -> None:
    """Else a load would have nothing to stand behind, once loads pay again."""
    ledger = ledger_of(num_blocks=5, frames=8)
    run_through(ledger, 1, prompt(49))
    run_through(ledger, 2, prompt(49, 1000))
    assert host_totals(ledger)[0] == 2, "the last blocks of the first prompt; its first one stays in the pool"
    play(ledger, transfer_costs=DEAR)
    run_through(ledger, 3, prompt(65, 2000))
    ledger.check_invariants()
    assert (host_totals(ledger)[0], ledger.pool_counts().totals.host_declined) == (3, 3)
    play(ledger, transfer_costs=CHEAP)
    assert run_through(ledger, 4, prompt(49)).n_shared == 3


def test_copies_that_save_less_than_they_take_are_left_out_for_a_while() -> None:
    ledger = ledger_of(num_blocks=64, frames=64)
    play(ledger, transfer_costs=TransferCosts(compute=0.010, read=0.0, copy=0.001))
    number = 0
    while not ledger.pool_counts().totals.host_declined:
        run_through(ledger, number, other(number, 1024))
        number += 1
        assert number < 64
    totals = ledger.pool_counts().totals
    assert totals.host_stores == 2 * 1024
    evicted = last(ledger, DecisionKind.EVICTION)
    said = "are not stored: copies took longer lately than what was loaded would have taken to compute"
    assert any(said in each for each in evicted.reasons)
    ledger.check_invariants()
