"""Retention on tiny pools: which blocks leave after the others, for how long, and how many of a tenant."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest

from common.contracts.clock import ManualClock
from common.contracts.lease import LAST_BLOCK, RetainedBlocks
from common.contracts.types import DecisionKind, MissReason, SequenceId
from kvmanager.contracts.ledger_config import EvictionName
from kvmanager.ledger.ledger import Ledger
from tests.support.kvmanager.ledgers import EMPTY, admit, finish, hashes, make_ledger, prompt, reserve, seal

POLICIES: tuple[str, ...] = get_args(EvictionName)
ALL = LAST_BLOCK


def serve(ledger: Ledger, number: int, tokens: list[int], *retention: RetainedBlocks, **options: Any) -> None:
    """Admit a prompt, seal its full blocks and finish it."""
    admitted = admit(ledger, reserve(number, tokens, retention=retention, **options))
    assert len(admitted) == 1, "a request was not admitted although the others have ended"
    seal(ledger, number, hashes(tokens))
    finish(ledger, number)
    ledger.check_invariants()


def cached(ledger: Ledger, tokens: list[int]) -> int:
    """Return how many leading blocks of a prompt are cached."""
    return ledger.look_up_prompt(hashes(tokens), len(tokens) + 1).hit_blocks


def others(ledger: Ledger, count: int, first: int = 100) -> None:
    """Serve so many prompts of one block that never come again."""
    for number in range(first, first + count):
        serve(ledger, number, prompt(16, start=1000 * number))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_retained_prefix_outlives_a_scan_until_its_time_is_over(policy: str) -> None:
    clock = ManualClock()
    ledger = make_ledger(8, clock=clock, eviction=policy, retention_share=0.5)
    serve(ledger, 1, prompt(64), RetainedBlocks(0, ALL, 80, 60.0))
    others(ledger, 40)
    assert (cached(ledger, prompt(64)), ledger.pool_counts().retained) == (4, 4)
    clock.advance(60.0)
    assert ledger.pool_counts().retained == 0
    others(ledger, 40, first=200)
    assert cached(ledger, prompt(64)) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_retained_blocks_leave_by_priority_when_nothing_else_is_left(policy: str) -> None:
    ledger = make_ledger(8, eviction=policy, retention_share=1.0)
    serve(ledger, 1, prompt(32), RetainedBlocks(0, ALL, 90, 60.0))
    serve(ledger, 2, prompt(32, start=500), RetainedBlocks(0, ALL, 50, 60.0))
    serve(ledger, 3, prompt(80, start=900))
    assert (cached(ledger, prompt(32)), cached(ledger, prompt(32, start=500))) == (2, 1)
    serve(ledger, 4, prompt(96, start=2000))
    assert (cached(ledger, prompt(32)), cached(ledger, prompt(32, start=500))) == (2, 0)
    serve(ledger, 5, prompt(128, start=3000))
    assert (cached(ledger, prompt(32)), ledger.pool_counts().retained) == (0, 0), (
        "nothing is refused for retained blocks"
    )
    assert ledger.pool_counts().totals.retained_evictions == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_a_retained_block_holds_the_blocks_before_it(policy: str) -> None:
    ledger = make_ledger(8, eviction=policy, retention_share=0.5)
    serve(ledger, 1, prompt(48), RetainedBlocks(2, 3, 80, 60.0))
    others(ledger, 40)
    assert (cached(ledger, prompt(48)), ledger.pool_counts().retained) == (3, 3)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_low_priority_leaves_before_the_usual_order(policy: str) -> None:
    ledger = make_ledger(6, eviction=policy)
    serve(ledger, 1, prompt(32))
    serve(ledger, 2, prompt(64, start=500), RetainedBlocks(0, ALL, 5, 60.0))
    others(ledger, 1)
    assert (cached(ledger, prompt(32)), cached(ledger, prompt(64, start=500))) == (2, 3)


def test_a_low_priority_does_not_count_for_blocks_that_others_computed_or_use_again() -> None:
    ledger = make_ledger(8)
    serve(ledger, 1, prompt(32))
    serve(ledger, 2, prompt(64), RetainedBlocks(0, ALL, 5, 60.0))
    assert len(ledger.state.store.retention.held) == 2
    serve(ledger, 3, prompt(65))
    assert not ledger.state.store.retention.marks


def test_the_usual_order_goes_on_as_if_a_block_had_never_been_retained() -> None:
    """With LRU the block goes back to its place by release, between those that were released before and after it."""
    clock = ManualClock()
    ledger = make_ledger(4, clock=clock, retention_share=0.25)
    for number, start in ((1, 0), (3, 1000), (4, 2000)):
        serve(ledger, number, prompt(16, start=start))
    serve(ledger, 2, prompt(16, start=500), RetainedBlocks(0, ALL, 80, 5.0))
    serve(ledger, 5, prompt(48, start=3000))
    assert cached(ledger, prompt(16, start=500)) == 1
    clock.advance(5.0)
    serve(ledger, 6, prompt(16, start=4000))
    assert (cached(ledger, prompt(16, start=500)), cached(ledger, prompt(48, start=3000))) == (0, 3)


def test_of_several_terms_each_counts_for_its_time() -> None:
    clock = ManualClock()
    ledger = make_ledger(4, clock=clock, retention_share=1.0)
    serve(ledger, 1, prompt(16), RetainedBlocks(0, ALL, 90, 10.0), RetainedBlocks(0, ALL, 50, 100.0))
    serve(ledger, 2, prompt(16, start=500), RetainedBlocks(0, ALL, 70, 100.0))
    (first, second) = sorted(ledger.state.store.retention.held)
    assert [ledger.state.store.retention.held[each].priority for each in (first, second)] == [90, 70]
    clock.advance(10.0)
    serve(ledger, 3, prompt(48, start=900))
    assert (cached(ledger, prompt(16)), cached(ledger, prompt(16, start=500))) == (0, 1)


def test_a_block_that_is_used_again_stays_retained_until_the_time_that_was_said() -> None:
    clock = ManualClock()
    ledger = make_ledger(4, clock=clock, retention_share=0.5)
    serve(ledger, 1, prompt(32), RetainedBlocks(0, ALL, 80, 60.0))
    clock.advance(30.0)
    serve(ledger, 2, prompt(33))
    others(ledger, 5)
    assert cached(ledger, prompt(32)) == 2
    clock.advance(30.0)
    others(ledger, 5, first=200)
    assert cached(ledger, prompt(32)) == 0


def test_a_tenant_retains_its_share_and_the_oldest_beyond_it_goes_back() -> None:
    ledger = make_ledger(8, retention_share=0.25)
    serve(ledger, 1, prompt(32), RetainedBlocks(0, ALL, 80, 60.0), tenant="a")
    serve(ledger, 2, prompt(32, start=500), RetainedBlocks(0, ALL, 80, 60.0), tenant="b")
    assert ledger.pool_counts().retained == 4
    serve(ledger, 3, prompt(16, start=900), RetainedBlocks(0, ALL, 80, 60.0), tenant="a")
    assert (ledger.state.store.retention.count_retained("a"), ledger.state.store.retention.count_retained("b")) == (
        2,
        2,
    )
    others(ledger, 20)
    left = [prompt(32), prompt(32, start=500), prompt(16, start=900)]
    assert [cached(ledger, each) for each in left] == [1, 2, 1]


def test_all_tenants_together_retain_half_of_the_pool_and_the_largest_holder_falls_back_first() -> None:
    ledger = make_ledger(20, retention_share=0.25)
    for number, (tenant, blocks) in enumerate((("a", 5), ("b", 3), ("c", 2))):
        serve(ledger, number, prompt(16 * blocks, start=1000 * number), RetainedBlocks(0, ALL, 80, 60.0), tenant=tenant)
    # Of equals, the one goes back that releases now, or the one that has had so many for the longest time.
    expected = (("c", (4, 3, 3, 0)), ("c", (4, 3, 3, 0)), ("d", (3, 3, 3, 1)), ("d", (3, 2, 3, 2)))
    for number, (tenant, left) in enumerate(expected, start=10):
        serve(ledger, number, prompt(16, start=1000 * number), RetainedBlocks(0, ALL, 80, 60.0), tenant=tenant)
        assert tuple(map(ledger.state.store.retention.count_retained, "abcd")) == left
    others(ledger, 20)
    found = [cached(ledger, prompt(80)), cached(ledger, prompt(48, start=1000)), cached(ledger, prompt(32, start=2000))]
    found += [cached(ledger, prompt(16, start=1000 * number)) for number in range(10, 14)]
    assert (found, ledger.pool_counts().retained) == ([3, 2, 1, 1, 1, 1, 1], 10)


def test_a_tenant_that_retains_nothing_yet_gets_room_from_the_largest() -> None:
    ledger = make_ledger(8, retention_share=0.5)
    serve(ledger, 1, prompt(64), RetainedBlocks(0, ALL, 100, 60.0), tenant="a")
    serve(ledger, 2, prompt(16, start=500), RetainedBlocks(0, ALL, 36, 60.0), tenant="b")
    assert (ledger.state.store.retention.count_retained("a"), ledger.state.store.retention.count_retained("b")) == (
        3,
        1,
    )
    serve(ledger, 3, prompt(64, start=900))
    assert ledger.look_up_prompt(hashes(prompt(64)), 65).retention == "all tenants retained more than half of the pool"


def python_calls(work: Callable[[], object]) -> int:
    """Return how many functions written in Python some work calls."""
    calls, before = Counter[str](), sys.getprofile()
    sys.setprofile(lambda frame, event, argument: calls.update((event,)))
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls["call"]


def mark_calls(blocks: int) -> tuple[list[int], Ledger]:
    """Release a sequence of so many blocks five times, each with sixteen ranges; return the calls of `mark_blocks`."""
    clock, calls = ManualClock(), list[int]()
    ledger = make_ledger(2 * blocks, clock=clock, retention_share=0.5)
    for number in range(5):
        asks = [RetainedBlocks(0, blocks, 36 + number + 4 * each, 3000.0 - 170.0 * each) for each in range(16)]
        admit(ledger, reserve(number, prompt(16 * blocks), retention=tuple(asks)))
        seal(ledger, number, hashes(prompt(16 * blocks)))
        sequence = ledger.state.sequences.live[SequenceId(number)]
        calls.append(python_calls(partial(ledger.state.store.retention.mark_blocks, sequence, sequence.block_table)))
        finish(ledger, number)
        clock.advance(0.01)
    return calls, ledger


def test_the_calls_of_a_release_do_not_grow_with_its_blocks() -> None:
    few, many = mark_calls(20)[0], mark_calls(200)[0]
    assert few == many


def test_a_content_has_four_terms_at_most_the_highest_and_the_longest() -> None:
    _, ledger = mark_calls(20)
    assert {len(mark.terms) for mark in ledger.state.store.retention.marks.values()} == {4}
    clock = ManualClock()
    ledger = make_ledger(4, clock=clock)
    serve(ledger, 1, prompt(16), *(RetainedBlocks(0, ALL, 90 - 10 * each, 10.0 + each) for each in range(5)))
    terms = ledger.state.store.retention.marks[hashes(prompt(16))[0]].terms
    assert [(priority, until - clock.monotonic()) for priority, until in terms] == [
        (90, 10.0), (80, 11.0), (70, 12.0), (50, 14.0),
    ]  # fmt: skip


def test_a_mark_that_says_as_much_already_stays_as_it_is() -> None:
    ledger = make_ledger(8, retention_share=0.5)
    serve(ledger, 1, prompt(48), RetainedBlocks(0, ALL, 80, 60.0), tenant="a")
    before = dict(ledger.state.store.retention.marks)
    serve(ledger, 2, prompt(48), RetainedBlocks(0, ALL, 80, 60.0), RetainedBlocks(0, 2, 50, 10.0), tenant="b")
    after = ledger.state.store.retention.marks
    assert len(before) == 3
    assert all(after[key] is mark for key, mark in before.items())


def test_a_low_priority_does_not_count_for_blocks_that_another_sequence_uses() -> None:
    ledger = make_ledger(9)
    others(ledger, 4)
    low = (RetainedBlocks(0, ALL, 0, 3600.0),)
    admit(ledger, reserve(1, prompt(64), retention=low))
    seal(ledger, 1, hashes(prompt(64)))
    admit(ledger, reserve(2, prompt(49)))
    finish(ledger, 1)
    assert set(ledger.state.store.retention.marks) == set(hashes(prompt(64))[3:])
    finish(ledger, 2)
    others(ledger, 3, first=200)
    assert cached(ledger, prompt(64)) == 3


@pytest.mark.parametrize("order", [(2, 3), (3, 2)])
def test_a_low_priority_counts_for_what_several_sequences_of_a_request_share(order: tuple[int, int]) -> None:
    """Two blocks were another request's, two are those of the prompt, whichever sequence leaves last."""
    ledger = make_ledger(16)
    serve(ledger, 1, prompt(32))
    low = (RetainedBlocks(0, ALL, 0, 3600.0),)
    for number, fork in ((2, None), (3, SequenceId(2))):
        admit(ledger, reserve(number, prompt(65), retention=low, fork_of=fork))
    seal(ledger, 2, hashes(prompt(65)))
    assert ledger.state.sequences.live[SequenceId(3)].n_shared == 4
    finish(ledger, order[0])
    assert not ledger.state.store.retention.marks, "the other one uses them"
    finish(ledger, order[1])
    assert set(ledger.state.store.retention.marks) == set(hashes(prompt(65))[2:])


def test_no_share_and_no_duration_turn_retention_off() -> None:
    for ledger in (make_ledger(4, retention_share=0.0), make_ledger(4, max_retention=0.0)):
        serve(ledger, 1, prompt(32), RetainedBlocks(0, ALL, 100, 60.0))
        assert not ledger.state.store.retention.marks


def test_a_duration_is_at_most_the_longest() -> None:
    clock = ManualClock()
    ledger = make_ledger(4, clock=clock, max_retention=10.0)
    serve(ledger, 1, prompt(16), RetainedBlocks(0, ALL, 100, 1e9))
    clock.advance(10.0)
    assert ledger.pool_counts().retained == 0


def test_a_rebuild_forgets_what_was_retained_and_keeps_what_live_sequences_ask_for() -> None:
    ledger = make_ledger(4)
    serve(ledger, 1, prompt(16), RetainedBlocks(0, ALL, 100, 60.0))
    ledger.rebuild(EMPTY)
    ledger.check_invariants()
    assert (ledger.pool_counts().retained, ledger.state.store.retention.marks) == (0, {})


def test_a_reset_forgets_marks_with_their_blocks() -> None:
    ledger = make_ledger(8, retention_share=0.5)
    serve(ledger, 1, prompt(16), RetainedBlocks(0, ALL, 100, 60.0))
    admit(ledger, reserve(2, prompt(16, start=700)))
    assert ledger.reset_cache(1) == 1
    ledger.check_invariants()
    assert not ledger.state.store.retention.marks
    finish(ledger, 2)
    serve(ledger, 3, prompt(16), RetainedBlocks(0, ALL, 100, 60.0))
    assert ledger.reset()
    ledger.check_invariants()
    assert not ledger.state.store.retention.marks


def test_of_two_copies_the_content_keeps_its_mark() -> None:
    """Two sequences compute one content at once; the one that asked for retention ends first."""
    ledger = make_ledger(8, retention_share=0.5)
    asks = (RetainedBlocks(0, ALL, 80, 60.0),)
    first = reserve(1, prompt(17), 32, retention=asks)
    admit(ledger, first, reserve(2, prompt(17), 32, computes_all=True))
    seal(ledger, 1, hashes(prompt(16)))
    seal(ledger, 2, hashes(prompt(16)))
    finish(ledger, 1)
    finish(ledger, 2)
    others(ledger, 20)
    assert cached(ledger, prompt(16)) == 1


def test_records_say_when_a_retained_block_went_and_why() -> None:
    clock = ManualClock()
    ledger = make_ledger(4, clock=clock, retention_share=0.5)
    serve(ledger, 1, prompt(32), RetainedBlocks(0, ALL, 80, 60.0))
    serve(ledger, 2, prompt(48, start=900))
    record = next(each for each in ledger.drain_decisions() if each.kind is DecisionKind.EVICTION)
    assert record.reasons[-1] == "block 1: no block without retention was left"
    assert dict(record.candidates[0].figures)["retention_priority"] == 80.0
    assert dict(record.figures)["retained"] == 1.0
    clock.advance(60.0)
    serve(ledger, 3, prompt(64, start=2000))
    record = next(each for each in ledger.drain_decisions() if each.kind is DecisionKind.EVICTION)
    assert "block 0: its retention was over" in record.reasons
    assert "retained" not in dict(record.figures)


@pytest.mark.parametrize(
    ("share", "seconds", "why"),
    [
        (0.5, 60.0, "no block without retention was left"),
        (0.5, 1.0, "its retention was over"),
        (0.25, 60.0, "its tenant retained more than its share of the pool"),
    ],
)
def test_a_miss_says_what_became_of_the_retention(share: float, seconds: float, why: str) -> None:
    clock = ManualClock()
    ledger = make_ledger(4, clock=clock, retention_share=share)
    serve(ledger, 1, prompt(32), RetainedBlocks(0, ALL, 80, seconds))
    clock.advance(30.0)
    serve(ledger, 2, prompt(48, start=900))
    ledger.drain_decisions()
    match = ledger.look_up_prompt(hashes(prompt(32)), 33)
    assert (match.miss_reason, match.retention) == (MissReason.EVICTED, why)
    serve(ledger, 3, prompt(33))
    grant = next(each for each in ledger.drain_decisions() if each.kind is DecisionKind.GRANT)
    assert f"retention of the first evicted block: {why}" in grant.reasons


@pytest.mark.searches
def test_stale_items_of_blocks_that_come_and_go_are_dropped() -> None:
    ledger = make_ledger(8, retention_share=0.5)
    for number in range(1000):
        serve(ledger, number, prompt(33), RetainedBlocks(0, 1, 80, 60.0), RetainedBlocks(1, 2, 5, 60.0))
    retention = ledger.state.store.retention
    assert max(len(retention._due), len(retention._late), len(retention._early)) < 80
