"""The manager's benchmark: a real manager under one simulated worker, and the reports of a simulated worker."""

from __future__ import annotations

import itertools

from bench import manager
from bench.manager_load.pools import growth_figures, inventory_of
from bench.manager_load.reporter import BLOCK_SIZE, Reporter
from bench.manager_load.reports import report_figures
from common.contracts.clock import ManualClock
from common.contracts.lease import Inventory
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.ledger.ledger import Ledger


def ledger_of(num_blocks: int, inventory: Inventory) -> Ledger:
    numbers = itertools.count()
    ledger = Ledger(LedgerConfig(num_blocks, BLOCK_SIZE), ManualClock(), lambda: str(next(numbers)))
    ledger.rebuild(inventory)
    return ledger


def test_a_simulated_worker_keeps_the_protocol() -> None:
    """Its reports are applied without a violation until sequences have ended, hits were made and blocks evicted."""
    worker = Reporter(1, 8)
    ledger = ledger_of(worker.num_blocks, Inventory())
    for step in range(1500):
        ledger.apply_report(worker.step())
        batch = ledger.schedule()
        if batch is not None:
            worker.apply(batch)
        if step % 100 == 0:
            ledger.check_invariants()
    totals = ledger.pool_counts().totals
    assert totals.ignored_seals == 0
    assert min(totals.evictions, totals.prefix_hit_blocks, worker.tokens) > 100
    assert ledger.pool_counts().running == 8


def test_one_level_measures_a_real_manager() -> None:
    level = manager.run_level(workers=2, sequences=4, seconds=1.0)
    figures = level.figures()
    assert level.reports == 100, "as many as are due in the time, however late they come"
    assert len(level.grants) <= level.reports
    assert {"grant_p50_ms", "grant_p99_ms", "cpu_us_per_token", "late_reports"} <= set(figures)


def test_a_split_level_has_the_same_workers_at_managers_of_their_own() -> None:
    one, two = (manager.run_level(4, 4, 1.0, groups, per_driver=2) for groups in (1, 2))
    assert one.reports == two.reports == 200
    assert min(one.tokens, two.tokens) > 0, "how many depends on when grants come"
    assert two.cpu > 0.0


def test_workers_are_split_evenly_and_each_process_has_one_manager() -> None:
    assert list(manager.split(64, 1, 32)) == [(0, 0, 32), (0, 32, 32)]
    assert list(manager.split(64, 2, 32)) == [(0, 0, 32), (1, 32, 32)]
    assert list(manager.split(5, 2, 2)) == [(0, 0, 2), (1, 2, 2), (1, 4, 1)]


def test_levels_that_are_split_are_named_so() -> None:
    figures = manager.level_figures([2], [1, 2], runs=1, sequences=2, seconds=0.5)
    assert {"grant_p99_ms_2_groups_1", "grant_p50_ms_2_groups_2", "cpu_us_per_report_2_groups_2"} <= set(figures)
    assert manager.level_name(2, 1, [1]) == "2"


def test_an_inventory_of_the_benchmark_is_cached_as_a_whole() -> None:
    ledger = ledger_of(96, inventory_of(96))
    ledger.check_invariants()
    assert ledger.pool_counts().cached == 96


def test_growth_is_the_cost_of_the_largest_pool_over_that_of_the_smallest() -> None:
    figures = growth_figures("utility", (64, 128), blocks=64)
    assert set(figures) == {"ns_per_block_64_utility", "ns_per_block_128_utility", "growth_utility"}
    ratio = figures["ns_per_block_128_utility"] / figures["ns_per_block_64_utility"]
    assert figures["growth_utility"] == ratio


def test_the_parts_of_a_report_add_up() -> None:
    figures = report_figures("utility", workers=1, sequences=4, steps=200)
    total = figures.pop("core_us_per_report_utility")
    assert set(figures) == {f"{part}_us_per_report_utility" for part in ("decode", "apply", "schedule", "encode")}
    assert total == sum(figures.values()) > 0.0
