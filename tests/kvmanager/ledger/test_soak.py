"""A long random life of one ledger under a worker that keeps the protocol."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from kvmanager.ledger.ledger import Ledger
from tests.suites.protocol.ledger_copies import copy_ledger, ledger_key
from tests.support.kvmanager.fake_worker import FakeWorker
from tests.support.kvmanager.index_replica import IndexReplica
from tests.support.kvmanager.ledgers import EMPTY, make_ledger


class Life:
    """A ledger and its worker, driven by random operations."""

    def __init__(self, num_blocks: int, block_size: int, seed: int, max_num_seqs: int = 16, **options: Any) -> None:
        self.ledger = make_ledger(num_blocks, block_size, max_num_seqs=max_num_seqs, **options)
        self.worker = FakeWorker(num_blocks, block_size, window=options.get("window", 0))
        self.random = random.Random(seed)
        self.replica = IndexReplica()
        self.seen: Counter[str] = Counter()
        self.resets = 0

    def submit(self) -> None:
        """Take a request over two tokens, so that prompts share prefixes all the time; some fork a live one."""
        if len(self.worker.live) >= 24:
            return
        pick, live = self.random, list(self.worker.live.values())
        tokens = [pick.randrange(2) for _ in range(pick.randrange(1, 40))]
        fork_of, cached = None, pick.random() < 0.9
        if live and pick.random() < 0.2:
            parent = pick.choice(live)
            tokens, fork_of = parent.tokens[: parent.reserve.num_tokens], parent.reserve.sequence
            cached = bool(parent.reserve.block_hashes) or parent.reserve.num_tokens < self.worker.block_size
        self.worker.submit(tokens, len(tokens) + pick.randrange(100), pick.randrange(2), fork_of, cached)

    def cancel(self) -> None:
        """End any sequence, in whatever phase."""
        if self.worker.live:
            self.worker.cancel(self.random.choice(list(self.worker.live)))

    def trip(self) -> None:
        """Run a step and take one report there and one batch back."""
        self.worker.step(self.random.choice((4, 16, 64)))
        self.ledger.apply_report(self.worker.report())
        self.worker.deliver(self.ledger.schedule())

    def resync(self) -> None:
        """Break the stream: the ledger is rebuilt from the inventory alone."""
        self.ledger.rebuild(self.worker.inventory())
        self.replica.load(self.ledger.index_snapshot())
        self.worker.deliver(self.ledger.schedule())

    def reset(self) -> None:
        """Try to clear the cache."""
        in_use = self.ledger.pool_counts().in_use > 0
        assert self.ledger.reset() is not in_use

    def reset_cache(self) -> None:
        """Drop what no sequence uses, while the others run."""
        self.resets += 1
        assert self.ledger.reset_cache(self.resets) >= 0
        assert self.ledger.pool_counts().cached == 0
        self.worker.deliver(self.ledger.schedule())

    def operate(self) -> None:
        """Do one random operation and check what must hold after each."""
        names = ("submit", "cancel", "trip", "resync", "reset", "reset_cache")
        weights = (20, 8, 68, 2, 2, 1.5)
        name = self.random.choices(names, weights)[0]
        getattr(self, name)()
        self.seen[name] += 1
        pool = self.ledger.pool_counts()
        assert pool.free + pool.leased + pool.in_use + pool.cached == pool.num_blocks

    def settle(self) -> None:
        """Let every request end; fails when one does not."""
        for _ in range(20_000):
            if not self.worker.live and not self.worker.pool and not self.worker.ended:
                return
            self.trip()
        pytest.fail(f"sequences {sorted(self.worker.live)} did not end")


def assert_quiet(ledger: Ledger) -> None:
    pool = ledger.pool_counts()
    assert (pool.in_use, pool.leased, pool.running, pool.waiting, pool.preempting) == (0, 0, 0, 0, 0)
    assert pool.free + pool.cached == pool.num_blocks
    assert not ledger.state.store.cache.pending
    assert not ledger.state.sequences.live
    ledger.check_invariants()


@pytest.mark.rest
@pytest.mark.timeout(900)
@pytest.mark.parametrize("operations", [20_000, pytest.param(100_000, marks=pytest.mark.exhaustive)])
def test_a_soak_over_100_blocks(operations: int) -> None:
    life, share = Life(100, 4, seed=21), operations / 100_000
    for number in range(operations):
        life.operate()
        if number % 50 == 0:
            life.ledger.check_invariants()
            life.ledger.drain_decisions()
            assert life.replica.apply(life.ledger.drain_index_events())
            assert life.replica.depths == dict(life.ledger.index_snapshot().entries)
    totals = life.ledger.pool_counts().totals
    life.settle()
    assert_quiet(life.ledger)
    assert min(life.seen.values()) > 1000 * share
    assert totals.preemptions > 100 * share
    assert totals.evictions > 1000 * share
    assert totals.prefix_hit_blocks > 1000 * share
    assert totals.recompute_hit_blocks > 100 * share
    assert totals.ignored_seals == 0


@pytest.mark.parametrize(("seed", "eviction"), [(0, "lru"), (1, "frequency"), (2, "utility"), (3, "utility")])
def test_a_tiny_pool_is_never_stuck(seed: int, eviction: str) -> None:
    life = Life(26, 4, seed=seed, max_num_seqs=6, eviction=eviction)
    for _ in range(3000):
        life.operate()
        life.ledger.check_invariants()
        life.ledger.drain_decisions()
    life.settle()
    assert_quiet(life.ledger)


_MORE_WINDOWS = ((32, "lru", 8), (128, "frequency", 5), (32, "lru", 1))


@pytest.mark.parametrize(
    ("runway_reach", "eviction", "window"),
    [(128, "utility", 8), *(pytest.param(*each, marks=pytest.mark.rest) for each in _MORE_WINDOWS)],
)
def test_where_every_layer_has_a_window_blocks_are_used_again_whose_ancestors_are_gone(
    runway_reach: int, eviction: str, window: int
) -> None:
    life = Life(40, 4, seed=5, window=window, runway_reach=runway_reach, eviction=eviction)
    behind_empty_places = 0
    for _ in range(6000):
        life.operate()
        life.ledger.check_invariants()
        reasons = (reason for each in life.ledger.drain_decisions() for reason in each.reasons)
        behind_empty_places += sum("left the window" in reason for reason in reasons)
        assert life.replica.apply(life.ledger.drain_index_events())
        assert life.replica.depths == dict(life.ledger.index_snapshot().entries)
    totals = life.ledger.pool_counts().totals
    assert behind_empty_places > 5
    assert totals.prefix_hit_blocks > 10
    assert totals.recompute_hit_blocks > 10
    assert totals.evictions > 100
    assert totals.ignored_seals == 0
    life.settle()
    assert_quiet(life.ledger)


def test_the_same_seed_gives_the_same_ledger() -> None:
    def state(seed: int) -> object:
        life = Life(30, 4, seed=seed)
        for _ in range(500):
            life.operate()
        return ledger_key(life.ledger)

    assert state(3) == state(3)
    assert state(3) != state(4)


def test_a_copy_is_independent() -> None:
    life = Life(30, 4, seed=8)
    for _ in range(400):
        life.operate()
    twin = copy_ledger(life.ledger)
    before = ledger_key(twin)
    assert before == ledger_key(life.ledger)
    twin.check_invariants()
    for _ in range(50):
        life.operate()
    assert ledger_key(twin) == before
    twin.check_invariants()
    twin.rebuild(EMPTY)
    life.ledger.check_invariants()
