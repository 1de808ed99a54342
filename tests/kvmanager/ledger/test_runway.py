"""How many blocks the worker leases ahead of need, and which target the manager sends."""

from __future__ import annotations

import pytest

from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.ledger.runway import RunwayTerms, is_short, next_target, runway_terms
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


@pytest.mark.parametrize(("want", "stalled", "leased"), [(9, 0, 3), (10, 0, 4), (1, 0, 1), (9, 5, 5), (0, 0, 0)])
def test_a_third_of_the_want_must_do_while_a_sequence_waits_for_blocks(want: int, stalled: int, leased: int) -> None:
    assert runway_terms(LedgerConfig(100, 16), want, stalled, 50, 2, pressed=True).want == leased


@pytest.mark.parametrize(
    ("last_sent", "refill", "pressed", "leased", "target"),
    [
        (None, False, False, 4, 16),
        (10, False, False, 4, 10),
        (10, True, False, 3, 16),
        (3, False, False, 3, 3),  # three quarters of the want are enough
        (2, False, False, 3, 16),
        (17, False, False, 8, 16),  # less than half of it is left
        (17, False, False, 9, 17),
        (40, False, False, 17, 16),  # a block is to be returned
        (10, False, True, 5, 4),
        (5, False, True, 4, 5),
        (4, True, True, 3, 4),
    ],
)
def test_a_target_is_left_alone_while_it_changes_nothing(
    last_sent: int | None, refill: bool, pressed: bool, leased: int, target: int
) -> None:
    assert next_target(RunwayTerms(4, 16), last_sent, refill, pressed, leased) == target


@pytest.mark.parametrize(
    ("want", "stalled", "leased", "short"),
    [(8, 0, 6, False), (8, 0, 5, True), (8, 7, 7, True), (8, 1, 8, False), (3, 0, 2, True), (0, 0, 0, False)],
)
def test_a_lease_is_refilled_once_a_quarter_of_the_want_is_used(
    want: int, stalled: int, leased: int, short: bool
) -> None:
    assert is_short(RunwayTerms(want, want), leased, stalled) == short


def test_the_want_is_leased_also_by_evicting() -> None:
    ledger = make_ledger(4)
    run_through(ledger, 1, prompt(33))
    admit(ledger, reserve(2, prompt(16, start=90), max_len=64))
    assert (ledger.pool_counts().free, ledger.pool_counts().cached) == (1, 2)
    batch = play(ledger, lease_want=2)
    assert batch is not None
    assert (batch.lease_target, batch.lease) == (2, (2, 1))
    assert ledger.pool_counts().totals.evictions == 1


def test_a_lease_is_refilled_to_the_whole_want_in_one_batch() -> None:
    ledger = make_ledger(24)
    admit(ledger, reserve(1, prompt(16), max_len=320))
    batch = play(ledger, lease_want=8)
    assert batch is not None
    leased = list(batch.lease)
    assert len(leased) == 8
    for _ in range(2):
        assert play(ledger, bind=((1, leased.pop(0)),), lease_want=8) is None
    batch = play(ledger, bind=((1, leased.pop(0)),), lease_want=8)
    assert batch is not None
    assert len(batch.lease) == 3


def test_a_want_that_shrinks_with_the_lease_is_answered_once_half_of_it_is_bound() -> None:
    ledger = make_ledger(24)
    admit(ledger, reserve(1, prompt(16), max_len=160))
    batch = play(ledger, lease_want=8)
    assert batch is not None
    targets = []
    for left in range(7, -1, -1):
        batch = play(ledger, bind=((1, batch.lease[7 - left] if batch and batch.lease else 8 - left),), lease_want=left)
        targets.append(batch.lease_target if batch else None)
    assert targets[-1] == 0
    assert targets.count(None) >= 4


def test_beyond_the_want_only_free_blocks_are_leased() -> None:
    ledger = make_ledger(8, runway_reach=128)
    run_through(ledger, 1, prompt(64))
    admit(ledger, reserve(2, prompt(16, start=90), max_len=128))
    assert (ledger.pool_counts().free, ledger.pool_counts().cached) == (3, 4)
    batch = play(ledger, lease_want=2)
    assert batch is not None
    assert batch.lease_target == 7
    assert batch.lease == (5, 6, 7)
    assert ledger.pool_counts().totals.evictions == 0


def test_a_runway_above_its_want_is_not_topped_up() -> None:
    ledger = make_ledger(20, runway_reach=128)
    admit(ledger, reserve(1, prompt(16), max_len=320))
    batch = play(ledger, lease_want=2)
    assert batch is not None
    assert len(batch.lease) == 8
    assert play(ledger, bind=((1, 1),), lease_want=2) is None
    assert ledger.pool_counts().leased == 7


def test_when_a_sequence_waits_for_blocks_what_is_beyond_the_want_is_called_back() -> None:
    ledger = make_ledger(12, runway_reach=128)
    admit(ledger, reserve(1, prompt(16), max_len=400 - 16 * 14))
    play(ledger, lease_want=2)
    assert ledger.pool_counts().leased == 8
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
    assert ledger.pool_counts().free == 8


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
    assert ledger.pool_counts().capacity == 1


def test_runway_max_seals_blocks_as_they_fill() -> None:
    ledger = make_ledger(8, runway="max")
    tokens = prompt(50)
    admit(ledger, reserve(1, tokens[:20], max_len=64))
    play(ledger, seal=tuple(zip((0, 1, 2), hashes(tokens), strict=True)))
    finish(ledger, 1)
    assert ledger.look_up_prompt(hashes(tokens), 50).hit_blocks == 3
