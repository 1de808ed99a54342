"""How many blocks the worker leases ahead of need, and which target the manager sends."""

from __future__ import annotations

import pytest

from kvmanager.core.config import LedgerConfig
from kvmanager.core.runway import RunwayTerms, next_target, runway_terms
from tests.support.kvmanager.ledgers import admit, finish, hashes, make_ledger, play, prompt, reserve, run_through


@pytest.mark.parametrize(
    ("want", "stalled", "growth", "running", "terms"),
    [
        (4, 0, 50, 2, RunwayTerms(4, 16)),  # two sequences reach 96 slots = 6 blocks further each
        (4, 7, 50, 2, RunwayTerms(7, 19)),  # at least the stalled
        (4, 0, 3, 2, RunwayTerms(3, 3)),  # at most what they may still grow by
        (0, 0, 50, 1, RunwayTerms(0, 6)),
        (9, 0, 0, 0, RunwayTerms(0, 0)),
    ],
)
def test_terms(want: int, stalled: int, growth: int, running: int, terms: RunwayTerms) -> None:
    assert runway_terms(LedgerConfig(100, 16), want, stalled, growth, running) == terms


@pytest.mark.parametrize(
    ("last_sent", "refill", "pressed", "target"),
    [
        (None, False, False, 16),
        (10, False, False, 10),
        (10, True, False, 16),
        (3, False, False, 16),
        (17, False, False, 16),
        (10, False, True, 4),
        (4, True, True, 4),
    ],
)
def test_a_target_within_bounds_is_left_alone(last_sent: int | None, refill: bool, pressed: bool, target: int) -> None:
    assert next_target(RunwayTerms(4, 16), last_sent, refill, pressed) == target


def test_the_want_is_leased_also_by_evicting() -> None:
    ledger = make_ledger(4)
    run_through(ledger, 1, prompt(33))
    admit(ledger, reserve(2, prompt(16, start=90), max_len=64))
    assert (ledger.pool().free, ledger.pool().cached) == (1, 2)
    batch = play(ledger, lease_want=2)
    assert batch is not None
    assert (batch.lease_target, batch.lease) == (2, (2, 1))
    assert ledger.pool().totals.evictions == 1


def test_beyond_the_want_only_free_blocks_are_leased() -> None:
    ledger = make_ledger(8, runway_reach=128)
    run_through(ledger, 1, prompt(64))
    admit(ledger, reserve(2, prompt(16, start=90), max_len=128))
    assert (ledger.pool().free, ledger.pool().cached) == (3, 4)
    batch = play(ledger, lease_want=2)
    assert batch is not None
    assert batch.lease_target == 7
    assert batch.lease == (5, 6, 7)
    assert ledger.pool().totals.evictions == 0


def test_a_runway_above_its_want_is_not_topped_up() -> None:
    ledger = make_ledger(20, runway_reach=128)
    admit(ledger, reserve(1, prompt(16), max_len=320))
    batch = play(ledger, lease_want=2)
    assert batch is not None
    assert len(batch.lease) == 8
    assert play(ledger, bind=((1, 1),), lease_want=2) is None
    assert ledger.pool().leased == 7


def test_when_a_sequence_waits_for_blocks_what_is_beyond_the_want_is_called_back() -> None:
    ledger = make_ledger(12, runway_reach=128)
    admit(ledger, reserve(1, prompt(16), max_len=400 - 16 * 14))
    play(ledger, lease_want=2)
    assert ledger.pool().leased == 8
    batch = play(ledger, reserve=(reserve(2, prompt(16 * 5, start=500)),), lease_want=2)
    assert batch is not None
    assert (batch.lease_target, batch.admit) == (2, ())
    batch = play(ledger, returned=(3, 4, 5, 6, 7, 8), lease_want=2)
    assert batch is not None
    assert [granted.sequence for granted in batch.admit] == [2]


def test_nothing_runs_so_nothing_is_leased() -> None:
    ledger = make_ledger(8)
    admit(ledger, reserve(1, prompt(16), max_len=64))
    batch = play(ledger, lease_want=2)
    assert batch is not None
    assert batch.lease_target == 2
    batch = finish(ledger, 1)
    assert batch is not None
    assert batch.lease_target == 0
    assert play(ledger, returned=(1, 2)) is None
    assert ledger.pool().free == 8


def test_a_level_that_the_worker_does_not_know_is_sent_though_it_is_the_default() -> None:
    ledger = make_ledger(8)
    batch = play(ledger)
    assert batch is not None
    assert batch.lease_target == 0
    assert play(ledger) is None


def test_runway_max_reserves_the_longest_length_at_admission() -> None:
    ledger = make_ledger(8, runway="max")
    (granted,) = admit(ledger, reserve(1, prompt(20), max_len=64))
    assert granted.block_table == (0, 1, 2, 3)
    batch = play(ledger, lease_want=5)
    assert batch is None
    assert admit(ledger, reserve(2, prompt(20, start=90), max_len=80)) == ()
    assert ledger.pool().capacity == 1


def test_runway_max_seals_blocks_as_they_fill() -> None:
    ledger = make_ledger(8, runway="max")
    tokens = prompt(50)
    admit(ledger, reserve(1, tokens[:20], max_len=64))
    play(ledger, seal=tuple(zip((0, 1, 2), hashes(tokens), strict=True)))
    finish(ledger, 1)
    assert ledger.lookup(hashes(tokens), 50).hit_blocks == 3
