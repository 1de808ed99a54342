"""The benchmark of tracing: a small run of it, its losses by hand, and records as the services make them."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from bench.lib.decision_records import bytes_of, records_of
from bench.lib.request_spans import SERVICES
from bench.tracing import ALL, COMPARED, NOTES, Measured, Pairs, figures_of
from common.contracts.types import DecisionKind
from common.decisions.ring import record_bytes
from tests.support.bench_process import run_benchmark


@pytest.mark.parametrize(
    "compared",
    [pytest.param((ALL,), id="one suite"), pytest.param((*COMPARED,), id="all", marks=pytest.mark.exhaustive)],
)
def test_a_small_run_has_every_figure(compared: tuple[str, ...]) -> None:
    words = ("--pairs", "2", "--requests", "8", "--output", "8", "--settle-s", "0")
    figures, _ = run_benchmark("tracing", *words, "--compare", *compared)
    left_out = {f"{what}_{each}" for what in ("overhead", "cpu", "steps") for each in COMPARED if each not in compared}
    bounds = itertools.product(("overhead", "cpu"), compared, ("lower", "upper"))
    assert set(figures) == {*NOTES, *("_".join(words) for words in bounds)} - left_out
    assert figures["pairs"] == 2
    assert (
        min(
            figures[name]
            for name in (
                *("tokens_s_off", "record_ns", "record_ns_log", "log_record_bytes", "record_bytes", "rules_ns"),
                *(f"spans_us_{service}" for service in SERVICES),
            )
        )
        > 0
    )
    assert max(value for name, value in figures.items() if name.startswith("overhead")) < 1


def test_a_loss_is_that_of_a_pair() -> None:
    pairs = Pairs(
        off=[Measured(100.0, 0.010, {"router": 1.0}, 50), Measured(50.0, 0.020), Measured(80.0, 0.010)],
        on=[
            Measured(98.0, 0.011, {"router": 1.5}, 55),
            Measured(45.0, 0.020, {"router": 0.25}),
            Measured(80.0, 0.015, steps=2),
        ],
    )
    found = figures_of({"sampled_all": pairs})
    assert pairs.losses() == pytest.approx([0.02, 0.1, 0.0])
    assert found["overhead_sampled_all"] == pytest.approx(0.02)
    assert (found["overhead_sampled_all_lower"], found["overhead_sampled_all_upper"]) == pytest.approx((0.0, 0.1))
    assert found["cpu_sampled_all"] == pytest.approx(0.1)
    assert (found["cpu_sampled_all_lower"], found["cpu_sampled_all_upper"]) == pytest.approx((0.0, 0.5))
    assert found["steps_sampled_all"] == pytest.approx(0.1)
    assert [found[f"trace_us_{each}"] for each in SERVICES] == [0.25e6, 0.0, 0.0]
    assert (found["tokens_s_off"], found["pairs"]) == (80.0, 3)


def test_a_request_has_four_records_of_its_own() -> None:
    made = list(records_of(100))
    kinds = (DecisionKind.ADMISSION, DecisionKind.ROUTING, DecisionKind.GRANT, DecisionKind.OUTCOME)
    assert Counter(each.kind for each in made) == dict.fromkeys(kinds, 100)
    assert len({each.decision_id for each in made}) == 400
    assert {len(each.candidates) for each in made if each.kind is DecisionKind.ROUTING} == {8}


def test_the_bound_of_a_ring_counts_what_records_take() -> None:
    made = list(records_of(200))
    counted = sum(map(record_bytes, made)) / len(made)
    assert 0.4 < counted / bytes_of(200) < 2.5
