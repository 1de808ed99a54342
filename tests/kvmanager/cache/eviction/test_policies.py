"""Every policy of eviction, on tiny pools: only leaves leave, and what each policy prefers."""

from __future__ import annotations

import gc
import random
from typing import get_args

import pytest

from common.contracts.lease import CachedBlock, Inventory, InventorySequence, Report
from common.contracts.types import BlockId, DecisionKind, SequencePhase
from kvmanager.contracts.ledger_config import EvictionName
from kvmanager.ledger.ledger import Ledger
from tests.support.kvmanager.ledgers import EMPTY, hashes, make_ledger, prompt, reserve, run_through

POLICIES: tuple[str, ...] = get_args(EvictionName)
LEARNED = ("frequency", "utility")


def cached_tokens(ledger: Ledger, tokens: list[int]) -> int:
    """Return how many leading tokens of a prompt are cached now."""
    return 16 * ledger.look_up_prompt(hashes(tokens), len(tokens) + 1).hit_blocks


def serve_hot_and_cold(ledger: Ledger, hot: list[int], rounds: int) -> None:
    """Serve one popular prefix now and then, and between two of its requests so many others that LRU forgets it."""
    number = 0
    for _ in range(rounds):
        run_through(ledger, number, [*hot, *prompt(16, start=10_000 + 100 * number)])
        for _ in range(5):
            number += 1
            run_through(ledger, number, prompt(64, start=10_000 + 100 * number))
        number += 1


@pytest.mark.parametrize("policy", POLICIES)
def test_leaves_leave_first(policy: str) -> None:
    """A chain of four blocks loses its tail first, whatever the policy learns."""
    ledger = make_ledger(6, eviction=policy)
    run_through(ledger, 1, prompt(64))
    kept = []
    for number in range(2, 8):
        run_through(ledger, number, prompt(16, start=1000 * number))
        kept.append(cached_tokens(ledger, prompt(64)))
    assert kept == sorted(kept, reverse=True)
    assert set(kept) <= {0, 16, 32, 48, 64}
    ledger.check_invariants()


@pytest.mark.searches
@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefix_outlives_all_that_extends_it(policy: str) -> None:
    """Random prompts of a small tree on a small pool: the map is closed under prefixes after each request."""
    ledger, pick = make_ledger(16, eviction=policy), random.Random(5)
    for number in range(400):
        tokens = [pick.randrange(3) for _ in range(pick.choice((2, 3, 4)))]
        run_through(ledger, number, [token for each in tokens for token in [each] * 16])  # checks the invariants
    assert ledger.pool_counts().totals.evictions > 50


@pytest.mark.searches
@pytest.mark.parametrize("policy", LEARNED)
def test_a_popular_prefix_survives_what_is_used_once(policy: str) -> None:
    hot = prompt(64)
    ledger, plain = make_ledger(16, eviction=policy), make_ledger(16, eviction="lru")
    for each in (ledger, plain):
        serve_hot_and_cold(each, hot, 30)
    assert (cached_tokens(ledger, hot), cached_tokens(plain, hot)) == (64, 0)


@pytest.mark.searches
@pytest.mark.parametrize("policy", LEARNED)
def test_what_was_learned_survives_a_rebuild(policy: str) -> None:
    """The inventory gives the blocks back, not what is known of them; nothing breaks, and the policy goes on."""
    ledger = make_ledger(16, eviction=policy)
    serve_hot_and_cold(ledger, prompt(64), 30)
    ledger.rebuild(EMPTY)
    ledger.check_invariants()
    assert len(ledger.state.store.pool.cached) == 0
    serve_hot_and_cold(ledger, prompt(64, start=5000), 30)
    assert cached_tokens(ledger, prompt(64, start=5000)) == 64


@pytest.mark.parametrize("policy", POLICIES)
def test_the_record_of_an_eviction_names_the_policy_and_its_reason(policy: str) -> None:
    ledger = make_ledger(4, eviction=policy)
    run_through(ledger, 1, prompt(64))
    run_through(ledger, 2, prompt(32, start=1000))
    record = next(each for each in ledger.drain_decisions() if each.kind is DecisionKind.EVICTION)
    assert record.reasons == ("no block is free", ledger.state.store.eviction.reason, f"policy {policy}")
    assert [each.name for each in record.candidates] == ["block 3", "block 2"]
    assert dict(record.candidates[0].terms) == {"depth": 3.0}


def test_the_record_of_an_eviction_by_utility_has_age_and_uses() -> None:
    ledger = make_ledger(4, eviction="utility")
    run_through(ledger, 1, prompt(32))
    run_through(ledger, 2, prompt(16, start=1000))
    run_through(ledger, 3, prompt(48, start=2000))
    record = next(each for each in ledger.drain_decisions() if each.kind is DecisionKind.EVICTION)
    assert {dict(each.figures)["uses"] for each in record.candidates} == {1.0}
    assert {dict(each.figures)["age"] for each in record.candidates} <= {0.0, 2.0, 3.0}, "in blocks released since"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_reset_frees_every_cached_block(policy: str) -> None:
    ledger = make_ledger(8, eviction=policy)
    run_through(ledger, 1, prompt(64))
    assert ledger.reset()
    ledger.check_invariants()
    assert (ledger.pool_counts().free, ledger.pool_counts().cached) == (8, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_empty_order_has_nothing_to_give(policy: str) -> None:
    order = make_ledger(4, eviction=policy).state.store.eviction
    with pytest.raises(IndexError):
        order.pop_block()
    assert (len(order), list(order), BlockId(0) in order) == (0, [], False)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_inventory_leaves_each_cached_block_evictable(policy: str) -> None:
    """It claims a child in a block table, whose own block before it is not sealed, and a parent that no table has."""
    first, second = hashes(prompt(32))
    ledger = make_ledger(4, eviction=policy)
    held = InventorySequence(
        reserve(1, prompt(33), block_hashes=()), SequencePhase.RUNNING, 0, (BlockId(2), BlockId(1))
    )
    claims = (CachedBlock(BlockId(0), first, -1, 0), CachedBlock(BlockId(1), second, 0, 0))
    ledger.rebuild(Inventory((held,), (), claims))
    assert (ledger.pool_counts().cached, ledger.pool_counts().free) == (1, 1)
    ledger.apply_report(Report(reserve=(reserve(2, prompt(32, start=1000)),)))
    batch = ledger.schedule()
    assert batch is not None
    assert [set(each.block_table) for each in batch.admit] == [{0, 3}]
    assert ledger.pool_counts().cached == 0


@pytest.mark.searches
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_requests_give_the_same_evictions(policy: str) -> None:
    def life() -> list[object]:
        ledger = make_ledger(16, eviction=policy)
        serve_hot_and_cold(ledger, prompt(64), 12)
        return [each.chosen for each in ledger.drain_decisions() if each.kind is DecisionKind.EVICTION]

    assert life() == life()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_kept_of_evicted_blocks_is_nothing_to_the_garbage_collector(policy: str) -> None:
    """There may be millions of them; each walk over them would hold up grants."""
    ledger = make_ledger(6, eviction=policy)
    for number in range(4):
        run_through(ledger, number, prompt(64, start=10_000 + 100 * number))
    ghosts = ledger.state.store.cache.ghosts
    assert ghosts
    gc.collect()
    assert not any(map(gc.is_tracked, ghosts.values()))
