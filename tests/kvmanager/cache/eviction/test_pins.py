"""Pinned prefixes on tiny pools: they leave last, survive a rebuild and a reset, and keep within their bounds."""

from __future__ import annotations

import gc
from typing import Any, get_args

import pytest

from common.contracts.clock import ManualClock
from common.contracts.errors import InvalidRequest, NotFound
from common.contracts.hashing import key_of
from common.contracts.lease import LAST_BLOCK, CachedBlock, Inventory, RetainedBlocks
from common.contracts.limits import MAX_PINNED_BLOCKS, MAX_PINS
from common.contracts.types import BlockHash, DecisionKind, KvGroup, KvGroupKind, MissReason
from kvmanager.cache import retention
from kvmanager.cache.pins import Pin, PinBook, fitting, one_worker_for_each_size
from kvmanager.cache.retention_terms import Mark
from kvmanager.contracts.ledger_config import EvictionName
from tests.kvmanager.cache.eviction.test_retention import cached, others, serve
from tests.support.kvmanager.ledgers import admit, hashes, make_ledger, prompt, reserve

POLICIES: tuple[str, ...] = get_args(EvictionName)
ALL = LAST_BLOCK


def pin(tokens: list[int], name: str = "p", tenant: str = "") -> Pin:
    return Pin(name, tenant, hashes(tokens), len(tokens))


def numbered(first: int, count: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(number.to_bytes(16, "little")) for number in range(first, first + count))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("before", [True, False], ids=["pinned before", "pinned while cached"])
def test_a_pinned_prefix_outlives_a_scan_until_it_is_unpinned(policy: str, before: bool) -> None:
    ledger = make_ledger(8, eviction=policy)
    if before:
        ledger.pin([pin(prompt(32))], 0.5)
    serve(ledger, 1, prompt(32))
    if not before:
        ledger.pin([pin(prompt(32))], 0.5)
    ledger.check_invariants()
    others(ledger, 40)
    assert (cached(ledger, prompt(32)), ledger.pool_counts().kept_pinned) == (2, 2)
    ledger.pin([], 0.5)
    ledger.check_invariants()
    assert ledger.pool_counts().kept_pinned == 0
    others(ledger, 20, first=200)
    assert cached(ledger, prompt(32)) == 0
    found = ledger.look_up_prompt(hashes(prompt(32)), 33)
    assert (found.miss_reason, found.retention) == (MissReason.EVICTED, "its pin was removed or over")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_block_that_was_set_aside_is_pinned_too(policy: str) -> None:
    """The order of eviction has looked at the block before: it must not go because of that."""
    ledger = make_ledger(8, eviction=policy, retention_share=0.5)
    serve(ledger, 1, prompt(32))
    serve(ledger, 2, prompt(16, start=500))
    serve(ledger, 3, prompt(32, start=900), RetainedBlocks(0, ALL, 80, 60.0))
    others(ledger, 4)
    ledger.pin([pin(prompt(32, start=900))], 0.5)
    others(ledger, 40, first=300)
    assert cached(ledger, prompt(32, start=900)) == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_pinned_blocks_leave_after_those_that_requests_retain_and_never_refuse_a_request(policy: str) -> None:
    ledger = make_ledger(8, eviction=policy, retention_share=0.25)
    ledger.pin([pin(prompt(32))], 0.25)
    serve(ledger, 1, prompt(32))
    serve(ledger, 2, prompt(32, start=500), RetainedBlocks(0, ALL, 100, 60.0))
    ledger.drain_decisions()
    serve(ledger, 3, prompt(96, start=900))
    assert (cached(ledger, prompt(32)), cached(ledger, prompt(32, start=500))) == (2, 0)
    serve(ledger, 4, prompt(112, start=2000))
    assert cached(ledger, prompt(32)) == 1
    assert (ledger.pool_counts().totals.pinned_evictions, ledger.pool_counts().totals.retained_evictions) == (1, 2)
    evictions = [each for each in ledger.drain_decisions() if each.kind is DecisionKind.EVICTION]
    assert any("an operator pinned it, and no block without a pin was left" in " ".join(e.reasons) for e in evictions)
    assert dict(evictions[-1].figures)["pinned"] == 1.0
    found = ledger.look_up_prompt(hashes(prompt(32)), 33)
    assert found.retention == "an operator pinned it, and no block without a pin was left"
    serve(ledger, 5, prompt(32))
    others(ledger, 20)
    assert cached(ledger, prompt(32)) == 2, "a pin holds a content that is computed again"


def test_what_requests_retain_counts_again_once_the_pin_is_gone() -> None:
    clock = ManualClock()
    ledger = make_ledger(8, clock=clock, retention_share=0.25)
    ledger.pin([pin(prompt(32))], 0.25)
    serve(ledger, 1, prompt(32), RetainedBlocks(0, ALL, 80, 60.0))
    assert (ledger.pool_counts().retained, ledger.pool_counts().kept_pinned) == (0, 2)
    ledger.pin([], 0.25)
    ledger.check_invariants()
    assert (ledger.pool_counts().retained, ledger.pool_counts().kept_pinned) == (2, 0)
    clock.advance(60.0)
    assert ledger.pool_counts().retained == 0
    ledger.check_invariants()


def test_requests_retain_what_pins_leave_of_half_of_the_pool() -> None:
    ledger = make_ledger(8, retention_share=0.5)
    serve(ledger, 1, prompt(32), RetainedBlocks(0, ALL, 80, 60.0), tenant="a")
    serve(ledger, 2, prompt(32, start=500), RetainedBlocks(0, ALL, 80, 60.0), tenant="b")
    assert ledger.pool_counts().retained == 4
    ledger.pin([pin(prompt(48, start=900))], 0.5)
    ledger.check_invariants()
    assert ledger.pool_counts().retained == 1, "not computed yet, and counted all the same"
    serve(ledger, 3, prompt(48, start=900))
    assert (ledger.pool_counts().retained, ledger.pool_counts().kept_pinned) == (1, 3)


def test_pins_with_a_common_beginning_hold_it_until_the_last_is_gone() -> None:
    ledger = make_ledger(8)
    serve(ledger, 1, prompt(48))
    ledger.pin([pin(prompt(32), "short"), pin(prompt(48), "long")], 0.5)
    assert ledger.pool_counts().kept_pinned == 3
    ledger.pin([pin(prompt(32), "short")], 0.5)
    ledger.check_invariants()
    others(ledger, 40)
    assert cached(ledger, prompt(48)) == 2


def test_a_pinned_block_in_use_is_held_once_it_is_released() -> None:
    ledger = make_ledger(8)
    serve(ledger, 1, prompt(32))
    assert admit(ledger, reserve(2, prompt(33)))[0].n_shared == 2
    ledger.pin([pin(prompt(32))], 0.5)
    ledger.check_invariants()
    assert ledger.pool_counts().kept_pinned == 0
    serve(ledger, 3, prompt(16, start=700))
    ledger.check_invariants()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rebuild_holds_what_is_pinned(policy: str) -> None:
    ledger = make_ledger(8, eviction=policy)
    ledger.pin([pin(prompt(32))], 0.5)
    first, second = hashes(prompt(32))
    entries = (CachedBlock(3, first, -1, 1), CachedBlock(5, second, 0, 1))  # type: ignore[arg-type]
    ledger.rebuild(Inventory(cached_blocks=entries))
    ledger.check_invariants()
    assert ledger.pool_counts().kept_pinned == 2
    others(ledger, 40)
    assert cached(ledger, prompt(32)) == 2


def test_a_reset_drops_pinned_blocks_and_keeps_the_pin() -> None:
    ledger = make_ledger(8)
    ledger.pin([pin(prompt(32))], 0.5)
    serve(ledger, 1, prompt(32))
    assert ledger.reset_cache(7) == 2
    ledger.check_invariants()
    assert ledger.pool_counts().kept_pinned == 0
    serve(ledger, 2, prompt(32))
    assert ledger.pool_counts().kept_pinned == 2


def test_a_change_is_recorded_with_what_was_left_out() -> None:
    ledger = make_ledger(8)
    serve(ledger, 1, prompt(32))
    ledger.drain_decisions()
    ledger.pin([pin(prompt(32), "a"), pin(prompt(16, start=500), "b")], 0.25, "pinned b")
    (decision,) = ledger.drain_decisions()
    assert (decision.kind, decision.chosen) == (DecisionKind.PIN, "pinned b")
    assert dict(decision.figures) == {"pins": 2.0, "pinned": 2.0, "cached": 2.0}
    assert decision.reasons[1] == (
        "b is left out: blocks needed: 1; pinned for no tenant: 2 of at most 2, 0.25 of 8 blocks"
    )


def test_a_worker_without_prefix_caching_pins_nothing() -> None:
    ledger = make_ledger(8, prefix_caching=False)
    ledger.pin([pin(prompt(32))], 0.5)
    serve(ledger, 1, prompt(32))
    ledger.check_invariants()
    assert ledger.pool_counts().kept_pinned == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_go_on_between_the_steps_of_a_change(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_A_STEP", 1)
    ledger = make_ledger(16, eviction=policy, retention_share=0.5)
    ledger.pin([pin(prompt(48, start=5000), "old")], 0.5)
    serve(ledger, 1, prompt(48, start=5000))
    serve(ledger, 2, prompt(64))
    serve(ledger, 3, prompt(64, start=900), RetainedBlocks(0, ALL, 80, 60.0))
    steps = 0
    for steps, _ in enumerate(ledger.pin_in_steps([pin(prompt(128))], 0.5), 1):
        ledger.check_invariants()
        serve(ledger, 10 + steps, prompt(16, start=10_000 + 100 * steps))
        serve(ledger, 50 + steps, prompt(64), RetainedBlocks(0, ALL, 50, 60.0))
        ledger.check_invariants()
    assert steps >= 3 + 8, "one for each content at least"
    serve(ledger, 90, prompt(64))
    ledger.check_invariants()
    assert (ledger.pool_counts().kept_pinned, ledger.pool_counts().retained) == (4, 0), "all of the half is pinned"


def test_a_change_makes_nothing_long_that_the_collector_would_walk_over() -> None:
    """A list of 65,536 hashes is visited as a whole by each walk over new objects, of which a change makes many."""
    ledger, long = make_ledger(64), 20_000
    contents = dict.fromkeys(numbered(0, long), "t")
    change = ledger.state.store.retention.pin_in_steps
    assert len({id(mark) for mark in _marks_after_unpinning().values()}) == 1, "one object for all"
    for wanted in (contents, {}):
        known = {id(each) for each in gc.get_objects()}
        for _ in change(wanted):
            new = [each for each in gc.get_objects() if type(each) in (list, set, tuple) and id(each) not in known]
            assert max((len(each) for each in new if each is not known), default=0) < long
            break
        for _ in change(wanted):
            pass
        assert len(ledger.state.store.retention.pinned) == len(wanted)


def _marks_after_unpinning() -> dict[BlockHash, Mark]:
    ledger = make_ledger(16)
    ledger.pin([pin(prompt(64))], 0.5)
    serve(ledger, 1, prompt(64))
    ledger.pin([], 0.5)
    marks = ledger.state.store.retention.marks
    assert len(marks) == 4
    return marks


# ---------------------------------------------------------------- bounds


def test_a_tenant_has_its_share_and_all_tenants_half() -> None:
    pins = [Pin(f"p{at}", f"t{at // 2}", numbered(10 * at, 10), 160) for at in range(8)]
    found = fitting(pins, 100, 0.25)
    assert (list(found.left_out), len(found.contents)) == (["p5", "p6", "p7"], 50)
    assert found.left_out["p6"] == "blocks needed: 10; pinned in all: 50 of at most 50, half of 100 blocks"
    (left_out,) = fitting([Pin("a", "t", numbered(0, 26), 416)], 100, 0.25).left_out.values()
    assert left_out == "blocks needed: 26; pinned for tenant t: 0 of at most 25, 0.25 of 100 blocks"


def test_a_common_beginning_counts_once() -> None:
    pins = [Pin("a", "t", numbered(0, 20), 320), Pin("b", "t", numbered(0, 25), 400)]
    found = fitting(pins, 100, 0.25)
    assert (len(found.contents), found.left_out) == (25, {})


def test_where_the_pool_has_groups_a_pin_takes_pages_and_the_window_at_its_end() -> None:
    groups = KvGroup(KvGroupKind.FULL, 0, 4, ()), KvGroup(KvGroupKind.WINDOW, 32, 21, ())
    pin = Pin("a", "t", numbered(0, 10), 160)
    found = fitting([pin], 328, 0.25, groups, 16)
    assert list(found.contents) == [*pin.block_hashes, *(key_of(each, 1) for each in pin.block_hashes[8:])]
    (left_out,) = fitting([pin], 327, 0.25, groups, 16).left_out.values()
    assert left_out == "pages needed: 82; pinned for tenant t: 0 of at most 81, 0.25 of 327 pages"


def pinned(book: PinBook, given: Pin, **pools: int) -> tuple[Pin, ...]:
    """Return all pins with this one, once it fits workers of these sizes."""
    pins = book.with_pin(given)
    for num_blocks, worker_id in one_worker_for_each_size(pools).items():
        book.check_fits(pins, worker_id, num_blocks)
    return pins


def refusal(book: PinBook, given: Pin, **pools: int) -> str:
    with pytest.raises(InvalidRequest) as caught:
        pinned(book, given, **pools)
    return str(caught.value)


def test_workers_of_one_size_are_looked_at_once() -> None:
    found = one_worker_for_each_size({"c": 9, "b": 80, "a": 80, "d": 7})
    assert list(found.items()) == [(7, "d"), (9, "c"), (80, "a")]


def test_a_pin_is_refused_over_a_bound_with_the_numbers() -> None:
    book = PinBook(0.25)
    book.set(pinned(book, Pin("a", "t", numbered(0, 20), 320), w0=100, w1=80))
    said = refusal(book, Pin("b", "t", numbered(50, 1), 16), w0=100, w1=80)
    assert "does not fit worker w1: blocks needed: 1; pinned for tenant t: 20 of at most 20" in said
    assert "--pin-share" in said
    assert len(pinned(book, Pin("a", "t", numbered(50, 20), 320), w1=80)) == 1, "it replaces that of its name"
    assert "another name" in refusal(book, Pin("a", "u", numbered(0, 1), 16))


def test_the_number_of_pins_and_of_their_blocks_is_bounded() -> None:
    book = PinBook(1.0)
    book.set(Pin(f"p{at}", "", numbered(0, 1), 16) for at in range(MAX_PINS + 5))
    assert len(book) == MAX_PINS
    assert f"at most {MAX_PINS}" in refusal(book, Pin("one more", "", numbered(0, 1), 16))
    book.set([Pin("large", "", numbered(0, MAX_PINNED_BLOCKS), 16), Pin("more", "", numbered(1 << 20, 1), 16)])
    assert [each.name for each in book.pins] == ["large"]
    assert f"at most {MAX_PINNED_BLOCKS}" in refusal(book, Pin("b", "", numbered(1 << 20, 1), 16))
    assert f"at most {MAX_PINNED_BLOCKS}" in refusal(book, Pin("b", "", numbered(0, 1), 16)), "though it is shared"


def test_pins_end_at_their_time_and_by_name() -> None:
    book = PinBook(0.25)
    pins: list[Any] = [
        Pin("a", "", numbered(0, 1), 16, 10.0),
        Pin("b", "", numbered(1, 1), 16),
        Pin("c", "", (), 3, 5.0),
    ]
    book.set(pins)
    assert book.next_end() == 5.0
    assert [each.name for each in book.live(5.0)] == ["a", "b"]
    assert [each.name for each in book.without("b")] == ["a", "c"]
    with pytest.raises(NotFound, match="no pin d"):
        book.without("d")
